"""MME: two yes/no questions an image, 14 subtasks; a subtask gives 100 x accuracy + 100 x both of an image right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vismmoe.evaluate.score import Benchmark, PromptSet, Reading, Row, Score, Scorer, mean
from vismmoe.evaluate.text import lmms_eval_answer, lmms_eval_yes_no, prefix_yes_no, through_sheet, word_yes_no

PERCEPTION = (
    "existence", "count", "position", "color", "posters", "celebrity", "scene", "landmark", "artwork", "OCR",
)  # fmt: skip
COGNITION = ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning")
SUFFIX = " Please answer yes or no."

Pairs = Mapping[str, Mapping[str, Sequence[Reading]]]  # category -> unit -> its readings


def normal(row: Row) -> Row:
    """question_id `category/file` is made from VLMEvalKit's image_path where it lacks."""
    answer = str(row["answer"]).strip().rstrip(".").capitalize()
    if answer not in ("Yes", "No"):
        raise ValueError(f"the answer must be Yes or No, not {row['answer']!r}")
    name = row.get("question_id") or row.get("image_path")
    if not name:
        raise ValueError("neither question_id nor image_path says which image the question is about")
    return {**row, "question_id": str(name), "answer": answer, "category": str(row["category"])}


# -- reading ----------------------------------------------------------------------------------------------------------


def _readings(rows: Sequence[Row], read: Callable[[str], str], unit: Callable[[int, Row], str]) -> list[Reading]:
    place: defaultdict[str, int] = defaultdict(int)
    found = []
    for index, row in enumerate(rows):
        label = read(row["prediction"])
        score = float(label.lower() == row["answer"].lower())
        own = unit(place[row["category"]], row)
        found.append(Reading(row, score, own, row["category"], label, place=index))
        place[row["category"]] += 1
    return found


def _by_image(place: int, row: Row) -> str:
    return f"{row['category']}:{row['question_id']}"


def _by_line(place: int, row: Row) -> str:
    return f"{row['category']}:{place // 2}"


def _read_lmms_eval(rows: Sequence[Row]) -> list[Reading]:
    return _readings(rows, lambda text: lmms_eval_yes_no(lmms_eval_answer(text)), _by_image)


def _read_vlmevalkit(rows: Sequence[Row]) -> list[Reading]:
    return _readings(rows, lambda text: word_yes_no(through_sheet(text)), _by_image)


def _read_official(rows: Sequence[Row]) -> list[Reading]:
    """One line an answer; lines are taken two by two, whatever image they name."""
    return _readings(rows, lambda text: prefix_yes_no(text.replace("\n", " ").lower()), _by_line)


# -- adding up --------------------------------------------------------------------------------------------------------


def _pairs(readings: Sequence[Reading]) -> Pairs:
    found: defaultdict[str, defaultdict[str, list[Reading]]] = defaultdict(lambda: defaultdict(list))
    for reading in readings:
        found[reading.row["category"]][reading.unit].append(reading)
    return found


def _accuracies(units: Mapping[str, Sequence[Reading]]) -> tuple[float, float]:
    """(accuracy, share of images with both answers right), 0 to 1. More than two of an image: the first two count."""
    every = [reading.score for own in units.values() for reading in own]
    return mean(every), mean([own[0].score * own[1].score for own in units.values()])


def _total_lmms_eval(readings: Sequence[Reading]) -> Score:
    return _add_up(readings, _unpaired)


def _total_vlmevalkit(readings: Sequence[Reading]) -> Score:
    def reason(units: Mapping[str, Sequence[Reading]]) -> str:
        short = [unit for unit, own in units.items() if len(own) < 2]
        return f"{short[0]} has one question: VLMEvalKit ends with IndexError" if short else ""

    return _add_up(readings, reason, _absent(readings, "VLMEvalKit itself ends with KeyError unless all are there"))


def _total_official(readings: Sequence[Reading]) -> Score:
    def reason(units: Mapping[str, Sequence[Reading]]) -> str:
        if any(len(own) != 2 for own in units.values()):
            return "an odd number of lines: the tool ends with AssertionError"
        if all(reading.label == "other" for own in units.values() for reading in own):
            return "no answer is readable: the tool ends with ValueError in sklearn"
        return ""

    score = _add_up(readings, reason, _absent(readings, "the tool itself wants a file for each"))
    both = {
        category: _accuracies(units) for category, units in _pairs(readings).items() if category not in score.undefined
    }
    acc = {category: 100 * acc for category, (acc, _) in both.items()}
    plus = {category: 100 * plus for category, (_, plus) in both.items()}
    values = {**score.values, "acc": acc, "acc_plus": plus}
    return Score(score.headline, score.unit, values, score.undefined, score.notes)


def _unpaired(units: Mapping[str, Sequence[Reading]]) -> str:
    odd = [unit for unit, own in units.items() if len(own) != 2]
    count = len(units[odd[0]]) if odd else 0
    return f"{odd[0]} has {count} questions: lmms-eval ends with AssertionError" if odd else ""


def _add_up(
    readings: Sequence[Reading],
    reason: Callable[[Mapping[str, Sequence[Reading]]], str],
    notes: tuple[str, ...] = (),
) -> Score:
    """reason: why the scorer gives a subtask no number, empty if it does."""
    scores: dict[str, float | None] = {}
    undefined: dict[str, str] = {}
    for category, units in _pairs(readings).items():
        if why := reason(units):
            scores[category], undefined[category] = None, why
        else:
            scores[category] = sum(100 * part for part in _accuracies(units))
    sums = {
        "perception": _sum(scores, lambda name: name in PERCEPTION),
        "cognition": _sum(scores, lambda name: name not in PERCEPTION),
    }
    values: dict[str, Any] = {**sums}
    values["total"] = _sum(sums, lambda name: True)
    values["category_scores"] = scores
    undefined |= {name: "of a subtask that is undefined" for name in (*sums, "total") if values[name] is None}
    return Score("total", "of 2800", values, undefined, notes)


def _sum(scores: Mapping[str, float | None], wanted: Callable[[str], bool]) -> float | None:
    chosen = [value for name, value in scores.items() if wanted(name)]
    return None if None in chosen else sum(value for value in chosen if value is not None)


def _absent(readings: Sequence[Reading], what: str) -> tuple[str, ...]:
    there = {reading.row["category"] for reading in readings}
    lacking = [name for name in (*PERCEPTION, *COGNITION) if name not in there]
    return (f"{len(lacking)} of 14 subtasks are absent ({', '.join(lacking)}): {what}",) if lacking else ()


# -- asking -----------------------------------------------------------------------------------------------------------


def _ask_lmms_eval(row: Row) -> str:
    return f"{row['question'].strip().replace(SUFFIX, '')}\nAnswer the question using a single word or phrase."


def _ask_plain(row: Row) -> str:
    return str(row["question"])


def _ask_twice(row: Row) -> str:
    return f"{row['question']}{SUFFIX}"


MME = Benchmark(
    name="mme",
    title="MME",
    required=(("question",), ("answer",), ("category",), ("question_id", "image_path")),
    prompts={
        "lmms-eval": PromptSet("lmms-eval", _ask_lmms_eval),
        "vlmevalkit": PromptSet("vlmevalkit", _ask_plain),
        "vlmevalkit-qwen2": PromptSet("vlmevalkit-qwen2", _ask_plain),
        "vlmevalkit-qwen3": PromptSet("vlmevalkit-qwen3", _ask_twice),
        "official": PromptSet("official", _ask_plain),
        "plain": PromptSet("plain", _ask_plain),
    },
    scorers={
        "lmms-eval": Scorer("lmms-eval", "lmms-eval 0.7.3, tasks/mme", _read_lmms_eval, _total_lmms_eval),
        "vlmevalkit": Scorer("vlmevalkit", "VLMEvalKit e8e78f0, exact matching", _read_vlmevalkit, _total_vlmevalkit),
        "official": Scorer("official", "MME eval_tool/calculation.py", _read_official, _total_official),
    },
    max_new_tokens={"lmms-eval": 16, "vlmevalkit": 2048, "official": 16},
    normal=normal,
    unit=lambda row: f"{row['category']}:{row['question_id']}",
)
