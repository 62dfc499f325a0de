"""The corpus on disk."""

import json
from pathlib import Path

import pytest
from PIL import Image

from vismmoe_training.scenes import KINDS, write_corpus
from vismmoe_training.scenes.__main__ import main as draw


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "corpus", 12, seed=3)


def lines_of(corpus: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (corpus / "images" / "metadata.jsonl").read_text().splitlines()]


def test_metadata_describes_every_picture(corpus: Path) -> None:
    lines = lines_of(corpus)
    assert [line["file_name"] for line in lines] == [f"{index:06d}.png" for index in range(12)]
    for line in lines:
        with Image.open(corpus / "images" / str(line["file_name"])) as image:
            assert image.size == (line["width"], line["height"])
        assert len(line["questions"]) == 8  # type: ignore[arg-type]


def test_pictures_are_small(corpus: Path) -> None:
    sizes = [path.stat().st_size for path in (corpus / "images").glob("*.png")]
    assert sum(sizes) / len(sizes) < 20_000


def test_the_same_seed_writes_the_same_files(corpus: Path, tmp_path: Path) -> None:
    again = write_corpus(tmp_path / "again", 12, seed=3)
    for path in sorted((corpus / "images").iterdir()):
        assert path.read_bytes() == (again / "images" / path.name).read_bytes()


def test_a_folder_in_use_is_refused_and_an_empty_one_filled(tmp_path: Path) -> None:
    empty, used = tmp_path / "empty", tmp_path / "used"
    empty.mkdir()
    used.mkdir()
    (used / "notes.txt").write_text("keep")
    write_corpus(empty, 1, seed=0)
    with pytest.raises(ValueError, match="not an empty folder"):
        write_corpus(used, 1, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "used"]
    assert [path.name for path in used.iterdir()] == ["notes.txt"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vismmoe_training.scenes.corpus._compact", fail)
    with pytest.raises(OSError, match="disk full"):
        write_corpus(tmp_path / "corpus", 2, seed=0)
    assert not list(tmp_path.iterdir())


def test_datasets_reads_the_corpus_as_an_image_folder(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset("imagefolder", data_dir=str(corpus), split="train", cache_dir=str(tmp_path))
    lines = lines_of(corpus)
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        assert row["image"].size == (line["width"], line["height"])
        assert row["objects"] == line["objects"]
        assert row["questions"] == line["questions"]
        assert all(item["kind"] in KINDS for item in row["objects"])


def test_the_command_draws_each_kind_into_a_folder_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "drawn"), "--seed", "5", "--count", "2", "--kind", "small", "usual"]
    assert draw(words) == 0
    assert [len(lines_of(tmp_path / "drawn" / kind)) for kind in ("small", "usual")] == [2, 2]
    boxes = [thing["box"] for line in lines_of(tmp_path / "drawn/small") for thing in line["objects"]]  # type: ignore[attr-defined]
    assert max(max(x1 - x0, y1 - y0) for x0, y0, x1, y1 in boxes) <= 32
    again = write_corpus(tmp_path / "again", 2, seed=6)  # kinds count on from the seed
    assert lines_of(again) == lines_of(tmp_path / "drawn/usual")
    assert draw(words) == 2
    assert "not an empty folder" in capsys.readouterr().err
