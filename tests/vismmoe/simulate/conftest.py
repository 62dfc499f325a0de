"""Routing logs written down by hand: which experts each layer of each step asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch

from vismmoe.simulate.profile import DeviceProfile
from vismmoe.trace import TraceHeader, TraceSet
from vismmoe.types import ModelSpec, RequestRecord

Step = Mapping[int, Sequence[int]]  # decoder layer -> experts, each of one token
MakeTraces = Callable[..., TraceSet]


def traces_of(requests: Sequence[Sequence[Step]], *, experts: int = 8, top_k: int = 1, prefix: int = 0) -> TraceSet:
    """The log of these requests; step 0 of each is its prefill. Next gate is always right."""
    layers = tuple(requests[0][0])
    spec = ModelSpec("imagined", len(layers), layers, experts, top_k, 4, 8, "f" * 64)
    rows = [
        (request, step, layer, chosen)
        for request, steps in enumerate(requests)
        for step, wanted in enumerate(steps)
        for layer, chosen in wanted.items()
    ]
    counts = torch.zeros(len(rows), experts, dtype=torch.int32)
    for row, (*_, chosen) in enumerate(rows):
        for expert in chosen:
            counts[row, expert] += 1
    window = 2
    gate = torch.zeros(len(rows), window, experts)
    for row, (request, step, layer, _) in enumerate(rows):
        for ahead in range(1, window + 1):
            for expert in requests[request][step].get(layer + ahead, ()):
                gate[row, ahead - 1, expert] = 0.5**ahead
    told = tuple(RequestRecord(n, f"{n}.png", "", "", 1, 1, len(s), torch.zeros(4)) for n, s in enumerate(requests))
    return TraceSet(
        header=TraceHeader(spec, 1.0, "affinity", window, {"prefix_layers": prefix}),
        requests=told,
        request=torch.tensor([row[0] for row in rows]),
        step=torch.tensor([row[1] for row in rows]),
        decode=torch.tensor([row[1] > 0 for row in rows]),
        layer=torch.tensor([row[2] for row in rows]),
        counts=counts,
        gate_mass=counts.float(),
        token=torch.zeros(len(rows), 4, dtype=torch.float16),
        own_gate=torch.zeros(len(rows), experts),
        next_gate=gate,
        retained_mean=torch.zeros(len(rows), 4, dtype=torch.float16),
        retained_row=torch.arange(len(rows)),
    )


@pytest.fixture(scope="session")
def make_traces() -> MakeTraces:
    return traces_of


@pytest.fixture(scope="session")
def random_traces() -> Callable[[int], TraceSet]:
    """random_traces(seed): three requests over five layers of 16 experts, top 4, wide prefills, local decodes."""

    def make(seed: int) -> TraceSet:
        random = torch.Generator().manual_seed(seed)
        favourites = {layer: torch.randperm(16, generator=random)[:8] for layer in range(5)}

        def token(layer: int) -> list[int]:
            usual = favourites[layer][torch.randperm(8, generator=random)[:3]].tolist()
            other = torch.randperm(16, generator=random).tolist()
            return [*usual, next(expert for expert in other if expert not in usual)]

        def step(tokens: int) -> Step:
            return {layer: [expert for _ in range(tokens) for expert in token(layer)] for layer in range(5)}

        return traces_of([[step(3), *(step(1) for _ in range(4))] for _ in range(3)], experts=16, top_k=4, prefix=1)

    return make


@pytest.fixture(scope="session")
def device() -> DeviceProfile:
    """One expert of 2 MB (read alone): 10 ms to read, 1 ms to run; a layer besides: 4 ms."""
    return DeviceProfile(
        name="bench",
        device_memory=10**9,
        disk_rate=200_000_000,
        disk_ms=0.0,
        wake_ms=0.0,
        memory_rate=10**15,
        compute_rate=1e18,
        expert_ms=1.0,
        layer_ms=4.0,
        layer_experts=0.0,
        predictor_ms=0.0,
    )
