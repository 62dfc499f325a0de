"""The pipeline counts what it does, foresees no further than it may, and never waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vismmoe.experts.plan import MemoryPlan, plan_memory
from vismmoe.experts.transfers import Ticket
from vismmoe.models.checkpoint import Checkpoint, open_checkpoint
from vismmoe.models.footprint import model_bytes
from vismmoe.models.prompt import Prompt
from vismmoe.pipeline import ExpertPipeline, PipelineOptions
from vismmoe.session import Session
from vismmoe.types import ExpertId, LayerState

LAYERS, EXPERTS, TOP_K, HIDDEN = 6, 16, 4, 32


@dataclass
class Oracle:
    """Foresees what a test tells it to."""

    window: int = 2
    kind: str = "oracle"

    def __post_init__(self) -> None:
        self.wanted: dict[int, list[int]] = {}  # layer -> experts
        self.asked: list[int] = []

    def predict(self, state: LayerState) -> Tensor:
        self.asked.append(state.layer)
        scores = torch.full((self.window, EXPERTS), -torch.inf)
        for distance in range(1, self.window + 1):
            for expert in self.wanted.get(state.layer + distance, []):
                scores[distance - 1, expert] = 2.0**-distance
        return scores


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint)


@pytest.fixture(scope="module")
def plan(checkpoint: Checkpoint) -> MemoryPlan:
    sizes = model_bytes(
        checkpoint, visual_tokens=16, prompt_tokens=64, compute_dtype=torch.float32, device=torch.device("cpu")
    )
    return plan_memory(sizes, device_budget_bytes=None, host_budget_bytes=0, prefix_layers=1, context_tokens=64)


@pytest.fixture
def build(checkpoint: Checkpoint, plan: MemoryPlan) -> Iterator[Callable[..., ExpertPipeline]]:
    made: list[ExpertPipeline] = []

    def make(slabs: int, pinned: int = 1, predictor: Any = None, **options: Any) -> ExpertPipeline:
        forced = replace(plan, slabs=slabs, pinned_layers=pinned, cycle_slabs=TOP_K * (LAYERS - pinned))
        made.append(
            ExpertPipeline(
                checkpoint.spec,
                checkpoint.layout,
                forced,
                PipelineOptions(**options),
                device=torch.device("cpu"),
                predictor=predictor,
            )
        )
        return made[-1]

    yield make
    for pipeline in made:
        pipeline.close()


def session_of(checkpoint: Checkpoint) -> Session:
    none = torch.zeros(0, dtype=torch.int64)
    prompt = Prompt({}, 8, none, none, ())
    return Session(checkpoint.spec, prompt, keep_count=0, compressor=None, prefix=(0,), device=torch.device("cpu"))


class Gated(torch.nn.Module):
    has_gate, has_post_expert_norm, is_transposed = True, False, False

    def _apply_gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def forward(pipeline: ExpertPipeline, session: Session, choices: list[list[list[int]]]) -> list[Tensor]:
    """One forward: per layer, per token, the chosen experts. The inputs depend on nothing else."""
    session.begin_forward(torch.zeros(1, len(choices[0]), HIDDEN))
    out = []
    for layer, chosen in enumerate(choices):
        hidden = torch.randn(len(chosen), HIDDEN, generator=torch.Generator().manual_seed(layer))
        index = torch.tensor(chosen)
        weights = torch.linspace(0.1, 0.4, index.numel()).view(index.shape)
        out.append(pipeline.run_layer(session, Gated(), layer, hidden, index, weights))
    return out


def same_for_all_layers(*experts: int) -> list[list[list[int]]]:
    return [[list(experts)]] * LAYERS


def test_first_use_is_a_load_and_the_second_a_hit(build: Any, checkpoint: Checkpoint) -> None:
    pipeline, session = build(slabs=TOP_K * 5), session_of(checkpoint)
    forward(pipeline, session, same_for_all_layers(0, 1, 2, 3))
    first = session.counters["prefill"]
    assert (first.accesses, first.hits, first.demand_loads) == (20, 0, 20)
    forward(pipeline, session, same_for_all_layers(0, 1, 2, 3))
    second = session.counters["decode"]
    assert (second.accesses, second.hits, second.demand_loads, second.bytes_loaded) == (20, 20, 0, 0)
    assert first.bytes_loaded == 20 * checkpoint.layout.expert_bytes
    assert pipeline.evictions == 0


def test_a_forecast_that_never_comes_true_is_soon_not_loaded_any_more(build: Any, checkpoint: Checkpoint) -> None:
    oracle = Oracle()
    oracle.wanted = {layer: [9] for layer in range(LAYERS)}
    pipeline, session = build(slabs=TOP_K * 5, predictor=oracle), session_of(checkpoint)
    prefetched = []
    for _ in range(20):
        forward(pipeline, session, same_for_all_layers(0, 1, 2, 3))
        prefetched.append(session.counters["decode"].prefetched)
    assert prefetched[-1] == prefetched[9] < 10
    assert session.counters["decode"].prefetched_used == 0


def test_a_forecast_that_comes_true_goes_on_being_loaded(build: Any, checkpoint: Checkpoint) -> None:
    oracle = Oracle(window=1)
    pipeline, session = build(slabs=TOP_K * 5 + 8, predictor=oracle), session_of(checkpoint)
    forward(pipeline, session, same_for_all_layers(0, 1, 2, 3))
    for token in range(4, EXPERTS):  # each token needs one expert more that nobody has needed before
        oracle.wanted = {layer: [token] for layer in range(LAYERS)}
        forward(pipeline, session, same_for_all_layers(0, 1, 2, token))
    told = session.counters["decode"]
    assert told.prefetched_used >= 0.9 * 4 * (EXPERTS - 4), "in all layers but the first, which nobody foresees"
    assert told.accesses == told.hits + told.demand_loads


def test_pinned_layers_are_no_accesses(build: Any, checkpoint: Checkpoint) -> None:
    pipeline, session = build(slabs=0, pinned=LAYERS), session_of(checkpoint)
    forward(pipeline, session, same_for_all_layers(0, 5, 9, 15))
    assert session.counters["prefill"].accesses == 0
    assert session.counters["prefill"].hit_rate == 1.0


def test_a_right_forecast_becomes_hits_and_a_wrong_one_only_bytes(build: Any, checkpoint: Checkpoint) -> None:
    oracle = Oracle()
    pipeline, session = build(slabs=40, predictor=oracle, lookahead_top=4), session_of(checkpoint)
    oracle.wanted = {layer: [0, 1] for layer in range(LAYERS)}
    forward(pipeline, session, same_for_all_layers(0, 1, 2, 3))
    told = session.counters["prefill"]
    assert told.prefetched > 0
    assert told.prefetched_used == 10, "experts 0 and 1 of the five deeper layers"
    assert (told.hits, told.demand_loads) == (10, 10)


def test_only_deeper_layers_within_the_window_are_foreseen(build: Any, checkpoint: Checkpoint) -> None:
    oracle = Oracle(window=2)
    oracle.wanted = {layer: [7] for layer in range(LAYERS)}
    pipeline, session = build(slabs=40, pinned=2, predictor=oracle, lookahead_top=2), session_of(checkpoint)
    foreseen: list[set[ExpertId]] = []
    original = pipeline._traffic.foresee
    pipeline._traffic.foresee = lambda s, state: foreseen.append(dict(original(s, state))) or foreseen[-1]
    forward(pipeline, session, same_for_all_layers(0, 1, 2, 3))
    forward(pipeline, session, same_for_all_layers(0, 1, 2, 3))
    decode = foreseen[LAYERS:]
    assert ExpertId(2, 7) in decode[0], "layer 1 is pinned, layer 2 is not"
    assert all(expert.layer >= 2 for told in foreseen for expert in told)
    assert all(layer < expert.layer <= layer + 2 for layer, told in enumerate(decode) for expert in told)
    assert all(len(told) <= 2 for told in decode)
    assert decode[-1] == {}


def test_without_prefetch_the_predictor_is_never_asked(build: Any, checkpoint: Checkpoint) -> None:
    oracle = Oracle()
    pipeline, session = build(slabs=40, predictor=oracle, prefetch=False), session_of(checkpoint)
    forward(pipeline, session, same_for_all_layers(0, 1, 2, 3))
    assert oracle.asked == []
    assert session.counters["prefill"].prefetched == 0


def test_guesses_of_an_earlier_request_are_not_counted_in_the_next(build: Any, checkpoint: Checkpoint) -> None:
    oracle = Oracle(window=1)
    pipeline, before, after = build(slabs=60, predictor=oracle), session_of(checkpoint), session_of(checkpoint)
    oracle.wanted = {layer: [9] for layer in range(LAYERS)}
    forward(pipeline, before, same_for_all_layers(0, 1, 2, 3))
    oracle.wanted = {}
    pipeline.begin_request(1)
    forward(pipeline, after, same_for_all_layers(9, 0, 1, 2))
    assert before.counters["prefill"].prefetched_used == 0
    assert (after.counters["prefill"].prefetched, after.counters["prefill"].prefetched_used) == (0, 0)


@settings(max_examples=12)
@given(data=st.data())
def test_any_demand_through_any_cache_gives_the_same_bits_and_counts_that_add_up(
    checkpoint: Checkpoint, plan: MemoryPlan, data: st.DataObject
) -> None:
    """Random slabs, readers, forecasts and demands: wide prefills through one slab included."""
    slabs = data.draw(st.sampled_from([1, 2, 3, 4, 5, 9, 17, 80]))
    token = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True)
    forwards = [[data.draw(st.lists(token, min_size=n, max_size=n)) for _ in range(LAYERS)] for n in (12, 1, 1)]
    oracle = Oracle(window=data.draw(st.integers(1, 3)))
    oracle.wanted = {layer: data.draw(st.lists(st.integers(0, EXPERTS - 1), max_size=8)) for layer in range(LAYERS)}
    outputs = []
    for count, pinned in ((slabs, 1), (0, LAYERS)):
        forced = replace(plan, slabs=count, pinned_layers=pinned, cycle_slabs=TOP_K * (LAYERS - pinned))
        options = PipelineOptions(readers=data.draw(st.integers(1, 3)), lookahead_top=data.draw(st.integers(1, 20)))
        pipeline = ExpertPipeline(
            checkpoint.spec, checkpoint.layout, forced, options, device=torch.device("cpu"), predictor=oracle
        )
        session = session_of(checkpoint)
        try:
            outputs.append([forward(pipeline, session, chosen) for chosen in forwards])
        finally:
            pipeline.close()
        for counts in session.counters.values():
            assert counts.accesses == counts.hits + counts.demand_loads
            assert 0 <= counts.prefetched_used <= counts.prefetched
            assert counts.bytes_loaded >= counts.demand_loads * checkpoint.layout.expert_bytes
        if pinned == 1:
            wanted = [len(set(chain.from_iterable(tokens))) for chosen in forwards for tokens in chosen[1:]]
            assert sum(counts.accesses for counts in session.counters.values()) == sum(wanted)
    for ours, theirs in zip(*outputs, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_a_prefetch_on_its_way_counts_as_a_hit_and_its_rest_as_stall(
    build: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Oracle(window=1)
    oracle.wanted = {1: [0, 1, 2, 3]}
    pipeline, session = build(slabs=40, predictor=oracle, lookahead_top=4), session_of(checkpoint)
    read, wait, awaited = pipeline._store.read_batch, Ticket.wait, threading.Event()

    def slow(items: Any) -> None:
        assert awaited.wait(600), "nobody waits for the prefetch"
        read(items)

    def waiting(ticket: Ticket) -> int:
        awaited.set()  # only now the disk begins to answer
        return wait(ticket)

    monkeypatch.setattr(Ticket, "wait", waiting)
    monkeypatch.setattr(pipeline, "_store", SimpleNamespace(read_batch=slow, close=pipeline._store.close))
    monkeypatch.setattr(pipeline._transfers, "_store", pipeline._store)
    session.begin_forward(torch.zeros(1, 1, HIDDEN))
    for layer in (0, 1):
        pipeline.run_layer(
            session, Gated(), layer, torch.zeros(1, HIDDEN), torch.tensor([[0, 1, 2, 3]]), torch.ones(1, 4)
        )
    told = session.counters["prefill"]
    assert (told.hits, told.demand_loads, told.prefetched_used) == (4, 0, 4)
    assert told.stall_ms > 0
