"""Exclusive or inclusive: what the tier between disk and device should keep. Measured on logs of a model.

    python benchmarks/host_tier.py --traces DIR          # logs of `vismmoe collect`

Exclusive: what leaves the slabs goes to host memory, what goes up leaves it. Inclusive: whatever is read from disk is
kept in host memory too. Both make room by how often experts were used; slabs are governed by lfu in both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eviction import Forward, forwards_of

from vismmoe.config import REFERENCE_MODEL, EngineConfig
from vismmoe.engine import Engine
from vismmoe.experts.cache import ExpertCache
from vismmoe.talk import table
from vismmoe.types import ExpertId


def disk_reads(forwards: Sequence[Forward], slabs: int, copies: int, top_k: int, exclusive: bool) -> float:
    """Experts read from disk per decoded token."""
    cache = ExpertCache(slabs, top_k)
    host: set[ExpertId] = set()
    reads = tokens = 0

    def keep(expert: ExpertId) -> None:
        if expert in host or not copies:
            return
        if len(host) >= copies:
            least = min(host, key=cache.frequency)
            if cache.frequency(least) >= cache.frequency(expert):
                return
            host.discard(least)
        host.add(expert)

    for forward in forwards:
        tokens += forward.decode and forward.first
        if forward.first:
            cache.begin_step()
        held = []
        for expert in forward.needed:
            passing = not forward.decode and expert not in forward.lasting
            if cache.lookup(expert, passing) is not None:
                held.append(expert)
                continue
            while (placement := cache.require(expert, passing)) is None:
                cache.release([held.pop(0)])
            cache.landed(expert)
            held.append(expert)
            if placement.evicted is not None and exclusive:
                keep(placement.evicted)
            if expert in host:
                if exclusive:
                    host.discard(expert)
            else:
                reads += forward.decode
                if not exclusive:
                    keep(expert)
        cache.expire_layer(forward.layer)
        if not forward.decode:
            cache.begin_step()
    return reads / max(1, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Exclusive against inclusive host tier on routing logs.")
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help="folders that `vismmoe collect` wrote")
    parser.add_argument("--model", default=REFERENCE_MODEL, help="the model that they are of")
    parser.add_argument("--slabs", nargs="+", type=int, default=[64, 96, 128])
    parser.add_argument("--copies", nargs="+", type=int, default=[0, 32, 64, 128, 256])
    asked = parser.parse_args()
    with Engine.load(EngineConfig(model=asked.model)) as engine:
        forwards, top_k = forwards_of(asked.traces, engine), engine.spec.top_k
    rows = []
    for slabs in asked.slabs:
        for name, exclusive in (("exclusive", True), ("inclusive", False)):
            cells = [f"{disk_reads(forwards, slabs, copies, top_k, exclusive):.1f}" for copies in asked.copies]
            rows.append((f"{slabs} slabs, {name}", *cells))
    print("Experts read from disk per decoded token, by copies that host memory has room for\n")
    print(table(rows, ("", *map(str, asked.copies))))


if __name__ == "__main__":
    main()
