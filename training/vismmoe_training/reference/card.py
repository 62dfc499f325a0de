"""The model card of checkpoints/reference: what was measured, in the measurement's own numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from vismmoe_training.reference.measure import Measurement
from vismmoe_training.reference.routing import RoutingFigures
from vismmoe_training.reference.shape import ReferenceShape

HEAD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---

# VisMMoE reference model

A Qwen3-VL-MoE of {parameters:.1f} million parameters, trained from scratch on generated scenes with the recipe of
`make reference` (seed {seed}). **It demonstrates and tests the machinery**: it knows 28 kinds of drawn things,
10 colours, 24 written words and two-digit numbers, and nothing else. Real use names a real checkpoint.

| | |
|---|---|
| decoder layers | {layers} |
| experts a layer, chosen a token | {experts}, {top_k} |
| hidden size, expert width | {hidden_size}, {expert_width} |
| pixels a side that one visual token shows | {token_px} |
| training steps | vision tower {vision_steps}, decoder {whole_steps} |

Plain transformers loads it: `AutoModelForImageTextToText.from_pretrained("checkpoints/reference")`.
"""

ROUTING_ROWS = (
    ("least used expert, as a part of the uniform share", "least_share", "at least 0.10"),
    ("top-20 coverage, visual tokens", "coverage_visual", "0.40 to 0.60"),
    ("top-20 coverage, text tokens", "coverage_text", "0.60 to 0.85"),
    ("previous-token recall, text", "previous_token_text", "at most 0.65"),
    ("previous-token recall, visual", "previous_token_visual", ""),
    ("next gate, one layer ahead, recall@8", "next_gate", "0.75 to 0.92"),
)


def write_card(
    folder: Path,
    measured: Measurement,
    shape: ReferenceShape,
    *,
    seed: int,
    vision_steps: int,
    whole_steps: int,
    parameters: int,
) -> None:
    """Write README.md (the card) and measured.json (the same figures, for programs) into the checkpoint's folder."""
    head = HEAD.format(
        parameters=parameters / 1e6,
        seed=seed,
        vision_steps=vision_steps,
        whole_steps=whole_steps,
        token_px=shape.token_px,
        **asdict(shape),
    )
    (folder / "README.md").write_text(
        "\n".join([head, _answers(measured), _routing(measured.routing), _misses(measured)])
    )
    figures = {"by_style": measured.by_style, "overall": measured.overall, "routing": asdict(measured.routing)}
    (folder / "measured.json").write_text(json.dumps(figures, indent=1) + "\n")


def _answers(measured: Measurement) -> str:
    rows = [f"| {style} | {count} | {measured.by_style[style]:.3f} |" for style, count in measured.asked.items()]
    return "\n".join(
        [
            "## It answers",
            "",
            f"Exact match, greedy, weights as saved, on {measured.scenes} held-out scenes of the full range of sizes:",
            "",
            "| question | asked | exact match |",
            "|---|---|---|",
            *rows,
            f"| **all, each style alike** | {sum(measured.asked.values())} | **{measured.overall:.3f}** |",
            "",
        ]
    )


def _routing(figures: RoutingFigures) -> str:
    rows = []
    for title, name, band in ROUTING_ROWS:
        values = getattr(figures, name)
        mean = sum(values) / len(values)
        rows.append(f"| {title} | {mean:.3f} | {min(values):.3f} to {max(values):.3f} | {band} |")
    outside = figures.failures()
    verdict = "All layers lie within the bands." if not outside else "Outside the bands: " + "; ".join(outside) + "."
    return "\n".join(
        [
            "## It routes like a real vision-language MoE",
            "",
            "Per layer, over the same scenes with one question each; the bands are those of published models.",
            "",
            "| figure | mean over layers | lowest and highest layer | band |",
            "|---|---|---|---|",
            *rows,
            "",
            verdict,
            "",
        ]
    )


def _misses(measured: Measurement) -> str:
    shown = measured.misses[:: max(1, len(measured.misses) // 12)][:12]
    lines = [f"| {_plain(asked)} | {_plain(right)} | {_plain(given)} |" for asked, right, given in shown]
    return "\n".join(["## Some of its misses", "", "| question | right | given |", "|---|---|---|", *lines, ""])


def _plain(text: str) -> str:
    """Without special tokens and line breaks."""
    for token in ("<|im_end|>", "<|im_start|>assistant", "<|im_start|>"):
        text = text.replace(token, "")
    return text.replace("\n", " ").replace("|", "\\|").strip()
