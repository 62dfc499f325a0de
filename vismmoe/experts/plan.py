"""What goes where, in bytes: pure integer arithmetic, nothing is allocated and torch is not imported.

The rule (VisMMoE §4.3: L_semantic <= L_pinned <= floor((M_avail - C_safe) / S_layer)):

1. Everything that is not a routed expert is resident, and so are the experts of the first `prefix_layers` MoE layers.
2. If all experts fit, they are all resident and there is no cache.
3. What is left becomes slabs, as long as one token's cycle (top_k in each deeper layer) fits into them.
4. If the cycle does not fit, recency is worthless (each expert would be evicted just before its next use), whereas an
   expert of a pinned layer always hits: what exceeds two layers' slabs (one runs, one is on its way) pins more layers.

How many layers are pinned never changes an answer: the compressor takes effect after `prefix_layers`, fixed beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vismmoe.errors import BudgetError, UsageError
from vismmoe.sizes import format_size
from vismmoe.types import ModelBytes

_DOUBLE_BUFFER = 2  # layers' worth of slabs that stay slabs when the cycle does not fit


@dataclass(frozen=True)
class Machine:
    """What there is: bytes that this process may still take, after cgroups; None where nobody can tell."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    unified: bool = False  # both are the same memory: a CPU, an integrated GPU

    @property
    def shared_bytes(self) -> int | None:
        """What device and host may take together; None when each has its own."""
        told = [size for size in (self.device_bytes, self.host_bytes) if size is not None]
        return min(told, default=None) if self.unified else None

    def room_for_device(self, host_bytes: int) -> int | None:
        """Bytes that are left to the device beside `host_bytes` of copies in host memory."""
        if not self.unified:
            return self.device_bytes
        return None if self.shared_bytes is None else self.shared_bytes - host_bytes

    def to_json(self) -> dict[str, Any]:
        return {"device_bytes": self.device_bytes, "host_bytes": self.host_bytes, "unified": self.unified}


@dataclass(frozen=True)
class MemoryPlan:
    """Where every byte goes; budgets and parts in bytes, layers and slabs in counts."""

    minimum_bytes: int  # the least device memory with which a request runs
    all_resident_bytes: int  # what needs no offloading
    budget_bytes: int
    planned: dict[
        str, int
    ]  # backbone, vision, shared_experts, pinned_experts, slabs, kv, activations, staging, runtime
    pinned_layers: int  # MoE layers from the front whose experts are all resident
    slabs: int
    cycle_slabs: int  # top_k * (moe_layers - pinned_layers): distinct experts of one token, at the most
    host: dict[str, int]  # expert_copies
    disk: dict[str, int]  # experts: those that are read from disk whenever they are needed
    warnings: tuple[str, ...]
    machine: Machine = Machine()

    @property
    def planned_bytes(self) -> int:
        """Device memory, all parts together."""
        return sum(self.planned.values())

    def to_json(self) -> dict[str, Any]:
        """The object that `vismmoe plan --json` prints."""
        device = {
            "minimum_bytes": self.minimum_bytes,
            "all_resident_bytes": self.all_resident_bytes,
            "budget_bytes": self.budget_bytes,
            "planned_bytes": self.planned_bytes,
            "planned": dict(self.planned),
        }
        return {
            "device": device,
            "host": dict(self.host),
            "disk": dict(self.disk),
            "pinned_layers": self.pinned_layers,
            "slabs": self.slabs,
            "cycle_slabs": self.cycle_slabs,
            "warnings": list(self.warnings),
            "machine": self.machine.to_json(),
        }


def plan_memory(
    sizes: ModelBytes,
    *,
    device_budget_bytes: int | None,
    host_budget_bytes: int,
    prefix_layers: int,
    context_tokens: int,
    requests: int = 1,
    machine: Machine = Machine(),
) -> MemoryPlan:
    """Divide the device budget (None: as much as it takes) and the host budget, for a context of `context_tokens` that
    `requests` share which run together.

    What the machine has not is not planned with: a larger budget is cut, with a warning.
    Raises BudgetError below the minimum, UsageError for counts that make no sense.
    """
    _check(sizes, host_budget_bytes, prefix_layers, context_tokens)
    fixed = _fixed_parts(sizes, context_tokens, requests)
    base = sum(fixed.values())
    layer_bytes = sizes.experts_per_layer * sizes.slab_bytes
    everything = base + sizes.moe_layers * layer_bytes
    minimum = base + prefix_layers * layer_bytes
    if prefix_layers < sizes.moe_layers:
        minimum += sizes.top_k * sizes.slab_bytes
    budget = everything if device_budget_bytes is None else device_budget_bytes
    if budget < minimum:
        raise BudgetError(_refusal(budget, minimum, everything, fixed, prefix_layers * layer_bytes))
    host_budget_bytes, cut_host = _cut_host(host_budget_bytes, sizes, machine, minimum)
    room = machine.room_for_device(min(host_budget_bytes, everything - base))
    cut: tuple[str, ...] = ()
    if room is not None and room < min(budget, everything):
        if room < minimum:
            raise BudgetError(_no_room(room, minimum, machine))
        cut = (_cut_device(budget, room, device_budget_bytes is not None),)
        budget = room
    pinned, slabs = sizes.moe_layers, 0
    if budget < everything:
        spare = (budget - base) // sizes.slab_bytes - prefix_layers * sizes.experts_per_layer
        pinned, slabs = _divide(sizes, spare, prefix_layers)
    planned = fixed | {"pinned_experts": pinned * layer_bytes, "slabs": slabs * sizes.slab_bytes}
    cycle = sizes.top_k * (sizes.moe_layers - pinned)
    copies, left = _host_copies(sizes, pinned, slabs, host_budget_bytes)
    return MemoryPlan(
        minimum_bytes=minimum,
        all_resident_bytes=everything,
        budget_bytes=budget,
        planned=planned,
        pinned_layers=pinned,
        slabs=slabs,
        cycle_slabs=cycle,
        host={"expert_copies": copies},
        disk={"experts": left},
        warnings=(*cut_host, *cut, *_warnings(slabs, cycle, budget, sizes)),
        machine=machine,
    )


def _check(sizes: ModelBytes, host_budget_bytes: int, prefix_layers: int, context_tokens: int) -> None:
    if not 0 <= prefix_layers <= sizes.moe_layers:
        raise UsageError(f"prefix_layers is {prefix_layers}: give 0 to {sizes.moe_layers}, the model's MoE layers.")
    if host_budget_bytes < 0:
        raise UsageError(f"--host-memory is {host_budget_bytes} bytes: give 0 (straight from disk) or more.")
    if context_tokens < 0:
        raise UsageError(f"--context is {context_tokens} tokens: give 0 or more.")


def _fixed_parts(sizes: ModelBytes, context_tokens: int, requests: int) -> dict[str, int]:
    return {
        "backbone": sizes.backbone,
        "vision": sizes.vision,
        "shared_experts": sizes.shared_experts,
        "kv": sizes.kv_bytes(context_tokens, requests),
        "activations": sizes.activation_bytes,
        "staging": sizes.staging_bytes,
        "runtime": sizes.runtime_bytes,
    }


def _divide(sizes: ModelBytes, spare: int, prefix_layers: int) -> tuple[int, int]:
    """(pinned layers, slabs) out of room for `spare` experts beyond the prefix; rules 3 and 4 above."""
    cycle = sizes.top_k * (sizes.moe_layers - prefix_layers)
    if spare >= cycle:
        return prefix_layers, spare
    more = max(0, spare - _DOUBLE_BUFFER * sizes.top_k) // sizes.experts_per_layer
    return prefix_layers + more, spare - more * sizes.experts_per_layer


def _cut_host(host_bytes: int, sizes: ModelBytes, machine: Machine, minimum: int) -> tuple[int, tuple[str, ...]]:
    """Host budget that there is, and a warning if less than asked for. The device's minimum goes first."""
    host_bytes = min(host_bytes, sizes.moe_layers * sizes.experts_per_layer * sizes.slab_bytes)
    room = machine.host_bytes
    if machine.shared_bytes is not None:
        room = max(0, machine.shared_bytes - minimum)
    if room is None or host_bytes <= room:
        return host_bytes, ()
    beside = " beside the least that the device needs" if machine.unified else ""
    return room, (f"--host-memory is cut to {_bytes(room)}: more is not left to this process{beside}.",)


def _cut_device(budget: int, room: int, asked: bool) -> str:
    what = "--device-memory" if asked else "What the whole model needs"
    return f"{what} ({_bytes(budget)}) is cut to {_bytes(room)}: more is not left to this process."


def _no_room(room: int, minimum: int, machine: Machine) -> str:
    whose = "of the memory that device and host share" if machine.unified else "on the device"
    return (
        f"This request needs at least {_bytes(minimum)} {whose}, and only {_bytes(max(0, room))} are left to this "
        "process (free memory, or the limit of its cgroup). End other programs, raise the limit, or give a shorter "
        "context, a smaller image or fewer prefix layers."
    )


def _host_copies(sizes: ModelBytes, pinned_layers: int, slabs: int, host_budget_bytes: int) -> tuple[int, int]:
    """(bytes of experts with a copy in host memory, bytes of experts that only the disk holds).

    What lies in a slab has no copy, so that more copies than the other experts would stay empty.
    """
    offloaded = (sizes.moe_layers - pinned_layers) * sizes.experts_per_layer
    copies = min(max(0, offloaded - slabs), host_budget_bytes // sizes.slab_bytes)
    return copies * sizes.slab_bytes, (offloaded - copies) * sizes.expert_bytes


def _warnings(slabs: int, cycle: int, budget: int, sizes: ModelBytes) -> tuple[str, ...]:
    if slabs >= cycle:
        return ()
    missing = (cycle - slabs) * sizes.slab_bytes
    return (
        f"{slabs} slabs are fewer than the {cycle} experts that one token may need in the deeper layers, so little is "
        f"found again in the next token; about {_bytes(missing)} more --device-memory (now {_bytes(budget)}) would do.",
    )


def _refusal(budget: int, minimum: int, everything: int, fixed: dict[str, int], prefix: int) -> str:
    parts = ", ".join(f"{name} {_bytes(size)}" for name, size in fixed.items() if size)
    return (
        f"--device-memory is {_bytes(budget)}, which is too little: this request needs at least {_bytes(minimum)} "
        f"({parts}, experts of the prefix layers {_bytes(prefix)}, and slabs for one token in one layer). "
        f"Give --device-memory {minimum} or more ({everything} needs no offloading), a shorter context, a smaller "
        "image or fewer prefix layers."
    )


def _bytes(count: int) -> str:
    return f"{count} bytes ({format_size(count)})"
