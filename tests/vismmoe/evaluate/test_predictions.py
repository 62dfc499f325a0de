"""`vismmoe eval --predictions`: what it takes, what it prints, and what it refuses with which exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vismmoe.cli import main

ROW = {"question_id": "count/1.png", "category": "count", "question": "?", "answer": "Yes", "prediction": "yes"}
PAIR = [ROW, {**ROW, "answer": "No", "prediction": "No"}]


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = main(["eval", *words])
    told = capsys.readouterr()
    return status, told.out, told.err


def write(folder: Path, content: Any) -> str:
    file = folder / "answers.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    "content", [PAIR, {"rows": PAIR}, "\n".join(map(json.dumps, PAIR)) + "\n"], ids=["list", "rows", "lines"]
)
def test_one_json_object_names_scorer_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any
) -> None:
    words = ["--benchmark", "mme", "--scorer", "official", "--predictions", write(tmp_path, content), "--json"]
    status, out, _ = run(words, capsys)
    told = json.loads(out)
    assert status == 0
    assert (told["benchmark"], told["scorer"], told["rows"]) == ("mme", "official", 2)
    assert told["headline"] == {"name": "total", "value": 200.0, "unit": "of 2800"}
    assert told["scores"]["category_scores"] == {"count": 200.0}
    assert told["row_labels"] == ["yes", "no"]
    assert "13 of 14 subtasks are absent" in told["notes"][0]


def test_the_official_result_lists_of_mme_are_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "count.txt").write_text("1.png\tIs it?\tYes\tyes\n1.png\tIsn't it?\tNo\tYes, it is.\n")
    status, out, _ = run(["--benchmark", "mme", "--predictions", str(tmp_path)], capsys)
    assert status == 0
    assert "count" in out
    assert "50" in out


def test_what_is_undefined_is_said_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "?", "answer": "yes", "category": "random", "prediction": "no"}]
    words = ["--benchmark", "pope", "--scorer", "official", "--predictions", write(tmp_path, rows)]
    status, out, _ = run(words, capsys)
    assert status == 0
    assert "undefined: f1: precision and recall give no ratio" in out
    told = json.loads(run([*words, "--json"], capsys)[1])
    assert told["scores"]["f1"] is None
    assert told["scores"]["recall"] == 0


@pytest.mark.parametrize(
    ("content", "status", "sentence"),
    [
        ([], 3, "no row of MME"),
        ("not json", 3, "no JSON"),
        ([1], 3, "row 1 is no JSON object"),
        ([{**ROW, "prediction": ["a"]}], 3, "row 1: the prediction must be a text"),
        ([{key: value for key, value in ROW.items() if key != "prediction"}], 3, "row 1 has no prediction"),
        ([ROW, {**ROW, "answer": "perhaps"}], 3, "row 2: the answer must be Yes or No"),
        ([{key: value for key, value in ROW.items() if key != "category"}], 3, "row 1 has no category"),
        ("[" * 100_000, 3, "nested too deeply"),
    ],
)
def test_bad_predictions_are_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, status: int, sentence: str
) -> None:
    found, out, err = run(["--benchmark", "mme", "--predictions", write(tmp_path, content)], capsys)
    assert (found, out) == (status, "")
    assert sentence in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--benchmark", "mme"], "either --data"),
        (["--benchmark", "mme", "--data", "x", "--predictions", "y"], "either --data"),
        (["--benchmark", "mme", "--predictions", "y", "--keep-ratio", "0.5"], "--keep-ratio needs a model"),
        (["--benchmark", "nme", "--data", "x"], "Did you mean mme"),
        (["--benchmark", "ocrbench", "--data", "x", "--prompts", "llava"], "OCRBench has no prompt set 'llava'"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    status, _, err = run(words, capsys)
    assert status == 2
    assert sentence in err
