"""How the harnesses clean and read answers: each function follows one community's code to the character."""

from __future__ import annotations

import re
from typing import Literal

YesNo = Literal["yes", "no", "other"]

REASONING_TAGS = (("<think>", "</think>"), ("<analysis>", "</analysis>"))
CELL_CHARACTERS = 32_767  # what an .xlsx cell holds
# What pandas reads as a missing value from a sheet or a table.
MISSING = frozenset(
    (
        "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
        "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
    )
)  # fmt: skip
_PUNCTUATION = (
    ";",
    "/",
    "[",
    "]",
    '"',
    "{",
    "}",
    "(",
    ")",
    "=",
    "+",
    "\\",
    "_",
    "-",
    ">",
    "<",
    "@",
    "`",
    ",",
    "?",
    "!",
)
_COMMA_IN_NUMBER = re.compile(r"(\d)(,)(\d)")
_PERIOD = re.compile(r"(?!<=\d)(\.)(?!\d)")  # the first group is a slip of the original, kept: it never refuses
_PERIODS_REMOVED = int(re.UNICODE)  # the original hands its flag over as the count


def is_missing(value: object) -> bool:
    """Whether pandas would call a cell of this value missing; the text `nan` stands for it in the hub's tables."""
    return value is None or (isinstance(value, float) and value != value) or str(value) in MISSING


def through_sheet(text: str) -> str:
    """What VLMEvalKit reads back of an answer that it wrote to an .xlsx sheet, its default."""
    return "nan" if text in MISSING else text[:CELL_CHARACTERS]


def lmms_eval_answer(text: str) -> str:
    """What lmms-eval hands to a task: without blocks of reasoning, stripped (api/reasoning.py, 0.7.3)."""
    for start_tag, end_tag in REASONING_TAGS:
        while start_tag in text and end_tag in text:
            start = text.find(start_tag)
            end = text.find(end_tag, start)
            if end == -1:
                break
            text = text[:start] + text[end + len(end_tag) :]
        if end_tag in text and start_tag not in text:  # the prompt opened the block
            text = text.rsplit(end_tag, 1)[-1]
    return text.strip()


def lmms_eval_yes_no(text: str) -> YesNo:
    """MME in lmms-eval: exact word, one letter, or the first four characters."""
    text = text.lower().strip().replace(".", "")
    if len(text) == 1:
        return "yes" if text == "y" else "no" if text == "n" else "other"
    return prefix_yes_no(text)


def prefix_yes_no(text: str) -> YesNo:
    """`yes`, else `no`, within the first four characters: MME's own tool, on lower case text."""
    return "yes" if "yes" in text[:4] else "no" if "no" in text[:4] else "other"


def word_yes_no(text: str) -> Literal["Yes", "No", "Unknown"]:
    """VLMEvalKit: whole words after the VQA clean-up, one of the two and not the other."""
    words = strip_punctuation(text.lower()).split()
    if ("yes" in words) == ("no" in words):
        return "Unknown"
    return "Yes" if "yes" in words else "No"


def strip_punctuation(text: str) -> str:
    """The clean-up of the VQA challenge: marks between words become spaces, others vanish, so do full stops."""
    number = _COMMA_IN_NUMBER.search(text) is not None
    out = text
    for mark in _PUNCTUATION:
        out = out.replace(mark, "" if number or mark + " " in text or " " + mark in text else " ")
    return _PERIOD.sub("", out, _PERIODS_REMOVED)


def fold_fullwidth(text: str) -> str:
    """Fullwidth ASCII and the ideographic space as plain ASCII (lmms-eval's OCRBench)."""
    return "".join(
        chr(ord(char) - 0xFEE0) if 0xFF01 <= ord(char) <= 0xFF5E else " " if char == "\u3000" else char for char in text
    )
