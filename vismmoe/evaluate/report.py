"""What `vismmoe eval` prints: the JSON object, and the tables for people made from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vismmoe.evaluate.score import Benchmark, Reading, Row, Score, Scorer, flat_numbers
from vismmoe.talk import table


def score_json(benchmark: Benchmark, scorer: Scorer, prompts: str | None, rows: Sequence[Row]) -> dict[str, Any]:
    """All that one scorer says of rows with predictions; prompts: the set that was asked with, if that is known."""
    score, readings = scorer(rows)
    return {
        "benchmark": benchmark.name,
        "scorer": scorer.name,
        "scorer_source": scorer.source,
        "prompts": prompts,
        "rows": len(rows),
        **numbers(score),
        "row_labels": [reading.label for reading in by_row(readings)],
        "row_scores": [reading.score for reading in by_row(readings)],
        **row_extras(readings),
    }


def numbers(score: Score) -> dict[str, Any]:
    """One scorer's numbers."""
    return {
        "headline": {"name": score.headline, "value": score.value, "unit": score.unit},
        "scores": dict(score.values),
        "undefined": dict(score.undefined),
        "notes": list(score.notes),
    }


def by_row(readings: Sequence[Reading]) -> list[Reading]:
    """One reading a row: where a row stands in several splits it was read the same way."""
    return list({reading.place: reading for reading in readings}.values())


def row_extras(readings: Sequence[Reading]) -> dict[str, list[Any]]:
    """What else the scorer tells of each row, by name."""
    names = dict.fromkeys(name for reading in readings for name in reading.extra)
    return {name: [reading.extra.get(name) for reading in by_row(readings)] for name in names}


def sample_lines(rows: Sequence[Row], prompts: Sequence[str], readings: Sequence[Reading]) -> list[dict[str, Any]]:
    """The per-sample file: what was asked, what is right, what was answered, how it was read, what it scores."""
    found = {reading.place: reading for reading in readings}
    return [
        {
            **{name: value for name, value in row.items() if name != "prediction"},
            "prompt": prompt,
            "prediction": row["prediction"],
            "label": found[place].label,
            "score": found[place].score,
        }
        for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]


# -- for people -------------------------------------------------------------------------------------------------------


def score_report(told: Mapping[str, Any]) -> str:
    """One scorer's numbers as a table."""
    head = f"{told['benchmark']}, {told['rows']} rows, scorer {told['scorer']} ({told['scorer_source']})"
    if told["prompts"]:
        head += f", prompts {told['prompts']}"
    shown = [(name, _number(value)) for name, value in flat_numbers(told["scores"]).items()]
    return "\n".join([head, "", table(shown, ("", "score")), *_remarks(told)])


def retention_report(told: Mapping[str, Any]) -> str:
    """Every arm's headline, beside what it costs; then the scorer's other numbers."""
    name, unit = told["arms"][0]["headline"]["name"], told["arms"][0]["headline"]["unit"]
    head = (
        f"{told['benchmark']}, {told['rows']} rows, scorer {told['scorer']} ({told['scorer_source']}), prompts "
        f"{told['prompts']}, {told['model']}"
    )
    columns = ("", f"{name} ({unit})", "retention", "95 % interval", "tokens", "experts", "ttft ms", "rows/min")
    lines = [head, "", table([_arm(arm) for arm in told["arms"]], columns), LEGEND]
    names = list(dict.fromkeys(key for arm in told["arms"] for key in flat_numbers(arm["scores"])))
    flat = [flat_numbers(arm["scores"]) for arm in told["arms"]]
    rows = [
        (key, *(_number(each.get(key)) for each in flat))
        for key in names
        if "." not in key or any(each.get(key) != 0 for each in flat)  # a part that nobody scored in is left out
    ]
    lines += ["", table(rows, ("", *(arm["name"] for arm in told["arms"]))), *_remarks(told["arms"][0])]
    return "\n".join(lines)


LEGEND = (
    "retention: of the first line; interval: paired bootstrap over the questions; tokens: visual tokens kept, mean;\n"
    "experts: distinct ones that a prefill needs in a layer after the prefix, mean; ttft: to the first token, median"
)


def _arm(arm: Mapping[str, Any]) -> tuple[str, ...]:
    interval = arm["interval"]
    return (
        arm["name"],
        _number(arm["headline"]["value"]),
        "-" if arm["retention"] is None else f"{arm['retention']:.1%}",
        "-" if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}",
        f"{arm['kept_visual_tokens']:.0f}",
        f"{arm['distinct_experts']:.1f}",
        f"{arm['ttft_ms']:.0f}",
        "-" if arm["rows_per_minute"] is None else f"{arm['rows_per_minute']:.1f}",
    )


def _number(value: float | None) -> str:
    if value is None:
        return "undefined"
    return str(value) if isinstance(value, int) else f"{value:.4f}".rstrip("0").rstrip(".")


def _remarks(told: Mapping[str, Any]) -> list[str]:
    remarks = [f"undefined: {name}: {why}" for name, why in told["undefined"].items()]
    remarks += [f"note: {note}" for note in told["notes"]]
    return ["", *remarks] if remarks else []
