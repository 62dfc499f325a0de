"""The predictor beside every trivial rule, on the same held-out rows.

Chance, static frequency (per layer and phase, counted on the training images), previous token (then older ones) and
next gate. For each distance and phase, on request for each layer and corpus too: recall@k, the same by gate mass,
precision and what would have to be loaded, with the ceiling that k experts can reach. The sums are those of the metrics
in recall.py (a test compares them), taken once for all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vismmoe.metrics import hot_recall, top_experts
from vismmoe.predictors.features import rows_ahead
from vismmoe.predictors.lookahead import LookaheadNet
from vismmoe.talk import table
from vismmoe_training.data import LookaheadData
from vismmoe_training.row_table import Batch

TOP = (10, 20, 30)
CEILING = "ceiling"
Score = Callable[[Tensor, Batch], Tensor]  # (row numbers, batch) -> (B, W, E)
Phases = ("all", "decode", "prefill")


@dataclass(frozen=True)
class Recall:
    """One cell of the table; distance 0 stands for the whole window blended."""

    rule: str
    phase: str
    k: int
    distance: int
    recall: float
    mass_recall: float
    precision: float = float("nan")
    moved: float = float("nan")  # experts a call that loading the list would move, if slabs held what was last used


def compare(net: LookaheadNet, data: LookaheadData, detailed: bool = False) -> list[Recall]:
    """Every rule on the test rows. `net` is the exported form, so the table is about what serving uses.

    detailed: of decode also "decode, layer N" and, when the logs come from several folders, "decode, corpus NAME".
    """
    return compare_rules(scoring_rules(net, data), data, detailed)


def compare_rules(rules: Mapping[str, Score], data: LookaheadData, detailed: bool = False) -> list[Recall]:
    """The same for rules by name."""
    sums: dict[tuple[str, str, int, int], Tensor] = defaultdict(lambda: torch.zeros(6, dtype=torch.float64))
    with torch.inference_mode():
        for rows, batch in data.batches("test"):
            seen = _Seen(batch, data.table.mass(rows), data.table.held(rows), _groups(data, rows, batch, detailed))
            scores = {rule: score(rows, batch) for rule, score in rules.items()}
            scores[CEILING] = seen.mass + batch.active
            for rule, given in scores.items():
                for k in TOP:
                    _add(sums, rule, k, given, seen)
    return [
        Recall(rule, phase, k, distance, *(float(v) for v in (s[0] / s[1], s[2] / s[3], s[0] / s[4] / k, s[5] / s[4])))
        for (rule, phase, k, distance), s in sums.items()
        if s[1] > 0
    ]


def control(data: LookaheadData) -> float:
    """Next gate at distance 0 on the decoded test rows: each router on its own input. Anything but 1 is a mistake."""
    rows = data.rows["test"]
    gate, active = data.table.own_gate(rows[data.table.decode(rows)])
    return hot_recall(gate, active, data.table.spec.top_k)


def scoring_rules(net: LookaheadNet | None, data: LookaheadData) -> dict[str, Score]:
    """Name -> batched scores, the learned predictor first if there is one."""
    frequency = _ahead_table(data.table.expert_table(data.rows["train"]), data.table.window)
    generator = torch.Generator().manual_seed(0)
    learned: dict[str, Score] = {}
    if net is not None:
        learned["lookahead"] = lambda rows, batch: net(batch.inputs).expand(batch.active.shape)
    return learned | {
        "next gate": lambda rows, batch: batch.inputs.next_gate,
        "previous token": lambda rows, batch: batch.inputs.ahead,
        "frequency": lambda rows, batch: frequency[batch.inputs.decode.long(), batch.inputs.row],
        "chance": lambda rows, batch: torch.rand(batch.active.shape, generator=generator),
    }


def recall_table(recalls: Sequence[Recall], phase: str) -> str:
    """For people: one line a rule and k, one column a distance."""
    cells = {(r.rule, r.k, r.distance): r.recall for r in recalls if r.phase == phase}
    distances = sorted({distance for _, _, distance in cells if distance})
    head = (f"{phase}: recall@k", "k", *(f"d={d}" for d in distances), "blended")
    rules = list(dict.fromkeys(r.rule for r in recalls))
    rows = [
        (rule, k, *(_percent(cells.get((rule, k, d))) for d in (*distances, 0)))
        for k in TOP
        for rule in rules
        if any((rule, k, d) in cells for d in distances)
    ]
    return table(rows, head)


def to_json(recalls: Sequence[Recall]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """phase -> rule -> "recall@20" or "mass_recall@20" -> distance ("1".. or "blended") -> value."""
    out: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for r in recalls:
        rule = out.setdefault(r.phase, {}).setdefault(r.rule, {})
        distance = str(r.distance) if r.distance else "blended"
        rule.setdefault(f"recall@{r.k}", {})[distance] = round(r.recall, 6)
        if r.mass_recall == r.mass_recall:
            rule.setdefault(f"mass_recall@{r.k}", {})[distance] = round(r.mass_recall, 6)
        if r.precision == r.precision:
            rule.setdefault(f"precision@{r.k}", {})[distance] = round(r.precision, 6)
            rule.setdefault(f"moved@{r.k}", {})[distance] = round(r.moved, 4)
    return out


def verdict(recalls: Sequence[Recall], k: int = 20) -> list[str]:
    """Where the learned predictor is not above a trivial rule, in decode or overall; empty when it is everywhere.

    Next gate is expected to be beaten from distance 2 on, the others at every distance.
    """
    cells = {(r.phase, r.rule, r.distance): r.recall for r in recalls if r.k == k and r.distance}
    found = []
    for (phase, rule, distance), value in sorted(cells.items()):
        own = cells.get((phase, "lookahead", distance))
        excused = rule in ("lookahead", CEILING) or (rule == "next gate" and distance < 2) or phase == "prefill"
        if own is not None and not excused and own <= value:
            found.append(f"at distance {distance} ({phase}) {rule} has recall@{k} {value:.1%}, the predictor {own:.1%}")
    return found


@dataclass(frozen=True)
class _Seen:
    """One batch and what became of it."""

    batch: Batch
    mass: Tensor  # (B, W, E)
    held: Tensor  # (B, W, E) bool
    groups: Mapping[str, Tensor]  # name -> (B,) bool


def _add(sums: Mapping[tuple[str, str, int, int], Tensor], rule: str, k: int, scores: Tensor, seen: _Seen) -> None:
    """Per call and distance: found, needed, the same in gate mass, whether there is such a layer, to be loaded."""
    active, exists = seen.batch.active, seen.batch.exists
    top = top_experts(scores, k)
    found = [(top & active).sum(-1), active.sum(-1)]
    weighed = [(seen.mass * (top & active)).sum(-1), (seen.mass * active).sum(-1)]
    parts = torch.stack([*found, *weighed, exists, (top & ~seen.held).sum(-1) * exists], dim=-1).double()  # (B, W, 6)
    for phase, rows in seen.groups.items():
        by_distance = parts[rows].sum(0)
        for distance, value in enumerate(by_distance, start=1):
            sums[rule, phase, k, distance].add_(value)
        sums[rule, phase, k, 0].add_(by_distance.sum(0))


def _groups(data: LookaheadData, rows: Tensor, batch: Batch, detailed: bool) -> dict[str, Tensor]:
    decode = batch.inputs.decode
    groups = {"all": torch.ones_like(decode), "decode": decode, "prefill": ~decode}
    if not detailed:
        return groups
    for row, layer in enumerate(data.table.spec.moe_layers):
        groups[f"decode, layer {layer}"] = decode & (batch.inputs.row == row)
    corpora = [data.table.corpora()[request] for request in data.table.request()[rows].tolist()]
    for name in sorted(set(corpora)):
        groups[f"decode, corpus {name}"] = decode & torch.tensor([corpus == name for corpus in corpora])
    return groups


def _ahead_table(frequency: Tensor, window: int) -> Tensor:
    """(2, L, E) -> (2, L, W, E): the rows of the layers ahead."""
    return torch.stack([rows_ahead(frequency, row, window) for row in range(frequency.shape[1])], dim=1)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
