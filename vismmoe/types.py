"""The vocabulary of the project: small frozen records that change hands between rooms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

from vismmoe.errors import UsageError

if TYPE_CHECKING:  # the command line prints its help without importing torch
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")
LEAST_TEMPERATURE = 0.01  # below it logits in float32 run over
MOST_SEED = 2**63 - 1


class ExpertId(NamedTuple):
    """One routed expert: index of its decoder layer, index within that layer."""

    layer: int
    expert: int


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest one at temperature 0, else drawn. The same seed draws the same.

    Raises UsageError for a value that makes no sense.
    """

    temperature: float = 0.0  # 0, or what logits are divided by
    top_p: float = 1.0  # share of the probability that the likeliest tokens must reach; the others are never drawn
    top_k: int | None = None  # so many of the likeliest tokens can be drawn; None: all
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature and not LEAST_TEMPERATURE <= self.temperature <= 100:
            raise UsageError(
                f"the temperature is {self.temperature:g}: give 0 for the likeliest answer, or {LEAST_TEMPERATURE} to "
                "100 to draw one (most models are used with 0.6 to 1)"
            )
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p is {self.top_p:g}: give a share above 0 and at most 1, which leaves all tokens")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top-k is {self.top_k}: give 1 or more tokens, or leave it out")
        if not 0 <= self.seed <= MOST_SEED:
            raise UsageError(f"the seed is {self.seed}: give a whole number from 0 to {MOST_SEED}")


GREEDY = Sampling()


@dataclass(frozen=True)
class ModelSpec:
    """What the runtime must know of a checkpoint; read from its config, never from its weights."""

    family: str  # transformers' model_type, e.g. "qwen3_vl_moe"
    num_layers: int  # decoder layers, dense ones included
    moe_layers: tuple[int, ...]  # indices of the decoder layers that hold routed experts, ascending
    num_experts: int  # E, routed experts a layer
    top_k: int
    hidden_size: int  # H
    expert_width: int  # I
    fingerprint: str  # hex digest of config and tensor headers: the same for the same checkpoint


@dataclass(frozen=True)
class AheadDemand:
    """What the visual tokens would ask of the first D deeper MoE layers, as next gate sees it after the prefix."""

    experts: Tensor  # (D, N, k) int64
    resident: Tensor  # (D, E) bool: has a slab, or is pinned
    bytes: Tensor  # (D,) int64 size of one expert of each layer


@dataclass(frozen=True)
class VisualTokens:
    """All that a compressor may look at, for the visual tokens of one request (N of them, prompt order)."""

    saliency: Tensor  # (N,) float32 in [0, 1]: attention received in the vision tower; zeros where it does not tell
    embeddings: Tensor  # (N, H) visual embeddings as the decoder receives them
    positions: Tensor  # (N,) int64 index of each visual token in the prompt
    image_index: Tensor  # (N,) int64 which image of the request
    grid: tuple[tuple[int, int], ...]  # per image: rows, columns of visual tokens
    prefix_experts: Tensor  # (P, N, k) int64 experts chosen in the P pinned prefix layers
    prefix_weights: Tensor  # (P, N, k) float32 their gate weights
    num_experts: int
    states: Tensor | None = None  # (N, H) MoE input of the last prefix layer
    prompt_states: Tensor | None = None  # (Q, H) the same for the text that follows the last visual token
    ahead: AheadDemand | None = None  # for compressors that look ahead


class Compressor(Protocol):
    """Chooses the visual tokens that the deeper layers see."""

    layers_ahead: ClassVar[int]  # deeper MoE layers that VisualTokens.ahead must speak of; 0: none
    needs_saliency: ClassVar[bool]  # whether it is lost in a family whose vision tower does not tell saliency

    @property
    def name(self) -> str: ...

    def resize(self, width: int, height: int, keep_ratio: float, token_px: int) -> tuple[int, int]:
        """Width and height in pixels to bring a picture to before the vision tower; token_px: a visual token's side."""
        ...

    def count(self, total: int, keep_ratio: float) -> int:
        """How many of `total` visual tokens the deeper layers see."""
        ...

    def keep(self, visual: VisualTokens, count: int) -> Tensor:
        """Return (count,) int64, sorted, distinct indices into the N visual tokens."""
        ...


@dataclass(frozen=True)
class LayerState:
    """What a predictor may look at after the router of one MoE layer has run."""

    layer: int  # decoder layer index l
    phase: Phase
    hidden: Tensor  # (T, H) input of the MoE block at layer l (after its norm), all tokens of this forward
    retained_mean: Tensor  # (H,) mean over the retained visual tokens at layer l; in decode the last prefill's value
    visual_summary: Tensor  # (H,) mean visual embedding of the retained tokens: static through the request
    history: Tensor  # (L_moe, E) float32 decayed histogram of recent activations, one row per MoE layer


class Predictor(Protocol):
    """Foresees which experts the next layers will need."""

    kind: str
    window: int  # W, layers ahead

    def predict(self, state: LayerState) -> Tensor:
        """Return (W, E) float32 scores, row d-1 for the d-th next MoE layer; higher means sooner needed."""
        ...


@dataclass(frozen=True)
class RoutingRecord:
    """One forward through one MoE layer, as the routing log keeps it."""

    request: int
    step: int  # 0 is the prefill, then one per decoded token
    phase: Phase
    layer: int
    counts: Tensor  # (E,) int32 tokens of this forward that chose each expert
    gate_mass: Tensor  # (E,) float32 summed gate weight
    retained_mean: Tensor  # (H,)
    token: Tensor  # (H,) MoE input of the last token of this forward
    own_gate: Tensor  # (E,) float32 soft gate mass of this layer's own router (one token: its softmax)
    next_gate: Tensor  # (W_log, E) float32 the same if the routers of the next layers saw this layer's state


@dataclass(frozen=True)
class RequestRecord:
    """What the routing log keeps once per request."""

    request: int
    item: str  # name of the corpus item
    prompt: str
    answer: str
    visual_tokens: int
    kept_visual_tokens: int
    completion_tokens: int
    visual_summary: Tensor  # (H,)


@dataclass(frozen=True)
class ExpertRange:
    """A run of bytes of one expert in one checkpoint file."""

    file: Path
    offset: int  # bytes from the start of the file
    length: int  # bytes


@dataclass(frozen=True)
class PartShape:
    """One weight of an expert as it lies on disk; parts follow each other in a slab, see experts.places."""

    name: str  # in-memory name, e.g. "gate_up_proj"
    shape: tuple[int, ...]  # per expert, as on disk, e.g. (H, 2I) or (2I, H)
    transposed: bool  # the in-memory weight is the transpose of what the disk holds


@dataclass(frozen=True)
class ExpertLayout:
    """Where every routed expert of a checkpoint lies, and how its bytes become weights."""

    dtype: torch.dtype
    parts: tuple[PartShape, ...]  # slab order
    ranges: Mapping[ExpertId, tuple[ExpertRange, ...]]  # slab order, one or more a part; lengths sum to expert_bytes
    expert_bytes: int


@dataclass(frozen=True)
class ModelBytes:
    """What a model takes, in bytes unless said otherwise: all that the memory plan needs to know."""

    backbone: int  # attention, norms, routers, embeddings, dense layers, in the compute dtype
    vision: int
    shared_experts: int
    expert_bytes: int  # one routed expert, in the checkpoint's dtype
    experts_per_layer: int  # count
    moe_layers: int  # count
    kv_bytes_per_token: int  # all layers together that keep every token
    activation_bytes: int  # the largest moment of vision tower or prefill
    staging_bytes: int  # read buffers and the up-cast of a running expert
    top_k: int  # count
    slack_bytes: int = 0  # beside each expert in memory: room for reads in whole blocks
    kv_window_bytes_per_token: int = 0  # all layers together that keep the last kv_window_tokens
    kv_window_tokens: int = 0  # count
    kv_constant_bytes: int = 0  # running states of one request
    runtime_bytes: int = 0  # Python's objects of the model's parts, and kernels that are compiled for them

    @property
    def slab_bytes(self) -> int:
        """One routed expert in memory."""
        return self.expert_bytes + self.slack_bytes

    def kv_bytes(self, tokens: int, requests: int = 1) -> int:
        """Cache of so many tokens of so many requests together."""
        in_windows = self.kv_window_bytes_per_token * min(tokens, self.kv_window_tokens * requests)
        return self.kv_bytes_per_token * tokens + in_windows + self.kv_constant_bytes * requests
