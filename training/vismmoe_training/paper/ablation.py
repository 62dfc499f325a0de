"""The published ablation on this machine: under a small budget, one part after the other is switched on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from vismmoe.config import EngineConfig, PlanConfig, resolve_model
from vismmoe.engine import Engine, Request, plan_for
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.predictors import LookaheadNet, LookaheadPredictor, NextGate
from vismmoe.simulate.agreement import compare_with_runtime
from vismmoe_training.arms import Arm, answer_all, read_questions
from vismmoe_training.paper.scale import ANSWER_TOKENS, DTYPE, Paper

SLOW_DISK = 20_000_000  # bytes a second: the page cache would answer faster than a thread wakes up
STEPS = ("base", "+ compression", "+ prediction and prefetch", "+ pipeline")


@dataclass(frozen=True)
class Step:
    """Means of a question."""

    ms: float
    stall_ms: float
    mebibytes: float
    hit_rate: float


def ablate(paper: Paper, seed: int, net: LookaheadNet, default: str) -> Mapping[str, Step]:
    """base: on demand, LRU; then half the tokens (`default` chooses them); then the predictor; then our eviction."""
    budget = small_budget(paper.model)
    questions = read_questions(paper.scenes(seed, "usual"), paper.scale.ablation_questions)
    found = {}
    for number, name in enumerate(STEPS):
        config = EngineConfig(
            model=paper.model,
            device="cpu",
            threads=1,
            compute_dtype=DTYPE,
            device_memory=budget,
            prefetch=number >= 2,
            eviction="lfu" if number == 3 else "lru",
        )
        arm = Arm(name, keep_ratio=0.5 if number else 1.0, compressor=default)
        result = answer_all(arm, partial(load_guided, config, net), questions, ANSWER_TOKENS)
        both, asked = result.prefill + result.decode, len(questions)
        found[name] = Step(
            result.total_ms / asked, both.stall_ms / asked, both.bytes_loaded / asked / 2**20, both.hit_rate
        )
    return found


def simulator_errors(paper: Paper, seed: int) -> Mapping[str, float]:
    """Share by which the simulated stall is off the measured one, by rule and budget, reads slowed to a known rate."""
    asked = read_questions(paper.scenes(seed, "usual"), paper.scale.simulator_questions)
    requests = [Request((one.image,), one.prompt, ANSWER_TOKENS, 0.5) for one in asked]
    config = EngineConfig(model=paper.model, device="cpu", threads=1, disk_rate=SLOW_DISK)
    found = compare_with_runtime(config, requests)
    return {f"{one.predictor}, {one.budget_bytes / 2**20:.0f} MiB": one.error for one in found}


def small_budget(model: str, dtype: Literal["auto", "float32"] = DTYPE) -> int:
    """A quarter of the way from the least that runs to everything resident, in bytes, as in the demo."""
    plan = plan_for(PlanConfig(model=model, device="cpu", compute_dtype=dtype))
    return plan.minimum_bytes + (plan.all_resident_bytes - plan.minimum_bytes) // 4


def load_guided(config: EngineConfig, net: LookaheadNet) -> Engine:
    """The engine of `config`, guided by `net` where it prefetches at all."""
    if not config.prefetch:
        return Engine.load(config)
    guide = LookaheadPredictor(net, open_checkpoint(resolve_model(config.model)).spec)
    engine = Engine.load(config, guide)
    guide.bind(NextGate(engine.spec, engine.routers, engine.router_norms, guide.window))
    return engine
