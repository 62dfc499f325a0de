"""MMBench: a question is asked once per option, options rotated, and counts only if every pass is right."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vismmoe.evaluate.mcq import extract_mcq_answer, lmms_eval_letter, option_in_text
from vismmoe.evaluate.score import Benchmark, PromptSet, Reading, Row, Score, Scorer, mean
from vismmoe.evaluate.text import is_missing, lmms_eval_answer, through_sheet

LETTERS = "ABCD"
PASS = 1_000_000  # index of pass k = index of the question + k * PASS
ABBREVIATIONS = {
    "coarse_perception": "CP",
    "finegrained_perception (instance-level)": "FP-S",
    "finegrained_perception (cross-instance)": "FP-C",
    "logic_reasoning": "LR",
    "relation_reasoning": "RR",
    "attribute_reasoning": "AR",
}
REFUSALS = (
    "Sorry, I can't help with images of people yet.",
    "I can't process this file.",
    "I'm sorry, but without the image provided",
    "Cannot determine the answer",
)
_VERBOSE_ANSWER = re.compile(r"(?i)(?:correct\s+)?answer\s+is\s+\**([ABCD])\**")


def normal(row: Row) -> Row:
    """index as a number, also where a revision of the hub's table holds text; `L2-category` in either spelling."""
    try:
        index = int(row["index"])
    except (TypeError, ValueError):
        raise ValueError(f"index must be a whole number, not {row['index']!r}") from None
    answer = str(row["answer"]).strip()
    if answer not in (*LETTERS, "E"):
        raise ValueError(f"the answer must be a letter of {', '.join(LETTERS)}, not {row['answer']!r}")
    level = row.get("L2-category", row.get("l2-category"))
    found = {**row, "index": index, "answer": answer, "L2-category": level}
    for letter in LETTERS:
        value = row.get(letter)
        found[letter] = None if isinstance(value, float) and value != value else value
    return found


def _readings(rows: Sequence[Row], labels: Sequence[str | None], extras: Sequence[Mapping[str, Any]]) -> list[Reading]:
    return [
        Reading(row, float(label == row["answer"]), str(row["index"] % PASS), "", label, extra, place)
        for place, (row, label, extra) in enumerate(zip(rows, labels, extras, strict=True))
    ]


def _hits(readings: Sequence[Reading]) -> list[tuple[Row, float]]:
    """(the row of the first pass, 1 or 0) of every question that has a first pass; absent passes are not asked for."""
    passes: defaultdict[str, list[Reading]] = defaultdict(list)
    for reading in readings:
        passes[reading.unit].append(reading)
    return [
        (first.row, float(all(reading.score for reading in own)))
        for own in passes.values()
        for first in own
        if first.row["index"] < PASS
    ]


def _means(hits: Sequence[tuple[Row, float]], key: str) -> dict[str, float]:
    """Percent by the value of a column, in the order of the alphabet."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row, hit in hits:
        if not is_missing(row.get(key)):
            groups[str(row[key])].append(hit)
    return {name: 100 * mean(groups[name]) for name in sorted(groups)}


def _overall(hits: Sequence[tuple[Row, float]]) -> tuple[float | None, dict[str, str]]:
    if hits:
        return 100 * mean([hit for _, hit in hits]), {}
    return None, {"overall": f"no row has an index below {PASS:,}: the first pass of every question is missing"}


# -- lmms-eval, task mmbench_en_dev_static ----------------------------------------------------------------------------


def _read_lmms_eval(rows: Sequence[Row]) -> list[Reading]:
    """The task's own rules first, then the general extraction; no judge is asked and nothing is guessed."""
    labels: list[str | None] = []
    extras = []
    for row in rows:
        answer = lmms_eval_answer(row["prediction"])
        options = {letter: str(row[letter]) for letter in LETTERS if row[letter] is not None}
        prefetched = lmms_eval_letter(answer) or option_in_text(answer, options)
        extracted = extract_mcq_answer(answer, sorted(options))
        labels.append(prefetched or extracted or None)
        extras.append({"prefetched": prefetched or False, "static_extracted": extracted})
    return _readings(rows, labels, extras)


def _total_lmms_eval(readings: Sequence[Reading]) -> Score:
    hits = _hits(readings)
    overall, undefined = _overall(hits)
    values = {"overall": overall, "category": _means(hits, "category"), "l2_category": _means(hits, "L2-category")}
    return Score("overall", "%", values, undefined)


# -- VLMEvalKit, exact matching ---------------------------------------------------------------------------------------


def vlmevalkit_letter(answer: str, options: Mapping[str, str]) -> str | None:
    """matching_util.can_infer: one option letter among the last words, a phrase, or one option's text."""
    if "Failed to obtain answer via API" in answer:
        return option_in_text(answer, options)
    if any(refusal in answer for refusal in REFUSALS):
        return "Z"
    words = answer.translate({ord(mark): " " for mark in ".()[],:;!*#{}"}).split()
    there = [letter for letter in options if letter in words]
    if len(there) == 1 and words.index(there[0]) > len(words) - 5:
        return there[0]
    if not there and "Z" in words:
        return "Z"
    match = _VERBOSE_ANSWER.search(answer)
    if match and match.group(1).upper() in options:
        return match.group(1).upper()
    if len(answer.lower()) > 2 * sum(map(len, options.values())):
        return None
    return option_in_text(answer, options)


def _read_vlmevalkit(rows: Sequence[Row]) -> list[Reading]:
    labels = []
    for row in rows:
        options = {letter: str(row[letter]) for letter in LETTERS if not is_missing(row[letter])}
        labels.append(vlmevalkit_letter(through_sheet(row["prediction"]), options))
    return _readings(rows, labels, [{"prefetched": label or False} for label in labels])


def _total_vlmevalkit(readings: Sequence[Reading]) -> Score:
    hits = _hits(readings)
    overall, undefined = _overall(hits)
    columns = {ABBREVIATIONS.get(name, name): value for name, value in _means(hits, "L2-category").items()}
    values = {"overall": overall, "columns": {**columns, **_means(hits, "category")}}
    return Score("overall", "%", values, undefined)


# -- asking -----------------------------------------------------------------------------------------------------------


def _options(row: Row) -> str:
    return "".join(f"{letter}. {row[letter]}\n" for letter in LETTERS if not is_missing(row[letter]))


def _ask_lmms_eval(row: Row) -> str:
    shown = {letter: row[letter] for letter in LETTERS if row[letter] and str(row[letter]) != "nan"}
    options = "".join(f"{letter}. {text}\n" for letter, text in shown.items())
    hint = row.get("hint")
    before = f"{hint} " if hint is not None and str(hint) != "nan" else ""
    listed = f"There are several options:\n{options}".rstrip("\n")
    return f"{before}{row['question']} {listed}\n\nAnswer with the option's letter from the given choices directly."


def _ask_vlmevalkit(row: Row) -> str:
    hint = "" if is_missing(row.get("hint")) else f"Hint: {row['hint']}\n"
    return (
        f"{hint}Question: {row['question']}\nOptions:\n{_options(row)}"
        "Please select the correct answer from the options above. \n"
    )


def _ask_qwen2(row: Row) -> str:
    text = _ask_vlmevalkit(row).strip()
    chinese = any("\u4e00" <= char <= "\u9fff" for char in text)
    return f"{text.rsplit(chr(10), 1)[0]}\n请直接回答选项字母。" if chinese else text


def _ask_qwen3(row: Row) -> str:
    return f"{_ask_vlmevalkit(row).strip().rsplit(chr(10), 1)[0]}\nAnswer with the option letter only."


def _ask_llava(row: Row) -> str:
    hint = "" if is_missing(row.get("hint")) else f"{row['hint']}\n"
    return f"{hint}{row['question']}\n{_options(row)}Answer with the option's letter from the given choices directly."


def _ask_plain(row: Row) -> str:
    return f"{row['question']}\n{_options(row)}Answer with the letter."


_VLMEVALKIT = "VLMEvalKit e8e78f0, exact matching"

MMBENCH = Benchmark(
    name="mmbench",
    title="MMBench",
    required=(("index",), ("question",), ("answer",), ("A",), ("B",)),
    prompts={
        "lmms-eval": PromptSet("lmms-eval", _ask_lmms_eval),
        "vlmevalkit": PromptSet("vlmevalkit", _ask_vlmevalkit),
        "vlmevalkit-qwen2": PromptSet("vlmevalkit-qwen2", _ask_qwen2),
        "vlmevalkit-qwen3": PromptSet("vlmevalkit-qwen3", _ask_qwen3),
        "llava": PromptSet("llava", _ask_llava),
        "official": PromptSet("official", _ask_vlmevalkit),
        "plain": PromptSet("plain", _ask_plain),
    },
    scorers={
        "lmms-eval": Scorer(
            "lmms-eval", "lmms-eval 0.7.3, task mmbench_en_dev_static", _read_lmms_eval, _total_lmms_eval
        ),
        "vlmevalkit": Scorer("vlmevalkit", _VLMEVALKIT, _read_vlmevalkit, _total_vlmevalkit),
        # MMBench's authors publish VLMEvalKit as the way to score it.
        "official": Scorer("official", f"{_VLMEVALKIT}, the authors' own", _read_vlmevalkit, _total_vlmevalkit),
    },
    max_new_tokens={"lmms-eval": 1024, "vlmevalkit": 2048, "official": 2048},
    normal=normal,
    unit=lambda row: str(row["index"] % PASS),
)
