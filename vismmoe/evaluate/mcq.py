"""Letters of multiple-choice answers as lmms-eval 0.7.3 finds them (mmbench_evals.py and mcq_extract.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# What may stand around a letter, in the order in which it is tried.
_DRESSES = (
    ("", "."), ("", ","), ("", ":"), ("", ")"), ("", ")."), ("(", ")"), ("(", ")."),
    (":", ""), (":", ","), (":", "."), (":", ")"), (":", ")."),
)  # fmt: skip
_PHRASES = (
    "the answer is", "answer is", "the correct answer is", "correct answer is", "the best answer is",
    "best answer is", "the correct option is", "correct option is", "the best option is", "best option is",
    "the choice is", "choice is", "the correct choice is", "correct choice is", "i choose", "i select", "i pick",
    "my answer is", "my choice is", "옵션", "정답은", "답은", "답:", "答案是", "答案为", "选", "答えは",
)  # fmt: skip


def lmms_eval_letter(answer: str) -> str | None:
    """can_infer_option: one bare letter of A to E, else one in a known dress."""
    if "Failed to obtain answer via API" in answer:
        return None
    words = answer.split()
    bare = [letter for letter in "ABCDE" if letter in words]
    article = "A" in words and len(words) > 3
    if sum(letter in words for letter in "ABCDE") == 1 and not article:
        return bare[0]
    for before, after in _DRESSES:
        dressed = [letter for letter in "ABCDE" if before + letter + after in words]
        if len(dressed) == 1:
            return dressed[0]
    return None


def option_in_text(answer: str, options: Mapping[str, str]) -> str | None:
    """can_infer_text, in both harnesses: the one option whose text the answer contains, case apart."""
    answer = answer.lower()
    found = [letter for letter, text in options.items() if text.lower() in answer]
    return found[0] if len(found) == 1 else None


def extract_mcq_answer(response: str, choices: Sequence[str]) -> str:
    """extract_mcq_answer: the letter in the most telling place, the last one among equals; "" without any."""
    if not response or not response.strip():
        return ""
    text = response.strip()
    for mark in (",", ".", "!", "?", ";", ":", "'", '"'):
        text = text.strip(mark)
    text = f" {text} "
    found = _marked(text, choices) + _after_phrases(text, choices) + _at_the_ends(text, choices)
    if not found:
        found = [(0, text.rfind(letter), letter) for letter in choices if letter in text]
    return max(found, key=lambda each: each[:2], default=(0, 0, ""))[2]


Candidate = tuple[int, int, str]  # (how telling, position, letter)


def _marked(text: str, choices: Sequence[str]) -> list[Candidate]:
    forms = ((6, "({})"), (5, "{}."), (4, "{}:"), (3, "{})"), (2, "{} "))
    return [
        (weight, text.rfind(form.format(letter)), letter)
        for weight, form in forms
        for letter in choices
        if form.format(letter) in text
    ]


def _after_phrases(text: str, choices: Sequence[str]) -> list[Candidate]:
    lower = text.lower()
    found = []
    for phrase in _PHRASES:
        start = lower.find(phrase)
        if start != -1:
            places = [(text.find(letter, start + len(phrase)), letter) for letter in choices]
            found += [(7, place, letter) for place, letter in places if place != -1]
    return found


def _at_the_ends(text: str, choices: Sequence[str]) -> list[Candidate]:
    bare = text.strip()
    found = [
        (10, 0, letter) for letter in choices if bare.startswith(letter) and (len(bare) == 1 or not bare[1].isalpha())
    ]
    found += [
        (9, len(text) - 1, letter)
        for letter in choices
        if bare.endswith(letter) and (len(bare) == 1 or not bare[-2].isalpha())
    ]
    return found
