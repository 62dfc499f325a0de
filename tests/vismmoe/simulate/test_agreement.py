"""The simulator against the runtime itself: the same requests under three budgets.

How near the simulated stall comes to the measured one is for `python benchmarks/simulator.py` to say, on a machine that
does nothing else: here stands only what holds on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vismmoe.config import EngineConfig
from vismmoe.request import Request
from vismmoe.simulate.agreement import Agreement, agreement_table, compare_with_runtime


def test_the_simulator_loads_exactly_what_the_runtime_loads_on_demand(
    tiny_checkpoint: Path, make_picture: Callable[..., Image.Image]
) -> None:
    requests = [Request((make_picture(64, 48, n),), "Question?", max_new_tokens=8, keep_ratio=0.5) for n in range(2)]
    found = compare_with_runtime(EngineConfig(model=str(tiny_checkpoint), device="cpu"), requests)
    told = agreement_table(found)
    assert [one.predictor for one in found] == ["none"] * 3 + ["next-gate"] * 3, told
    on_demand = found[:3]
    assert [one.measured_loads for one in on_demand] == [one.simulated_loads for one in on_demand], told
    assert on_demand[0].measured_loads > on_demand[1].measured_loads > on_demand[2].measured_loads > 0, told
    assert all(one.measured_ms > 0 and one.simulated_ms > 0 for one in on_demand), told


def test_the_error_is_a_share_of_what_was_measured() -> None:
    agreement = Agreement("none", 1, 1, measured_ms=200.0, simulated_ms=190.0, measured_loads=3, simulated_loads=3)
    assert agreement.error == pytest.approx(0.05)
