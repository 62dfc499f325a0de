"""A device as the simulator sees it: how much it holds, how fast bytes and arithmetic go.

Costs follow a straight line each: so much per call, so much per byte, so much per multiplication. They are scaled by
the bytes of one expert, so that one profile serves models of any size. Weights are taken as two bytes each: one token
through an expert of B bytes is B floating point operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vismmoe.config import Config, Count, Positive, Size, Weight, in_clone
from vismmoe.errors import UsageError
from vismmoe.schema import SIZE, Within, options
from vismmoe.settings import PROFILE_KEYS, build, keys_of

Rate = Annotated[int, SIZE, Within(1)]

DEFAULT_PROFILE = "configs/devices/cpu-2-cores.yaml"


@dataclass(frozen=True, kw_only=True)
class DeviceProfile(Config):
    """Memory, link and disk rates, time per expert of one device."""

    name: str
    """What people call it."""
    device_memory: Size
    """Memory that layers run in, in bytes."""
    host_memory: Size = 0
    """Memory below the device for copies of experts, in bytes; 0: they come straight from disk."""
    disk_rate: Rate
    """Bytes a second that come from disk."""
    disk_ms: Weight = 0.1
    """Milliseconds that a read from disk takes before its first byte."""
    link_rate: Rate | None = None
    """Bytes a second from host memory to the device; none: what the disk delivers is where layers run."""
    link_ms: Weight = 0.02
    """Milliseconds that a copy over the link takes before its first byte."""
    parallel_reads: Count = 1
    """Reads that go on side by side, each at the full rate; more than these wait for each other."""
    wake_ms: Weight = 0.05
    """Milliseconds from an order to the moment when an idle reader begins."""
    memory_rate: Rate
    """Bytes of weights a second that arithmetic can pass through, for one token."""
    compute_rate: Positive
    """Floating point operations a second in the matrix products of experts."""
    expert_ms: Weight = 0.0
    """Milliseconds that one run of one expert costs whatever its size."""
    access_ms: Weight = 0.0
    """Milliseconds of keeping the books on one needed expert of a layer that is not pinned."""
    layer_ms: Weight = 0.0
    """Milliseconds of one layer besides its experts, whatever its size."""
    layer_experts: Weight = 4.0
    """Weights of one layer besides its routed experts, in experts: 4 in Qwen3-VL-30B-A3B and in the reference model."""
    predictor_ms: Weight = 0.1
    """Milliseconds of one call of a predictor."""

    def expert_s(self, tokens: float, expert_bytes: int) -> float:
        """Seconds that one expert takes for its tokens."""
        return self.expert_ms / 1e3 + self._product_s(tokens, expert_bytes)

    def layer_s(self, tokens: float, expert_bytes: int) -> float:
        """Seconds of one layer besides its routed experts."""
        return self.layer_ms / 1e3 + self.layer_experts * self._product_s(tokens, expert_bytes)

    def disk_s(self, size: int) -> float:
        """Seconds of one read."""
        return self.disk_ms / 1e3 + size / self.disk_rate

    def link_s(self, size: int) -> float:
        """Seconds of one copy from host memory."""
        return 0.0 if self.link_rate is None else self.link_ms / 1e3 + size / self.link_rate

    def _product_s(self, tokens: float, weight_bytes: int) -> float:
        return weight_bytes / self.memory_rate + tokens * weight_bytes / self.compute_rate


def read_profile(file: str) -> DeviceProfile:
    """The profile in `file`; the shipped ones are found from anywhere. UsageError when it is none.

    A file of settings for other commands is told from a profile by its keys.
    """
    path = Path(file)
    if not path.exists() and not path.is_absolute() and (shipped := in_clone(str(path.parent))) is not None:
        path = shipped / path.name
    keys = keys_of(path)
    if keys and not PROFILE_KEYS & set(keys):
        raise UsageError(
            f"{file} is no device profile: it has none of {', '.join(sorted(PROFILE_KEYS))}, but "
            f"{', '.join(keys[:4])}. Profiles are in configs/devices, `vismmoe simulate --measure-profile FILE` writes "
            f"one of this machine; settings of other commands are given with --config."
        )
    lacking = [option.name for option in options(DeviceProfile) if option.required and option.name not in keys]
    if lacking:
        raise UsageError(f"The device profile {file} lacks {', '.join(lacking)}; configs/devices has complete ones.")
    return build(DeviceProfile, [str(path)])
