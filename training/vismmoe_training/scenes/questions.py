"""Questions about a scene whose answers follow from its ground truth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from .negatives import absent_kinds, negatives
from .scene import Scene, SceneObject
from .vocabulary import CELLS, COLOUR_NAMES

STYLES: Final = ("existence", "count", "position", "colour", "reading", "choice")
LETTERS: Final = "ABCD"
SPARE_CHOICES: Final = 8  # so that even a scene of one kind has enough to ask


@dataclass(frozen=True)
class Question:
    """A prompt with its one right answer; `negative` names how an absent kind was picked."""

    style: str
    prompt: str
    answer: str
    options: tuple[str, ...] = ()
    negative: str | None = None


def ask(scene: Scene, rng: np.random.Generator, styles: Sequence[str] = STYLES, per_style: int = 1) -> list[Question]:
    """Up to `per_style` random questions of each style; none of a style that the scene rules out."""
    return [question for style in styles for question in _POOLS[style](scene, rng)[:per_style]]


def all_questions(scene: Scene, rng: np.random.Generator, count: int, styles: Sequence[str] = STYLES) -> list[Question]:
    """`count` questions with distinct prompts, one style after the other; fewer where there are no more."""
    pools = [_POOLS[style](scene, rng) for style in styles]
    longest = max((len(pool) for pool in pools), default=0)
    ordered = [pool[turn] for turn in range(longest) for pool in pools if turn < len(pool)]
    return list({question.prompt: question for question in ordered}.values())[:count]


def _shuffled(items: Sequence[str], rng: np.random.Generator) -> list[str]:
    return [items[int(index)] for index in rng.permutation(len(items))]


def _singles(scene: Scene, rng: np.random.Generator) -> list[SceneObject]:
    items = scene.single_objects()
    return [items[int(index)] for index in rng.permutation(len(items))]


def _existence(scene: Scene, rng: np.random.Generator) -> list[Question]:
    """One absent kind for each present one, in pairs, so that every prefix is balanced."""
    present = _shuffled(scene.kinds(), rng)
    pool: list[Question] = []
    for kind, (absent, origin) in zip(present, negatives(scene, len(present), rng), strict=True):
        yes = Question("existence", _is_there(kind), "yes")
        no = Question("existence", _is_there(absent), "no", negative=origin)
        pool += [yes, no] if rng.random() < 0.5 else [no, yes]
    return pool


def _is_there(kind: str) -> str:
    return f"Is there {'an' if kind[0] in 'aeiou' else 'a'} {kind} in the image?"


def _count(scene: Scene, rng: np.random.Generator) -> list[Question]:
    """The total and each kind; repeated kinds come first half of the time, as most kinds occur once."""
    total = Question("count", "How many objects are in the image?", str(len(scene.objects)))
    kinds = _shuffled(scene.kinds(), rng)
    if rng.random() < 0.5:
        kinds.sort(key=scene.count, reverse=True)
    prompt = "How many objects of kind {} are in the image?"
    pool = [Question("count", prompt.format(kind), str(scene.count(kind))) for kind in kinds]
    pool.insert(int(rng.integers(2)), total)
    return pool


def _position(scene: Scene, rng: np.random.Generator) -> list[Question]:
    items = _singles(scene, rng)
    return [Question("position", f"Where is the {item.kind}?", CELLS[scene.cell_of(item)]) for item in items]


def _colour(scene: Scene, rng: np.random.Generator) -> list[Question]:
    return [Question("colour", f"What colour is the {item.kind}?", item.colour) for item in _singles(scene, rng)]


def _reading(scene: Scene, rng: np.random.Generator) -> list[Question]:
    if scene.text is None:
        return []
    what = "number" if scene.text.is_number else "word"
    return [Question("reading", f"What {what} is written in the image?", scene.text.text)]


def _choice(scene: Scene, rng: np.random.Generator) -> list[Question]:
    """Colour and position of each single object and the presence of each kind, as A to D; then spares."""
    pool: list[Question] = []
    for item in scene.single_objects():
        colours = [name for name in COLOUR_NAMES if name != item.colour]
        pool.append(_lettered(f"What colour is the {item.kind}?", item.colour, colours, rng))
        cell = CELLS[scene.cell_of(item)]
        pool.append(_lettered(f"Where is the {item.kind}?", cell, [name for name in CELLS if name != cell], rng))
    pool += [_which(scene, kind, rng) for kind in scene.kinds()]
    spares = [_which(scene, kind, rng) for kind in _shuffled(scene.kinds() * SPARE_CHOICES, rng)[:SPARE_CHOICES]]
    return [pool[int(index)] for index in rng.permutation(len(pool))] + spares


def _which(scene: Scene, kind: str, rng: np.random.Generator) -> Question:
    return _lettered("Which of these is in the image?", kind, absent_kinds(scene), rng)


def _lettered(question: str, right: str, wrong: Sequence[str], rng: np.random.Generator) -> Question:
    options = _shuffled([right, *_shuffled(wrong, rng)[: len(LETTERS) - 1]], rng)
    lines = [f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=True)]
    prompt = "\n".join([question, *lines, "Answer with the letter."])
    return Question("choice", prompt, LETTERS[options.index(right)], tuple(options))


_POOLS: Final[Mapping[str, Callable[[Scene, np.random.Generator], list[Question]]]] = MappingProxyType(
    {
        "existence": _existence,
        "count": _count,
        "position": _position,
        "colour": _colour,
        "reading": _reading,
        "choice": _choice,
    }
)
