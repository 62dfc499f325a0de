"""What every visual token shows: targets that need no language."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .draw import object_masks
from .lettering import character_centres
from .scene import Scene, SceneObject, centre
from .vocabulary import CHARACTERS, COLOUR_NAMES, KINDS, WORDS

Ints = npt.NDArray[np.int64]
CLEAR_SHARE: Final = 0.25  # the topmost object that covers so much of a token owns it
FAINT_SHARE: Final = 0.15  # failing that, the one that covers most, from this share on
TEXT_SHARE: Final = 0.2


@dataclass(frozen=True)
class TokenLabels:
    """Int64 arrays of shape (rows, cols); 0 always means that there is nothing of the sort."""

    kind: Ints  # 1 + index in KINDS
    colour: Ints  # 1 + index in COLOUR_NAMES
    cell: Ints  # 1 + index in CELLS of the centre of the object that owns the token
    text: Ints  # 1 for a number, 2 + index in WORDS for a word
    tens: Ints  # 1 + digit
    ones: Ints  # 1 + digit
    left_character: Ints  # 1 + index in CHARACTERS of the one nearest to the middle of the token's left half
    right_character: Ints  # the same of its right half
    place: Ints  # 1 + index in the text of the left character
    count_centre: Ints  # 1 at one token of each object: their sum is the number of objects


def label_tokens(scene: Scene, token_px: int = 16) -> TokenLabels:
    """Label all tokens of `token_px` by `token_px` pixels; the sides of the scene must be multiples."""
    if scene.height_px % token_px or scene.width_px % token_px:
        raise ValueError(f"{scene.width_px} x {scene.height_px} px is no whole number of {token_px} px tokens")
    owner = token_owners(scene, token_px)
    kinds = [1 + KINDS.index(item.kind) for item in scene.objects]
    colours = [1 + COLOUR_NAMES.index(item.colour) for item in scene.objects]
    cells = [1 + scene.cell_of(item) for item in scene.objects]
    text, tens, ones = _text_values(scene)
    written = _text_tokens(scene, token_px, owner.shape)
    return TokenLabels(
        kind=_spread(kinds, owner),
        colour=_spread(colours, owner),
        cell=_spread(cells, owner),
        text=written * text,
        tens=written * tens,
        ones=written * ones,
        **_characters(scene, token_px, written),
        count_centre=_centres(scene, token_px, owner.shape),
    )


def _spread(values: list[int], owner: Ints) -> Ints:
    """The value of each token's owner; -1 picks the 0 at the end."""
    return np.array([*values, 0], dtype=np.int64)[owner]


def token_owners(scene: Scene, token_px: int = 16) -> Ints:
    """Index of the object that owns each token, shape (rows, cols), -1 for the background."""
    rows, cols = scene.height_px // token_px, scene.width_px // token_px
    if not scene.objects:
        return np.full((rows, cols), -1, dtype=np.int64)
    tiles = object_masks(scene).reshape(-1, rows, token_px, cols, token_px)
    shares = tiles.sum((2, 4)) / token_px**2
    owner = np.where(shares.max(0) >= FAINT_SHARE, shares.argmax(0), -1)
    for index, share in enumerate(shares):  # later objects lie on top
        owner[share >= CLEAR_SHARE] = index
    return owner.astype(np.int64)


def _text_values(scene: Scene) -> tuple[int, int, int]:
    if scene.text is None:
        return 0, 0, 0
    if scene.text.is_number:
        return 1, 1 + int(scene.text.text[0]), 1 + int(scene.text.text[1])
    return 2 + WORDS.index(scene.text.text), 0, 0


def _characters(scene: Scene, token_px: int, written: Ints) -> dict[str, Ints]:
    """left_character, right_character and place of the tokens that the text covers."""
    if scene.text is None:
        return dict.fromkeys(("left_character", "right_character", "place"), np.zeros_like(written))
    centres = np.array(character_centres(scene.text))
    codes = np.array([1 + CHARACTERS.index(character) for character in scene.text.text])
    quarter = token_px * (np.arange(written.shape[1])[:, None] + np.array([0.25, 0.75]))
    nearest = np.abs(quarter[..., None] - centres).argmin(-1)  # (cols, 2)
    left, right = nearest.T
    return {
        "left_character": written * codes[left],
        "right_character": written * codes[right],
        "place": written * (1 + left),
    }


def _text_tokens(scene: Scene, token_px: int, shape: tuple[int, ...]) -> Ints:
    """1 where the plate covers enough of the token."""
    if scene.text is None:
        return np.zeros(shape, dtype=np.int64)
    x0, y0, x1, y1 = scene.text.box_px
    area = np.outer(_covered(y0, y1, shape[0], token_px), _covered(x0, x1, shape[1], token_px))
    return (area >= TEXT_SHARE * token_px**2).astype(np.int64)


def _covered(start: int, end: int, count: int, token_px: int) -> Ints:
    """Pixels of each of `count` tokens along one axis that lie from `start` to `end`."""
    edges = token_px * np.arange(count + 1)
    shared = np.minimum(edges[1:], end) - np.maximum(edges[:-1], start)
    covered: Ints = np.maximum(shared, 0)
    return covered


def _centres(scene: Scene, token_px: int, shape: tuple[int, ...]) -> Ints:
    """1 at the token of each object's centre, or at the nearest free one where objects share it."""
    marks = np.zeros(shape, dtype=np.int64)
    for item in scene.objects:
        free = [spot for spot in _spots(item, token_px) if not marks[spot]]
        if free:
            marks[free[0]] = 1
    return marks


def _spots(item: SceneObject, token_px: int) -> list[tuple[int, int]]:
    """Tokens (row, col) that the object's box touches, the nearest to its centre first."""
    x, y = centre(item.box_px)
    x0, y0, x1, y1 = (value // token_px for value in (*item.box_px[:2], item.box_px[2] - 1, item.box_px[3] - 1))
    spots = [(row, col) for row in range(y0, y1 + 1) for col in range(x0, x1 + 1)]
    # The token that holds the centre is nearest; ties at a token border go to the one right or below.

    def far(spot: tuple[int, int]) -> tuple[float, int, int]:
        row, col = spot
        return ((row + 0.5) * token_px - y) ** 2 + ((col + 0.5) * token_px - x) ** 2, -row, -col

    return sorted(spots, key=far)
