"""Every on-disk form of every benchmark gives the same questions; what is malformed is named with its line."""

from __future__ import annotations

import base64
import csv
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vismmoe.errors import CorpusError
from vismmoe.evaluate.benchmarks import BENCHMARKS
from vismmoe.evaluate.forms import chosen, load_items, originals
from vismmoe.evaluate.forms.items import Item
from vismmoe.images import load_image

MME, MMBENCH, POPE = BENCHMARKS["mme"], BENCHMARKS["mmbench"], BENCHMARKS["pope"]
OCRBENCH, TEXTVQA = BENCHMARKS["ocrbench"], BENCHMARKS["textvqa"]


def png(colour: str, side: int = 9) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(held, "PNG")
    return held.getvalue()


def noisy_png(make_picture: Callable[..., Image.Image], seed: int, side: int = 64) -> bytes:
    held = io.BytesIO()
    make_picture(side, side, seed).save(held, "PNG")
    return held.getvalue()


def colour_of(item: Item) -> tuple[int, ...]:
    assert item.image is not None
    pixel = load_image(item.image()).getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return pixel


def write_tsv(file: Path, rows: list[dict[str, Any]]) -> Path:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    return file


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


# -- MME --------------------------------------------------------------------------------------------------------------


def mme_folder(root: Path) -> Path:
    """Both shapes: `scene` in two folders, `count` in one; blank last lines, a jpg name that is a PNG."""
    inner = root / "MME_Benchmark_release_version" / "MME_Benchmark"
    (inner / "scene" / "images").mkdir(parents=True)
    (inner / "scene" / "questions_answers_YN").mkdir()
    (inner / "count").mkdir()
    for name, colour in (("a", "red"), ("b", "blue")):
        (inner / "scene" / "images" / f"{name}.jpg").write_bytes(png(colour))
        text = f"Is it {name}? Please answer yes or no.\tYes\nIs it no {name}? Please answer yes or no.\tNo\n\n"
        (inner / "scene" / "questions_answers_YN" / f"{name}.txt").write_text(text)
        (inner / "count" / f"{name}.png").write_bytes(png(colour))
        (inner / "count" / f"{name}.txt").write_text(text)
    return root / "MME_Benchmark_release_version"


def mme_rows() -> list[dict[str, Any]]:
    return [
        {
            "question_id": f"{category}/{name}.{'jpg' if category == 'scene' else 'png'}",
            "image": {"bytes": png(colour), "path": None},
            "question": f"Is it {word}{name}? Please answer yes or no.",
            "answer": answer,
            "category": category,
        }
        for category in ("count", "scene")
        for name, colour in (("a", "red"), ("b", "blue"))
        for word, answer in (("", "Yes"), ("no ", "No"))
    ]


def test_mme_as_folder_zip_parquet_and_table_gives_the_same_questions(tmp_path: Path) -> None:
    folder = mme_folder(tmp_path)
    with zipfile.ZipFile(tmp_path / "mme.zip", "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(tmp_path))
    write_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", mme_rows())
    rows = [
        {
            "index": place,
            "image": base64.b64encode(row["image"]["bytes"]).decode(),
            "image_path": row["question_id"],
            **{name: row[name] for name in ("question", "answer", "category")},
        }
        for place, row in enumerate(mme_rows())
    ]
    table = write_tsv(tmp_path / "MME.tsv", rows)
    wanted = None
    for source in (folder, folder / "MME_Benchmark", tmp_path / "mme.zip", tmp_path / "hub", table):
        items = load_items(MME, str(source))
        told = [(each.row["question_id"], each.row["question"], each.row["answer"], colour_of(each)) for each in items]
        wanted = wanted or told
        assert told == wanted, source
    assert wanted is not None
    assert len(wanted) == 8
    assert wanted[0][3] == (255, 0, 0)
    assert wanted[2][3] == (0, 0, 255)


def test_a_limit_keeps_pairs_together_and_spreads_over_the_subtasks(tmp_path: Path) -> None:
    items = load_items(MME, str(mme_folder(tmp_path)))
    some = chosen(MME, items, 2)
    assert [item.row["question_id"] for item in some] == ["count/a.png"] * 2 + ["scene/a.jpg"] * 2
    assert chosen(MME, items, 99) == items


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("Is it?\tYes\nno tab here\n", r"count/a.txt, line 2"),
        ("Is it?\tMaybe\n", "line 1: the answer must be Yes or No"),
    ],
)
def test_a_malformed_line_of_mme_is_named(tmp_path: Path, text: str, told: str) -> None:
    folder = mme_folder(tmp_path)
    (folder / "MME_Benchmark" / "count" / "a.txt").write_text(text)
    with pytest.raises(CorpusError, match=told):
        load_items(MME, str(folder))


def test_an_absent_picture_of_mme_is_named(tmp_path: Path) -> None:
    folder = mme_folder(tmp_path)
    (folder / "MME_Benchmark" / "count" / "b.png").unlink()
    with pytest.raises(CorpusError, match=r"count/b\.txt: there is no picture"):
        load_items(MME, str(folder))


# -- MMBench ----------------------------------------------------------------------------------------------------------


def mmbench_rows(picture: str) -> list[dict[str, Any]]:
    row = {"question": "Which?", "hint": "", "category": "c", "l2-category": "coarse_perception", "source": "x"}
    turned = {"A": "NA", "B": "None", "C": "", "D": ""}
    return [
        {"index": 7, **row, "A": "None", "B": "NA", "C": "", "D": "", "answer": "B", "image": picture},
        {"index": 1_000_007, **row, **turned, "answer": "A", "image": "7"},
    ]


def test_a_table_refers_to_pictures_of_other_rows_and_keeps_texts_like_none(tmp_path: Path, make_picture: Any) -> None:
    huge = base64.b64encode(noisy_png(make_picture, 3, 256)).decode()
    assert len(huge) > 131_072, "more than Python's csv takes by default"
    items = load_items(MMBENCH, str(write_tsv(tmp_path / "MMBench_DEV_EN.tsv", mmbench_rows(huge))))
    assert [item.row["A"] for item in items] == ["None", "NA"]
    assert items[0].row["C"] is None
    assert colour_of(items[0]) == colour_of(items[1])
    ask = MMBENCH.prompts["lmms-eval"].text(items[0].row)
    assert "A. None\nB. NA\n\nAnswer" in ask


def test_a_reference_to_a_row_that_is_not_there_is_named(tmp_path: Path) -> None:
    rows = mmbench_rows(base64.b64encode(png("red") + b" " * 60).decode())
    rows[1]["image"] = "8"
    with pytest.raises(CorpusError, match="line 3: the picture is that of row 8"):
        load_items(MMBENCH, str(write_tsv(tmp_path / "t.tsv", rows)))


def test_a_short_line_of_a_table_is_named_also_after_line_breaks_within_cells(tmp_path: Path) -> None:
    file = tmp_path / "t.tsv"
    file.write_text('index\tquestion\tA\tB\tanswer\n1\t"two\nlines"\ta\tb\tA\n2\tshort\n')
    with pytest.raises(CorpusError, match=r"t\.tsv, line 4: 2 cells where the head has 5"):
        load_items(MMBENCH, str(file))


@pytest.mark.parametrize(
    ("change", "told"),
    [({"index": "x"}, "row 1: index must be a whole number"), ({"answer": "F"}, "row 1: the answer must be a letter")],
)
def test_a_malformed_row_of_parquet_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    row = {"index": "1", "question": "?", "A": "a", "B": "b", "answer": "A", "image": {"bytes": png("red")}}
    with pytest.raises(CorpusError, match=told):
        load_items(MMBENCH, str(write_parquet(tmp_path / "x.parquet", [row | change])))


def test_the_english_split_is_found_and_an_index_of_text_is_read(tmp_path: Path) -> None:
    row = {"index": "1000001", "question": "?", "A": "a", "B": "b", "answer": "A", "image": {"bytes": png("red")}}
    write_parquet(tmp_path / "en" / "dev-0.parquet", [row])
    write_parquet(tmp_path / "en" / "test-0.parquet", [row, row])
    write_parquet(tmp_path / "cn" / "dev-0.parquet", [row, row, row])
    (item,) = load_items(MMBENCH, str(tmp_path))
    assert item.row["index"] == 1_000_001


# -- POPE -------------------------------------------------------------------------------------------------------------


def pope_folder(root: Path, lines: int = 3) -> Path:
    (root / "val2014").mkdir(parents=True)
    (root / "output" / "coco").mkdir(parents=True)
    name = "COCO_val2014_000000310196.jpg"
    (root / "val2014" / name).write_bytes(png("green"))
    for split in ("random", "popular", "adversarial"):
        rows = [
            {"question_id": n, "image": name, "text": f"Is there a {n}?", "label": "yes" if n % 2 else "no"}
            for n in range(1, lines + 1)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (root / "output" / "coco" / f"coco_pope_{split}.json").write_text(text)
    return root


def test_pope_reads_its_json_lines_with_the_pictures_of_coco(tmp_path: Path) -> None:
    items = load_items(POPE, str(pope_folder(tmp_path)))
    assert [item.row["category"] for item in items] == ["adversarial"] * 3 + ["popular"] * 3 + ["random"] * 3
    assert items[0].row["question"] == "Is there a 1?"
    assert items[0].row["answer"] == "yes"
    assert colour_of(items[8]) == (0, 128, 0)
    (one, *_) = load_items(POPE, str(tmp_path / "output" / "coco" / "coco_pope_random.json"))
    assert one.row["category"] == "random"


@pytest.mark.parametrize("lines", [2910, 3000])
def test_both_sizes_of_the_random_split_are_read(tmp_path: Path, lines: int) -> None:
    folder = pope_folder(tmp_path, lines)
    assert len(load_items(POPE, str(folder / "output" / "coco" / "coco_pope_random.json"))) == lines


def test_pictures_may_lie_elsewhere(tmp_path: Path) -> None:
    folder = pope_folder(tmp_path / "pope")
    (folder / "val2014").rename(tmp_path / "elsewhere")
    with pytest.raises(CorpusError, match=r"line 1: the picture COCO_val2014_000000310196\.jpg is not in"):
        load_items(POPE, str(folder))
    assert len(load_items(POPE, str(folder), str(tmp_path / "elsewhere"))) == 9


@pytest.mark.parametrize("name", ["../../secret.png", "/etc/passwd"])
def test_a_picture_outside_the_data_is_refused(tmp_path: Path, name: str) -> None:
    folder = pope_folder(tmp_path / "pope")
    file = folder / "output" / "coco" / "coco_pope_random.json"
    file.write_text(json.dumps({"image": name, "text": "Is there a 1?", "label": "yes"}))
    with pytest.raises(CorpusError, match="no name of a picture"):
        load_items(POPE, str(file))


def test_a_broken_line_of_pope_is_named(tmp_path: Path) -> None:
    file = pope_folder(tmp_path) / "output" / "coco" / "coco_pope_random.json"
    file.write_text(file.read_text() + '{"image": \n')
    with pytest.raises(CorpusError, match="line 4 is no JSON"):
        load_items(POPE, str(file))


def test_the_default_table_of_the_hub_is_taken_before_the_full_one(tmp_path: Path) -> None:
    row = {"question": "?", "answer": "yes", "image_source": "a", "category": "random", "image": {"bytes": png("red")}}
    write_parquet(tmp_path / "data" / "test-0.parquet", [row])
    write_parquet(tmp_path / "Full" / "random-0.parquet", [row, row])
    assert len(load_items(POPE, str(tmp_path))) == 1
    assert len(load_items(POPE, str(tmp_path / "Full"))) == 2


# -- OCRBench and TextVQA ---------------------------------------------------------------------------------------------


def test_ocrbench_reads_its_json_and_the_table(tmp_path: Path) -> None:
    images = tmp_path / "OCRBench_Images" / "IIIT5K"
    images.mkdir(parents=True)
    (images / "1.png").write_bytes(png("red"))
    entry = {"dataset_name": "IIIT5K", "id": 0, "image_path": "IIIT5K/1.png", "question": "what?", "answers": "HI"}
    entries = [{**entry, "type": "Regular Text Recognition"}]
    entries.append({**entry, "answers": ["x = 1\n", "1"], "type": "Handwritten Mathematical Expression Recognition"})
    (tmp_path / "OCRBench.json").write_text(json.dumps(entries))
    items = load_items(OCRBENCH, str(tmp_path))
    assert [item.row["answer"] for item in items] == [["HI"], ["x = 1\n", "1"]]
    assert colour_of(items[1]) == (255, 0, 0)
    picture = base64.b64encode(png("blue") + b" " * 60).decode()
    row = {"index": 0, "question": "what?", "answer": "['HI', 'ho']", "category": "Doc-oriented VQA", "image": picture}
    (item,) = load_items(OCRBENCH, str(write_tsv(tmp_path / "OCRBench.tsv", [row])))
    assert item.row["answer"] == ["HI", "ho"]
    assert item.row["question_type"] == "Doc-oriented VQA"


def test_textvqa_reads_its_json(tmp_path: Path) -> None:
    (tmp_path / "train_images").mkdir()
    (tmp_path / "train_images" / "abc.jpg").write_bytes(png("red"))
    data = [{"question": "what?", "image_id": "abc", "question_id": 1, "answers": ["cat"] * 9 + ["2 dogs"]}]
    (tmp_path / "TextVQA_0.5.1_val.json").write_text(json.dumps({"dataset_type": "val", "data": data}))
    (item,) = load_items(TEXTVQA, str(tmp_path))
    assert item.row["answers"] == ["cat"] * 9 + ["2 dogs"]
    assert colour_of(item) == (255, 0, 0)
    score, _ = TEXTVQA.scorers["lmms-eval"]([{**item.row, "prediction": "The Cat."}])
    assert score.value == 1.0
    score, _ = TEXTVQA.scorers["lmms-eval"]([{**item.row, "prediction": "two dogs"}])
    assert score.value == pytest.approx(0.3), "a third for nine people, nothing for the one who said so"


def test_data_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="is not there"):
        load_items(MME, str(tmp_path / "nowhere" / "at all"))
    (tmp_path / "empty").mkdir()
    for name in ("mme", "mmbench", "pope", "ocrbench", "textvqa"):
        with pytest.raises(CorpusError):
            load_items(BENCHMARKS[name], str(tmp_path / "empty"))
    (tmp_path / "x.zip").write_bytes(b"PK not really")
    with pytest.raises(CorpusError, match="zip"):
        load_items(MME, str(tmp_path / "x.zip"))
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(CorpusError, match="parquet"):
        load_items(MME, str(tmp_path / "x.parquet"))


def mme_zip(file: Path, question: bytes = b"Is it?\tYes\nIs it not?\tNo\n") -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("existence/1.txt", question)
        archive.writestr("existence/1.png", png("red"))
    return file


def flip(file: Path, local: int, central: int, value: int) -> None:
    """Change a byte of the first file's two headers."""
    data = bytearray(file.read_bytes())
    data[data.find(b"PK\3\4") + local] ^= value
    data[data.find(b"PK\1\2") + central] ^= value
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("local", "central", "value"), [(6, 8, 1), (14, 16, 255), (8, 10, 77)], ids=["encrypted", "checksum", "method"]
)
def test_a_zip_that_cannot_be_unpacked_is_told_by_the_file_within(
    tmp_path: Path, local: int, central: int, value: int
) -> None:
    flip(mme_zip(tmp_path / "mme.zip"), local, central, value)
    with pytest.raises(CorpusError, match=r"1\.txt cannot be read"):
        load_items(MME, str(tmp_path / "mme.zip"))


def test_a_zip_that_unfolds_without_end_is_not_unfolded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(originals, "MAX_TEXT_BYTES", 1000)
    with pytest.raises(CorpusError, match="more than 1000 bytes"):
        load_items(MME, str(mme_zip(tmp_path / "mme.zip", b"\0" * 100_000)))
    monkeypatch.setattr(originals, "MAX_BYTES", 10)
    (item, _) = load_items(MME, str(mme_zip(tmp_path / "other.zip")))
    assert item.image is not None
    with pytest.raises(CorpusError, match="more than 10 bytes"):
        item.image()


def test_a_pipe_a_folder_and_a_circle_among_the_questions_are_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "existence"
    folder.mkdir()
    (folder / "1.png").write_bytes(png("red"))
    text = folder / "1.txt"
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("1.txt", path)):
        make(text)
        with pytest.raises(CorpusError, match=r"1\.txt"):
            load_items(MME, str(tmp_path))
        text.rmdir() if text.is_dir() else text.unlink()
