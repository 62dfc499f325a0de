"""Does the simulator say what the runtime does? The same requests, answered and replayed, under several budgets."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vismmoe.config import EngineConfig
from vismmoe.engine import Engine
from vismmoe.experts.store import ExpertStore
from vismmoe.predictors import NextGate
from vismmoe.request import Request
from vismmoe.session import Session
from vismmoe.simulate.foresight import WINDOW, LoggedGate
from vismmoe.simulate.measure import access_cost, budget, forward_ms, measured_profile, read_costs
from vismmoe.simulate.profile import DeviceProfile
from vismmoe.simulate.replay import Setting, simulate
from vismmoe.talk import table
from vismmoe.trace import TraceHeader, TraceSet, TraceWriter, read_traces
from vismmoe.types import ExpertId, LayerState
from vismmoe.working_set import working_set

WorkingSets = Mapping[tuple[int, int], Sequence[int]]
FRACTIONS = (0.1, 0.3, 0.6)  # of the way from the least memory that runs to everything resident


@dataclass(frozen=True)
class Agreement:
    """One budget and rule: milliseconds of stall over all requests and loads on demand, measured and simulated.

    Without a predictor the loads are the same however fast the machine is: both sides run the same cache.
    """

    predictor: str
    budget_bytes: int
    slots: int
    measured_ms: float
    simulated_ms: float
    measured_loads: int
    simulated_loads: int

    @property
    def error(self) -> float:
        """Of the simulation, as a share of what was measured."""
        return abs(self.simulated_ms - self.measured_ms) / self.measured_ms

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "error": round(self.error, 6)}


def compare_with_runtime(
    config: EngineConfig, requests: Sequence[Request], *, fractions: Sequence[float] = FRACTIONS
) -> list[Agreement]:
    """Answer `requests` on this CPU on demand and with next gate, and replay their own routing.

    config.disk_rate: let reads take a known time that dwarfs the machine's own unrest. The profile is measured here:
    arithmetic on a resident engine, reads on the store that the runtime reads with.
    """
    resident = replace(config, device="cpu", device_memory=None, disk_rate=None)
    with Engine.load(resident) as engine:
        traces, sets = record(engine, requests), working_sets(engine, requests)
        profile = _with_reads(measured_profile(engine, requests, "this machine"), engine, config)
        gate = NextGate(engine.spec, engine.routers, engine.router_norms, WINDOW)
        resident_ms = forward_ms(engine, requests)
    found = []
    for guide in (None, gate):
        books_s = access_cost(budget(resident, fractions[0]), requests, resident_ms, guide)
        charged = replace(profile, access_ms=books_s * 1e3)
        found += [_compare(budget(config, share), requests, traces, sets, charged, guide) for share in fractions]
    return found


def agreement_table(found: Sequence[Agreement]) -> str:
    """For people."""
    rows = [
        (one.predictor, f"{one.budget_bytes / 2**20:.1f}", one.slots, f"{one.measured_ms:.1f}",
         f"{one.simulated_ms:.1f}", f"{one.error:.1%}", one.measured_loads, one.simulated_loads)
        for one in found
    ]  # fmt: skip
    heads = (
        "predictor",
        "budget MiB",
        "slots",
        "stall ms measured",
        "simulated",
        "error",
        "loads measured",
        "simulated",
    )
    return table(rows, heads)


def record(engine: Engine, requests: Sequence[Request]) -> TraceSet:
    """The routing log of these requests."""
    first = requests[0]
    header = TraceHeader(
        engine.spec, first.keep_ratio, first.compressor, WINDOW, {"prefix_layers": engine.prefix_layers}
    )
    with tempfile.TemporaryDirectory(prefix="vismmoe-agreement-") as folder:
        with TraceWriter(Path(folder), header) as writer:
            for number, request in enumerate(requests):
                told = engine.record(request, request_id=number, item=str(number), window=WINDOW)
                writer.add(told.request, told.routing)
        return read_traces([folder])


def working_sets(engine: Engine, requests: Sequence[Request]) -> WorkingSets:
    """(request, decoder layer) -> the experts of its prefill that decode is likely to want, the likeliest first."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, request in enumerate(requests):

        def note(session: Session, state: LayerState, index: Tensor, weights: Tensor, number: int = number) -> None:
            if state.phase == "prefill":
                rows = session.visual_rows(state.layer)
                found[number, state.layer] = working_set(index, rows, engine.spec.num_experts)

        engine.watch(request, note)
    return found


def _with_reads(profile: DeviceProfile, engine: Engine, config: EngineConfig) -> DeviceProfile:
    layout = engine.checkpoint.layout
    some = [ExpertId(layer, expert) for layer in engine.spec.moe_layers for expert in range(engine.spec.num_experts)]
    with ExpertStore.open(layout, direct_io=config.direct_io, disk_rate=config.disk_rate) as store:
        first_s, rate = read_costs(store, layout, some)
    return replace(profile, disk_ms=first_s * 1e3, disk_rate=int(rate))


def _compare(
    config: EngineConfig,
    requests: Sequence[Request],
    traces: TraceSet,
    sets: WorkingSets,
    profile: DeviceProfile,
    guide: NextGate | None,
) -> Agreement:
    stall = calls_ms = 0.0
    loads = 0
    with Engine.load(replace(config, prefetch=guide is not None), guide) as engine:
        plan, size = engine.plan, engine.checkpoint.layout.expert_bytes
        for request in requests:
            result = engine.generate(request)
            both = result.experts.prefill + result.experts.decode
            stall, loads = stall + both.stall_ms, loads + both.demand_loads
            calls_ms += result.timing_ms.predictor
    profile = replace(profile, predictor_ms=calls_ms / len(traces))
    setting = Setting.of(
        traces,
        profile,
        slots=plan.slabs,
        pinned_layers=plan.pinned_layers,
        expert_bytes=size,
        readers=config.readers,
        lookahead_top=config.lookahead_top,
    )
    setting = replace(setting, working_sets=sets)
    foresight = None if guide is None else LoggedGate(WINDOW)
    simulated = simulate(setting, policy=config.eviction, foresight=foresight)
    assert config.device_memory is not None
    kind = "none" if guide is None else guide.kind
    simulated_loads = simulated.prefill.demand_loads + simulated.decode.demand_loads
    return Agreement(kind, config.device_memory, plan.slabs, stall, simulated.stall_ms, loads, simulated_loads)
