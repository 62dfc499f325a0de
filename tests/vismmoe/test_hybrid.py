"""Where a missing expert runs is decided by what both ways cost."""

from __future__ import annotations

import pytest
import torch

from vismmoe.hybrid import Costs, measure
from vismmoe.types import ExpertLayout, PartShape

LAYOUT = ExpertLayout(torch.float32, (PartShape("up", (64, 32), False), PartShape("down", (32, 64), False)), {}, 16384)


@pytest.mark.parametrize(("tokens", "here"), [(1, True), (4, True), (5, False), (100, False)])
def test_few_tokens_run_on_the_cpu_and_many_are_worth_the_copy(tokens: int, here: bool) -> None:
    assert Costs(copy=2.0, first_token=0.5, further_token=0.4).cheaper_on_cpu(tokens) == here


@pytest.mark.parametrize(("mode", "here"), [("auto", True), ("on", True), ("off", False)])
def test_on_the_cpu_device_nothing_is_copied_unless_it_is_asked_for(mode: str, here: bool) -> None:
    costs = measure(mode, LAYOUT, torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
    assert costs.cheaper_on_cpu(1) == costs.cheaper_on_cpu(10_000) == here


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_beside_a_gpu_both_ways_are_measured_and_only_when_asked_for() -> None:
    device = torch.device("cuda")
    assert not measure("auto", LAYOUT, device, torch.float32).cheaper_on_cpu(1)
    costs = measure("on", LAYOUT, device, torch.float32)
    assert costs.copy > 0
    assert costs.first_token > 0
