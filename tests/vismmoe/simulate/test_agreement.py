"""The simulator against the runtime itself: the same requests under three budgets, reads slowed to a known rate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from vismmoe.config import EngineConfig
from vismmoe.request import Request
from vismmoe.simulate.agreement import Agreement, agreement_table, compare_with_runtime

READ_S = 10e-3  # of one expert: far more than the model takes to compute with it


@pytest.mark.timeout(240)
def test_simulated_stall_is_within_a_tenth_of_the_measured_one(
    tiny_checkpoint: Path, make_picture: Callable[..., Image.Image]
) -> None:
    requests = [Request((make_picture(64, 48),), "Question?", max_new_tokens=8, keep_ratio=0.5)]
    bytes_an_expert = 3 * 32 * 24 * 2
    config = EngineConfig(model=str(tiny_checkpoint), device="cpu", disk_rate=int(bytes_an_expert / READ_S))
    for _ in range(3):  # other work on the machine may stretch one run's arithmetic; it cannot make three agree
        found = compare_with_runtime(config, requests)
        if all(one.error < 0.1 for one in found):
            break
    told = agreement_table(found)
    assert [one.predictor for one in found] == ["none"] * 3 + ["next-gate"] * 3, told
    assert len({one.slots for one in found}) == 3, told
    assert all(one.measured_ms > 100 for one in found), told
    assert all(one.error < 0.1 for one in found), told


def test_the_error_is_a_share_of_what_was_measured() -> None:
    assert Agreement("none", 1, 1, measured_ms=200.0, simulated_ms=190.0).error == pytest.approx(0.05)
