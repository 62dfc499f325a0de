"""The guided network's drift by ridge regression, before any gradient step.

What the next gate gets wrong at distance d is the change of the router's logits between layer l and layer l+d. The logs
hold the softmax of both, so this change is known exactly, for all experts of every decoded token: a dense target, where
the activated experts alone are 8 bits of 128. A linear map from the token state, fitted in closed form and cut to the
network's rank, learns from hundreds of rows what the cross-entropy would need tens of thousands for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vismmoe.metrics import hot_recall
from vismmoe.predictors.features import gate_evidence
from vismmoe.predictors.lookahead import LookaheadNet
from vismmoe_training.data import LookaheadData, RowTable

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # of the standardised inputs' mean square, times rows
_FEWEST_ROWS = 16


def warm_start(net: LookaheadNet, data: LookaheadData) -> float | None:
    """Set `net.guide`'s drift (in place). The penalty with the best recall@20 on the validation images is taken.

    Returns that penalty, or None when there is nothing to fit: another network, or too few decoded tokens.
    """
    guide = net.guide
    if guide is None or not guide.use_token or not guide.use_gate:
        return None
    table = data.table
    train = [_decoded(table, data.rows["train"], layer) for layer in range(net.layers)]
    val = [_decoded(table, data.rows["val"], layer) for layer in range(net.layers)]
    best: tuple[float, float] | None = None
    for penalty in PENALTIES:
        fits = {layer: _fit(net, table, rows, penalty) for layer, rows in enumerate(train) if len(rows) >= _FEWEST_ROWS}
        score = _score(net, table, val, fits)
        if fits and score == score and (best is None or score > best[0]):
            best = score, penalty
            _set(net, fits)
    return None if best is None else best[1]


Fit = tuple[Tensor, Tensor, Tensor]  # down (H, r), up (r, W * E), intercept (W, E)


def _decoded(table: RowTable, rows: Tensor, layer: int) -> Tensor:
    return rows[table.decode(rows) & (table.row[rows] == layer)]


def _token(net: LookaheadNet, table: RowTable, rows: Tensor) -> Tensor:
    assert net.guide is not None
    return (table.inputs(rows).token - net.guide.token_mean) * net.guide.token_scale


def _fit(net: LookaheadNet, table: RowTable, rows: Tensor, penalty: float) -> Fit:
    """Reduced-rank ridge regression of the logits' change on the token state, for one layer."""
    assert net.guide is not None
    x, y = _token(net, table, rows), table.drift(rows).flatten(1)  # (n, H), (n, W * E)
    x_mean, y_mean = x.mean(0), y.mean(0)
    centred = x - x_mean
    gram = centred.T @ centred + penalty * len(rows) * torch.eye(x.shape[1])
    weight = torch.linalg.solve(gram, centred.T @ (y - y_mean))  # (H, W * E)
    _, _, directions = torch.linalg.svd(centred @ weight, full_matrices=False)
    up = torch.zeros_like(net.guide.up[0])
    kept = directions[: len(up)]
    up[: len(kept)] = kept
    down = weight @ up.T
    return down, up, (y_mean - x_mean @ down @ up).view(net.config.window, -1)


def _score(net: LookaheadNet, table: RowTable, rows: list[Tensor], fits: dict[int, Fit]) -> float:
    """Recall@20 of next gate plus drift, all distances together."""
    scores, active = [], []
    for layer, (down, up, intercept) in fits.items():
        if len(rows[layer]):
            drift = (_token(net, table, rows[layer]) @ down @ up).view(-1, *intercept.shape) + intercept
            scores.append(gate_evidence(table.inputs(rows[layer]).next_gate) + drift)
            active.append(table.active(rows[layer]))
    return hot_recall(torch.cat(scores), torch.cat(active), 20) if scores else float("nan")


@torch.no_grad()
def _set(net: LookaheadNet, fits: dict[int, Fit]) -> None:
    guide = net.guide
    assert guide is not None
    for layer, (down, up, intercept) in fits.items():
        guide.down[layer], guide.up[layer] = down, up
        guide.bias[1, layer] = guide.bias[0, layer] + intercept
