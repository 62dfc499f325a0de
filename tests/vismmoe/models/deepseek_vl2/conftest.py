"""Outputs of the official implementation: a part in vectors/, all of them where VISMMOE_VECTORS points."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from vismmoe.models.deepseek_vl2 import DeepseekVL2ForConditionalGeneration, DeepseekVL2Processor

PART = Path(__file__).parent / "vectors"
PICTURES = {
    "a_text": (),
    "b_single_tile": ("sq_60x58",),
    "c_multi_tile": ("wide_150x70",),
    "d_two_images": ("tall_70x140", "quad_148x150"),
    "e_batch_left_pad": ("sq_60x58",),
}


@dataclass(frozen=True)
class Case:
    """One run of the official implementation."""

    root: Path
    release: str
    name: str

    @property
    def folder(self) -> Path:
        return self.root / self.release

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the official forward took; the pixels come from the picture where they are not stored."""
        held = load_file(self.folder / "cases" / self.name / "inputs.safetensors")
        if "images" not in held:
            held["images"] = processed(self)["images"]
        return held

    @property
    def expected(self) -> dict[str, Tensor]:
        return load_file(self.folder / "cases" / self.name / "expected.safetensors")

    @property
    def pictures(self) -> list[Image.Image]:
        return [Image.open(self.root / "images" / f"{name}.png").convert("RGB") for name in PICTURES[self.name]]

    def __str__(self) -> str:
        return f"{self.release}-{self.name}" + ("" if self.root == PART else "-full")


def roots() -> list[Path]:
    more = os.environ.get("VISMMOE_VECTORS")
    return [PART] + ([Path(more)] if more else [])


def cases() -> Iterator[Case]:
    for root in roots():
        for folder in sorted(root.glob("*/cases/*")):
            yield Case(root, folder.parent.parent.name, folder.name)


@cache
def model_of(folder: Path) -> Any:
    return DeepseekVL2ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def processor_of(folder: Path) -> Any:
    return DeepseekVL2Processor.from_pretrained(folder)


def texts(case: Case) -> list[str]:
    """The prompts that the stored ids spell, one `<image>` for each picture, padding and the first token left out."""
    held = load_file(case.folder / "cases" / case.name / "inputs.safetensors")
    processor = processor_of(case.folder)
    spelt = []
    for ids, mask in zip(held["input_ids"], held["attention_mask"], strict=True):
        row = ids[mask][1:].tolist()
        once = [token for place, token in enumerate(row) if not place or token != 296 or row[place - 1] != 296]
        spelt.append(processor.tokenizer.decode(once))
    return spelt


def processed(case: Case) -> Any:
    return processor_of(case.folder)(images=case.pictures, text=texts(case))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", list(cases()), ids=str)
    if "told" in metafunc.fixturenames:
        metafunc.parametrize("told", [root / "processor" for root in roots()], ids=["part", "full"][: len(roots())])
