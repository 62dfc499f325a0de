"""What the routers choose for text, for all visual tokens and for those that are kept, seen while the model answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vismmoe.compressors.base import salient_core
from vismmoe.engine import Engine
from vismmoe.images import load_images
from vismmoe.request import Request
from vismmoe.session import Session
from vismmoe.types import LayerState

KINDS = ("text", "visual, all", "visual, kept")
TOP = 20  # of the busiest experts, as the paper counts coverage


@dataclass(frozen=True)
class Patches:
    """Which visual tokens of one picture were kept."""

    image: Image.Image
    question: str
    answer: str
    grid: tuple[int, int]  # rows, columns of visual tokens
    kept: tuple[int, ...]  # row by row, the core's among them
    core: tuple[int, ...]  # kept for their saliency alone


@dataclass(frozen=True)
class Observation:
    """Requests by kind of token; L MoE layers, E experts."""

    layers: tuple[int, ...]  # decoder layers
    prefix_layers: int  # MoE layers that see all visual tokens
    counts: dict[str, Tensor]  # kind -> (requests, L, E) tokens that chose each expert
    states: Tensor  # (requests, L, H) mean MoE input of the kept visual tokens
    patches: tuple[Patches, ...]
    keep_ratio: float
    compressor: str

    def coverage(self, kind: str) -> Tensor:
        """(L,) share of a request's choices that its own 20 busiest experts take, a mean over requests."""
        counts = self.counts[kind].double()
        top = counts.topk(min(TOP, counts.shape[-1]), dim=-1).values.sum(-1)
        return (top / counts.sum(-1).clamp(min=1)).mean(0)


@dataclass
class Choices:
    """A pipeline's watcher: counts of one request, visual and text tokens apart; text also while decoding."""

    layers: int
    experts: int
    rows: dict[int, int]  # decoder layer -> its place
    visual: Tensor = field(init=False)  # (L, E)
    text: Tensor = field(init=False)
    states: dict[int, Tensor] = field(default_factory=dict)
    session: Session | None = None

    def __post_init__(self) -> None:
        self.visual = torch.zeros(self.layers, self.experts)
        self.text = torch.zeros(self.layers, self.experts)

    def __call__(self, session: Session, state: LayerState, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        self.session = session
        row, chosen = self.rows[state.layer], top_k_index.cpu()
        seen = torch.zeros(len(chosen), dtype=torch.bool)
        if state.phase == "prefill":
            seen[session.visual_rows(state.layer).cpu()] = True
            self.states[row] = state.retained_mean.float().cpu()
        self.visual[row] += torch.bincount(chosen[seen].flatten(), minlength=self.experts)
        self.text[row] += torch.bincount(chosen[~seen].flatten(), minlength=self.experts)


def observe(engine: Engine, questions: Sequence[tuple[Path, str]], keep_ratio: float, compressor: str) -> Observation:
    """Ask each question about its picture twice: with all visual tokens, and with `keep_ratio` of them."""
    spec = engine.spec
    counts: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    states, patches = [], []
    for image, prompt in questions:
        whole, half = (
            Choices(len(spec.moe_layers), spec.num_experts, {layer: row for row, layer in enumerate(spec.moe_layers)})
            for _ in range(2)
        )
        engine.watch(Request((image,), prompt, max_new_tokens=12), whole)
        told = engine.watch(Request((image,), prompt, 12, keep_ratio, compressor), half)
        for kind, seen in zip(KINDS, (whole.text, whole.visual, half.visual), strict=True):
            counts[kind].append(seen)
        states.append(torch.stack([half.states[row] for row in range(len(spec.moe_layers))]))
        assert half.session is not None
        patches.append(_patches(engine, half.session, image, prompt, told.text))
    return Observation(
        layers=spec.moe_layers,
        prefix_layers=engine.prefix_layers,
        counts={kind: torch.stack(seen) for kind, seen in counts.items()},
        states=torch.stack(states),
        patches=tuple(patches),
        keep_ratio=keep_ratio,
        compressor=compressor,
    )


def _patches(engine: Engine, session: Session, image: Path, question: str, answer: str) -> Patches:
    kept = session.kept_visual()
    grid = session.prompt.grid[0]
    chosen = tuple(range(grid[0] * grid[1])) if kept is None else tuple(kept.tolist())
    core: tuple[int, ...] = ()
    if kept is not None:
        saliency = session.visual_tokens().saliency.cpu()
        best = set(salient_core(saliency, engine.config.salient_ratio, len(chosen)).tolist())
        core = tuple(sorted(best & set(chosen)))
    return Patches(load_images((image,))[0], question, answer, grid, chosen, core)
