"""One row times an expert's weights, as decode does it: torch's `linear` beside vismmoe.models.products.

    python benchmarks/one_row.py [--threads 2] [--dtype bfloat16]

Shapes of Qwen3-VL-30B-A3B. Weights take turns, more of them than caches hold, so that all come from memory; "sum" adds
the same bytes up, which is about what the memory allows. Milliseconds a product, the best of several turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from vismmoe.limits import usable_cpus
from vismmoe.models.products import product
from vismmoe.talk import table

HIDDEN, WIDTH = 2048, 768
SHAPES = {"gate_up": (2 * WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}  # (out, in)
BYTES = 1 << 30  # all weights together
TURNS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype: torch.dtype = getattr(torch, given.dtype)
    rows = []
    with torch.inference_mode():
        for name, shape in SHAPES.items():
            for transposed in (True, False):
                times = [f"{each:.2f}" for each in measure(shape, dtype, transposed)]
                rows.append((name, "transposed" if transposed else "straight", *times))
    print(f"{given.dtype}, {given.threads} threads")
    print(table(rows, ("weight", "as it lies", "linear", "here", "sum")))


def measure(shape: tuple[int, int], dtype: torch.dtype, transposed: bool) -> tuple[float, float, float]:
    """Milliseconds of `linear`, of ours and of adding the bytes up."""
    out, length = shape
    count = BYTES // (out * length * dtype.itemsize)
    held = torch.empty(count, *((length, out) if transposed else shape), dtype=dtype)
    held[:] = torch.randn(held.shape[1:])
    turn = [held[place] for place in torch.randperm(count).tolist()]
    weights = [weight.t() for weight in turn] if transposed else turn
    row = torch.randn(1, length).to(dtype)
    return (
        best(lambda weight: functional.linear(row, weight), weights),
        best(lambda weight: product(row, weight), weights),
        best(lambda weight: weight.view(torch.int64).sum(), turn),
    )


def best(run: Callable[[Tensor], object], weights: Sequence[Tensor]) -> float:
    times = []
    for _ in range(TURNS):
        began = time.perf_counter()
        for weight in weights:
            run(weight)
        times.append((time.perf_counter() - began) / len(weights) * 1e3)
    return min(times)


if __name__ == "__main__":
    main()
