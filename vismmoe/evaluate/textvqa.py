"""TextVQA: ten people's answers; an answer is right by a third for each other person who gave it, at most wholly."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from vismmoe.evaluate.score import Benchmark, PromptSet, Reading, Row, Score, Scorer, mean
from vismmoe.evaluate.text import lmms_eval_answer, strip_punctuation, through_sheet
from vismmoe.evaluate.vqa_words import ARTICLES, CONTRACTIONS, NUMBERS


def normal(row: Row) -> Row:
    """VLMEvalKit's table holds the answers as a Python list in text."""
    answers = row.get("answers", row.get("answer"))
    if isinstance(answers, str):
        try:
            answers = ast.literal_eval(answers) if answers.startswith("[") else [answers]
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            answers = [answers]
    if not isinstance(answers, (list, tuple)) or not answers or not all(isinstance(one, str) for one in answers):
        raise ValueError(f"answers must be a list of texts, not {answers!r}")
    return {**row, "answers": list(answers)}


def clean_words(text: str) -> str:
    """Digits for number words, no articles, contractions with their apostrophes."""
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def evalai(text: str) -> str:
    """EvalAIAnswerProcessor of MMF, which lmms-eval copies."""
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's").strip()
    return clean_words(strip_punctuation(text.replace("\n", " ").replace("\t", " ").strip()))


def vlmevalkit_answer(text: str) -> str:
    """process_answer of VLMEvalKit."""
    return clean_words(strip_punctuation(text.replace("\n", " ").replace("\t", " ").strip()))


def soft_accuracy(answer: str, given: Sequence[str]) -> float:
    """Mean over the people: a third for each of the others who answered the same, at most 1."""
    same = [float(one == answer) for one in given]
    return mean([min(1.0, (sum(same) - own) / 3) for own in same])


def _reader(clean: Callable[[str], str], before: Callable[[str], str]) -> Callable[[Sequence[Row]], list[Reading]]:
    def read(rows: Sequence[Row]) -> list[Reading]:
        found = []
        for place, row in enumerate(rows):
            label = clean(before(row["prediction"]))
            score = soft_accuracy(label, [clean(one) for one in row["answers"]])
            found.append(Reading(row, score, str(place), "", label, place=place))
        return found

    return read


def _total_lmms_eval(readings: Sequence[Reading]) -> Score:
    return Score("exact_match", "of 1", {"exact_match": mean([reading.score for reading in readings])})


def _total_percent(readings: Sequence[Reading]) -> Score:
    return Score("Overall", "%", {"Overall": 100 * mean([reading.score for reading in readings])})


def _ask_lmms_eval(row: Row) -> str:
    return f"{row['question'].capitalize()}\nAnswer the question using a single word or phrase."


def _ask_vlmevalkit(row: Row) -> str:
    return f"{row['question']}\nAnswer the question using a single word or phrase."


def _ask_plain(row: Row) -> str:
    return str(row["question"])


TEXTVQA = Benchmark(
    name="textvqa",
    title="TextVQA",
    required=(("question",), ("answers", "answer")),
    prompts={
        "lmms-eval": PromptSet("lmms-eval", _ask_lmms_eval),
        "vlmevalkit": PromptSet("vlmevalkit", _ask_vlmevalkit),
        "official": PromptSet("official", _ask_plain),
        "plain": PromptSet("plain", _ask_plain),
    },
    scorers={
        "lmms-eval": Scorer(
            "lmms-eval", "lmms-eval 0.7.3, task textvqa_val", _reader(evalai, lmms_eval_answer), _total_lmms_eval
        ),
        "vlmevalkit": Scorer(
            "vlmevalkit", "VLMEvalKit, vqa_score", _reader(vlmevalkit_answer, through_sheet), _total_percent
        ),
        "official": Scorer("official", "MMF's TextVQA evaluator", _reader(evalai, str.strip), _total_lmms_eval),
    },
    max_new_tokens={"lmms-eval": 1024, "vlmevalkit": 2048, "official": 16},
    normal=normal,
    unit=None,
)
