"""Answers that exist already: JSON, JSON lines, or a folder of MME's official result lists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vismmoe.errors import CorpusError
from vismmoe.evaluate.benchmarks import checked_all
from vismmoe.evaluate.score import Benchmark, Row
from vismmoe.untrusted import parse_json, read_text


def read_predictions(benchmark: Benchmark, source: str) -> list[Row]:
    """Rows with their fields and a text under "prediction". CorpusError names the row that lacks something."""
    place = Path(source)
    if place.is_dir() and benchmark.name == "mme":
        rows = [row for file in sorted(place.glob("*.txt")) for row in _result_list(file)]
    else:
        rows = list(_json_rows(place))
    for where, row in rows:
        if "prediction" not in row and "predict" not in row:
            raise CorpusError(f"{where} has no prediction.")
    return checked_all(benchmark, [(where, {**row, "prediction": _text(row, where)}) for where, row in rows])


def _text(row: Row, where: str) -> str:
    value = row.get("prediction", row.get("predict"))
    if value is None:
        return ""
    if not isinstance(value, (str, int, float)):
        raise CorpusError(f"{where}: the prediction must be a text, not {value!r}.")
    return str(value)


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = _text_of(file)
    try:
        told = parse_json(text)
    except ValueError as error:
        if "too deeply" in str(error):
            raise CorpusError(f"{file} is nested too deeply to be rows of predictions.") from None
        told = _lines(file, text, error)
    if isinstance(told, dict):
        told = told.get("rows", told.get("samples"))
    if not isinstance(told, list):
        raise CorpusError(f'{file} must hold a list of rows, {{"rows": [...]}}, or one row a line.')
    for number, row in enumerate(told, start=1):
        if not isinstance(row, dict):
            raise CorpusError(f"{file.name}, row {number} is no JSON object.")
        yield f"{file.name}, row {number}", row


def _text_of(file: Path) -> str:
    try:
        return read_text(file)
    except ValueError as error:
        raise CorpusError(f"--predictions {file} cannot be used: {error}.") from None


def _lines(file: Path, text: str, error: ValueError) -> list[Any]:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                found.append(parse_json(line))
            except ValueError:
                told = f"line {number} is no JSON" if found else f"it is no JSON ({error})"
                raise CorpusError(f"{file}: {told}.") from None
    return found


def _result_list(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """`image<TAB>question<TAB>Yes|No<TAB>answer`, one file a subtask."""
    for number, line in enumerate(_text_of(file).splitlines(), start=1):
        if not line.strip():
            continue
        cells = line.split("\t")
        where = f"{file.name}, line {number}"
        if len(cells) != 4:
            raise CorpusError(f"{where}: image, question, Yes or No and answer must stand there between tabs.")
        image, question, answer, prediction = cells
        name = f"{file.stem}/{image}"
        row = {"question_id": name, "category": file.stem, "question": question, "answer": answer}
        yield where, {**row, "prediction": prediction}
