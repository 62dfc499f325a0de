"""What happens at an MoE layer: fetch what is missing, foresee, prefetch, run, expire (VisMMoE §4.3).

Experts of the pinned layers are always there. Deeper layers share a few slabs: what the router asks for is fetched
(demand first, what is resident runs meanwhile), in waves when the slabs are fewer than the experts, and what the
predictor foresees is copied beside the computation. The order in which experts arrive never changes a result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.host import HostTier
from vismmoe.experts.places import slack_bytes
from vismmoe.experts.plan import MemoryPlan
from vismmoe.experts.policies import DEFAULT_POLICY, get_policy
from vismmoe.experts.slabs import SlabPool
from vismmoe.experts.store import DirectIO, ExpertStore
from vismmoe.experts.transfers import CpuTransfers, CudaTransfers
from vismmoe.hybrid import Costs, Hybrid, measure
from vismmoe.models.arithmetic import Demand, LayerSum, read_demand
from vismmoe.prefetch import Foreseen
from vismmoe.session import Session
from vismmoe.traffic import ExpertTraffic
from vismmoe.types import ExpertId, ExpertLayout, LayerState, ModelSpec, Predictor
from vismmoe.watchdog import Watchdog
from vismmoe.working_set import rooms, working_set

Watcher = Callable[[Session, LayerState, Tensor, Tensor], None]  # recording: after a router, with indices and weights


@dataclass(frozen=True)
class LayerCall:
    """What one request asks of the routed experts of one layer: hidden (T, H), choices and weights (T, k)."""

    session: Session
    module: nn.Module
    hidden: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor


@dataclass(frozen=True)
class PipelineOptions:
    """How experts are read and foreseen."""

    direct_io: DirectIO = "auto"
    readers: int = 1
    prefetch: bool = True
    lookahead_top: int = 20  # B: experts foreseen after each decoded layer, at most
    eviction: str = DEFAULT_POLICY
    hybrid: Hybrid = "auto"
    disk_rate: int | None = None  # bytes a second that reads are slowed down to


@dataclass(frozen=True)
class Visit:
    """One request at one layer: what its router chose, and the sum that the experts' outputs go into."""

    session: Session
    state: LayerState
    demand: Demand
    work: LayerSum
    lasting: Sequence[ExpertId]  # in a prefill: experts that decode is likely to want


class ExpertPipeline:
    """One per engine; owns cache, transfers, slabs and pinned weights. To be used by one thread at a time.

    Counting, per phase: an access is one distinct expert that one forward of a deeper layer needs. It is a *hit* when
    its slab is filled or a prefetch into it is under way; the wait that remains goes to stall_ms. Everything else is a
    *demand load*. bytes_loaded counts what was copied into slabs, on demand or ahead, whether from disk or from host
    copies; a prefetch that was dropped from the queue before it began counts neither as prefetched nor in bytes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: ExpertLayout,
        plan: MemoryPlan,
        options: PipelineOptions,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        predictor: Predictor | None = None,
    ) -> None:
        """Reads the pinned experts. CheckpointError when they cannot be read. dtype: of the arithmetic."""
        self.spec = spec
        self.plan = plan
        self.watcher: Watcher | None = None
        self._layout = layout
        self._slab_bytes = layout.expert_bytes + slack_bytes(layout, packed=device.type != "cpu")
        self._options = options
        self._device = device
        self._dtype = dtype
        self._predictor = predictor if options.prefetch else None
        self._watchdog = Watchdog(options.lookahead_top)
        self._step_began = 0.0
        self._store = ExpertStore.open(layout, options.direct_io, options.disk_rate)
        try:
            self._place()
        except BaseException:
            self._store.close()
            raise

    def replan(self, plan: MemoryPlan) -> None:
        """Begin anew under another plan: what is resident is read again. After an error only close() is left."""
        self._transfers.close()
        del self._pinned_pool, self._slabs, self._host, self._cache, self._transfers, self._traffic
        self.plan = plan
        self._place()

    def _place(self) -> None:
        """Take the plan's memory and fill what stays resident."""
        self._pinned = self.spec.moe_layers[: self.plan.pinned_layers]
        self._pinned_slots = {
            ExpertId(layer, expert): row * self.spec.num_experts + expert
            for row, layer in enumerate(self._pinned)
            for expert in range(self.spec.num_experts)
        }
        self._host = self._host_tier()
        hybrid = self._options.hybrid if self._host is not None else "off"
        self._costs = measure(hybrid, self._layout, self._device, self._dtype)
        self._pinned_pool = SlabPool(len(self._pinned_slots), self._layout, self._device)
        self._load_pinned()
        self._slabs = SlabPool(self.plan.slabs, self._layout, self._device)
        self._start()

    def run_layer(
        self,
        session: Session,
        module: nn.Module,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """Output (T, H) of the routed experts of decoder layer `layer`; hidden (T, H), choices and weights (T, k)."""
        return self.run_together(layer, (LayerCall(session, module, hidden, top_k_index, top_k_weights),))[0]

    def run_together(self, layer: int, calls: Sequence[LayerCall]) -> list[Tensor]:
        """The same for requests that are at the same layer of the same phase: each expert is loaded once for all.

        Every request's arithmetic is its own, so its bits are those it would get alone.
        """
        if layer == self.spec.moe_layers[0]:
            self._time_token(calls[0].session)
        self._traffic.begin_layer(calls[0].session, layer)
        visits = [self._visit(layer, call) for call in calls]
        needed = visitors(visits)
        if layer in self._pinned:
            self._traffic.look_ahead(calls[0].session, layer, len(needed), lambda: self._foresee(visits))
            for visit in visits:
                visit.work.run({expert: self._pinned_weights(layer, expert) for expert in visit.demand.experts})
        else:
            self._run_streamed(visits, needed)
        return [visit.work.total() for visit in visits]

    def _pinned_weights(self, layer: int, expert: int) -> Mapping[str, Tensor]:
        found = ExpertId(layer, expert)
        return self._pinned_pool.weights(self._pinned_slots[found], found)

    def _time_token(self, session: Session) -> None:
        now = self._transfers.now()
        if session.step > 1:  # from the first decoded token to the second on
            self._watchdog.token((now - self._step_began) * 1e3)
        self._step_began = now

    def _visit(self, layer: int, call: LayerCall) -> Visit:
        demand = read_demand(call.top_k_index)
        work = LayerSum(call.module, call.hidden, call.top_k_weights, demand)
        state = call.session.see_routing(layer, call.hidden, call.top_k_index, call.top_k_weights, demand)
        if self.watcher is not None:
            self.watcher(call.session, state, call.top_k_index, call.top_k_weights)
        prefill = state.phase == "prefill"  # decode needs no second look at the router's choice
        lasting: list[ExpertId] = []
        if prefill and layer not in self._pinned:
            rows = call.session.visual_rows(layer)
            lasting = [ExpertId(layer, expert) for expert in working_set(call.top_k_index, rows, self._rooms[layer])]
        return Visit(call.session, state, demand, work, lasting)

    def _run_streamed(self, visits: Sequence[Visit], needed: Mapping[ExpertId, Sequence[Visit]]) -> None:
        lead = visits[0].session
        sessions = {expert: [visit.session for visit in askers] for expert, askers in needed.items()}
        lasting: Collection[ExpertId] = needed
        if lead.phase == "prefill":
            lasting = {expert for visit in visits for expert in visit.lasting}
        below = _RunsBelow(self._host, self._costs, tokens_of(visits))
        arrivals = self._traffic.arrivals(
            visits[0].state.layer,
            sessions,
            lasting,
            lambda: self._foresee(visits),
            lead=lead,
            requests=len(visits),
            run_below=below.begin,
        )
        for group in arrivals:
            weights = {
                expert: below.weights(expert) if slot is None else self._slabs.weights(slot, expert)
                for expert, slot in group
            }
            for visit in visits:
                asked = {e.expert: held for e, held in weights.items() if any(v is visit for v in needed[e])}
                if asked:
                    visit.work.run(asked)
            for expert, slot in group:
                if slot is None:
                    below.end(expert)

    def _foresee(self, visits: Sequence[Visit]) -> Foreseen:
        """Of several requests: every expert that one of them foresees, by its highest priority."""
        first, *others = (self._traffic.foresee(visit.session, visit.state) for visit in visits)
        if not others:
            return first
        merged = dict(first)
        for foreseen in others:
            for expert, priority in foreseen.items():
                merged[expert] = max(priority, merged.get(expert, priority))
        return dict(sorted(merged.items(), key=lambda item: -item[1]))

    def resident(self, layers: Sequence[int]) -> Tensor:
        """(layers, E) bool: experts of these decoder layers that need no loading now."""
        there = torch.zeros(len(layers), self.spec.num_experts, dtype=torch.bool)
        for row, layer in enumerate(layers):
            if layer in self._pinned:
                there[row] = True
            else:
                there[row, [e for e in range(self.spec.num_experts) if ExpertId(layer, e) in self._cache]] = True
        return there

    # -- lifetime -------------------------------------------------------------------------------------------------
    @property
    def evictions(self) -> int:
        """Since the engine began, or since the last recover()."""
        return self._cache.evictions

    @property
    def fallbacks(self) -> list[str]:
        """What was asked for and is done differently, each said once."""
        host = self._host.fallbacks if self._host is not None else []
        return [*self._store.fallbacks, *self._transfers.fallbacks, *host, *self._watchdog.notes]

    @property
    def host_bytes(self) -> int:
        """Bytes of experts that were held in host memory at the same time, at most."""
        return self._host.most * self._slab_bytes if self._host is not None else 0

    def begin_request(self, tokens: int) -> None:
        """A prompt of so many tokens begins: guesses of an earlier one are not counted, what is resident stays."""
        self._traffic.begin_request()
        self.read_ahead(tokens)

    def read_ahead(self, tokens: int) -> None:
        """Begin to read what a prompt of so many tokens needs first, if it needs nearly all of a layer."""
        self._traffic.read_ahead(tokens)

    def recover(self) -> None:
        """After a forward that ended in an error: forget the cache, which may hold half of a layer."""
        self._transfers.close()
        if self._host is not None:
            self._host.let_go()
        self._start()

    def close(self) -> None:
        """Join the readers and close the files. Twice is harmless."""
        self._transfers.close()
        self._store.close()

    def _start(self) -> None:
        """An empty cache and idle readers."""
        kind = CudaTransfers if self._device.type == "cuda" else CpuTransfers
        self._cache = ExpertCache(self.plan.slabs, reserve=self.spec.top_k, policy=get_policy(self._options.eviction))
        self._rooms = rooms(self._cache, self.spec.moe_layers[self.plan.pinned_layers :], self.spec.top_k)
        self._transfers = kind(self._store, self._slabs, self._options.readers, self._host)
        self._traffic = ExpertTraffic(
            self.spec,
            self.plan.pinned_layers,
            self._cache,
            self._transfers,
            self._watchdog,
            expert_bytes=self._layout.expert_bytes,
            predictor=self._predictor,
            read_ahead=self._options.prefetch,
            below=self._host if self._host is not None and self._costs.cheaper_on_cpu(1) else (),
        )

    def _host_tier(self) -> HostTier | None:
        capacity = self.plan.host.get("expert_copies", 0) // self._slab_bytes
        if not capacity:
            return None
        pin = self._device.type == "cuda"
        return HostTier(capacity, self._layout, lambda expert: self._cache.frequency(expert), pin)

    def _load_pinned(self) -> None:
        if not self._pinned_slots:
            return
        if self._device.type == "cpu":
            pool = self._pinned_pool
            items = [(expert, pool.buffer(slot)) for expert, slot in self._pinned_slots.items()]
            self._store.read_batch(items, paced=False)
            return
        staging = SlabPool(1, self._layout)
        for expert, slot in self._pinned_slots.items():
            self._store.read_into(expert, staging.bytes(0), paced=False)
            self._pinned_pool.take(slot, staging, 0, expert)


class _RunsBelow:
    """Experts that one layer runs where they lie in host memory, and that stay there meanwhile."""

    def __init__(self, host: HostTier | None, costs: Costs, tokens: Mapping[ExpertId, int]) -> None:
        self._host = host
        self._costs = costs
        self._tokens = tokens
        self._weights: dict[ExpertId, Mapping[str, Tensor]] = {}

    def begin(self, expert: ExpertId) -> bool:
        """Hold the expert where it lies, if it is there and running it there is cheaper."""
        if self._host is None or not self._costs.cheaper_on_cpu(self._tokens[expert]):
            return False
        weights = self._host.run_here(expert)
        if weights is None:
            return False
        self._weights[expert] = weights
        return True

    def weights(self, expert: ExpertId) -> Mapping[str, Tensor]:
        return self._weights[expert]

    def end(self, expert: ExpertId) -> None:
        assert self._host is not None
        del self._weights[expert]
        self._host.stop_running(expert)


def tokens_of(visits: Sequence[Visit]) -> Counter[ExpertId]:
    """Expert -> how many tokens run through it, in all visits together."""
    found: Counter[ExpertId] = Counter()
    for visit in visits:
        for expert, count in zip(visit.demand.experts, visit.demand.counts, strict=True):
            found[ExpertId(visit.state.layer, expert)] += count
    return found


def visitors(visits: Sequence[Visit]) -> dict[ExpertId, list[Visit]]:
    """Expert -> the visits that need it, experts ascending."""
    found: dict[ExpertId, list[Visit]] = {}
    for visit in visits:
        for expert in visit.demand.experts:
            found.setdefault(ExpertId(visit.state.layer, expert), []).append(visit)
    return dict(sorted(found.items()))
