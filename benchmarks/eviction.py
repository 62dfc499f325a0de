"""Which eviction policy hits most: logs of a model, replayed through the runtime's own cache at several slab counts.

    python benchmarks/eviction.py --traces DIR          # logs of `vismmoe collect`

Experts are loaded on demand only. `flooded` is lfu whose prefills go through the cache like everything else; `belady`
knows the future and may keep an expert out of the slabs altogether, so nothing can miss less.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vismmoe.config import REFERENCE_MODEL, EngineConfig
from vismmoe.engine import Engine
from vismmoe.experts.cache import ExpertCache
from vismmoe.experts.policies import POLICIES
from vismmoe.talk import table
from vismmoe.trace import read_traces
from vismmoe.types import ExpertId

FLOODED = "flooded"


@dataclass(frozen=True)
class Forward:
    """What one forward needs of one layer."""

    decode: bool
    first: bool  # layer of its forward
    layer: int
    needed: tuple[ExpertId, ...]
    lasting: frozenset[ExpertId]  # experts of its last token


def forwards_of(folders: Sequence[Path], engine: Engine) -> list[Forward]:
    """The log's rows of the layers after the prefix, in the order in which they ran."""
    traces, spec = read_traces(folders), engine.spec
    deep = spec.moe_layers[engine.prefix_layers :]
    routers = {layer: engine.routers[layer] for layer in deep}
    found = []
    for row in range(len(traces)):
        layer = int(traces.layer[row])
        if layer not in routers:
            continue
        needed = tuple(ExpertId(layer, e) for e in traces.counts[row].nonzero().flatten().tolist())
        last = (routers[layer] @ traces.token[row].float()).topk(spec.top_k).indices.tolist()
        lasting = frozenset(ExpertId(layer, e) for e in last) & frozenset(needed)
        found.append(Forward(bool(traces.decode[row]), layer == deep[0], layer, needed, lasting))
    return found


def hit_rates(forwards: Sequence[Forward], slabs: int, policy: str, top_k: int) -> tuple[float, float]:
    """(prefill, decode) share of accesses that find their expert in a slab."""
    flooded = policy == FLOODED
    cache = ExpertCache(slabs, top_k, POLICIES["lfu" if flooded else policy])
    hits, accesses = [0, 0], [0, 0]
    cycle = sum(len(f.needed) for f in forwards if f.decode) / max(1, sum(f.first for f in forwards if f.decode))
    for forward in forwards:
        if forward.first:
            cache.begin_step()
        waiting = []
        for expert in forward.needed:
            passing = not (forward.decode or flooded) and expert not in forward.lasting
            found = cache.lookup(expert, passing) is not None
            hits[forward.decode] += found
            if not found:
                waiting.append((expert, passing))
        accesses[forward.decode] += len(forward.needed)
        _load(cache, waiting, [e for e in forward.needed if e in cache])
        cache.expire_layer(forward.layer)
        if not forward.decode or slabs < cycle:
            cache.begin_step()
    return hits[0] / accesses[0], hits[1] / accesses[1]


def _load(cache: ExpertCache, waiting: list[tuple[ExpertId, bool]], held: list[ExpertId]) -> None:
    """In waves, as LayerDemand does: what has run makes room for the next."""
    while waiting:
        placement = cache.require(*waiting[0])
        if placement is None:
            cache.release([held.pop(0)])
            continue
        expert, _ = waiting.pop(0)
        cache.landed(expert)
        held.append(expert)


def belady(forwards: Sequence[Forward], slabs: int) -> tuple[float, float]:
    """The same with perfect foresight: what is needed latest is not kept."""
    sequence = [(expert, forward.decode) for forward in forwards for expert in forward.needed]
    places: dict[ExpertId, list[int]] = defaultdict(list)
    for index, (expert, _) in enumerate(sequence):
        places[expert].append(index)
    hits, accesses = [0, 0], [0, 0]
    held: dict[ExpertId, int] = {}  # -> its next use
    latest: list[tuple[int, ExpertId]] = []
    for index, (expert, decode) in enumerate(sequence):
        accesses[decode] += 1
        hits[decode] += expert in held
        uses = places[expert]
        after = bisect.bisect_right(uses, index)
        following = uses[after] if after < len(uses) else len(sequence) + index
        held[expert] = following
        heapq.heappush(latest, (-following, expert))
        while len(held) > slabs:
            use, candidate = heapq.heappop(latest)
            if held.get(candidate) == -use:
                del held[candidate]
    return hits[0] / accesses[0], hits[1] / accesses[1]


def rows(forwards: Sequence[Forward], slab_counts: Sequence[int], top_k: int) -> Iterator[dict[str, Any]]:
    for name in (*POLICIES, FLOODED, "belady"):
        for slabs in slab_counts:
            found = belady(forwards, slabs) if name == "belady" else hit_rates(forwards, slabs, name, top_k)
            yield {"policy": name, "slabs": slabs, "prefill": found[0], "decode": found[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Hit rates of eviction policies on routing logs.")
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help="folders that `vismmoe collect` wrote")
    parser.add_argument("--model", default=REFERENCE_MODEL, help="the model that they are of")
    parser.add_argument("--slabs", nargs="+", type=int, default=[32, 64, 96, 128, 256, 512])
    parser.add_argument("--json", type=Path, help="write the rows here too")
    asked = parser.parse_args()
    with Engine.load(EngineConfig(model=asked.model)) as engine:
        forwards, spec = forwards_of(asked.traces, engine), engine.spec
    found = list(rows(forwards, asked.slabs, spec.top_k))
    deep = len({forward.layer for forward in forwards})
    steps = sum(forward.first and forward.decode for forward in forwards)
    print(
        f"{sum(f.first and not f.decode for f in forwards)} prefills and {steps} decoded tokens through {deep} layers "
        f"of {spec.num_experts} experts, top-{spec.top_k}; hit rate prefill / decode\n"
    )
    by_policy = {name: [f"{r['prefill']:.3f} / {r['decode']:.3f}" for r in found if r["policy"] == name]
                 for name in dict.fromkeys(r["policy"] for r in found)}  # fmt: skip
    print(table([(name, *cells) for name, cells in by_policy.items()], ("slabs", *map(str, asked.slabs))))
    if asked.json:
        asked.json.write_text(json.dumps({"rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
