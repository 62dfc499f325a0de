"""One arm, in a process of its own: `python -m vismmoe.bench.arm SPEC.json` loads, answers once, prints one object."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vismmoe.bench.replay import Replay
    from vismmoe.models.checkpoint import Checkpoint

OURS = ("resident", "lru", "next-gate", "predictor")
BASELINES = ("accelerate-disk", "mmap")
CONTEXT_SLACK_TOKENS = 64


@dataclass(frozen=True)
class ArmSpec:
    """What one process does."""

    name: str  # of OURS or BASELINES
    model: str  # checkpoint folder
    image: str  # "": no image
    image_scale: int  # pictures are enlarged by this before the processor sees them
    prompt: str
    tokens: int  # to generate
    device_memory: int | None  # bytes; of OURS only
    prefix_layers: int | None
    keep_ratio: float = 1.0
    readers: int = 1
    threads: int | None = None
    vision: str = "resident"
    replay: str = ""  # file; "": the model routes for itself
    copies: str = ""  # folder of Accelerate's copy
    predictor: str = ""  # artifact or registry name, when nothing is replayed

    @classmethod
    def read(cls, path: Path) -> ArmSpec:
        value = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{field.name: value[field.name] for field in fields(cls)})

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class ArmResult:
    """What one process measured. A request ends with its last token; loading comes before it and is told apart."""

    decode_tokens_per_s: float
    prefill_s: float  # from the request to its first token, vision included
    load_s: float  # Python's modules are there before it begins
    load_bytes: int  # from disk
    prefill_bytes: int
    decode_bytes: int
    stall_ms: float | None  # None: this system does not tell
    decode_p50_ms: float
    decode_p95_ms: float
    prefill_stall_ms: float
    hit_rate: float | None
    peak_rss_bytes: int
    planned_bytes: int | None
    peak_bytes: int | None
    slabs: int
    tokens: int


def main(words: list[str]) -> int:
    results = sys.stdout
    sys.stdout = sys.stderr  # libraries that print must not spoil the results
    run(ArmSpec.read(Path(words[0])), results)
    return 0


def run(spec: ArmSpec, results: IO[str]) -> None:
    """Measure, and print the result as one JSON object."""
    measured = _run_ours(spec) if spec.name in OURS else _run_baseline(spec)
    print(json.dumps(asdict(measured)), file=results, flush=True)


def _run_ours(spec: ArmSpec) -> ArmResult:
    from vismmoe.bench.hooks import ReplayedRouters, StepClock, bytes_from_disk
    from vismmoe.bench.replay import Replay
    from vismmoe.config import EngineConfig
    from vismmoe.engine import Engine, Request
    from vismmoe.models.checkpoint import open_checkpoint

    _import_libraries(spec.model)
    started, before = time.perf_counter(), bytes_from_disk()
    config = EngineConfig(
        model=spec.model,
        device="cpu",
        device_memory=None if spec.name == "resident" else spec.device_memory,
        prefix_layers=spec.prefix_layers,
        readers=spec.readers,
        vision="streamed" if spec.vision == "streamed" else "resident",
        threads=spec.threads,
        prefetch=spec.name in ("next-gate", "predictor"),
        eviction="lru" if spec.name == "lru" else "lfu",
    )
    image = _image(spec)
    replay = Replay.load(Path(spec.replay)) if spec.replay else None
    checkpoint = open_checkpoint(spec.model)
    guide = _guide(spec, checkpoint, replay)
    size = image.size if image is not None else (32, 32)
    with Engine.load(config, guide, image_size=size, context_tokens=_context(spec, checkpoint, image)) as engine:
        _bind(guide, engine)
        clock = StepClock(engine.model)
        if replay is not None:
            ReplayedRouters(engine.model, checkpoint.family, replay, guide if spec.replay else None)
        loaded, loaded_bytes = time.perf_counter(), bytes_from_disk()
        clock.mark()
        result = engine.generate(
            Request(
                images=() if image is None else (image,),
                prompt=spec.prompt,
                max_new_tokens=spec.tokens,
                keep_ratio=spec.keep_ratio,
            )
        )
        report = result.to_json()
    phases = report["experts"]
    return _result(
        clock,
        load_s=loaded - started,
        load_bytes=loaded_bytes - before,
        stall_ms=phases["prefill"]["stall_ms"] + phases["decode"]["stall_ms"],
        prefill_stall_ms=phases["prefill"]["stall_ms"],
        hit_rate=phases["decode"]["hit_rate"],
        planned=report["memory"]["device_planned_bytes"],
        peak=report["memory"]["device_peak_bytes"],
        slabs=phases["slabs"],
    )


def _run_baseline(spec: ArmSpec) -> ArmResult:
    import torch

    from vismmoe.bench.hooks import ReplayedRouters, StepClock, bytes_from_disk
    from vismmoe.bench.replay import Replay
    from vismmoe.bench.systems import accelerate_model, mapped_model
    from vismmoe.memory import arithmetic_threads
    from vismmoe.models.checkpoint import open_checkpoint
    from vismmoe.models.generation import greedy_config, stop_tokens
    from vismmoe.models.load import load_processor
    from vismmoe.models.prompt import encode

    _import_libraries(spec.model)
    started, before = time.perf_counter(), bytes_from_disk()
    checkpoint = open_checkpoint(spec.model)
    torch.set_num_threads(spec.threads or arithmetic_threads(checkpoint.layout.expert_bytes))
    processor = load_processor(checkpoint.folder, checkpoint.family)
    model: Any
    model = mapped_model(checkpoint) if spec.name == "mmap" else accelerate_model(checkpoint, Path(spec.copies))
    image = _image(spec)
    clock = StepClock(model)
    if spec.replay:
        ReplayedRouters(model, checkpoint.family, Replay.load(Path(spec.replay)), None)
    prompt = encode(processor, checkpoint.config, checkpoint.family, [] if image is None else [image], spec.prompt)
    loaded, loaded_bytes = time.perf_counter(), bytes_from_disk()
    clock.mark()
    with torch.inference_mode():
        model.generate(
            **prompt.inputs, generation_config=greedy_config(stop_tokens(checkpoint, processor), processor, spec.tokens)
        )
    return _result(clock, load_s=loaded - started, load_bytes=loaded_bytes - before)


def _result(
    clock: Any,
    *,
    load_s: float,
    load_bytes: int,
    stall_ms: float | None = None,
    prefill_stall_ms: float = 0.0,
    hit_rate: float | None = None,
    planned: int | None = None,
    peak: int | None = None,
    slabs: int = 0,
) -> ArmResult:
    import statistics

    from vismmoe.memory import process_peak_bytes

    seconds, disk = clock.seconds, clock.bytes
    steps = [(after - start) * 1e3 for start, after in pairwise(seconds[1:])] or [0.0]
    spent = seconds[-1] - seconds[1]
    return ArmResult(
        decode_tokens_per_s=(len(seconds) - 2) / spent if spent else 0.0,
        prefill_s=seconds[1] - seconds[0],
        load_s=load_s,
        load_bytes=load_bytes,
        prefill_bytes=disk[1] - disk[0],
        decode_bytes=disk[-1] - disk[1],
        stall_ms=stall_ms,
        decode_p50_ms=statistics.median(steps),
        decode_p95_ms=sorted(steps)[min(len(steps) - 1, round(0.95 * len(steps)))],
        prefill_stall_ms=prefill_stall_ms,
        hit_rate=hit_rate,
        peak_rss_bytes=process_peak_bytes(),
        planned_bytes=planned,
        peak_bytes=peak,
        slabs=slabs,
        tokens=len(seconds) - 1,
    )


def _import_libraries(model: str) -> None:
    """The modules that run this model: seconds of Python, the same for all arms and no part of loading a checkpoint."""
    from transformers import AutoProcessor, AutoTokenizer  # noqa: F401

    from vismmoe.models.skeleton import named_class, read_config

    named_class(read_config(Path(model))[1].model_class)


def _image(spec: ArmSpec) -> Any:
    if not spec.image:
        return None
    from vismmoe.images import load_images

    (image,) = load_images((spec.image,))
    return image.resize((image.width * spec.image_scale, image.height * spec.image_scale))


def _context(spec: ArmSpec, checkpoint: Checkpoint, image: Any) -> int:
    """Prompt and answer, with room for the template's words."""
    from vismmoe.models.footprint import image_limits, visual_tokens

    visual = 0 if image is None else visual_tokens(image_limits(checkpoint), image.size)
    return visual + len(spec.prompt) + CONTEXT_SLACK_TOKENS + spec.tokens


def _guide(spec: ArmSpec, checkpoint: Checkpoint, replay: Replay | None) -> Any:
    """The predictor of this arm; under a replay what was logged, at the price of a predictor of this model's size."""
    if spec.name not in ("next-gate", "predictor"):
        return None
    if replay is not None:
        from vismmoe.bench.replay import ReplayedPredictor

        return ReplayedPredictor(spec.name, replay.scores[spec.name], checkpoint.spec.moe_layers)
    if spec.name == "next-gate":
        return _GateLater()
    from vismmoe.predictors import build_predictor
    from vismmoe_deploy.resolve import resolve

    return build_predictor(resolve(spec.predictor, None, checkpoint.spec).artifact)


class _GateLater:
    """Next gate of a model that is not loaded yet."""

    kind = "next-gate"
    window = 5

    def __init__(self) -> None:
        self.gate: Any = None

    def predict(self, state: Any) -> Any:
        return self.gate.predict(state)


def _bind(guide: Any, engine: Any) -> None:
    """Hand over what exists once the model is loaded."""
    from vismmoe.bench.replay import ReplayedPredictor
    from vismmoe.predictors.next_gate import NextGate

    if guide is None:
        return
    gate = NextGate(engine.spec, engine.routers, engine.router_norms, guide.window)
    if isinstance(guide, _GateLater):
        guide.gate = gate
    elif isinstance(guide, ReplayedPredictor):
        guide.priced = gate if guide.kind == "next-gate" else _untrained(engine, gate)
    else:
        guide.bind(gate)


def _untrained(engine: Any, gate: Any) -> Any:
    """A predictor of the default make and this model's size: it costs what a trained one costs."""
    from vismmoe.predictors import LookaheadNet, LookaheadPredictor, PredictorConfig

    config = PredictorConfig(window=gate.window)
    folded = LookaheadNet(config, engine.spec, folded=True)
    folded.load_state_dict(LookaheadNet(config, engine.spec).folded_weights())
    return LookaheadPredictor(folded, engine.spec, gate)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
