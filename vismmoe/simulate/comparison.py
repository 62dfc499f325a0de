"""Every asked rule on every asked device: what `vismmoe simulate` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from vismmoe.config import SimulateConfig
from vismmoe.predictors import LookaheadPredictor
from vismmoe.simulate.foresight import RULES, WINDOW, Foresight, LearnedForesight, rule_foresight
from vismmoe.simulate.profile import read_profile
from vismmoe.simulate.replay import Setting, belady_limit, simulate
from vismmoe.simulate.result import SimulationResult
from vismmoe.sizes import format_size
from vismmoe.talk import table
from vismmoe.trace import TraceSet, read_traces
from vismmoe.types import ModelSpec

Learned = Callable[[str, ModelSpec], LookaheadPredictor]  # from a folder or a registered name to its predictor


def compare_rules(config: SimulateConfig, learned: Learned) -> list[SimulationResult]:
    """Device by device and number of slots by number of slots, Belady's limit last of each.

    Raises CorpusError, ArtifactError, UsageError for what cannot be read, BudgetError for what does not fit a device.
    """
    profiles = [read_profile(file) for file in config.profile]
    traces = read_traces(config.traces)
    foresights = [_foresight(source, traces, learned) for source in config.predictor]
    settings = [
        Setting.of(
            traces,
            profile,
            slots=slots,
            pinned_layers=config.pinned_layers,
            expert_bytes=config.expert_bytes,
            limit=config.limit,
            readers=config.readers,
            lookahead_top=config.lookahead_top,
        )
        for profile in profiles
        for slots in config.slots or (None,)
    ]
    return [result for setting in settings for result in _rules(setting, config.policy, foresights)]


def simulation_json(results: Sequence[SimulationResult]) -> dict[str, Any]:
    """The object that `simulate --json` prints."""
    return {"rows": [result.to_json() for result in results]}


def simulation_report(results: Sequence[SimulationResult]) -> str:
    """For people: one table for each device and number of slots."""
    parts = []
    for _, group in groupby(results, key=lambda result: (result.profile, result.slots)):
        parts.append(_table(list(group)))
    last = (
        "hit: needed experts that had a slab, or were on their way into one; stall: time that a request waited for\n"
        "experts; MiB: loaded for a request, on demand and ahead; belady: its evictions know the future and its loads\n"
        "come as early as the device can bring them, which no rule can beat"
    )
    return "\n\n".join((*parts, last))


def _rules(
    setting: Setting, policies: Iterable[str], foresights: Sequence[Foresight | None]
) -> Iterator[SimulationResult]:
    for foresight in foresights:
        for policy in policies:
            yield simulate(setting, policy=policy, foresight=foresight)
    yield belady_limit(setting)


def _foresight(source: str, traces: TraceSet, learned: Learned) -> Foresight | None:
    if source == "none":
        return None
    if source in RULES:
        return rule_foresight(source, traces, min(WINDOW, traces.header.window))
    return LearnedForesight(learned(source, traces.header.spec))


def _table(results: Sequence[SimulationResult]) -> str:
    first = results[0]
    title = (
        f"{first.profile}: {first.slots} slots and {first.pinned_layers} pinned layers, experts of "
        f"{format_size(first.expert_bytes)}; {first.requests} requests, {first.decoded_tokens} decoded tokens"
    )
    head = ("predictor", "policy", "hit prefill", "decode", "MiB", "stall ms", "in prefill", "prefill ms", "tokens/s")
    return f"{title}\n{table([_cells(result) for result in results], head)}"


def _cells(result: SimulationResult) -> tuple[str, ...]:
    count = max(1, result.requests)
    return (
        result.predictor,
        result.policy,
        f"{result.prefill.hit_rate:.1%}",
        f"{result.decode.hit_rate:.1%}",
        f"{result.bytes_loaded / count / 2**20:.2f}",
        f"{result.stall_ms / count:.2f}",
        f"{result.prefill.stall_ms / count:.2f}",
        f"{result.prefill_ms / count:.1f}",
        f"{result.tokens_per_s:.1f}",
    )
