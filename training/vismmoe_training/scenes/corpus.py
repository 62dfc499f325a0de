"""A folder of pictures and questions in the ImageFolder form of Hugging Face `datasets`."""

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from .draw import draw_scene
from .questions import Question, all_questions
from .sampling import sample_scene
from .scene import Scene, SceneSpec

QUESTIONS_PER_IMAGE: Final = 8
PALETTE_COLOURS: Final = 192


def write_corpus(folder: Path | str, count: int, seed: int, spec: SceneSpec | None = None) -> Path:
    """Write `count` scenes to `folder`/images and return the folder.

    `images` holds 000000.png and so on and metadata.jsonl beside them. The folder appears whole or
    not at all; one that holds anything already is refused with ValueError.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write_images(work / "images", count, seed, spec or SceneSpec())
        work.chmod(0o755)  # temporary folders are private
        if target.exists():
            target.rmdir()
        work.rename(target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return target


def _write_images(folder: Path, count: int, seed: int, spec: SceneSpec) -> None:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    with (folder / "metadata.jsonl").open("w", encoding="utf-8", newline="\n") as lines:
        for index in range(count):
            scene, name = sample_scene(rng, spec), f"{index:06d}.png"
            _compact(draw_scene(scene)).save(folder / name, optimize=True)
            questions = all_questions(scene, rng, QUESTIONS_PER_IMAGE)
            lines.write(json.dumps(metadata(name, scene, questions)) + "\n")


def _compact(image: Image.Image) -> Image.Image:
    """A palette picture: a third of the size, and no difference that a 16 px token would notice."""
    return image.quantize(PALETTE_COLOURS, method=Image.Quantize.MEDIANCUT, kmeans=1, dither=Image.Dither.NONE)


def metadata(file_name: str, scene: Scene, questions: list[Question]) -> dict[str, Any]:
    """One line of metadata.jsonl; boxes are (x0, y0, x1, y1) in pixels."""
    text = scene.text
    return {
        "file_name": file_name,
        "width": scene.width_px,
        "height": scene.height_px,
        "objects": [{"kind": o.kind, "colour": o.colour, "box": list(o.box_px)} for o in scene.objects],
        "text": text.text if text else None,
        "text_box": list(text.box_px) if text else None,
        "questions": [asdict(question) for question in questions],
    }
