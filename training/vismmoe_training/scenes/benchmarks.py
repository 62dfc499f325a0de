"""Held-out scenes in the shapes of four benchmarks, so that an evaluation's whole path runs on the reference model.

They are named as scenes, never as the benchmarks, whose tables they only share the columns of: hub-style parquet, a
README.md that declares the splits.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vismmoe_training.scenes.draw import draw_scene
from vismmoe_training.scenes.negatives import absent_kinds, negative_pool
from vismmoe_training.scenes.questions import LETTERS, ask
from vismmoe_training.scenes.sampling import sample_scene
from vismmoe_training.scenes.scene import Scene, SceneSpec
from vismmoe_training.scenes.vocabulary import CELLS, COLOUR_NAMES

SEED = 20270131
PASS = 1_000_000
CATEGORIES = {
    "colour": ("attribute_recognition", "finegrained_perception (instance-level)"),
    "position": ("spatial_relationship", "finegrained_perception (cross-instance)"),
    "presence": ("object_localization", "finegrained_perception (instance-level)"),
}


@dataclass(frozen=True)
class Sizes:
    """How much of each shape is made."""

    mme: int = 18  # images, two questions each
    mmbench: int = 9  # questions, four passes each
    pope: int = 6  # images, six questions each
    ocrbench: int = 36  # rows


SHAPES = ("mme", "mmbench", "pope", "ocrbench")
Rows = list[dict[str, Any]]


def write_benchmarks(folder: Path | str, sizes: Sizes = Sizes(), seed: int = SEED) -> dict[str, Path]:
    """Write `scenes-<shape>` folders below `folder`; returns them by shape. The same seed gives the same questions."""
    target = Path(folder)
    found = {}
    for number, shape in enumerate(SHAPES):
        rng = np.random.default_rng((seed, number))
        rows = _MAKERS[shape](pictures_of(rng), rng, getattr(sizes, shape))
        place = target / f"scenes-{shape}"
        _write(place, shape, rows)
        found[shape] = place
    return found


Pictures = Iterator[tuple[Scene, bytes]]


def pictures_of(rng: np.random.Generator) -> Pictures:
    """Scenes without end, each with its picture as a PNG file."""
    while True:
        scene = sample_scene(rng, SceneSpec())
        yield scene, png(draw_scene(scene))


def png(image: Image.Image) -> bytes:
    """The picture as a PNG file."""
    held = io.BytesIO()
    image.save(held, "PNG")
    return held.getvalue()


# -- the shapes -------------------------------------------------------------------------------------------------------


def mme_rows(pictures: Pictures, rng: np.random.Generator, images: int) -> Rows:
    """Two questions an image, one of each answer; all of the subtask that the scenes can ask, existence."""
    rows: Rows = []
    for number in range(images):
        scene, picture = next(pictures)
        pair = ask(scene, rng, ("existence",), per_style=2)
        for question in sorted(pair, key=lambda each: each.answer, reverse=True):
            rows.append(
                {
                    "question_id": f"existence/{number:04d}.png",
                    "image": picture,
                    "question": question.prompt,
                    "answer": question.answer.capitalize(),
                    "category": "existence",
                }
            )
    return rows


def pope_rows(pictures: Pictures, rng: np.random.Generator, images: int) -> Rows:
    """Six questions an image, two a split: a thing that is there and one that is not, picked as the split picks it."""
    rows: Rows = []
    for image in range(images):
        scene, picture = next(pictures)
        kinds = scene.kinds()
        for split in ("adversarial", "popular", "random"):
            for kind, answer in ((kinds[int(rng.integers(len(kinds)))], "yes"), (_absent(scene, split, rng), "no")):
                number = str(len(rows) + 1)
                rows.append(
                    {
                        "id": number,
                        "question_id": number,
                        "question": f"Is there {'an' if kind[0] in 'aeiou' else 'a'} {kind} in the image?",
                        "answer": answer,
                        "image_source": f"scene_{image:06d}",
                        "image": picture,
                        "category": split,
                    }
                )
    return rows


def mmbench_rows(pictures: Pictures, rng: np.random.Generator, questions: int) -> Rows:
    """Four options and four passes a question, the options turned by one from pass to pass."""
    rows: Rows = []
    for number in range(questions):
        scene, picture = next(pictures)
        kind, question, right, wrong = _choice(scene, rng)
        category, level = CATEGORIES[kind]
        options = [right, *(wrong[int(index)] for index in rng.permutation(len(wrong))[: len(LETTERS) - 1])]
        options = [options[int(index)] for index in rng.permutation(len(options))]
        for turn in range(len(LETTERS)):
            turned = options[turn:] + options[:turn]
            rows.append(
                {
                    "index": number + turn * PASS,
                    "question": question,
                    "hint": "nan",
                    "answer": LETTERS[turned.index(right)],
                    **dict(zip(LETTERS, turned, strict=True)),
                    "category": category,
                    "image": picture,
                    "source": "scenes",
                    "L2-category": level,
                    "comment": "nan",
                    "split": "dev",
                }
            )
    return rows


def ocrbench_rows(pictures: Pictures, rng: np.random.Generator, count: int) -> Rows:
    """What is written: words count as regular text, numbers as digit strings."""
    rows: Rows = []
    while len(rows) < count:
        scene, picture = next(pictures)
        if scene.text is None:
            continue
        (question,) = ask(scene, rng, ("reading",))
        kind = "Digit String Recognition" if scene.text.is_number else "Regular Text Recognition"
        rows.append(
            {
                "dataset": "scenes",
                "question": question.prompt,
                "question_type": kind,
                "answer": [question.answer],
                "image": picture,
            }
        )
    return rows


def _absent(scene: Scene, split: str, rng: np.random.Generator) -> str:
    pool = negative_pool(scene, split) or absent_kinds(scene)
    return pool[int(rng.integers(len(pool)))]


def _choice(scene: Scene, rng: np.random.Generator) -> tuple[str, str, str, Sequence[str]]:
    """(kind of question, question, right option, wrong options)."""
    singles = scene.single_objects()
    kind = ("colour", "position", "presence")[int(rng.integers(3))] if singles else "presence"
    if kind == "presence":
        kinds = scene.kinds()
        return kind, "Which of these is in the image?", kinds[int(rng.integers(len(kinds)))], absent_kinds(scene)
    item = singles[int(rng.integers(len(singles)))]
    if kind == "colour":
        wrong = [name for name in COLOUR_NAMES if name != item.colour]
        return kind, f"What colour is the {item.kind}?", item.colour, wrong
    cell = CELLS[scene.cell_of(item)]
    return kind, f"Where is the {item.kind}?", cell, [name for name in CELLS if name != cell]


_MAKERS = {"mme": mme_rows, "mmbench": mmbench_rows, "pope": pope_rows, "ocrbench": ocrbench_rows}


# -- files ------------------------------------------------------------------------------------------------------------

# (folder, split) as on the hub
_PLACES = {"mme": ("data", "test"), "mmbench": ("en", "dev"), "pope": ("data", "test"), "ocrbench": ("data", "test")}
_CARD = """\
---
configs:
- config_name: {config}
  data_files:
  - split: {split}
    path: {folder}/{split}-*
---
# Scenes in the shape of {shape}

{rows} rows over generated pictures. They share the columns of the benchmark that the folder's name ends in, and nothing
else: figures on them say how the machinery behaves, not how a model fares on that benchmark.
"""


def _write(place: Path, shape: str, rows: Rows) -> None:
    """One parquet file, and the card that tells `datasets` where it is."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    folder, split = _PLACES[shape]
    (place / folder).mkdir(parents=True, exist_ok=True)
    pictures = [{"bytes": row["image"], "path": f"{number:06d}.png"} for number, row in enumerate(rows)]
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {"image": pictures}
    table = pyarrow.table(columns)
    features = {field.name: _feature(field.name, str(field.type)) for field in table.schema}
    told = json.dumps({"info": {"features": features}})
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": told}), place / folder / f"{split}-00000-of-00001.parquet"
    )
    config = folder if shape == "mmbench" else "default"
    card = _CARD.format(config=config, split=split, folder=folder, shape=shape, rows=len(rows))
    (place / "README.md").write_text(card, encoding="utf-8")


def _feature(name: str, kind: str) -> Any:
    """As Hugging Face `datasets` describes a column."""
    if name == "image":
        return {"_type": "Image"}
    if kind.startswith("list"):
        return {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"}
    return {"dtype": kind, "_type": "Value"}
