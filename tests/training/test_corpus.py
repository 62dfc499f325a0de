"""Folders, parquet, webdataset, json lists and the hub: which items, in which order, with which question."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vismmoe.errors import CorpusError
from vismmoe_training.corpus import CorpusItem, open_corpus
from vismmoe_training.corpus.tables import open_hub


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8)).save(path)
    return path


def describe(folder: Path, *lines: Any) -> None:
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def asked(source: Path) -> list[tuple[str, str]]:
    return [(item.name, item.prompt) for item in open_corpus(str(source), "Describe it.")]


def test_a_folder_of_images_is_read_in_order_with_the_default_question(tmp_path: Path) -> None:
    for name in ("b.png", "a.jpg", "inner/c.PNG", ".hidden/d.png"):
        picture(tmp_path / name) if name != "inner/c.PNG" else picture(tmp_path / "inner/c.png")
    (tmp_path / "notes.txt").write_text("no image")
    assert asked(tmp_path) == [(name, "Describe it.") for name in ("a.jpg", "b.png", "inner/c.png")]
    assert open_corpus(str(tmp_path), "").size == 3


def test_questions_take_turns_so_that_their_styles_mix(tmp_path: Path) -> None:
    questions = [{"prompt": "How many?", "answer": "3"}, {"prompt": "Which colour?", "answer": "red"}]
    for number in range(3):
        picture(tmp_path / f"images/{number}.png")
    describe(tmp_path / "images", *({"file_name": f"{n}.png", "questions": questions} for n in range(3)))
    assert asked(tmp_path) == [
        ("images/0.png", "How many?"), ("images/1.png", "Which colour?"), ("images/2.png", "How many?")
    ]  # fmt: skip


def test_an_own_question_goes_before_the_default(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        picture(tmp_path / name)
    describe(tmp_path, {"file_name": "a.png", "question": "Why?"}, {"file_name": "b.png", "prompt": " "})
    assert [prompt for _, prompt in asked(tmp_path)] == ["Why?", "Describe it.", "Describe it."]


def test_an_item_whose_file_is_missing_stays_in_the_list_to_be_named_later(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    describe(tmp_path, {"file_name": "gone.png"})
    assert [name for name, _ in asked(tmp_path)] == ["a.png", "gone.png"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1: this is not JSON"),
        ("[" * 200_000, "line 1: this is not JSON"),
        ("[]", "no file_name"),
        ('{"file_name": "../../etc/x.png"}', "outside"),
        ('{"file_name": "a\\u0000.png"}', "no file"),
    ],
)
def test_metadata_that_cannot_be_meant_is_refused(tmp_path: Path, line: str, told: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(line)
    with pytest.raises(CorpusError, match=told):
        open_corpus(str(tmp_path), "")


def test_what_is_no_corpus_is_refused_by_name(tmp_path: Path) -> None:
    for name, told in (
        ("llava.json", "is not JSON"),
        ("shard.tar", "is not a tar file"),
        ("notes.txt", "is no corpus"),
    ):
        (tmp_path / name).write_text("no")
        with pytest.raises(CorpusError, match=told):
            open_corpus(str(tmp_path / name), "")
    (tmp_path / "inner").mkdir()
    with pytest.raises(CorpusError, match="holds no image"):
        open_corpus(str(tmp_path / "inner"), "")
    with pytest.raises(CorpusError, match="There is no 'gone/list"):
        open_corpus("gone/list.json", "")


def test_a_hub_id_without_a_network_is_told_in_a_sentence() -> None:
    script = (
        "from vismmoe_training.corpus import open_corpus\n"
        "from vismmoe.errors import CorpusError\n"
        "try: open_corpus('org/no-such-data', '')\n"
        "except CorpusError as error: print(error)\n"
    )
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=offline, check=True)
    assert told.stdout.startswith("There is no 'org/no-such-data' on this disk, and no data set of this name")


def test_a_data_set_is_read_as_the_hub_hands_it_out(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        picture(tmp_path / f"data/{split}/a.png")
        describe(tmp_path / f"data/{split}", {"file_name": "a.png", "question": f"Which {split}?"})
    told = list(open_hub(str(tmp_path / "data"), "Describe it."))
    assert [item.prompt for item in told] == ["Which train?"]
    assert told[0].image == (tmp_path / "data/train/a.png").read_bytes()
    chosen = open_hub(f"{tmp_path / 'data'}:validation", "Describe it.")
    assert [item.prompt for item in chosen] == ["Which validation?"]


def shard(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_webdataset_shards_give_a_question_with_each_image(tmp_path: Path) -> None:
    data = picture(tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").unlink()
    shard(
        tmp_path / "one.tar",
        {
            "000.png": data,
            "000.json": json.dumps({"question": "Why?"}).encode(),
            "001.png": b"broken",
            "001.json": json.dumps({"question": "What?"}).encode(),
        },
    )
    corpus = open_corpus(str(tmp_path), "Describe it.")
    assert corpus.size == 2
    assert list(corpus) == [CorpusItem("one.tar#000", data, "Why?"), CorpusItem("one.tar#001", b"broken", "What?")]
    with pytest.raises(CorpusError, match="holds no image"):
        open_corpus(str(shard(tmp_path / "two.tar", {"a.txt": b"words"})), "")


def test_a_llava_list_asks_what_its_humans_ask(tmp_path: Path) -> None:
    picture(tmp_path / "pictures/a.png")
    turns = [{"from": "human", "value": "<image>\nWhy?"}, {"from": "gpt", "value": "Because."}]
    entries = [
        {"id": "0", "image": "pictures/a.png", "conversations": turns},
        {"id": "1", "image": "pictures/a.png", "conversations": [{"from": "human", "value": "<image>"}]},
        {"id": "2", "conversations": turns},
    ]
    (tmp_path / "list.json").write_text(json.dumps(entries))
    (tmp_path / "list.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    for name in ("list.json", "list.jsonl"):
        assert asked(tmp_path / name) == [("pictures/a.png", "Why?"), ("pictures/a.png#2", "Describe it.")]


def test_coco_annotations_are_read_with_their_images_elsewhere(tmp_path: Path) -> None:
    picture(tmp_path / "val2017/7.jpg")
    told = {
        "images": [{"id": 7, "file_name": "7.jpg"}, {"id": 8, "file_name": "8.jpg"}],
        "annotations": [{"image_id": 7, "caption": "A thing."}, {"image_id": 8, "question": "Which?"}],
    }
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/val.json").write_text(json.dumps(told))
    items = list(open_corpus(str(tmp_path / "notes/val.json"), "Describe it.", tmp_path / "val2017"))
    assert [(item.name, item.prompt) for item in items] == [("7.jpg", "Describe it."), ("8.jpg", "Which?")]
    assert items[0].image == tmp_path / "val2017/7.jpg"
    with pytest.raises(CorpusError, match="--image-folder says where"):
        open_corpus(str(tmp_path / "notes/val.json"), "")


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"a": 1}, "neither a list"),
        ([{"text": "a"}], "names no image"),
        ([{"image": "../../etc/x.png"}], "outside"),
        ([{"image": "a\0.png"}], "no file"),
    ],
)
def test_a_list_that_names_no_image_of_its_folder_is_refused(tmp_path: Path, told: object, why: str) -> None:
    (tmp_path / "list.json").write_text(json.dumps(told))
    with pytest.raises(CorpusError, match=why):
        open_corpus(str(tmp_path / "list.json"), "")


def test_annotations_of_any_shape_do_no_harm(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    for noted in (5, [{"image_id": {"a": 1}, "question": "Why?"}], [None]):
        told = {"images": [{"id": [1], "file_name": "a.png"}], "annotations": noted}
        (tmp_path / "list.json").write_text(json.dumps(told))
        assert asked(tmp_path / "list.json") == [("a.png", "Describe it.")]


def test_a_pipe_among_the_files_is_not_waited_for(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    assert asked(tmp_path) == [("a.png", "Describe it.")]
    os.mkfifo(tmp_path / "metadata.jsonl")
    with pytest.raises(CorpusError, match="no regular file"):
        asked(tmp_path)


def test_parquet_gives_encoded_bytes_and_its_own_questions(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    data = picture(tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").unlink()
    images = [{"bytes": data, "path": "a.png"}, {"bytes": b"", "path": None}]
    pq.write_table(pa.table({"image": images, "question": ["Why?", None]}), tmp_path / "part.parquet")
    assert list(open_corpus(str(tmp_path), "Describe it.")) == [
        CorpusItem("part.parquet#0000000", data, "Why?"),
        CorpusItem("part.parquet#0000001", b"", "Describe it."),
    ]


def test_parquet_without_images_is_refused(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "part.parquet")
    with pytest.raises(CorpusError, match="a column `image` is needed"):
        open_corpus(str(tmp_path / "part.parquet"), "")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(CorpusError, match="not valid parquet"):
        open_corpus(str(tmp_path / "bad.parquet"), "")
