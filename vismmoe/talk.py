"""Reports for people, from the same JSON objects that scripts get: pure functions from numbers to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vismmoe.sizes import format_size


def table(rows: Iterable[Sequence[object]], head: Sequence[str]) -> str:
    """Columns under their heads; the first column is flush left, the others flush right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in (lines[0], "-" * len(lines[0]), *lines[1:]))


def plan_report(plan: Mapping[str, Any]) -> str:
    """`vismmoe plan`: what goes where, in bytes, and what would not fit."""
    device = plan["device"]
    rows = [(part.replace("_", " "), f"{size:,}", format_size(size)) for part, size in device["planned"].items()]
    rows.append(
        ("planned in all", f"{sum(device['planned'].values()):,}", format_size(sum(device["planned"].values())))
    )
    rows.append(("least that runs", f"{device['minimum_bytes']:,}", format_size(device["minimum_bytes"])))
    rows.append(("everything resident", f"{device['all_resident_bytes']:,}", format_size(device["all_resident_bytes"])))
    for tier in ("host", "disk"):
        rows += [(f"{tier}: {part.replace('_', ' ')}", *_size_cells(value)) for part, value in plan[tier].items()]
    lines = [table(rows, ("device", "bytes", "")), ""]
    cycle = f"one token needs {plan['cycle_slabs']} of them"
    lines.append(f"{plan['pinned_layers']} MoE layers pinned; {plan['slabs']} slabs for the others, {cycle}.")
    lines += [f"warning: {warning}" for warning in plan["warnings"]]
    return "\n".join(lines)


def _size_cells(value: object) -> tuple[str, str]:
    return (
        (f"{value:,}", format_size(value))
        if isinstance(value, int) and not isinstance(value, bool)
        else (str(value), "")
    )


def infer_report(report: Mapping[str, Any]) -> str:
    """What `vismmoe infer` says beside the answer: tokens, hit rates, bytes, memory, fall-backs once each."""
    usage, memory, timing = report["usage"], report["memory"], report["timing_ms"]
    lines = [
        f"tokens     {usage['prompt_tokens']} prompt, {_cached(usage)}of them {usage['visual_tokens']} visual"
        f" ({usage['kept_visual_tokens']} kept); {usage['completion_tokens']} answered ({report['finish_reason']})",
        f"time       {timing['prefill']:.0f} ms prefill, {timing['decode_p50']:.1f} ms a token (p50),"
        f" {report['tokens_per_second']:.1f} tokens/s, {timing['total']:.0f} ms in all",
        *(f"{name:<10} {phase_line(report['experts'][name])}" for name in ("prefill", "decode")),
        *(f"{tier:<10} {_memory_line(memory, tier)}" for tier in ("device", "host")),
        f"experts    {report['experts']['pinned_layers']} MoE layers pinned, {report['experts']['slabs']} slabs,"
        f" {report['experts']['evictions']} evictions",
        f"predictor  {predictor_line(report['predictor'])}",
    ]
    if report.get("sampling"):
        lines.append(f"sampling   {sampling_line(report['sampling'])}")
    lines += [f"fall-back  {fallback}" for fallback in dict.fromkeys(report["fallbacks"])]
    return "\n".join(lines)


def _cached(usage: Mapping[str, int]) -> str:
    cached = usage.get("cached_tokens", 0)
    return f"{cached} from earlier turns, " if cached else ""


def sampling_line(sampling: Mapping[str, Any]) -> str:
    """What a drawn answer takes to be drawn again."""
    parts = [f"temperature {sampling['temperature']:g}"]
    if sampling["top_k"] is not None:
        parts.append(f"top-k {sampling['top_k']}")
    if sampling["top_p"] < 1:
        parts.append(f"top-p {sampling['top_p']:g}")
    return ", ".join([*parts, f"seed {sampling['seed']}"])


def _memory_line(memory: Mapping[str, int], tier: str) -> str:
    planned, peak = memory[f"{tier}_planned_bytes"], memory[f"{tier}_peak_bytes"]
    return f"{format_size(planned)} planned, {format_size(peak)} at the peak"


def phase_line(phase: Mapping[str, Any]) -> str:
    """One phase's counters; nothing is said of what did not happen."""
    if not phase["accesses"]:
        return "no expert outside the pinned layers was needed"
    parts = [
        f"{phase['hits']} of {phase['accesses']} experts found ({phase['hit_rate']:.0%})",
        f"{format_size(phase['bytes_loaded'])} loaded",
        f"{phase['stall_ms']:.0f} ms waited",
    ]
    if phase["prefetched"]:
        parts.append(f"{phase['prefetched_used']} of {phase['prefetched']} prefetches used")
    if phase["cpu_runs"]:
        parts.append(f"{phase['cpu_runs']} run on the CPU")
    return ", ".join(parts)


def predictor_line(predictor: Mapping[str, Any] | None) -> str:
    if predictor is None:
        return "none: experts are loaded when they are needed"
    version = f", version {predictor['version']}" if predictor.get("version") else ""
    return f"{predictor['kind']}, {predictor['window']} layers ahead, from {predictor['source']}{version}"
