"""OCRBench: a point for every answer that contains the right text; 1,000 questions, hence points of 1,000."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from vismmoe.evaluate.score import Benchmark, PromptSet, Reading, Row, Score, Scorer
from vismmoe.evaluate.text import fold_fullwidth, lmms_eval_answer, through_sheet

RECOGNITION = (
    "Regular Text Recognition", "Irregular Text Recognition", "Artistic Text Recognition", "Handwriting Recognition",
    "Digit String Recognition", "Non-Semantic Text Recognition",
)  # fmt: skip
MATHS = "Handwritten Mathematical Expression Recognition"
OTHERS = ("Scene Text-centric VQA", "Doc-oriented VQA", "Key Information Extraction", MATHS)
MATHS_DATASET = "HME100k"


def normal(row: Row) -> Row:
    """The original's names (dataset_name, answers, type) and VLMEvalKit's (category) become the hub's."""
    answers = row.get("answer", row.get("answers"))
    if isinstance(answers, str) and answers.startswith("[") and "question_type" not in row and "type" not in row:
        answers = _literal(answers)  # VLMEvalKit's table holds a Python list as text
    listed = [answers] if isinstance(answers, str) else answers
    if not isinstance(listed, (list, tuple)) or not listed or not all(isinstance(one, str) for one in listed):
        raise ValueError(f"the answer must be a text or a list of texts, not {answers!r}")
    kind = row.get("question_type") or row.get("type") or row.get("category")
    if kind not in (*RECOGNITION, *OTHERS):
        raise ValueError(f"question_type must be one of OCRBench's ten, not {kind!r}")
    dataset = row.get("dataset") or row.get("dataset_name")
    if dataset is None:  # VLMEvalKit's table does not say
        dataset = MATHS_DATASET if kind == MATHS else ""
    return {**row, "answer": list(listed), "question_type": kind, "dataset": dataset}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def contains(prediction: str, answers: Sequence[str]) -> bool:
    """Case apart, line ends as spaces."""
    clean = prediction.lower().strip().replace("\n", " ")
    return any(answer.lower().strip().replace("\n", " ") in clean for answer in answers)


def contains_formula(prediction: str, answers: Sequence[str]) -> bool:
    """Case matters, spaces do not."""
    clean = prediction.strip().replace("\n", " ").replace(" ", "")
    return any(answer.strip().replace("\n", " ").replace(" ", "") in clean for answer in answers)


def _readings(rows: Sequence[Row], right: Callable[[Row], bool]) -> list[Reading]:
    return [
        Reading(row, float(right(row)), str(place), row["question_type"], place=place) for place, row in enumerate(rows)
    ]


def _points(readings: Sequence[Reading]) -> dict[str, int]:
    return {
        kind: int(sum(reading.score for reading in readings if reading.row["question_type"] == kind))
        for kind in (*RECOGNITION, *OTHERS)
    }


def _read_lmms_eval(rows: Sequence[Row]) -> list[Reading]:
    def right(row: Row) -> bool:
        answer = lmms_eval_answer(row["prediction"])
        if row["dataset"] == MATHS_DATASET:
            return contains_formula(answer, row["answer"])
        return contains(fold_fullwidth(answer), [fold_fullwidth(one) for one in row["answer"]])

    return _readings(rows, right)


def _total_lmms_eval(readings: Sequence[Reading]) -> Score:
    points = _points(readings)
    values = {
        "final_score": sum(points.values()),
        "ocrbench_accuracy": sum(points.values()) / 1000,
        "by_type_nonzero": {kind: count for kind, count in points.items() if count},
    }
    return Score("final_score", "points", values, {}, ("ocrbench_accuracy is points / 1000 whatever the rows",))


def _read_vlmevalkit(rows: Sequence[Row]) -> list[Reading]:
    def right(row: Row) -> bool:
        rule = contains_formula if row["question_type"] == MATHS else contains
        return rule(through_sheet(row["prediction"]), row["answer"])

    return _readings(rows, right)


def _total_vlmevalkit(readings: Sequence[Reading]) -> Score:
    points = _points(readings)
    final = sum(points.values())
    values = {
        "Text Recognition": sum(points[kind] for kind in RECOGNITION),
        **{kind: points[kind] for kind in OTHERS},
        "Final Score": final,
        "Final Score Norm": final / 10,
    }
    return Score("Final Score", "points", values)


def _read_official(rows: Sequence[Row]) -> list[Reading]:
    def right(row: Row) -> bool:
        rule = contains_formula if row["dataset"] == MATHS_DATASET else contains
        return rule(row["prediction"], row["answer"])

    return _readings(rows, right)


def _total_official(readings: Sequence[Reading]) -> Score:
    points = _points(readings)
    values = {
        "final_score": sum(points.values()),
        "Text Recognition": sum(points[kind] for kind in RECOGNITION),
        **points,
    }
    return Score("final_score", "points", values)


def _ask_plain(row: Row) -> str:
    return str(row["question"])


def _ask_lmms_eval(row: Row) -> str:
    return str(row["question"]).strip()


def _ask_qwen2(row: Row) -> str:
    return f"{row['question']}\nPlease try to answer the question with short words or phrases if possible."


def _ask_qwen3(row: Row) -> str:
    return f"{row['question']}\nPlease answer concisely with short words or phrases when possible."


OCRBENCH = Benchmark(
    name="ocrbench",
    title="OCRBench",
    required=(("question",), ("answer", "answers"), ("question_type", "type", "category")),
    prompts={
        "lmms-eval": PromptSet("lmms-eval", _ask_lmms_eval),
        "vlmevalkit": PromptSet("vlmevalkit", _ask_plain),
        "vlmevalkit-qwen2": PromptSet("vlmevalkit-qwen2", _ask_qwen2),
        "vlmevalkit-qwen3": PromptSet("vlmevalkit-qwen3", _ask_qwen3),
        "official": PromptSet("official", _ask_plain),
        "plain": PromptSet("plain", _ask_plain),
    },
    scorers={
        "lmms-eval": Scorer("lmms-eval", "lmms-eval 0.7.3, tasks/ocrbench", _read_lmms_eval, _total_lmms_eval),
        "vlmevalkit": Scorer("vlmevalkit", "VLMEvalKit e8e78f0", _read_vlmevalkit, _total_vlmevalkit),
        "official": Scorer("official", "MultimodalOCR 794c36d, OCRBench/example.py", _read_official, _total_official),
    },
    max_new_tokens={"lmms-eval": 128, "vlmevalkit": 2048, "official": 128},
    normal=normal,
    unit=None,
)
