"""The guided network's drift by ridge regression, before any gradient step.

What the next gate gets wrong at distance d is the change of the router's logits between layer l and layer l+d. The logs
hold the softmax of both, so this change is known exactly, for all experts of every decoded token: a dense target, where
the activated experts alone are 8 bits of 128. A linear map from the token state, fitted in closed form and cut to the
network's rank, learns from hundreds of rows what the cross-entropy would need tens of thousands for.

A prefill gives one row a layer and image: there only the mean change of each expert is taken over, which is what a
static frequency knows beyond next gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vismmoe.metrics import hot_hits
from vismmoe.predictors.features import gate_evidence
from vismmoe.predictors.guide import Guide
from vismmoe.predictors.lookahead import LookaheadNet
from vismmoe_training.data import LookaheadData, Split

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of the standardised inputs' mean square, times rows
FEWEST_ROWS = 16
SHRINKAGE = 4.0  # rows of "no change" that the mean over a prefill's few rows is diluted with


@dataclass(frozen=True)
class _Layer:
    """Rows of one layer: standardised token states, the logits' change, what next gate said, what happened."""

    x: Tensor  # (n, H)
    y: Tensor  # (n, W * E)
    evidence: Tensor  # (n, W, E)
    active: Tensor  # (n, W, E) bool


@torch.no_grad()
def warm_start(net: LookaheadNet, data: LookaheadData) -> float | None:
    """Set `net.guide`'s drift (in place). The penalty with the best recall@20 on the validation images is taken.

    Returns that penalty, or None when there is nothing to fit: another network, or too few decoded tokens.
    """
    guide = net.guide
    if guide is None or not guide.use_token or not guide.use_gate:
        return None
    for layer in range(net.layers):
        change = _rows(net, data, "train", layer, decode=False).y
        guide.bias[0, layer] += (change.sum(0) / (len(change) + SHRINKAGE)).view(guide.window, -1)
    train = {layer: _rows(net, data, "train", layer) for layer in range(net.layers)}
    train = {layer: rows for layer, rows in train.items() if len(rows.x) >= FEWEST_ROWS}
    val = {layer: _rows(net, data, "val", layer) for layer in train}
    best: tuple[float, float, dict[int, Tensor]] | None = None
    for penalty in PENALTIES:
        weights = {layer: _ridge(rows, penalty) for layer, rows in train.items()}
        score = _recall(train, val, weights)
        if best is None or score > best[0]:
            best = score, penalty, weights
    if best is None or not train:
        return None
    for layer, weight in best[2].items():
        _set(guide, layer, train[layer], weight)
    return best[1]


def _rows(net: LookaheadNet, data: LookaheadData, side: Split, layer: int, decode: bool = True) -> _Layer:
    assert net.guide is not None
    table, rows = data.table, data.rows[side]
    rows = rows[(table.decode(rows) == decode) & (table.row[rows] == layer)]
    inputs = table.inputs(rows)
    x = (inputs.token - net.guide.token_mean) * net.guide.token_scale
    return _Layer(x, table.drift(rows).flatten(1), gate_evidence(inputs.next_gate, inputs.decode), table.active(rows))


def _ridge(rows: _Layer, penalty: float) -> Tensor:
    """(H, W * E): ridge regression of the centred change on the centred state."""
    x, y = rows.x - rows.x.mean(0), rows.y - rows.y.mean(0)
    weight: Tensor = torch.linalg.solve(x.T @ x + penalty * len(x) * torch.eye(x.shape[1]), x.T @ y)
    return weight


def _recall(train: dict[int, _Layer], val: dict[int, _Layer], weights: dict[int, Tensor]) -> float:
    """Recall@20 of next gate plus drift on the validation rows, all distances together."""
    hits = needed = 0.0
    for layer, weight in weights.items():
        fitted, seen = train[layer], val[layer]
        drift = (seen.x - fitted.x.mean(0)) @ weight + fitted.y.mean(0)
        found, wanted = hot_hits(seen.evidence + drift.view_as(seen.evidence), seen.active, 20)
        hits, needed = hits + float(found.sum()), needed + float(wanted.sum())
    return hits / max(needed, 1.0)


def _set(guide: Guide, layer: int, rows: _Layer, weight: Tensor) -> None:
    """Cut to the network's rank along the directions in which the fitted change varies most, and store."""
    x = rows.x - rows.x.mean(0)
    spread = torch.linalg.cholesky(x.T @ x + 1e-4 * len(x) * torch.eye(x.shape[1])).T
    directions = torch.linalg.svd(spread @ weight, full_matrices=False).Vh[: guide.up.shape[1]]
    guide.up[layer].zero_()
    guide.up[layer, : len(directions)] = directions
    guide.down[layer] = weight @ guide.up[layer].T
    intercept = rows.y.mean(0) - rows.x.mean(0) @ guide.down[layer] @ guide.up[layer]
    guide.bias[1, layer] += intercept.view(guide.window, -1)
