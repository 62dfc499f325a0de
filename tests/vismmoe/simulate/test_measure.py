"""Measuring a machine: costs that are put in come out again, and the profile that is written can be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vismmoe.cli import main
from vismmoe.experts import pace as pace_module
from vismmoe.experts import store as store_module
from vismmoe.experts.pace import Pace
from vismmoe.experts.store import ExpertStore
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.simulate import measure as measure_module
from vismmoe.simulate.measure import fit_costs, read_costs
from vismmoe.simulate.profile import read_profile
from vismmoe.types import ExpertId


def test_costs_of_layer_expert_and_token_are_told_apart() -> None:
    rows = np.array([(1.0, experts, tokens) for experts in (4, 8, 60, 120) for tokens in (1, 50, 300)])
    seconds = rows @ np.array([3e-3, 1e-4, 2e-5])
    assert fit_costs(rows, seconds) == pytest.approx((3e-3, 1e-4, 2e-5))


def test_no_cost_is_negative() -> None:
    rows = np.array([(1.0, experts, tokens) for experts in (4, 8, 60) for tokens in (1, 50)])
    seconds = rows @ np.array([3e-3, 1e-4, -1e-6])
    assert min(fit_costs(rows, seconds)) == 0.0


class SettableClock:
    """Stands for the module time: sleeping takes exactly as long as asked, everything else no time."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SettableClock:
    made = SettableClock()
    for module in (pace_module, measure_module, store_module):
        monkeypatch.setattr(module, "time", made)
    return made


def test_the_rate_that_reads_are_slowed_to_is_found_again(tiny_checkpoint: Path, clock: SettableClock) -> None:
    layout = open_checkpoint(tiny_checkpoint).layout
    experts = [ExpertId(layer, expert) for layer in range(6) for expert in range(16)]
    rate = layout.expert_bytes * 500  # 2 ms an expert

    class Reads:
        pace = Pace(rate)

        def read_batch(self, items: Sequence[Any]) -> None:
            self.pace.wait(len(items) * layout.expert_bytes, clock.now)

    first_s, found = read_costs(Reads(), layout, experts)  # type: ignore[arg-type]
    assert found == pytest.approx(rate, rel=1e-6)
    assert first_s == pytest.approx(0.0, abs=1e-9)
    with ExpertStore.open(layout, disk_rate=rate) as store:
        began = clock.now
        store.read_batch([(expert, memoryview(bytearray(layout.expert_bytes))) for expert in experts[:8]])
        assert clock.now - began == pytest.approx(8 * 2e-3, rel=1e-4)


def test_a_measured_profile_can_be_read_and_an_unwritable_one_is_told(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "mine.yaml"
    assert main(["simulate", "--model", str(tiny_checkpoint), "--measure-profile", str(file)]) == 0
    profile = read_profile(str(file))
    assert "Replay with it" in capsys.readouterr().out
    assert profile.disk_rate > 10**6
    assert profile.memory_rate > 10**8
    assert profile.expert_s(1, 4608) + profile.layer_s(1, 4608) > 1e-6
    (tmp_path / "file").write_text("")
    words = ["simulate", "--model", str(tiny_checkpoint), "--measure-profile", str(tmp_path / "file" / "x.yaml")]
    assert main(words) == 2
    assert "cannot be written" in capsys.readouterr().err
