"""POPE: is a thing in the image, yes or no; splits random, popular, adversarial."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vismmoe.evaluate.score import Benchmark, PromptSet, Reading, Row, Score, Scorer, mean
from vismmoe.evaluate.text import lmms_eval_answer, through_sheet, word_yes_no

SPLITS = ("adversarial", "popular", "random")


def normal(row: Row) -> Row:
    """The original's names (text, label, image) and VLMEvalKit's (image_path) become the hub's."""
    answer = str(row.get("answer", row.get("label"))).strip().lower()
    if answer not in ("yes", "no"):
        raise ValueError(f"the answer must be yes or no, not {row.get('answer', row.get('label'))!r}")
    image = row.get("image_source") or row.get("image_path") or row.get("image") or ""
    question = row.get("question", row.get("text"))
    category = ",".join(part.strip() for part in str(row.get("category") or "").split(","))
    return {**row, "question": question, "answer": answer, "category": category, "image_source": str(image)}


def _split_up(rows: Sequence[Row], read: Callable[[Row], tuple[str, float]]) -> list[Reading]:
    """One reading for each split that a row stands in: VLMEvalKit's table holds each question once."""
    found = []
    for place, row in enumerate(rows):
        label, score = read(row)
        for split in row["category"].split(","):
            found.append(Reading({**row, "category": split}, score, row["image_source"], "", label, place=place))
    return found


def _counts(readings: Sequence[Reading], yes: str, no: str) -> tuple[int, int, int, int]:
    """(TP, FP, TN, FN) of answers labelled `yes` and `no`; others count nowhere."""
    pairs = [(reading.row["answer"], reading.label) for reading in readings]
    return (
        pairs.count(("yes", yes)),
        pairs.count(("no", yes)),
        pairs.count(("no", no)),
        pairs.count(("yes", no)),
    )


def _by_split(readings: Sequence[Reading], total: Callable[[Sequence[Reading]], Any]) -> dict[str, Any]:
    splits = {reading.row["category"] for reading in readings} - {""}
    order = [*(name for name in SPLITS if name in splits), *sorted(splits - set(SPLITS))]
    return {name: total([reading for reading in readings if reading.row["category"] == name]) for name in order}


def _ratio(part: int, whole: int) -> float:
    """0 for 0 of 0, as lmms-eval and VLMEvalKit define it."""
    return part / whole if whole else 0


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0


# -- lmms-eval: the whole answer must be the word ---------------------------------------------------------------------


def _read_lmms_eval(rows: Sequence[Row]) -> list[Reading]:
    def read(row: Row) -> tuple[str, float]:
        label = lmms_eval_answer(row["prediction"]).lower().strip()
        return label, float(label == row["answer"])

    return _split_up(rows, read)


def _total_lmms_eval(readings: Sequence[Reading]) -> Score:
    notes = ("yes_ratio is that of the right answers, as lmms-eval computes it; predicted_yes_ratio is ours",)
    values = _lmms_eval_values(readings)
    return Score("accuracy", "of 1", {**values, "by_split": _by_split(readings, _lmms_eval_values)}, {}, notes)


def _lmms_eval_values(readings: Sequence[Reading]) -> dict[str, float]:
    tp, fp, _, fn = _counts(readings, "yes", "no")
    precision, recall = _ratio(tp, tp + fp), _ratio(tp, tp + fn)
    return {
        "accuracy": mean([reading.score for reading in readings]),
        "precision": precision,
        "recall": recall,
        "f1": _f1(precision, recall),
        "yes_ratio": mean([float(reading.row["answer"] == "yes") for reading in readings]),
        "predicted_yes_ratio": mean([float(reading.label == "yes") for reading in readings]),
    }


# -- VLMEvalKit: whole words; what is unreadable is "not yes" ---------------------------------------------------------


def _read_vlmevalkit(rows: Sequence[Row]) -> list[Reading]:
    def read(row: Row) -> tuple[str, float]:
        label = word_yes_no(through_sheet(row["prediction"]))
        return label, float(label.lower() == row["answer"])

    return _split_up(rows, read)


def _total_vlmevalkit(readings: Sequence[Reading]) -> Score:
    splits = {"Overall": _vlmevalkit_values(readings), **_by_split(readings, _vlmevalkit_values)}
    ratio = mean([float(reading.label == "Yes") for reading in readings])
    return Score("splits.Overall.f1", "%", {"splits": splits, "predicted_yes_ratio": ratio})


def _vlmevalkit_values(readings: Sequence[Reading]) -> dict[str, float]:
    tp, fp, _, _ = _counts(readings, "Yes", "No")
    precision = _ratio(tp, tp + fp)
    recall = _ratio(tp, sum(reading.row["answer"] == "yes" for reading in readings))
    accuracy = mean([reading.score for reading in readings])
    return {
        "f1": 100 * _f1(precision, recall),
        "acc": 100 * accuracy,
        "precision": 100 * precision,
        "recall": 100 * recall,
    }


# -- official: everything that does not deny is a yes -----------------------------------------------------------------


def official_yes_no(text: str) -> str:
    """POPE's evaluate.py: the first sentence, without commas, cut at single spaces."""
    words = text.split(".")[0].replace(",", "").split(" ")
    return "no" if {"No", "not", "no"} & set(words) else "yes"


def _read_official(rows: Sequence[Row]) -> list[Reading]:
    def read(row: Row) -> tuple[str, float]:
        label = official_yes_no(row["prediction"])
        return label, float(label == row["answer"])

    return _split_up(rows, read)


def _total_official(readings: Sequence[Reading]) -> Score:
    values, undefined = _official_values(readings)
    splits = _by_split(readings, _official_values)
    for name, (_, why) in splits.items():
        undefined |= {f"by_split.{name}.{key}": reason for key, reason in why.items()}
    parts = {name: own for name, (own, _) in splits.items()}
    each = [own["f1"] for own in parts.values()]
    if parts:
        values["mean_f1_of_splits"] = None if None in each else mean(each)
    return Score("f1", "of 1", {**values, "by_split": parts}, undefined)


def _official_values(readings: Sequence[Reading]) -> tuple[dict[str, Any], dict[str, str]]:
    tp, fp, tn, fn = _counts(readings, "yes", "no")
    precision = tp / (tp + fp) if tp + fp else None
    recall = tp / (tp + fn) if tp + fn else None
    known = precision is not None and recall is not None and precision + recall > 0
    f1 = _f1(precision or 0, recall or 0) if known else None
    undefined = {}
    if precision is None:
        undefined["precision"] = "no answer is a yes: the script ends with ZeroDivisionError"
    if recall is None:
        undefined["recall"] = "no right answer is yes: the script ends with ZeroDivisionError"
    if f1 is None:
        undefined["f1"] = "precision and recall give no ratio: the script ends with ZeroDivisionError"
    values = {
        "TP": tp,
        "FP": fp,
        "TN": tn,
        "FN": fn,
        "accuracy": (tp + tn) / len(readings),
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "yes_ratio": mean([float(reading.label == "yes") for reading in readings]),
    }
    return values, undefined


# -- asking -----------------------------------------------------------------------------------------------------------


def _ask_lmms_eval(row: Row) -> str:
    return f"{row['question'].strip()}\nAnswer the question using a single word or phrase."


def _ask_plain(row: Row) -> str:
    return str(row["question"])


def _ask_yes_or_no(row: Row) -> str:
    return f"{row['question']} Please answer yes or no."


def _ask_evalscope(row: Row) -> str:
    return f"{row['question']}\nPlease answer YES or NO without an explanation."


POPE = Benchmark(
    name="pope",
    title="POPE",
    required=(("question", "text"), ("answer", "label")),
    prompts={
        "lmms-eval": PromptSet("lmms-eval", _ask_lmms_eval),
        "vlmevalkit": PromptSet("vlmevalkit", _ask_plain),
        "vlmevalkit-qwen2": PromptSet("vlmevalkit-qwen2", _ask_yes_or_no),
        "vlmevalkit-qwen3": PromptSet("vlmevalkit-qwen3", _ask_yes_or_no),
        "evalscope": PromptSet("evalscope", _ask_evalscope),
        "official": PromptSet("official", _ask_plain),
        "plain": PromptSet("plain", _ask_plain),
    },
    scorers={
        "lmms-eval": Scorer("lmms-eval", "lmms-eval 0.7.3, tasks/pope", _read_lmms_eval, _total_lmms_eval),
        "vlmevalkit": Scorer("vlmevalkit", "VLMEvalKit e8e78f0, exact matching", _read_vlmevalkit, _total_vlmevalkit),
        "official": Scorer("official", "RUCAIBox/POPE 3df3ba1, evaluate.py", _read_official, _total_official),
    },
    max_new_tokens={"lmms-eval": 128, "vlmevalkit": 2048, "official": 128},
    normal=normal,
    unit=None,
)
