"""One row a family: its tiny checkpoint is answered resident, streamed, together, pruned and by transformers itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny import build
from torch import Tensor

from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, Request
from vismmoe.errors import VisMMoEError
from vismmoe.models.catalogue import Family
from vismmoe.models.load import tokenizer_of
from vismmoe.models.prompt import encode
from vismmoe.models.skeleton import named_class
from vismmoe.planning import plan_for

TOKENS = 4
IMAGES, CONTEXT = (128, 64), 256  # what the least memory is planned for: width x height in pixels, tokens
TOLERANCE = 1e-4  # of logits in float32
QUESTION = "What is this, please?"


@dataclass(frozen=True)
class Row:
    """What a family was seen to do."""

    family: str
    experts: str  # flags of the experts class that differ from the usual
    streamed: bool  # same bits resident and streamed, in every case
    loads: int  # experts that the streamed engine read on demand: it streamed at all
    difference: float  # largest, of logits, against transformers' eager experts
    together: bool  # two requests in lock-step have the bits they have alone
    pruned: str  # compression: kept of all visual tokens
    images: str

    @property
    def holds(self) -> bool:
        return self.streamed and self.together and self.loads > 0 and self.difference <= TOLERANCE

    def cells(self) -> tuple[str, ...]:
        close = "same bits" if self.difference == 0 else f"{self.difference:.0e}"
        return self.family, self.experts, _yes(self.streamed), close, _yes(self.together), self.images, self.pruned


HEADINGS = (
    "family", "experts", "resident = streamed", "against transformers", "two together = alone", "images", "compression",
)  # fmt: skip


def row_of(family: Family, folder: Path | None = None) -> Row:
    """Build the family's tiny checkpoint (in `folder`, else a temporary one) and try it."""
    if folder is None:
        with tempfile.TemporaryDirectory() as made:
            return row_of(family, Path(made))
    build(family, folder)
    requests = _requests(family)
    prefix = None if family.vision else 0
    asked = PlanConfig(
        model=str(folder), device="cpu", image_size=IMAGES, context=CONTEXT, prefix_layers=prefix,
        compute_dtype="float32",
    )  # fmt: skip
    least = plan_for(asked).minimum_bytes
    with _engine(family, folder, None) as engine:
        resident = [_answer(engine, request) for request in requests]
        difference = max(
            _difference(engine, request, held, folder)
            for request, held in zip(requests, resident, strict=True)
            if request.keep_ratio == 1
        )
        alone = [engine.generate(request).text for request in requests[-2:]]
        together = [result.text for result in engine.generate_together(requests[-2:])] == alone
        flags = _flags(engine)
    with _engine(family, folder, least) as engine:
        streamed = [_answer(engine, request) for request in requests]
    loads = sum(result.experts.prefill.demand_loads + result.experts.decode.demand_loads for result, _ in streamed)
    return Row(
        family.model_type, flags,
        all(_same(*pair) for pair in zip(resident, streamed, strict=True)),
        loads, difference, together, *_told(family, requests, resident),
    )  # fmt: skip


def _requests(family: Family) -> list[Request]:
    """Text alone; one and two images; the same with half of the visual tokens."""
    asked = [Request((), QUESTION, TOKENS), Request((), "And that?", TOKENS)]
    if family.vision is None:
        return asked
    one, two = (picture(64, 48, 0),), (picture(64, 48, 1), picture(32, 80, 2))
    ways = ("affinity",) if family.vision.saliency_attention else ("uniform",)
    asked += [Request(one, QUESTION, TOKENS), Request(two, QUESTION, TOKENS)]
    asked += [Request(two, QUESTION, TOKENS, 0.5, ways[0]), Request(one, QUESTION, TOKENS, 0.7, "random")]
    return asked


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Coloured noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@contextmanager
def _engine(family: Family, folder: Path, device_memory: int | None) -> Iterator[Engine]:
    prefix = None if family.vision else 0  # without images no layer need be pinned: all of them stream
    config = EngineConfig(
        model=str(folder), device_memory=device_memory, compute_dtype="float32", device="cpu", prefix_layers=prefix
    )
    with Engine.load(config, image_size=IMAGES, context_tokens=CONTEXT) as engine:
        yield engine


def _answer(engine: Engine, request: Request) -> tuple[Any, list[Tensor]]:
    """The result and each forward's logits of the last token."""
    logits: list[Tensor] = []
    hook = engine._model.register_forward_hook(lambda module, args, out: logits.append(out.logits[0, -1].clone()))
    try:
        return engine.generate(request), logits
    finally:
        hook.remove()


def _same(one: tuple[Any, list[Tensor]], other: tuple[Any, list[Tensor]]) -> bool:
    equal = len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))
    return equal and one[0].text == other[0].text


def _difference(engine: Engine, request: Request, held: tuple[Any, list[Tensor]], folder: Path) -> float:
    family = engine.checkpoint.family
    inputs = encode(engine._processor, engine.checkpoint.config, family, request.images, request.prompt).inputs
    theirs = named_class(family.model_class).from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    out = theirs.eval().generate(
        **{name: value.clone() for name, value in inputs.items()},
        do_sample=False, max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True,
        pad_token_id=tokenizer_of(engine._processor).pad_token_id,
    )  # fmt: skip
    return max(float((a - b[0]).abs().max()) for a, b in zip(held[1], out.logits, strict=False))


def _flags(engine: Engine) -> str:
    module = next(module for module in engine._model.modules() if hasattr(module, "is_concatenated"))
    told = {
        "transposed": module.is_transposed, "bias": module.has_bias, "no gate": not module.has_gate,
        "interleaved": not module.is_concatenated, "norm after": module.has_post_expert_norm,
    }  # fmt: skip
    return ", ".join(name for name, holds in told.items() if holds)


def _told(family: Family, requests: Sequence[Request], answers: Sequence[tuple[Any, Any]]) -> tuple[str, str]:
    if family.vision is None:
        return "", "text only"
    kept = [
        f"{answer.usage.kept_visual_tokens} of {answer.usage.visual_tokens} ({request.compressor})"
        for request, (answer, _) in zip(requests, answers, strict=True) if request.keep_ratio < 1
    ]  # fmt: skip
    return ", ".join(kept), "one, two"


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def failure(error: Exception) -> str:
    """In one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{'' if isinstance(error, VisMMoEError) else type(error).__name__ + ': '}{first}"
