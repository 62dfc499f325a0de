"""How many questions a minute an offloaded model answers one by one, and in batches that share the loads of experts.

    python benchmarks/batched_eval.py --questions 8 --batch-size 8 --disk 20MB

--disk slows every read of experts down to so many bytes a second, since a page cache would hide what an evaluation of
a model that does not fit into memory waits for. The budget is a quarter of the way from the least that runs to
everything resident, as in `make demo`.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Sequence
from typing import Any

from vismmoe.config import REFERENCE_MODEL, EngineConfig, PlanConfig
from vismmoe.engine import Engine, GenerationResult, Request, plan_for
from vismmoe.experts.store import ExpertStore
from vismmoe.sizes import format_size, parse_size
from vismmoe.talk import table
from vismmoe_training.scenes.benchmarks import pictures_of, pope_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=REFERENCE_MODEL, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--questions", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--disk", metavar="SIZE", help="bytes a second that a read may take; default: as fast as it is")
    given = parser.parse_args()
    plan = plan_for(PlanConfig(model=given.model, device="cpu"))
    budget = plan.minimum_bytes + (plan.all_resident_bytes - plan.minimum_bytes) // 4
    config = EngineConfig(model=given.model, device="cpu", device_memory=budget, direct_io="off")
    if given.disk:
        slow_down(parse_size(given.disk))
    requests = questions(given.questions)
    runs = [timed(config, requests, size) for size in (1, given.batch_size)]
    rows = [
        (f"batches of {size}", f"{60 * len(requests) / seconds:.1f}", f"{seconds:.1f}", format_size(loaded(results)))
        for size, (seconds, results) in zip((1, given.batch_size), runs, strict=True)
    ]
    print(table(rows, ("", "questions/min", "s", "loaded")))
    same = [one.text for one in runs[0][1]] == [one.text for one in runs[1][1]]
    print(f"\n{runs[0][0] / runs[1][0]:.2f} times as many; the answers are {'the same' if same else 'NOT the same'}")
    disk = f"reads slowed down to {given.disk} a second" if given.disk else "reads as fast as they are"
    print(f"{given.questions} questions, budget {format_size(budget)}, {disk}, {platform.processor() or 'CPU'}")


def questions(count: int) -> list[Request]:
    """Pictures of their own, one yes/no question each."""
    import numpy as np

    rng = np.random.default_rng(5)
    rows = pope_rows(pictures_of(rng), rng, count)
    return [Request((row["image"],), row["question"], 8) for row in rows[::6]]


def timed(config: EngineConfig, requests: Sequence[Request], size: int) -> tuple[float, list[GenerationResult]]:
    """Seconds, without loading the model, and the results."""
    results: list[GenerationResult] = []
    with Engine.load(config) as engine:
        started = time.perf_counter()
        for start in range(0, len(requests), size):
            results += engine.generate_together(requests[start : start + size])
        return time.perf_counter() - started, results


def loaded(results: Sequence[GenerationResult]) -> int:
    """Bytes of experts that were copied into slabs."""
    return sum(told.experts.prefill.bytes_loaded + told.experts.decode.bytes_loaded for told in results)


def slow_down(bytes_per_second: int) -> None:
    """Every read of experts takes as long as a disk of this speed would."""
    read = ExpertStore.read_batch

    def slow(self: ExpertStore, items: Sequence[Any], *args: Any, **more: Any) -> Any:
        started = time.perf_counter()
        out = read(self, items, *args, **more)
        wanted = sum(len(memory) for _, memory in items) / bytes_per_second
        time.sleep(max(0.0, wanted - (time.perf_counter() - started)))
        return out

    ExpertStore.read_batch = slow  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
