"""Replays routing logs on a device that only counts: the runtime's own cache, prefetcher and order of events
(vismmoe.traffic), in simulated time. Transfers and arithmetic overlap as they do in the runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from vismmoe.errors import BudgetError, UsageError
from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.policies import DEFAULT_POLICY, get_policy
from vismmoe.metrics import PhaseCounters
from vismmoe.session import Clock
from vismmoe.simulate.belady import BeladyCache
from vismmoe.simulate.foresight import Foresight
from vismmoe.simulate.profile import DeviceProfile
from vismmoe.simulate.result import SimulationResult, Span
from vismmoe.simulate.rows import Row, requests_of
from vismmoe.simulate.transfers import Read, SimulatedTransfers
from vismmoe.sizes import format_size
from vismmoe.trace import TraceSet
from vismmoe.traffic import ExpertTraffic
from vismmoe.types import ExpertId, LayerState, ModelSpec, Phase
from vismmoe.watchdog import Watchdog
from vismmoe.working_set import rooms

LOOKAHEAD_TOP = 20  # B, as the runtime's default


@dataclass(frozen=True)
class Setting:
    """What does not change between rules: the logs, the device, how much of it experts may take."""

    traces: TraceSet
    profile: DeviceProfile
    slots: int
    pinned_layers: int
    expert_bytes: int
    limit: int | None = None  # requests
    readers: int = 1
    lookahead_top: int = LOOKAHEAD_TOP
    working_sets: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    """(request, decoder layer) -> experts of a prefill that decode is likely to want, the likeliest first, where they
    are known (vismmoe.working_set): logs do not tell them."""

    @classmethod
    def of(
        cls,
        traces: TraceSet,
        profile: DeviceProfile,
        *,
        slots: int | None = None,
        pinned_layers: int | None = None,
        expert_bytes: int | None = None,
        limit: int | None = None,
        readers: int = 1,
        lookahead_top: int = LOOKAHEAD_TOP,
    ) -> Setting:
        """slots: slabs of the deeper layers (default: a quarter of their experts); pinned_layers: MoE layers whose
        experts are all resident (default: the prefix of the logs); expert_bytes: default: as the logged model's in two
        bytes a weight. BudgetError when the experts alone take more than the device has.
        """
        spec = traces.header.spec
        prefix = int(traces.header.settings.get("prefix_layers", 0))
        pinned = min(prefix if pinned_layers is None else pinned_layers, len(spec.moe_layers))
        deep = (len(spec.moe_layers) - pinned) * spec.num_experts
        if not deep:
            raise UsageError(f"All {pinned} MoE layers are pinned: nothing is ever loaded. Give fewer --pinned-layers.")
        slabs = deep // 4 if slots is None else min(slots, deep)
        if slabs < 1:
            raise UsageError("--slots is 0: give 1 or more.")
        size = expert_bytes or 6 * spec.hidden_size * spec.expert_width
        setting = cls(traces, profile, slabs, pinned, size, limit, readers, lookahead_top)
        setting.check_memory()
        return setting

    @property
    def spec(self) -> ModelSpec:
        return self.traces.header.spec

    @property
    def deep_layers(self) -> tuple[int, ...]:
        """Decoder layers whose experts share the slabs."""
        return self.spec.moe_layers[self.pinned_layers :]

    @property
    def preloaded(self) -> bool:
        """Whether host memory holds every expert that has no slab of its own."""
        return self.profile.host_memory // self.expert_bytes >= len(self.deep_layers) * self.spec.num_experts

    def check_memory(self) -> None:
        """BudgetError when pinned experts and slabs alone are more than the device holds."""
        taken = (self.pinned_layers * self.spec.num_experts + self.slots) * self.expert_bytes
        if taken > self.profile.device_memory:
            raise BudgetError(
                f"{self.slots} slots and {self.pinned_layers} pinned layers take {format_size(taken)}, but "
                f"{self.profile.name} has {format_size(self.profile.device_memory)}. Give fewer --slots or "
                "--pinned-layers, or another --profile."
            )


class Asker:
    """One request of the log; implements vismmoe.traffic.Asker."""

    def __init__(self) -> None:
        self.counters: Mapping[Phase, PhaseCounters] = {"prefill": PhaseCounters(), "decode": PhaseCounters()}
        self.clock = Clock()
        self.phase: Phase = "prefill"

    @property
    def counting(self) -> PhaseCounters:
        return self.counters[self.phase]


class _Oracle:
    """Hands the prefetcher what the log's predictor said at the row that is being replayed; takes its time for it."""

    def __init__(self, foresight: Foresight, spend: Callable[[], None]) -> None:
        self.kind, self.window = foresight.kind, foresight.window
        self.said: Tensor | None = None
        self._spend = spend

    def predict(self, state: LayerState) -> Tensor:
        assert self.said is not None
        self._spend()
        return self.said


def simulate(
    setting: Setting,
    *,
    policy: str = DEFAULT_POLICY,
    foresight: Foresight | None = None,
    spans: list[Span] | None = None,
    reads: list[Read] | None = None,
) -> SimulationResult:
    """Replay the logs, requests one after another on a cache that begins empty.

    foresight: None loads on demand alone. spans, reads: lists that get what happened when.
    """
    return Replay(setting, policy, foresight, spans).run(reads)


class Replay:
    """One walk through the logs."""

    def __init__(
        self, setting: Setting, policy: str, foresight: Foresight | None, spans: list[Span] | None = None
    ) -> None:
        self._setting, self._policy, self._foresight, self._spans = setting, policy, foresight, spans
        self._transfers = SimulatedTransfers(
            setting.profile,
            setting.expert_bytes,
            readers=setting.readers,
            host_experts=setting.profile.host_memory // setting.expert_bytes,
            preloaded=setting.preloaded,
        )
        self._oracle = None if foresight is None else _Oracle(foresight, self._spend_foreseeing)
        cache = ExpertCache(setting.slots, reserve=setting.spec.top_k, policy=get_policy(policy))
        self._cache = cache
        self._rooms = rooms(cache, setting.deep_layers, setting.spec.top_k)
        self._traffic = ExpertTraffic(
            setting.spec,
            setting.pinned_layers,
            cache,
            self._transfers,
            Watchdog(setting.lookahead_top),
            expert_bytes=setting.expert_bytes,
            predictor=self._oracle,
            read_ahead=foresight is not None,
        )

    def run(self, reads: list[Read] | None = None) -> SimulationResult:
        """All requests; `reads` gets every transfer."""
        totals: dict[Phase, PhaseCounters] = {"prefill": PhaseCounters(), "decode": PhaseCounters()}
        seconds: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
        requests = steps = 0
        for rows in requests_of(self._setting.traces, self._setting.limit):
            requests += 1
            asker = self._request(rows, seconds)
            totals = {phase: totals[phase] + asker.counters[phase] for phase in totals}
            steps += len({row.step for row in rows if row.step})
        if reads is not None:
            reads.extend(self._transfers.reads)
        setting = self._setting
        return SimulationResult(
            profile=setting.profile.name,
            policy=self._policy,
            predictor="none" if self._foresight is None else self._foresight.kind,
            slots=setting.slots,
            pinned_layers=setting.pinned_layers,
            expert_bytes=setting.expert_bytes,
            requests=requests,
            prefill=totals["prefill"],
            decode=totals["decode"],
            prefill_ms=seconds["prefill"] * 1e3,
            decode_ms=seconds["decode"] * 1e3,
            decoded_tokens=steps,
            evictions=self._cache.evictions,
        )

    def _request(self, rows: list[Row], seconds: dict[Phase, float]) -> Asker:
        asker = Asker()
        said = None if self._foresight is None else self._foresight.scores(self._setting.traces, rows)
        self._traffic.begin_request()
        self._traffic.read_ahead(int(rows[0].tokens))
        numbered = enumerate(rows)
        for step, forward in groupby(numbered, key=lambda place: place[1].step):
            asker.phase = "decode" if step else "prefill"
            started = self._transfers.now()
            for place, row in forward:
                if self._oracle is not None and said is not None:
                    self._oracle.said = said[place]
                self._layer(asker, row)
            seconds[asker.phase] += self._transfers.now() - started
        return asker

    def _layer(self, asker: Asker, row: Row) -> None:
        profile, size, traffic = self._setting.profile, self._setting.expert_bytes, self._traffic
        self._spend("layer", row, profile.layer_s(row.tokens, size))
        traffic.begin_layer(asker, row.layer)
        state = self._state(row)
        if row.layer not in self._setting.deep_layers:
            traffic.look_ahead(asker, row.layer, len(row.demand), lambda: traffic.foresee(asker, state))
            self._spend("experts", row, sum(profile.expert_s(tokens, size) for _, tokens in row.demand))
            return
        needed = {ExpertId(row.layer, expert): (asker,) for expert, _ in row.demand}
        tokens = {ExpertId(row.layer, expert): count for expert, count in row.demand}
        mark = self._transfers.now()
        arrivals = traffic.arrivals(
            row.layer,
            needed,
            self._lasting(row, needed),
            lambda: traffic.foresee(asker, state),
            lead=asker,
        )
        for group in arrivals:
            self._note("stall", row, mark)
            for expert, _ in group:
                self._spend("experts", row, profile.access_ms / 1e3 + profile.expert_s(tokens[expert], size))
            mark = self._transfers.now()

    def _lasting(self, row: Row, needed: Mapping[ExpertId, object]) -> set[ExpertId]:
        """What decode may want again: all of it in decode; of a prefill its working set.

        Where these are not known, as many of the busiest stand for them.
        """
        if row.step:
            return set(needed)
        known = self._setting.working_sets.get((int(self._setting.traces.request[row.number]), row.layer))
        if known is None:
            known = [expert for expert, _ in sorted(row.demand, key=lambda place: -place[1])]
        return {ExpertId(row.layer, expert) for expert in known[: self._rooms[row.layer]]}

    def _state(self, row: Row) -> LayerState:
        """The prefetcher needs to know where it is; what a predictor sees was looked at beforehand."""
        traces = self._setting.traces
        token = traces.token[row.number : row.number + 1]
        return LayerState(row.layer, row.phase, token, token[0], token[0], traces.own_gate[:0])

    def _spend_foreseeing(self) -> None:
        self._transfers.advance(self._setting.profile.predictor_ms / 1e3)

    def _spend(self, kind: str, row: Row, seconds: float) -> None:
        mark = self._transfers.now()
        self._transfers.advance(seconds)
        self._note(kind, row, mark)

    def _note(self, kind: str, row: Row, start: float) -> None:
        end = self._transfers.now()
        if self._spans is not None and end > start:
            request = int(self._setting.traces.request[row.number])
            self._spans.append(Span(kind, row.layer, row.step, request, start, end))


def belady_limit(setting: Setting) -> SimulationResult:
    """What no rule can beat: Belady's loads, each begun as early as the link lets it, in each request.

    Reads are as cheap as the device can make them (full batches on every channel).
    """
    requests = list(requests_of(setting.traces, setting.limit))
    deep = set(setting.deep_layers)
    visits = [[ExpertId(row.layer, e) for e, _ in row.demand] for rows in requests for row in rows if row.layer in deep]
    cache = BeladyCache(setting.slots, visits)
    totals: dict[Phase, PhaseCounters] = {"prefill": PhaseCounters(), "decode": PhaseCounters()}
    seconds: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
    read_s, steps = _cheapest_read_s(setting), 0
    for rows in requests:
        now = loaded = 0.0
        steps += len({row.step for row in rows if row.step})
        for row in rows:
            begin = now
            now += setting.profile.layer_s(row.tokens, setting.expert_bytes)
            spent = sum(setting.profile.expert_s(tokens, setting.expert_bytes) for _, tokens in row.demand)
            if row.layer in deep:
                counters = totals[row.phase]
                misses = len(list(cache.misses([ExpertId(row.layer, e) for e, _ in row.demand])))
                spent += len(row.demand) * setting.profile.access_ms / 1e3
                loaded += misses * read_s
                stall = max(0.0, loaded - now - spent)  # the last load may arrive when all else has run
                counters.accesses += len(row.demand)
                counters.demand_loads += misses
                counters.hits += len(row.demand) - misses
                counters.bytes_loaded += misses * setting.expert_bytes
                counters.stall_ms += stall * 1e3
                now += stall
            now += spent
            seconds[row.phase] += now - begin
    return SimulationResult(
        profile=setting.profile.name,
        policy="belady",
        predictor="perfect",
        slots=setting.slots,
        pinned_layers=setting.pinned_layers,
        expert_bytes=setting.expert_bytes,
        requests=len(requests),
        prefill=totals["prefill"],
        decode=totals["decode"],
        prefill_ms=seconds["prefill"] * 1e3,
        decode_ms=seconds["decode"] * 1e3,
        decoded_tokens=steps,
        evictions=0,
    )


def _cheapest_read_s(setting: Setting) -> float:
    profile, size = setting.profile, setting.expert_bytes
    disk = 0.0 if profile.host_memory >= size else size / profile.disk_rate
    return (disk + (size / profile.link_rate if profile.link_rate else 0.0)) / profile.parallel_reads
