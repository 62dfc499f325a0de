"""What a corpus is: images in a fixed order, each with a question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_QUESTION_KEYS = ("prompt", "question")


@dataclass(frozen=True)
class CorpusItem:
    """One image of a corpus and what to ask about it."""

    name: str  # unique in its corpus, the same in every run
    image: Path | bytes  # file, or encoded bytes
    prompt: str


@dataclass(frozen=True)
class Corpus:
    """Items in a fixed order; `size` of them, None where only reading to the end would tell."""

    name: str
    size: int | None
    items: Iterable[CorpusItem]

    def __iter__(self) -> Iterator[CorpusItem]:
        return iter(self.items)


def question_of(told: Mapping[str, Any], index: int, default: str) -> str:
    """The question of an item: of its list or conversation the one whose turn it is, else its own, else the default.

    An item with several questions is asked one of them, in turn, so that a corpus mixes their styles.
    """
    asked = _asked_in(told.get("conversations"))
    questions = told.get("questions") or asked
    if isinstance(questions, list) and questions:
        chosen = questions[index % len(questions)]
        return question_of(chosen, index, default) if isinstance(chosen, dict) else str(chosen)
    own = [told[key] for key in _QUESTION_KEYS if isinstance(told.get(key), str) and told[key].strip()]
    return str(own[0]) if own else default


def _asked_in(conversation: object) -> list[str]:
    """What the human asks in a LLaVA conversation, without the image's placeholder."""
    turns = [turn for turn in conversation if isinstance(turn, dict)] if isinstance(conversation, list) else []
    said = [str(turn.get("value", "")) for turn in turns if turn.get("from") in ("human", "user")]
    return [text for text in (each.replace("<image>", "").strip() for each in said) if text]
