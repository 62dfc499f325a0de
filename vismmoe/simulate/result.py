"""What a simulation found, in the words of the runtime's own report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vismmoe.metrics import PhaseCounters


@dataclass(frozen=True)
class Span:
    """The computing thread over one stretch of time: seconds since the simulation began."""

    kind: str  # "layer" (attention, router), "experts" or "stall"
    layer: int
    step: int
    request: int
    start: float
    end: float


@dataclass(frozen=True)
class SimulationResult:
    """Routing logs replayed on one device under one rule of eviction and one of foresight."""

    profile: str
    policy: str  # an eviction policy, or "belady"
    predictor: str  # kind, "none", or "perfect" for Belady's limit
    slots: int
    pinned_layers: int
    expert_bytes: int
    requests: int
    prefill: PhaseCounters
    decode: PhaseCounters
    prefill_ms: float  # all requests together, without the vision tower
    decode_ms: float
    decoded_tokens: int  # all but the first of each answer
    evictions: int

    @property
    def stall_ms(self) -> float:
        """Milliseconds that compute waited for experts, all requests together."""
        return self.prefill.stall_ms + self.decode.stall_ms

    @property
    def hit_rate(self) -> float:
        """Over both phases."""
        return (self.prefill + self.decode).hit_rate

    @property
    def bytes_loaded(self) -> int:
        """Copied into slabs, on demand and ahead."""
        return self.prefill.bytes_loaded + self.decode.bytes_loaded

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second of decode; 0 when none was decoded."""
        return self.decoded_tokens / self.decode_ms * 1e3 if self.decode_ms else 0.0

    def to_json(self) -> dict[str, Any]:
        """One row of what `simulate --json` prints."""
        return {
            "profile": self.profile,
            "policy": self.policy,
            "predictor": self.predictor,
            "slots": self.slots,
            "pinned_layers": self.pinned_layers,
            "expert_bytes": self.expert_bytes,
            "requests": self.requests,
            "prefill": self.prefill.to_json(),
            "decode": self.decode.to_json(),
            "prefill_ms": round(self.prefill_ms, 3),
            "decode_ms": round(self.decode_ms, 3),
            "decoded_tokens": self.decoded_tokens,
            "hit_rate": round(self.hit_rate, 6),
            "stall_ms": round(self.stall_ms, 3),
            "bytes_loaded": self.bytes_loaded,
            "tokens_per_s": round(self.tokens_per_s, 3),
            "evictions": self.evictions,
        }
