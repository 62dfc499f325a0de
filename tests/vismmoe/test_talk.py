from __future__ import annotations

from typing import Any

from vismmoe.talk import infer_report, phase_line, plan_report, table

PHASE = {
    "accesses": 10, "hits": 7, "demand_loads": 3, "cpu_runs": 0, "prefetched": 5, "prefetched_used": 4,
    "bytes_loaded": 3 * 2**20, "stall_ms": 12.0, "hit_rate": 0.7,
}  # fmt: skip
IDLE = {**dict.fromkeys(PHASE, 0), "hit_rate": 1.0}
REPORT: dict[str, Any] = {
    "text": "two",
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 100, "visual_tokens": 64, "kept_visual_tokens": 32, "completion_tokens": 2},
    "timing_ms": {"prefill": 20.0, "decode_p50": 1.5, "total": 99.0},
    "tokens_per_second": 30.0,
    "experts": {"prefill": PHASE, "decode": IDLE, "evictions": 1, "slabs": 40, "pinned_layers": 3},
    "memory": {
        "device_planned_bytes": 2**20,
        "device_peak_bytes": 2**19,
        "host_planned_bytes": 0,
        "host_peak_bytes": 7,
    },
    "predictor": {"kind": "lookahead", "window": 5, "source": "models:/scenes@champion", "version": "2"},
    "fallbacks": ["direct I/O is not possible here", "direct I/O is not possible here"],
}


def test_a_table_is_flush_left_in_the_first_column_and_right_in_the_others() -> None:
    lines = table([("a", 1), ("long name", 1000)], ("what", "n")).splitlines()
    assert lines[0].startswith("what ")
    assert {len(line) for line in lines} == {len(lines[0])}
    assert lines[2].endswith("    1")


def test_the_report_says_tokens_hit_rates_bytes_and_memory() -> None:
    text = infer_report(REPORT)
    for said in ("64 visual (32 kept)", "7 of 10", "70%", "3.00 MiB", "1.00 MiB planned", "512 KiB at the peak"):
        assert said in text
    assert "models:/scenes@champion, version 2" in text


def test_each_fall_back_is_named_once() -> None:
    assert infer_report(REPORT).count("direct I/O") == 1


def test_a_phase_without_accesses_claims_no_hit_rate() -> None:
    assert "%" not in phase_line(IDLE)


def test_without_a_predictor_the_report_says_so() -> None:
    assert "none" in infer_report({**REPORT, "predictor": None})


def test_the_plan_shows_every_part_and_warning() -> None:
    plan = {
        "device": {"minimum_bytes": 1000, "all_resident_bytes": 9000, "planned": {"backbone": 700, "slabs": 1300}},
        "host": {"expert_copies": 5000},
        "disk": {"experts": 123456},
        "pinned_layers": 3,
        "slabs": 4,
        "cycle_slabs": 72,
        "warnings": ["the slabs hold less than one token needs"],
    }
    text = plan_report(plan)
    for said in ("backbone", "700", "2,000", "9,000", "5,000", "123,456", "72", "warning: the slabs hold less"):
        assert said in text
