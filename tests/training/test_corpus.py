"""Folders and parquet: which items, in which order, with which question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vismmoe.errors import CorpusError
from vismmoe_training.corpus import CorpusItem, open_corpus


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
    [("{", "line 1: this is not JSON"), ("[]", "no file_name"), ('{"file_name": "../../etc/x.png"}', "outside")],
)
def test_metadata_that_cannot_be_meant_is_refused(tmp_path: Path, line: str, told: str) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(line)
    with pytest.raises(CorpusError, match=told):
        open_corpus(str(tmp_path), "")


def test_what_is_no_corpus_or_not_read_yet_is_refused_by_name(tmp_path: Path) -> None:
    for name, told in (("llava.json", "LLaVA"), ("shard.tar", "webdataset"), ("notes.txt", "is no corpus")):
        (tmp_path / name).write_text("")
        with pytest.raises(CorpusError, match=told):
            open_corpus(str(tmp_path / name), "")
    with pytest.raises(CorpusError, match="holds no image"):
        open_corpus(str(tmp_path), "")
    with pytest.raises(CorpusError, match="There is no 'org/data'"):
        open_corpus("org/data", "")


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
