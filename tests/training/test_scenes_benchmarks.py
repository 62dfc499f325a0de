"""Scenes in the shapes of four benchmarks: read back as those are, and true to what is in the pictures."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import pytest

from vismmoe.evaluate.benchmarks import BENCHMARKS
from vismmoe.evaluate.forms import load_items
from vismmoe.evaluate.forms.items import Item
from vismmoe.images import load_image
from vismmoe_training.scenes.benchmarks import SHAPES, Sizes, write_benchmarks

SIZES = Sizes(mme=5, mmbench=4, pope=3, ocrbench=6)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_benchmarks(tmp_path_factory.mktemp("data"), SIZES)


@pytest.fixture(scope="module")
def items(data: dict[str, Path]) -> dict[str, list[Item]]:
    return {shape: load_items(BENCHMARKS[shape], str(data[shape])) for shape in SHAPES}


@pytest.mark.parametrize("shape", SHAPES)
def test_right_answers_get_the_full_score_from_every_scorer(items: dict[str, list[Item]], shape: str) -> None:
    benchmark, full = BENCHMARKS[shape], {"mme": 200, "mmbench": 100, "pope": 1, "ocrbench": SIZES.ocrbench}
    for name, scorer in benchmark.scorers.items():
        rows = [{**item.row, "prediction": _right(item)} for item in items[shape]]
        score, _ = scorer(rows)
        assert score.value == pytest.approx(100 if (shape, name) == ("pope", "vlmevalkit") else full[shape])
        wrong, _ = scorer([{**row, "prediction": "I cannot tell."} for row in rows])
        assert not wrong.value or (shape, name) == ("pope", "official"), "whatever does not deny is a yes there"


def _right(item: Item) -> str:
    answer = item.row["answer"]
    return str(answer[0] if isinstance(answer, list) else answer)


def test_questions_are_balanced_and_turned_as_the_benchmarks_are(items: dict[str, list[Item]]) -> None:
    assert Counter(item.row["answer"] for item in items["mme"]) == {"Yes": 5, "No": 5}
    pope = Counter((item.row["category"], item.row["answer"]) for item in items["pope"])
    assert set(pope.values()) == {3}
    assert len(pope) == 6
    for question in range(4):
        passes = [item.row for item in items["mmbench"] if item.row["index"] % 1_000_000 == question]
        assert sorted(row["answer"] for row in passes) == list("ABCD")
        assert len({row[row["answer"]] for row in passes}) == 1, "the right option is the same in every pass"


@pytest.mark.parametrize("shape", SHAPES)
def test_pictures_open_and_belong_to_their_rows(items: dict[str, list[Item]], shape: str) -> None:
    seen: dict[str, set[str]] = {}
    for place, item in enumerate(items[shape]):
        assert item.image is not None
        data = item.image()
        assert isinstance(data, bytes)
        assert min(load_image(data).size) >= 128
        key = (
            item.row.get("image_source") or item.row.get("question_id") or str(item.row.get("index", place) % 1_000_000)
        )
        seen.setdefault(str(key), set()).add(hashlib.sha256(data).hexdigest())
    assert all(len(digests) == 1 for digests in seen.values())


def test_the_same_seed_gives_the_same_questions(items: dict[str, list[Item]], tmp_path: Path) -> None:
    again = write_benchmarks(tmp_path, SIZES)
    for shape in SHAPES:
        assert [item.row for item in load_items(BENCHMARKS[shape], str(again[shape]))] == [i.row for i in items[shape]]


def test_hugging_face_reads_them_as_pictures(data: dict[str, Path]) -> None:
    from datasets import load_dataset

    for shape, split in (("mme", "test"), ("mmbench", "dev"), ("ocrbench", "test")):
        rows = load_dataset(str(data[shape]), *(["en"] if shape == "mmbench" else []), split=split)
        assert rows[0]["image"].size[0] >= 128
