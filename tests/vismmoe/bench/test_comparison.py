from __future__ import annotations

from dataclasses import replace

import pytest

from vismmoe.bench.arm import ArmResult, ArmSpec
from vismmoe.bench.comparison import ArmError, belady_limit, goals, median, own_limit, rounds, row_of

RESULT = ArmResult(
    decode_tokens_per_s=10.0, prefill_s=2.0, load_s=1.0, load_bytes=5, prefill_bytes=400, decode_bytes=100,
    stall_ms=7.0, decode_p50_ms=100.0, decode_p95_ms=120.0, prefill_stall_ms=1.0, hit_rate=0.5, peak_rss_bytes=1000,
    planned_bytes=900, peak_bytes=950, slabs=2, tokens=11,
)  # fmt: skip
RESIDENT = replace(RESULT, decode_tokens_per_s=20.0, prefill_s=1.0, prefill_bytes=0, decode_bytes=0)
SPEC = ArmSpec("lru", "model", "", 1, "?", 11, None, None)


def test_every_other_round_runs_in_reverse_and_an_arm_may_fail_once() -> None:
    order: list[str] = []

    def run(spec: ArmSpec) -> ArmResult:
        order.append(spec.name)
        if len(order) == 1:
            raise ArmError("killed")
        return replace(RESULT, prefill_s=float(len(order)))

    found = rounds([SPEC, replace(SPEC, name="mmap")], 3, run, lambda _: None)
    assert order == ["lru", "mmap", "mmap", "lru", "lru", "mmap"]
    assert [result.prefill_s for result in found["lru"]] == [4.0, 5.0]
    assert median(found["mmap"]).prefill_s == 3.0


def test_an_arm_that_always_fails_is_told() -> None:
    def run(spec: ArmSpec) -> ArmResult:
        raise ArmError("killed")

    with pytest.raises(ArmError, match="killed"):
        rounds([SPEC], 2, run, lambda _: None)


def test_what_a_system_does_not_tell_of_stalls_is_its_time_beyond_the_resident_model() -> None:
    row = row_of("mmap", replace(RESULT, stall_ms=None), RESIDENT)
    assert row.stall_ms == pytest.approx(1500.0)  # 2 s + 10 tokens at 10/s, against 1 s + 10 tokens at 20/s
    assert row.bytes_read == 500
    assert row_of("lru", RESULT, RESIDENT).stall_ms == 7.0


def test_the_own_limit_is_the_longer_of_disk_and_arithmetic_phase_by_phase() -> None:
    row = own_limit(RESULT, RESIDENT, bytes_per_s=100.0)
    assert row.prefill_s == 4.0  # 400 bytes at 100/s against 1 s
    assert row.decode_tokens_per_s == 10.0  # 100 bytes take 1 s, the arithmetic of 10 tokens half of that
    assert own_limit(RESULT, RESIDENT, bytes_per_s=1e6).decode_tokens_per_s == 20.0


def test_the_belady_limit_counts_the_loads_of_a_cache_that_knows_the_future() -> None:
    visits = [[(0, 0), (0, 1)], *([[(0, 0)], [(0, 2)]] * 5)]  # two slabs: 2 is loaded once and stays
    row = belady_limit(visits, 1, expert_bytes=50, ours=RESULT, resident=RESIDENT, bytes_per_s=10.0)
    assert row.bytes_read == 150
    assert row.decode_tokens_per_s == 2.0  # 50 bytes at 10/s for 10 tokens


def test_ratios_compare_the_predictor_arm_with_each_other_row() -> None:
    rows = {"predictor": row_of("predictor", RESULT, None), "mmap": row_of("mmap", RESIDENT, None)}
    assert goals(rows) == ["predictor / mmap: 0.50"]
