"""The pictures. Colours are Okabe and Ito's and cividis, which the colour-blind tell apart; every line also has its own
marker, every area its own hatching, so that print without colour says the same."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from vismmoe.simulate.result import SimulationResult, Span
from vismmoe.simulate.transfers import Read
from vismmoe_training.evaluate_predictors import Recall
from vismmoe_training.report.observe import KINDS, Observation, Patches

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
LINES = (
    (BLUE, "o", "-"),
    (RED, "s", "--"),
    (GREEN, "^", "-."),
    (ORANGE, "D", ":"),
    (PINK, "v", "-"),
    (BLACK, "x", "--"),
)
HEAT = "cividis"


def svg(figure: Figure) -> bytes:
    """The same bytes for the same figure."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "vismmoe", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def routing(seen: Observation) -> Figure:
    """Experts by share of the choices, busiest first, for each layer and kind of token."""
    figure = _figure(9.6, 3.6)
    axes = figure.subplots(1, 3, sharey=True)
    shares = [_ranked(seen.counts[kind]) for kind in KINDS]
    most = max(float(share.max()) for share in shares)
    for ax, kind, share in zip(axes, KINDS, shares, strict=True):
        image = ax.imshow(share.numpy(), aspect="auto", cmap=HEAT, vmin=0, vmax=most, interpolation="nearest")
        ax.axvline(19.5, color="white", linewidth=1.2, linestyle="--")
        ax.set_title(f"{kind}: {float(seen.coverage(kind).mean()):.1%} on 20", fontsize=10)
        ax.set_xlabel("experts, busiest of the request first")
        ax.set_yticks(range(len(seen.layers)), [str(layer) for layer in seen.layers])
    axes[0].set_ylabel("decoder layer")
    figure.colorbar(image, ax=list(axes), label="share of the choices", format=lambda value, _: f"{value:.0%}")
    return figure


def coverage(seen: Observation) -> Figure:
    """Top-20 coverage of each layer."""
    figure = _figure(9.6, 2.8)
    ax = figure.subplots()
    for kind, (colour, marker, line) in zip(KINDS, LINES, strict=False):
        ax.plot(seen.layers, seen.coverage(kind) * 100, color=colour, marker=marker, linestyle=line, label=kind)
    if 0 < seen.prefix_layers < len(seen.layers):
        ax.axvline(seen.layers[seen.prefix_layers] - 0.5, color="grey", linestyle=":", linewidth=1)
        ax.annotate("tokens are dropped here ", (seen.layers[seen.prefix_layers] - 0.5, 3), fontsize=8, ha="right")
    _percent(ax, "top-20 coverage")
    ax.set_xlabel("decoder layer")
    ax.legend(loc="lower right", fontsize=8)
    return figure


def similarity(seen: Observation) -> Figure:
    """Cosine between layers, of the kept visual tokens' mean state and of what they ask of each expert id."""
    figure = _figure(9.6, 4.0)
    axes = figure.subplots(1, 2)
    tables = {
        "state of the kept visual tokens": _cosines(seen.states),
        "experts that they ask for, by expert id": _cosines(seen.counts[KINDS[2]]),
    }
    for ax, (title, values) in zip(axes, tables.items(), strict=True):
        image = ax.imshow(values.numpy(), cmap=HEAT, vmin=0, vmax=1)
        ax.set_title(title, fontsize=10)
        ax.set_xticks(range(len(seen.layers)), [str(layer) for layer in seen.layers])
        ax.set_yticks(range(len(seen.layers)), [str(layer) for layer in seen.layers])
        ax.set_xlabel("decoder layer")
    axes[0].set_ylabel("decoder layer")
    figure.colorbar(image, ax=list(axes), label="mean cosine over requests")
    return figure


def recall_by_distance(recalls: Sequence[Recall], phases: Sequence[str] = ("decode", "prefill"), k: int = 20) -> Figure:
    """Hot Recall@k of each rule for each layer ahead, one panel a phase."""
    figure = _figure(9.6, 3.4)
    axes = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    rules = list(dict.fromkeys(recall.rule for recall in recalls))
    for ax, phase in zip(axes, phases, strict=True):
        for rule, (colour, marker, line) in zip(rules, LINES, strict=False):
            cells = {r.distance: r.recall for r in recalls if (r.rule, r.phase, r.k) == (rule, phase, k) and r.distance}
            ax.plot(list(cells), [value * 100 for value in cells.values()], color=colour, marker=marker, linestyle=line,
                    label=rule)  # fmt: skip
            ax.set_xticks(sorted({r.distance for r in recalls if r.distance}))
        ax.set_title(phase, fontsize=10)
        ax.set_xlabel("layers ahead")
        _percent(ax, f"recall@{k}")
    axes[1 if len(axes) > 1 else 0].set_ylabel("")
    axes[-1].legend(fontsize=8, loc="lower left", bbox_to_anchor=(1.01, 0.0))
    return figure


def recall_by_layer(recalls: Sequence[Recall], k: int = 20) -> Figure:
    """The same for each layer that foresees, all distances together, in decode."""
    figure = _figure(9.6, 3.0)
    ax = figure.subplots()
    rules = list(dict.fromkeys(recall.rule for recall in recalls))
    for rule, (colour, marker, line) in zip(rules, LINES, strict=False):
        cells = {
            int(r.phase.rsplit(" ", 1)[1]): r.recall
            for r in recalls
            if r.rule == rule and r.k == k and not r.distance and r.phase.startswith("decode, layer ")
        }
        ax.plot(list(cells), [value * 100 for value in cells.values()], color=colour, marker=marker, linestyle=line,
                label=rule)  # fmt: skip
    ax.set_xlabel("decoder layer that foresees")
    _percent(ax, f"recall@{k} in decode")
    ax.legend(fontsize=8, loc="lower left", bbox_to_anchor=(1.01, 0.0))
    return figure


def memory_front(results: Mapping[str, Sequence[SimulationResult]]) -> Figure:
    """Simulated stall of a request against the memory that slabs take, for each predictor; the limit in grey."""
    figure = _figure(9.6, 3.4)
    ax = figure.subplots()
    styles = dict(zip(results, LINES, strict=False))
    for name, points in results.items():
        colour, marker, line = styles[name] if name != "perfect, belady" else ("grey", "None", "-")
        x = [result.slots * result.expert_bytes / 2**20 for result in points]
        y = [result.stall_ms / max(1, result.requests) for result in points]
        ax.plot(x, y, color=colour, marker=marker, linestyle=line, label=name)
    flat = [(r.slots, r.stall_ms, r) for name, points in results.items() if "belady" not in name for r in points]
    best = [r for slots, stall, r in flat if not any(s <= slots and t < stall for s, t, _ in flat)]
    ax.scatter([r.slots * r.expert_bytes / 2**20 for r in best], [r.stall_ms / max(1, r.requests) for r in best], s=130,
               facecolors="none", edgecolors=BLACK, linewidths=1.2, label="Pareto front", zorder=3)  # fmt: skip
    ax.set_xlabel("MiB of slabs")
    ax.set_ylabel("ms a request waits")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="lower left", bbox_to_anchor=(1.01, 0.0))
    return figure


def study_front(
    points: Sequence[tuple[float, float]], front: Sequence[tuple[float, float]], chosen: tuple[float, float] | None
) -> Figure:
    """Trials of a tuning study: simulated stall against held-out accuracy."""
    figure = _figure(9.6, 3.4)
    ax = figure.subplots()
    ax.scatter([x for x, _ in points], [y for _, y in points], color=SKY, marker="o", s=22, label="trials")
    ax.plot([x for x, _ in front], [y for _, y in front], color=BLUE, marker="s", linestyle="-", label="Pareto front")
    if chosen is not None:
        ax.scatter(*chosen, s=150, facecolors="none", edgecolors=RED, linewidths=2, label="recommended", zorder=3)
    ax.set_xlabel("ms a request waits, simulated (less is better)")
    ax.set_ylabel("accuracy on held-out questions")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def timeline(runs: Mapping[str, tuple[Sequence[Span], Sequence[Read]]]) -> Figure:
    """What computes, what waits and what is read, for one request under each rule; right, its first decoded token."""
    figure = _figure(9.6, 0.7 + 1.5 * len(runs))
    axes = figure.subplots(len(runs), 2, sharex="col", sharey=True, squeeze=False, width_ratios=(2, 1))
    for (whole, token), (name, (spans, reads)) in zip(axes, runs.items(), strict=True):
        start, end = min(span.start for span in spans), max(span.end for span in spans)
        tracks = _tracks(spans, reads)
        _lanes(whole, tracks, start, end)
        for step in sorted({span.step for span in spans})[1:]:
            whole.axvline((min(s.start for s in spans if s.step == step) - start) * 1e3, color="black", linewidth=0.5)
        first = [span for span in spans if span.step == 1]
        if first:
            _lanes(token, tracks, first[0].start, first[-1].end)
        whole.set_title(name, fontsize=10, loc="left")
    axes[-1][0].set_xlabel("ms since the request's first layer; thin lines: a token ends", fontsize=9)
    axes[-1][1].set_xlabel("ms of the first decoded token", fontsize=9)
    return figure


_Track = tuple[str, str, str, list[tuple[float, float]]]  # label, colour, hatching, (begin, end) in seconds


def _tracks(spans: Sequence[Span], reads: Sequence[Read]) -> list[_Track]:
    """Top to bottom."""
    kinds = (("attention, router", SKY, "layer"), ("experts run", BLUE, "experts"), ("waits for experts", RED, "stall"))
    lanes: list[_Track] = [
        (label, colour, "", [(s.start, s.end) for s in spans if s.kind == kind]) for label, colour, kind in kinds
    ]
    lanes.append(("read on demand", ORANGE, "", [(r.start, r.end) for r in reads if not r.speculative]))
    lanes.append(("read ahead", GREEN, "////", [(r.start, r.end) for r in reads if r.speculative]))
    return lanes


def _lanes(ax: Any, tracks: Sequence[_Track], start: float, end: float) -> None:
    """A lane each, cut to [start, end]; bars that would touch on paper are drawn as one."""
    for place, (_, colour, hatch, times) in enumerate(reversed(tracks)):
        bars: list[list[float]] = []
        for begin, stop in sorted((max(b, start), min(e, end)) for b, e in times if e > start and b < end):
            if bars and begin - bars[-1][1] < (end - start) / 2000:
                bars[-1][1] = max(bars[-1][1], stop)
            else:
                bars.append([begin, stop])
        widths = [((begin - start) * 1e3, (stop - begin) * 1e3) for begin, stop in bars]
        ax.broken_barh(widths, (place - 0.35, 0.7), facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0)
    ax.set_yticks(range(len(tracks)), [label for label, *_ in reversed(tracks)], fontsize=8)
    ax.set_ylim(-0.6, len(tracks) - 0.4)
    ax.set_xlim(0, max((end - start) * 1e3, ax.get_xlim()[1]))  # shared by all rules, the longest decides
    ax.grid(axis="x", alpha=0.3)


def kept_patches(shown: Sequence[Patches]) -> Figure:
    """Pictures with core, kept and dropped visual tokens."""
    figure = _figure(9.6, 3.9)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for ax, patches in zip(axes, shown, strict=True):
        rows, columns = patches.grid
        ax.imshow(patches.image, extent=(0, columns, rows, 0))
        for index in range(rows * columns):
            row, column = divmod(index, columns)
            ax.add_patch(Rectangle((column, row), 1, 1, **_mark(index, patches)))
        ax.set_xlim(0, columns)
        ax.set_ylim(rows, 0)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(f"{len(patches.kept)} of {rows * columns} kept, {len(patches.core)} in the core", fontsize=9)
    keys = [
        Patch(facecolor="none", edgecolor=RED, linewidth=2, label="core: kept for its saliency"),
        Patch(facecolor="none", edgecolor=BLUE, linewidth=1, label="kept: few experts beyond the core's"),
        Patch(facecolor="white", hatch="xxxx", edgecolor="grey", label="dropped"),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _mark(index: int, patches: Patches) -> dict[str, Any]:
    if index in patches.core:
        return {"fill": False, "edgecolor": RED, "linewidth": 2.2, "zorder": 3}
    if index in patches.kept:
        return {"fill": False, "edgecolor": BLUE, "linewidth": 0.9, "zorder": 2}
    return {"facecolor": (1, 1, 1, 0.75), "edgecolor": (0.4, 0.4, 0.4, 0.8), "hatch": "xxx", "linewidth": 0.0}


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _percent(ax: Any, label: str) -> None:
    ax.set_ylim(0, 102)
    ax.set_ylabel(f"{label} (%)")
    ax.grid(alpha=0.3)


def _ranked(counts: Tensor) -> Tensor:
    """(requests, L, E) -> (L, E): mean share of each request's busiest expert, second busiest ..."""
    shares = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    return shares.sort(dim=-1, descending=True).values.mean(0)


def _cosines(vectors: Tensor) -> Tensor:
    """(requests, L, N) -> (L, L)."""
    unit = torch.nn.functional.normalize(vectors.double(), dim=-1)
    return (unit @ unit.transpose(1, 2)).mean(0)
