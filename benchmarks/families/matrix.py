"""One row a family: its tiny checkpoint is answered resident, streamed, together, pruned and by transformers itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
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
from vismmoe.models.kv import CACHE_ARGUMENT, allocated_cache
from vismmoe.models.load import tokenizer_of
from vismmoe.models.prompt import encode
from vismmoe.models.skeleton import named_class
from vismmoe.planning import plan_for

TOKENS = 4
IMAGES, CONTEXT = (128, 64), 512  # what the least memory is planned for: width x height in pixels, tokens
OTHER_IMAGES = {  # of towers that bring every picture to one size, or to a least one
    "aria": (980, 980), "deepseek_ocr2": (768, 768), "gemma4": (576, 576), "glm5_next": (256, 128),
    "unlimited_ocr": (256, 256),
}  # fmt: skip
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
    masked: float | None  # largest difference of logits: tokens dropped by us, hidden from transformers' attention
    images: str
    notes: str

    @property
    def holds(self) -> bool:
        close = max(self.difference, self.masked or 0) <= TOLERANCE
        return self.streamed and self.together and self.loads > 0 and close

    def cells(self) -> tuple[str, ...]:
        return (
            self.family, _yes(self.streamed), _close(self.difference), _yes(self.together), self.images, self.pruned,
            "" if self.masked is None else _close(self.masked), "; ".join(filter(None, (self.experts, self.notes))),
        )  # fmt: skip


HEADINGS = (
    "family", "resident = streamed", "against transformers", "two together = alone", "images", "compression",
    "dropped = hidden", "notes",
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
        model=str(folder), device="cpu", image_size=_planned(family), context=CONTEXT, prefix_layers=prefix,
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
        masked = [
            _difference(engine, request, held, folder, hidden=True)
            for request, held in zip(requests, resident, strict=True) if request.keep_ratio < 1 and not _states(engine)
        ]  # fmt: skip
        notes = _notes(engine)
        alone = [engine.generate(request).text for request in requests[-2:]]
        together = [result.text for result in engine.generate_together(requests[-2:])] == alone
        flags = _flags(engine)
    with _engine(family, folder, least) as engine:
        streamed = [_answer(engine, request) for request in requests]
    loads = sum(result.experts.prefill.demand_loads + result.experts.decode.demand_loads for result, _ in streamed)
    return Row(
        family.model_type, flags,
        all(_same(*pair) for pair in zip(resident, streamed, strict=True)),
        loads, difference, together, _kept(requests, resident), max(masked, default=None),
        "one, two" if family.vision else "text only", notes,
    )  # fmt: skip


def _requests(family: Family) -> list[Request]:
    """Text alone; one and two images; the same with half of the visual tokens."""
    asked = [Request((), QUESTION, TOKENS), Request((), "And that?", TOKENS)]
    if family.vision is None:
        return asked
    one, two = (picture(64, 48, 0),), (picture(64, 48, 1), picture(32, 80, 2))
    ways = ("affinity",) if family.vision.saliency_attention else ("uniform",)
    asked += [Request(one, QUESTION, TOKENS), Request(two, QUESTION, TOKENS)]
    if family.vision.keeps_all is None:
        asked += [Request(two, QUESTION, TOKENS, 0.5, ways[0]), Request(one, QUESTION, TOKENS, 0.7, "random")]
    return asked


def _planned(family: Family) -> tuple[int, int]:
    return OTHER_IMAGES.get(family.model_type, IMAGES)


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Coloured noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@contextmanager
def _engine(family: Family, folder: Path, device_memory: int | None) -> Iterator[Engine]:
    prefix = None if family.vision else 0  # without images no layer need be pinned: all of them stream
    config = EngineConfig(
        model=str(folder), device_memory=device_memory, compute_dtype="float32", device="cpu", prefix_layers=prefix
    )
    with Engine.load(config, image_size=_planned(family), context_tokens=CONTEXT) as engine:
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


def _difference(
    engine: Engine, request: Request, held: tuple[Any, list[Tensor]], folder: Path, *, hidden: bool = False
) -> float:
    """Of logits, against transformers' own model with its eager experts, while both say the same.

    hidden: nothing is dropped there; the attention of the deeper layers is kept from looking at what we drop.
    """
    family = engine.checkpoint.family
    inputs = encode(engine._processor, engine.checkpoint.config, family, request.images, request.prompt).inputs
    theirs = named_class(family.model_class).from_pretrained(
        folder,
        dtype=torch.float32,
        experts_implementation="eager",
        **({"attn_implementation": "eager"} if hidden else {}),
    )
    if hidden:
        _hide(theirs, engine, request)
    out = theirs.eval().generate(
        **{name: deepcopy(value) for name, value in inputs.items()},
        **{CACHE_ARGUMENT: allocated_cache(theirs.config, TOKENS, whole=hidden)},
        do_sample=False, max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True,
        pad_token_id=tokenizer_of(engine._processor).pad_token_id,
    )  # fmt: skip
    ours, logits = held[1], [step[0] for step in out.logits]
    same = [int(a.argmax()) == int(b.argmax()) for a, b in zip(ours, logits, strict=False)]
    steps = len(same) if all(same) else same.index(False) + 1
    return max(float((a - b).abs().max()) for a, b in zip(ours[:steps], logits[:steps], strict=True))


def _hide(theirs: Any, engine: Engine, request: Request) -> None:
    """Deeper layers of `theirs` see the prompt that ours see after compression."""
    ((_, session),) = engine._answer((request,), None, None)
    kept = session.kept()
    dropped = torch.ones(session.prompt.tokens, dtype=torch.bool)
    dropped[kept] = False
    columns = dropped.nonzero().squeeze(-1)

    def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[..., columns] = False if mask.dtype is torch.bool else torch.finfo(mask.dtype).min
        if mask.shape[-2] > 1:  # a row of nothing has no softmax; what dropped tokens see, nobody sees
            mask[..., columns, :] = kwargs["attention_mask"][..., columns, :]
        return args, {**kwargs, "attention_mask": mask}

    for layer in theirs.get_submodule(engine.checkpoint.family.layers)[engine.boundary :]:
        layer.register_forward_pre_hook(hide, with_kwargs=True)


def _states(engine: Engine) -> bool:
    """Whether layers carry a running state, which cannot be kept from what it has seen."""
    kinds = getattr(engine.checkpoint.config.get_text_config(), "layer_types", None) or ()
    return any("attention" not in kind or kind == "linear_attention" for kind in kinds)


def _notes(engine: Engine) -> str:
    vision = engine.checkpoint.family.vision
    if vision is None:
        return ""
    if vision.keeps_all is not None:
        return f"keeps all visual tokens: {vision.keeps_all}"
    told = ["dropped tokens do not enter the running state"] if _states(engine) else []
    if vision.saliency_attention is None:
        told.append("no saliency: uniform, random, downsample")
    return "; ".join(told)


def _flags(engine: Engine) -> str:
    module = next(module for module in engine._model.modules() if hasattr(module, "is_concatenated"))
    told = {
        "transposed": module.is_transposed, "bias": module.has_bias, "no gate": not module.has_gate,
        "interleaved": not module.is_concatenated, "norm after": module.has_post_expert_norm,
    }  # fmt: skip
    return ", ".join(name for name, holds in told.items() if holds)


def _kept(requests: Sequence[Request], answers: Sequence[tuple[Any, Any]]) -> str:
    return ", ".join(
        f"{answer.usage.kept_visual_tokens} of {answer.usage.visual_tokens} ({request.compressor})"
        for request, (answer, _) in zip(requests, answers, strict=True) if request.keep_ratio < 1
    )  # fmt: skip


def _close(difference: float) -> str:
    return "same bits" if difference == 0 else f"{difference:.0e}"


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def failure(error: Exception) -> str:
    """In one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{'' if isinstance(error, VisMMoEError) else type(error).__name__ + ': '}{first}"
