"""The published hot recall table and its Fig. 11: our network, the published one and every trivial rule."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from vismmoe.predictors import LookaheadNet, PredictorConfig
from vismmoe.trace import read_traces
from vismmoe_training.data import LookaheadData
from vismmoe_training.evaluate_predictors import Recall, compare, control
from vismmoe_training.fitting import FitSettings, fit
from vismmoe_training.paper.scale import SPECS, Paper
from vismmoe_training.recall import UnionRecall
from vismmoe_training.row_table import RowTable

TOP = (10, 20, 30)
WINDOW = 5
OURS, PUBLISHED = "lookahead", "published network"
NETWORKS = {OURS: PredictorConfig(window=WINDOW), PUBLISHED: PredictorConfig.published(window=WINDOW)}
WITHOUT = {  # Fig. 11, and what else can be left out
    "visual summary": PredictorConfig(window=WINDOW, use_visual_summary=False),
    "next gate": PredictorConfig(window=WINDOW, use_next_gate=False),
    "token state": PredictorConfig(window=WINDOW, use_token_state=False),
}
VAL_FRACTION = 0.15


@dataclass(frozen=True)
class Foresight:
    """One seed: recalls on held-out scenes of other seeds and mixes, by rule, phase, k and distance."""

    recalls: tuple[Recall, ...]
    union: Mapping[str, Mapping[int, float]]  # rule -> k -> the published blend of decoded tokens
    without: Mapping[str, tuple[Recall, ...]]  # the guided network without one of its features
    control: float
    net: LookaheadNet


def foresee_seed(paper: Paper, seed: int) -> Foresight:
    """Train on the shipped scenes' logs, test on newly drawn ones."""
    logs = [paper.logs("train"), *(paper.logs(f"{kind}-{seed}") for kind in SPECS)]
    table = RowTable(read_traces(logs), WINDOW)
    tests = frozenset(log.name for log in logs[1:])
    data = LookaheadData(table, 256, VAL_FRACTION, VAL_FRACTION, seed, tests)
    nets = {name: _fit(options, paper, data, seed) for name, options in NETWORKS.items()}
    ours, published = (compare(net, data, detailed=name == OURS) for name, net in nets.items())
    renamed = [Recall(**{**vars(r), "rule": PUBLISHED}) for r in published if r.rule == OURS]
    without = {name: _fit(options, paper, data, seed) for name, options in WITHOUT.items()}
    return Foresight(
        recalls=(*ours, *renamed),
        union={name: _union(net, data) for name, net in nets.items()},
        without={name: tuple(r for r in compare(net, data) if r.rule == OURS) for name, net in without.items()},
        control=control(data),
        net=nets[OURS],
    )


def _fit(options: PredictorConfig, paper: Paper, data: LookaheadData, seed: int) -> LookaheadNet:
    settings = FitSettings(paper.scale.epochs, patience=5, learning_rate=3e-4, weight_decay=1e-2, seed=seed)
    if options.network == "published":
        settings = FitSettings(paper.scale.epochs, patience=8, learning_rate=3e-3, weight_decay=1e-2, seed=seed)
    with tempfile.TemporaryDirectory(prefix="vismmoe-paper-") as state:
        return fit(options, settings, data, state=Path(state)).net


def _union(net: LookaheadNet, data: LookaheadData) -> dict[int, float]:
    """By k; the best that a list could reach stands at -k."""
    metrics = {k: UnionRecall(k, net.config.gamma) for k in TOP}
    with torch.inference_mode():
        for _, batch in data.batches("test"):
            rows = batch.inputs.decode
            scores = net(batch.inputs).sigmoid() * (1 if net.config.head == "single" else batch.exists.unsqueeze(-1))
            for metric in metrics.values():
                metric.update(scores[rows], batch.active[rows])
    found = {k: float(metric.compute()) for k, metric in metrics.items()}
    return found | {-k: metric.ceiling() for k, metric in metrics.items()}
