"""What goes into an Engine and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from vismmoe.images import ImageSource
from vismmoe.metrics import PhaseCounters
from vismmoe.types import GREEDY, RequestRecord, RoutingRecord, Sampling

FinishReason = Literal["stop", "length"]
Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True)
class Picture:
    """An image within a message."""

    source: ImageSource


@dataclass(frozen=True)
class Message:
    """What one side says: text and pictures, in their order."""

    role: Role
    parts: tuple[str | Picture, ...]

    @property
    def pictures(self) -> tuple[ImageSource, ...]:
        return tuple(part.source for part in self.parts if isinstance(part, Picture))


@dataclass(frozen=True)
class Request:
    """One question about zero or more images."""

    images: tuple[ImageSource, ...]
    prompt: str
    max_new_tokens: int = 64
    keep_ratio: float = 1.0  # floor(keep_ratio * N) of the N visual tokens reach the deeper layers
    compressor: str = "affinity-bytes"  # how they are chosen; not consulted when all are kept
    sampling: Sampling = GREEDY
    prefill_chunk: int | None = None  # tokens of the prompt that a layer takes at once; None: all of them
    history: tuple[Message, ...] = ()  # what was said before; with no images and no prompt, its end is the question

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole conversation up to the answer that is asked for."""
        if self.history and not self.images and not self.prompt:
            return self.history
        return (*self.history, Message("user", (*map(Picture, self.images), self.prompt)))


@dataclass(frozen=True)
class Usage:
    """Token counts of one request; in a conversation those of all of it so far."""

    prompt_tokens: int
    visual_tokens: int
    kept_visual_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt: keys and values were there from earlier turns


@dataclass(frozen=True)
class Timing:
    """Milliseconds. prefill is the first forward without vision and compress; decode all later ones together."""

    load: float
    vision: float
    compress: float
    prefill: float
    decode: float
    decode_p50: float
    decode_p95: float
    predictor: float  # part of prefill and decode
    total: float  # from the decoded images to the text; without load


@dataclass(frozen=True)
class ExpertReport:
    """Expert traffic of one request."""

    prefill: PhaseCounters
    decode: PhaseCounters
    evictions: int
    slabs: int
    pinned_layers: int
    distinct_in_prefill: float  # experts that the prefill needs in a layer after the prefix: mean of these layers


@dataclass(frozen=True)
class MemoryReport:
    """Planned bytes and the measured peak.

    On the CPU the device's peak is how far this process's resident memory has grown at most since the engine began to
    load weights, host copies of experts and pages of program files taken out: weights, slabs, KV, activations, and what
    Python, torch and its kernels allocate on the way (some MB that no plan counts). Memory that an earlier engine of
    the same process gave back to the allocator is not seen again. On CUDA it is what torch's allocator held at most.
    """

    device_planned_bytes: int
    device_peak_bytes: int
    host_planned_bytes: int
    host_peak_bytes: int


@dataclass(frozen=True)
class PredictorReport:
    """Which predictor guided the request, and where it came from."""

    kind: str
    window: int
    source: str | None
    version: str | None


@dataclass(frozen=True)
class GenerationResult:
    """The answer and the whole report."""

    text: str
    model: str
    finish_reason: FinishReason
    usage: Usage
    timing_ms: Timing
    tokens_per_second: float  # decoded tokens (all but the first) per second of decode
    experts: ExpertReport
    memory: MemoryReport
    predictor: PredictorReport | None
    fallbacks: tuple[str, ...]
    sampling: Sampling = GREEDY

    def to_json(self) -> dict[str, Any]:
        """The object that `infer --json` prints."""
        return {
            "text": self.text,
            "model": self.model,
            "finish_reason": self.finish_reason,
            "usage": dict(vars(self.usage)),
            "timing_ms": {name: round(value, 3) for name, value in vars(self.timing_ms).items()},
            "tokens_per_second": round(self.tokens_per_second, 3),
            "experts": {
                **vars(self.experts),
                "distinct_in_prefill": round(self.experts.distinct_in_prefill, 3),
                "prefill": self.experts.prefill.to_json(),
                "decode": self.experts.decode.to_json(),
            },
            "memory": dict(vars(self.memory)),
            "predictor": None if self.predictor is None else dict(vars(self.predictor)),
            "sampling": dict(vars(self.sampling)) if self.sampling.temperature else None,
            "fallbacks": list(self.fallbacks),
        }


@dataclass(frozen=True)
class Recording:
    """One request as the routing log keeps it, and its answer."""

    result: GenerationResult
    request: RequestRecord
    routing: tuple[RoutingRecord, ...]  # forward by forward, layer by layer
