"""What one call of the predictor costs in decode, at the shape of the reference model and at a real model's.

    python benchmarks/predictor_call.py [--threads 1] [--calls 960]

Random weights: the time depends on shapes only. Layers take turns as they do while decoding, so that a layer's matrices
are as cold as they would be. The goal is 0.13 ms at hidden 2048, 128 experts (published: 2.72 ms).
"""

from __future__ import annotations

import argparse
import time

import torch

from vismmoe.predictors import LookaheadNet, LookaheadPredictor, NextGate, PredictorConfig
from vismmoe.talk import table
from vismmoe.types import LayerState, ModelSpec

SHAPES = {"reference, hidden 128": (10, 128), "Qwen3-VL-30B, hidden 2048": (48, 2048)}
NETWORKS = {
    "guided": PredictorConfig(),
    "guided, next gate not asked": PredictorConfig(use_next_gate=False),
    "published": PredictorConfig.published(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calls", type=int, default=960)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for shape, (layers, hidden) in SHAPES.items():
        spec = ModelSpec("made up", layers, tuple(range(layers)), 128, 8, hidden, 32, "0" * 64)
        for name, config in NETWORKS.items():
            times = sorted(measure(predictor(config, spec), spec, given.calls))
            rows.append((shape, name, *(f"{times[int(len(times) * q)]:.3f}" for q in (0.05, 0.5, 0.95))))
    print(table(rows, ("model", "network", "ms best 5 %", "median", "worst 5 %")))
    print(f"{given.threads} thread(s) of torch {torch.__version__}, {given.calls} calls each, W = 5, 128 experts")


def predictor(config: PredictorConfig, spec: ModelSpec) -> LookaheadPredictor:
    torch.manual_seed(0)
    net = LookaheadNet(config, spec, folded=True)
    if net.token_basis is not None:
        torch.nn.init.normal_(net.token_basis, std=spec.hidden_size**-0.5)
    routers = {layer: torch.randn(spec.num_experts, spec.hidden_size) for layer in spec.moe_layers}
    return LookaheadPredictor(net, spec, NextGate(spec, routers))


def measure(serving: LookaheadPredictor, spec: ModelSpec, calls: int) -> list[float]:
    """Milliseconds of each call, the first round left out."""
    means = [torch.randn(spec.hidden_size) for _ in spec.moe_layers]
    summary, history = torch.randn(spec.hidden_size), torch.rand(len(spec.moe_layers), spec.num_experts)
    states = [
        LayerState(layer, "decode", torch.randn(1, spec.hidden_size), means[layer], summary, history)
        for layer in spec.moe_layers[:-5]  # all five layers ahead exist
    ]
    times = []
    for call in range(calls + len(states)):
        started = time.perf_counter()
        serving.predict(states[call % len(states)])
        times.append((time.perf_counter() - started) * 1e3)
    return times[len(states) :]


if __name__ == "__main__":
    main()
