"""One request while it runs: what it has seen, kept and counted. Nothing of it outlives the request.

The model's hooks tell it what happens (it is their Observer); the pipeline asks it for the predictor's view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from vismmoe.metrics import PhaseCounters
from vismmoe.models.arithmetic import Demand
from vismmoe.models.prompt import Prompt
from vismmoe.models.saliency import scale_to_unit
from vismmoe.predictors.features import advance_history
from vismmoe.types import AheadDemand, Compressor, LayerState, ModelSpec, Phase, VisualTokens


@dataclass(frozen=True)
class Past:
    """Earlier turns of a conversation, as this turn finds them in the cache."""

    tokens: int = 0  # in the layers that see everything
    kept: Tensor | None = None  # (C,) int64 ascending positions of those that deeper layers hold; None: all of them
    visual: int = 0  # visual tokens among them
    kept_visual: int = 0


NOTHING = Past()


@dataclass
class Clock:
    """Milliseconds of one request by what they were spent on; vision and compress are not part of prefill."""

    vision: float = 0.0
    compress: float = 0.0
    predictor: float = 0.0
    steps: list[float] = field(default_factory=list)  # one per forward, prefill first, from end to end
    mark: float = 0.0  # start of the running forward
    vision_mark: float = 0.0


class Asker(Protocol):
    """What fetching and foreseeing must know of the request that they work for."""

    @property
    def phase(self) -> Phase: ...

    @property
    def counters(self) -> Mapping[Phase, PhaseCounters]: ...

    @property
    def counting(self) -> PhaseCounters:
        """Counters of the running phase."""
        ...

    @property
    def clock(self) -> Clock: ...


@dataclass
class _LayerChunks:
    """What the pieces of the prompt have shown of one layer so far."""

    history: Tensor  # (E,) before this forward
    counts: Tensor | int = 0  # (E,) int32 tokens that chose each expert
    total: Tensor | float = 0.0  # (H,) float32 sum over the visual tokens
    visual: int = 0


class Session:
    """State of one request; implements vismmoe.models.hooks.Observer."""

    def __init__(
        self,
        spec: ModelSpec,
        prompt: Prompt,
        *,
        keep_count: int,
        compressor: Compressor | None,
        prefix: Sequence[int],
        device: torch.device,
        past: Past = NOTHING,
        prefill_chunk: int | None = None,
        foresee: Callable[[int, Tensor], AheadDemand] | None = None,
    ) -> None:
        """keep_count: visual tokens that the layers after `prefix` (MoE layers) see; compressor None keeps all.
        foresee: from the last prefix layer and its visual states (N, H) to what deeper layers would be asked."""
        self.spec = spec
        self.prompt = prompt
        self.past = past
        self.prefill_chunk = prefill_chunk  # tokens that a layer takes at once; None: the whole prompt
        self._chunk_start, self._chunk_end = 0, None  # type: int, int | None
        self._chunks: dict[int, _LayerChunks] = {}
        self.known_tokens = past.tokens + prompt.tokens
        self.prompt_inputs = prompt.inputs
        self.notes: tuple[str, ...] = ()  # what was left out of the images
        self.keep_count = keep_count
        self.wants_saliency = compressor is not None
        self.counters: Mapping[Phase, PhaseCounters] = {"prefill": PhaseCounters(), "decode": PhaseCounters()}
        self.clock = Clock(mark=time.perf_counter())
        self.step = -1
        self.embeddings: Tensor | None = None  # (N, H) visual embeddings as the decoder receives them
        self.visual_summary = torch.zeros(spec.hidden_size, device=device)
        self._compressor = compressor
        self._foresee = foresee
        self._states: Tensor | None = None  # MoE input of the last prefix layer
        self._prefix = tuple(prefix)
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._device = device
        self._visual = prompt.visual_positions.to(device)
        self._deep_visual = self._visual  # rows of the visual tokens in what deeper layers see
        self._history = torch.zeros(len(spec.moe_layers), spec.num_experts)
        self._means: dict[int, Tensor] = {}
        self._distinct: dict[int, int] = {}  # layer -> experts that the prefill needs
        self._saliency: Tensor | None = None
        self._choices: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: Tensor | None = None
        self._held = None if past.kept is None else self._with_past(torch.arange(prompt.tokens, device=device))
        self._kept_visual: Tensor | None = None

    @property
    def compresses(self) -> bool:
        """Whether deeper layers see fewer visual tokens than the prompt has."""
        return self._compressor is not None

    @property
    def phase(self) -> Phase:
        return "prefill" if self.step <= 0 else "decode"

    @property
    def counting(self) -> PhaseCounters:
        """Counters of the running phase."""
        return self.counters[self.phase]

    # -- told by the hooks ----------------------------------------------------------------------------------------
    def begin_vision(self) -> None:
        self.clock.vision_mark = time.perf_counter()

    def end_vision(self) -> None:
        self.clock.vision += (time.perf_counter() - self.clock.vision_mark) * 1e3

    def see_saliency(self, received: Tensor) -> None:
        self._saliency = scale_to_unit(received)

    def begin_forward(self, embeds: Tensor | None) -> None:
        self.step += 1
        if self.step == 0 and embeds is not None and len(self._visual):
            self.embeddings = embeds[0, self._visual]
            self.visual_summary = self.embeddings.float().mean(0)

    def end_forward(self) -> None:
        now = time.perf_counter()
        self.clock.steps.append((now - self.clock.mark) * 1e3)
        self.clock.mark = now

    def compress(self) -> None:
        """Choose the visual tokens that deeper layers see, in the prefill; drops no text token."""
        if self._compressor is None or self.step != 0:
            return
        started = time.perf_counter()
        visual = self.visual_tokens()
        chosen = self._compressor.keep(visual, self.keep_count).to(self._device)
        text = torch.ones(self.prompt.tokens, dtype=torch.bool, device=self._device)
        text[self._visual] = False
        seen = text.clone()
        seen[self._visual[chosen]] = True
        self._kept = seen.nonzero().squeeze(-1)
        self._held = self._with_past(self._kept)
        self._kept_visual = chosen
        self._deep_visual = (~text[self._kept]).nonzero().squeeze(-1)
        if len(chosen):
            self.visual_summary = visual.embeddings[chosen].float().mean(0)
        self.clock.compress += (time.perf_counter() - started) * 1e3

    def kept(self) -> Tensor | None:
        return self._kept

    def begin_chunk(self, start: int, end: int | None) -> None:
        """The layer that runs now takes the prompt in pieces and is at rows `start` to `end`; None: to the last one."""
        self._chunk_start, self._chunk_end = start, end

    def note(self, sentence: str) -> None:
        """Say it in the report, once."""
        if sentence not in self.notes:
            self.notes = (*self.notes, sentence)

    def held(self) -> Tensor | None:
        return self._held

    def _with_past(self, rows: Tensor) -> Tensor:
        """(C,) positions in the conversation: what deeper layers hold of the past, then `rows` of this turn."""
        kept = self.past.kept
        before = torch.arange(self.past.tokens, device=rows.device) if kept is None else kept.to(rows.device)
        return torch.cat((before, rows + self.past.tokens))

    def kept_visual(self) -> Tensor | None:
        return self._kept_visual

    def visual_tokens(self) -> VisualTokens:
        """All that a compressor may look at; the prefix must have run."""
        if self.embeddings is None:
            raise RuntimeError("the vision tower and the prefix have not run yet")
        experts, weights = zip(*(self._choices[layer] for layer in self._prefix), strict=True)
        assert self._states is not None
        states = self._states[self._visual]
        after = int(self._visual[-1]) + 1 if len(self._visual) else 0
        unknown = torch.zeros(len(self._visual), device=self._device)
        return VisualTokens(
            saliency=unknown if self._saliency is None else self._saliency,
            embeddings=self.embeddings,
            positions=self._visual,
            image_index=self.prompt.image_index.to(self._device),
            grid=self.prompt.grid,
            prefix_experts=torch.stack(experts),
            prefix_weights=torch.stack(weights),
            num_experts=self.spec.num_experts,
            states=states,
            prompt_states=self._states[after:],
            ahead=None if self._foresee is None else self._foresee(self._prefix[-1], states),
        )

    def distinct_experts(self) -> float:
        """Experts that the prefill needed in a MoE layer after the prefix: mean over these layers, 0 without any."""
        deep = [count for layer, count in self._distinct.items() if layer not in self._prefix]
        return sum(deep) / len(deep) if deep else 0.0

    def in_prefix(self, layer: int) -> bool:
        """Whether `layer` sees all visual tokens."""
        return layer in self._prefix

    def visual_rows(self, layer: int) -> Tensor:
        """(V,) int64 rows of the visual tokens among the tokens that `layer` sees in the prefill, in the piece of the
        prompt that it is at."""
        rows = self._visual if self._kept is None or layer in self._prefix else self._deep_visual
        if self._chunk_end is None:
            return rows
        return rows[(rows >= self._chunk_start) & (rows < self._chunk_end)] - self._chunk_start

    # -- told and asked by the pipeline ---------------------------------------------------------------------------
    def see_routing(
        self, layer: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, demand: Demand
    ) -> LayerState:
        """Take note of one router's choice; returns what a predictor may look at.

        The layer's row of the history holds this forward already. Before the compressor has run (the prefix, in the
        prefill) all visual tokens count as retained.
        """
        row = self._rows[layer]
        counts = torch.zeros(self.spec.num_experts, dtype=torch.int32)
        counts[list(demand.experts)] = torch.tensor(demand.counts, dtype=torch.int32)
        if self.phase == "decode":
            self._history[row] = advance_history(self._history[row], counts, self.spec.top_k)
        else:
            self._see_prefill(layer, hidden, top_k_index, top_k_weights, counts)
        return LayerState(layer, self.phase, hidden, self._means[layer], self.visual_summary, self._history)

    def _see_prefill(
        self, layer: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, counts: Tensor
    ) -> None:
        """The whole prompt, or one piece more of it."""
        row, start = self._rows[layer], self._chunk_start
        if start == 0:
            self._chunks[layer] = _LayerChunks(self._history[row].clone())
        seen = self._chunks[layer]
        seen.counts = seen.counts + counts
        self._history[row] = advance_history(seen.history, seen.counts, self.spec.top_k)
        self._distinct[layer] = int((seen.counts > 0).sum())
        rows = self.visual_rows(layer)
        seen.visual += len(rows)
        seen.total = seen.total + hidden[rows].float().sum(0)
        self._means[layer] = seen.total / max(1, seen.visual)
        if layer in self._prefix and self._compressor is not None:
            self._states = hidden if start == 0 or self._states is None else torch.cat((self._states, hidden))
            choice = top_k_index[rows], top_k_weights[rows].float()
            before = self._choices.get(layer)
            if start and before is not None:
                choice = torch.cat((before[0], choice[0])), torch.cat((before[1], choice[1]))
            self._choices[layer] = choice
