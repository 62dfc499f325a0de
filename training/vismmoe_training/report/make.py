"""Collects the sections of a report, writes the page and its pictures, and logs both to MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vismmoe.config import EngineConfig, ReportConfig, in_clone, resolve_model
from vismmoe.engine import Engine
from vismmoe.errors import CheckpointError, CorpusError, UsageError, VisMMoEError
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.predictors import build_predictor
from vismmoe.simulate import (
    LearnedForesight,
    Setting,
    SimulationResult,
    belady_limit,
    read_profile,
    rule_foresight,
    simulate,
)
from vismmoe.simulate.foresight import Foresight
from vismmoe.simulate.result import Span
from vismmoe.simulate.transfers import Read
from vismmoe.talk import table
from vismmoe.trace import TraceSet, write_atomically
from vismmoe.tracking import talking_to
from vismmoe.types import ModelSpec
from vismmoe_training.corpus import open_corpus
from vismmoe_training.data import LookaheadData
from vismmoe_training.evaluate_predictors import Recall, compare_rules, recall_table, scoring_rules
from vismmoe_training.registry import TrackedRun
from vismmoe_training.report import figures
from vismmoe_training.report.observe import KINDS, Observation, observe
from vismmoe_training.report.page import Picture, Section, page
from vismmoe_training.report.sources import Sources, read_sources, read_study
from vismmoe_training.row_table import RowTable
from vismmoe_training.tune_front import RULE

PAGE = "report.html"
_SHOWN_PICTURES = 3
_SLOT_SHARES = (0.0625, 0.125, 0.25, 0.5, 0.75)  # of the deeper layers' experts


@dataclass(frozen=True)
class ReportSummary:
    """What `vismmoe report` says at its end."""

    page: Path
    pictures: int
    lacking: tuple[str, ...]
    logged: str

    def __str__(self) -> str:
        lines = [f"{self.page}: {self.pictures} pictures", *(f"  not in it: {line}" for line in self.lacking)]
        return "\n".join((*lines, self.logged)) if self.logged else "\n".join(lines)


def make_report(config: ReportConfig) -> ReportSummary:
    """Raises CorpusError, ArtifactError, CheckpointError and UsageError for what is named and cannot be used."""
    output = Path(config.output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {config.output} is a file: name a folder.")
    sources = read_sources(config)
    sections = list(_sections(config, sources))
    text = page("VisMMoE report", _facts(config, sources), sections)
    pictures = [picture for section in sections for picture in section.pictures]
    try:
        (output / "pictures").mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            write_atomically(output / "pictures" / f"{picture.name}.svg", picture.svg)
        write_atomically(output / PAGE, text.encode())
    except OSError as error:
        raise UsageError(f"The report cannot be written to {output}: {error.strerror}.") from None
    lacking = tuple(f"{s.title}: {s.text}" for s in sections if not s.pictures and not s.numbers)
    return ReportSummary(output / PAGE, len(pictures), lacking, _log(config, output) if config.log else "")


def _sections(config: ReportConfig, sources: Sources) -> Iterator[Section]:
    seen = _observed(config, sources)
    if isinstance(seen, Observation):
        yield from _routing(seen)
    else:
        yield Section("Which experts text and pictures ask for", seen)
    yield from _foresight(sources)
    yield _front(config, sources)
    yield _timeline(config, sources)


def _facts(config: ReportConfig, sources: Sources) -> list[str]:
    facts = []
    if sources.traces is not None:
        header = sources.traces.header
        facts.append(
            f"Routing logs: {', '.join(config.traces)}: {len(sources.traces.requests)} requests, {len(sources.traces)} "
            f"rows, {header.keep_ratio:.0%} of the visual tokens kept ({header.compressor}), {_model(header.spec)}"
        )
    if sources.artifact is not None:
        artifact = sources.artifact
        facts.append(f"Predictor: {sources.artifact_name}: {artifact.kind}, {artifact.window} layers ahead")
        if sources.traces is None:
            facts.append(f"Made for {_model(artifact.spec)}")
    if sources.run:
        facts.append("Run: " + ", ".join(f"{key} {value}" for key, value in sorted(sources.run.items())))
    return facts


def _model(spec: ModelSpec) -> str:
    return f"{spec.family}, {len(spec.moe_layers)} layers of {spec.num_experts} experts, top {spec.top_k}"


# ---- what the model does


def _observed(config: ReportConfig, sources: Sources) -> Observation | str:
    """A look at the model itself, or why there is none."""
    spec = sources.traces.header.spec if sources.traces else sources.artifact.spec if sources.artifact else None
    place = config.images if Path(config.images).exists() else str(in_clone(config.images) or config.images)
    try:
        checkpoint = open_checkpoint(resolve_model(config.model))
        corpus = open_corpus(place, "Describe the image.")
    except (CheckpointError, CorpusError) as error:
        return f"Shown when the model and pictures are at hand (--model, --images). {error}"
    if spec is not None and checkpoint.spec != spec:
        return (
            f"{config.model} is another model than the one that was logged: name that one with --model, and pictures "
            "with --images."
        )
    items = [item for _, item in zip(range(config.limit), corpus, strict=False)]
    questions = [(item.image, item.prompt) for item in items if isinstance(item.image, Path)]
    if not questions:
        return f"{config.images} holds no picture files: name a folder of them with --images."
    try:
        with Engine.load(EngineConfig(model=config.model, device="cpu")) as engine:
            return observe(engine, questions, config.keep_ratio, config.compressor)
    except VisMMoEError as error:
        return f"The model could not be watched: {error}"


def _routing(seen: Observation) -> Iterator[Section]:
    requests = len(seen.patches)
    rows = [
        (layer, *(f"{float(seen.coverage(kind)[row]):.1%}" for kind in KINDS)) for row, layer in enumerate(seen.layers)
    ]
    rows.append(("all", *(f"{float(seen.coverage(kind).mean()):.1%}" for kind in KINDS)))
    yield Section(
        "Which experts text and pictures ask for",
        f"{requests} questions about {requests} pictures, asked with all visual tokens and with {seen.keep_ratio:.0%} "
        f"of them ({seen.compressor}). Top-20 coverage is the share of a request's choices in one layer that its own "
        "twenty busiest experts take; published for Qwen3-VL-30B-A3B: text 76.9 %, raw visual 45.4 %, pruned 60.3 %.",
        [
            Picture(
                "routing",
                figures.svg(figures.routing(seen)),
                "Share of the choices that go to each expert, for text, for all visual tokens and for those kept; rows "
                "are layers, experts are sorted by each request's own use, and the dashed line stands after the "
                "twentieth.",
            ),
            Picture(
                "coverage",
                figures.svg(figures.coverage(seen)),
                "Top-20 coverage of each layer, for the same three kinds.",
            ),
        ],
        table(rows, ("layer", *KINDS)),
    )
    yield Section(
        "How alike layers are",
        "Left, the mean state of the kept visual tokens hardly turns from one layer to the next, which is what lets a "
        "router be asked ahead of time. Right, the experts that two layers ask for under the same number: outside the "
        "diagonal it stays low where an expert's number means nothing in another layer.",
        [
            Picture(
                "similarity",
                figures.svg(figures.similarity(seen)),
                "Cosine between every two layers, of states (left) and of demand by expert number (right).",
            )
        ],
    )
    shown = seen.patches[:_SHOWN_PICTURES]
    yield Section(
        "Which visual tokens are kept",
        "The salient core is kept whatever it costs; of the others those that are salient and ask for few experts "
        "beyond the core's (VisMMoE, section 4.1).",
        [
            Picture(
                "patches",
                figures.svg(figures.kept_patches(shown)),
                "Visual tokens of the core (thick frame), otherwise kept (thin frame) and dropped (crossed out).",
            )
        ],
        table([(p.question, p.answer) for p in shown], ("question", f"answer with {seen.keep_ratio:.0%}")),
    )


# ---- foresight


def _foresight(sources: Sources) -> Iterator[Section]:
    title = "How well experts are foreseen"
    if sources.traces is None:
        if sources.artifact is None or not sources.artifact.metrics.get("held_out"):
            yield Section(
                title, "Shown when routing logs (--traces) or a predictor with measures (--artifact) are named."
            )
            return
        recalls = _told(sources.artifact.metrics["held_out"])
        yield _recall_section(
            title, recalls, "As measured when the predictor was trained, on images that it had not seen."
        )
        return
    data, how = _data(sources)
    if isinstance(data, str):
        yield Section(title, data)
        return
    net = None if sources.artifact is None else build_predictor(sources.artifact).net
    recalls = compare_rules(scoring_rules(net, data), data, detailed=True)
    yield _recall_section(title, recalls, how)


def _recall_section(title: str, recalls: Sequence[Recall], how: str) -> Section:
    pictures = [
        Picture(
            "recall-by-distance",
            figures.svg(figures.recall_by_distance(recalls)),
            "Hot recall@20: of the experts that a layer then used, how many were among the 20 named so many layers "
            "before; the ceiling is the best that 20 names can reach.",
        )
    ]
    if any(recall.phase.startswith("decode, layer ") for recall in recalls):
        pictures.append(
            Picture(
                "recall-by-layer",
                figures.svg(figures.recall_by_layer(recalls)),
                "The same in decode for each layer that foresees, all distances together.",
            )
        )
    numbers = "\n\n".join(recall_table([r for r in recalls if r.k == 20], phase) for phase in ("decode", "prefill"))
    return Section(title, how, pictures, numbers)


def _data(sources: Sources) -> tuple[LookaheadData | str, str]:
    """The rows to measure on, and how they were chosen."""
    assert sources.traces is not None
    traces, told = sources.traces, dict(sources.artifact.training) if sources.artifact else {}
    window = min(sources.artifact.window if sources.artifact else 5, traces.header.window)
    split = [
        told.get(name, default) for name, default in (("val_fraction", 0.15), ("test_fraction", 0.15), ("seed", 0))
    ]
    try:
        data = LookaheadData(RowTable(traces, window), 256, float(split[0]), float(split[1]), int(split[2]))
    except CorpusError as error:
        return f"The logs are too few to hold images out: {error}", ""
    rows = f"{len(data.rows['test'])} rows of images that were held out"
    if not told:
        return data, f"{rows}; frequency was counted on the others. No predictor was named (--artifact)."
    if (told.get("logs.rows"), told.get("logs.items")) == (len(data.table), len(data.side_of)):
        return data, f"{rows} when the predictor was trained; frequency was counted on the others."
    return data, f"{rows} of these logs. The predictor was trained on other logs, which may share images with these."


def _told(measured: dict[str, Any]) -> list[Recall]:
    """Recalls out of an artifact's manifest; what has another form is left out."""
    found = []
    for phase, rules in measured.items():
        for rule, cells in rules.items() if isinstance(rules, dict) else ():
            for name, values in cells.items() if isinstance(cells, dict) else ():
                if not name.startswith("recall@") or not name[7:].isdigit() or not isinstance(values, dict):
                    continue
                for distance, value in values.items():
                    if isinstance(value, int | float) and (distance.isdigit() or distance == "blended"):
                        place = int(distance) if distance.isdigit() else 0
                        found.append(Recall(rule, phase, int(name[7:]), place, float(value), float("nan")))
    return found


# ---- trade-offs and time


def _front(config: ReportConfig, sources: Sources) -> Section:
    title = "What memory and foresight buy"
    if config.study is not None:
        study = read_study(config.storage, config.study)
        if not study.points:
            return Section("The Pareto front of tuning", f"The study {study.name} has no finished trial yet.")
        told = [(f"{x:.3f}", f"{y:.3f}", "<" if (x, y) == study.recommended else "") for x, y in study.front]
        return Section(
            "The Pareto front of tuning",
            f"{len(study.points)} trials of the study {study.name}. No other trial is better than one on the front in "
            f"both; recommended is {RULE}.",
            [
                Picture(
                    "pareto",
                    figures.svg(figures.study_front(study.points, study.front, study.recommended)),
                    "Simulated stall of a request against accuracy on held-out questions.",
                )
            ],
            table(told, ("stall ms", "accuracy", "recommended")),
        )
    if sources.traces is None:
        return Section(title, "Shown when routing logs (--traces) or a tuning study (--study) are named.")
    results = _swept(config, sources.traces, sources)
    rows = [
        (name, r.slots, f"{r.stall_ms / r.requests:.2f}", f"{r.decode.hit_rate:.1%}", f"{r.tokens_per_s:.1f}")
        for name, points in results.items()
        for r in points
    ]
    return Section(
        title,
        f"The logs replayed on the profile {config.profile} with the default eviction rule and more and more slabs. On "
        "the front are the points that no other one beats with as few slabs; the grey line is Belady's limit, which "
        "knows the future.",
        [
            Picture(
                "pareto",
                figures.svg(figures.memory_front(results)),
                "Simulated milliseconds that a request waits for experts, against the memory of the slabs.",
            )
        ],
        table(rows, ("predictor", "slots", "stall ms a request", "decode hits", "tokens/s")),
    )


def _swept(config: ReportConfig, traces: TraceSet, sources: Sources) -> dict[str, list[SimulationResult]]:
    results: dict[str, list[SimulationResult]] = {}
    for share in _SLOT_SHARES:
        setting = _setting(config, traces, share)
        for name, foresight in _foresights(traces, sources).items():
            results.setdefault(name, []).append(simulate(setting, foresight=foresight))
        results.setdefault("perfect, belady", []).append(belady_limit(setting))
    return results


def _setting(config: ReportConfig, traces: TraceSet, share: float | None = None, limit: int | None = None) -> Setting:
    setting = Setting.of(
        traces,
        read_profile(config.profile),
        slots=config.slots,
        expert_bytes=config.expert_bytes,
        limit=limit or config.limit,
    )
    if share is None:
        return setting
    slots = max(1, int(share * len(setting.deep_layers) * setting.spec.num_experts))
    return Setting.of(
        traces, setting.profile, slots=slots, expert_bytes=config.expert_bytes, limit=limit or config.limit
    )


def _foresights(traces: TraceSet, sources: Sources) -> dict[str, Foresight | None]:
    window = min(5, traces.header.window)
    found: dict[str, Foresight | None] = {"on demand": None, "next gate": rule_foresight("next-gate", traces, window)}
    if sources.artifact is not None:
        found["lookahead"] = LearnedForesight(build_predictor(sources.artifact))
    return found


def _timeline(config: ReportConfig, sources: Sources) -> Section:
    title = "One request, from its first layer to its last token"
    if sources.traces is None:
        return Section(title, "Shown when routing logs are named (--traces).")
    traces = sources.traces
    setting = _setting(config, traces, limit=1)
    runs: dict[str, tuple[list[Span], list[Read]]] = {}
    rows = []
    for name, foresight in _foresights(traces, sources).items():
        spans: list[Span] = []
        reads: list[Read] = []
        result = simulate(setting, foresight=foresight, spans=spans, reads=reads)
        runs[name] = (spans, reads)
        both = result.prefill + result.decode
        rows.append(
            (name, f"{result.prefill_ms + result.decode_ms:.1f}", f"{result.stall_ms:.1f}", both.demand_loads,
             both.prefetched, both.prefetched_used)
        )  # fmt: skip
    return Section(
        title,
        f"{traces.requests[0].item}, replayed on the profile {config.profile} with {setting.slots} slabs that begin "
        "empty. Simulated; the simulator shares the runtime's cache and order of events (docs/simulate.md says how "
        "far off it is).",
        [
            Picture(
                "timeline",
                figures.svg(figures.timeline(runs)),
                "What computes, what waits and what is read, on demand and with foresight: left the whole request, "
                "right its first decoded token.",
            )
        ],
        table(rows, ("", "ms", "of them waiting", "loads on demand", "read ahead", "of them used")),
    )


def _log(config: ReportConfig, output: Path) -> str:
    """Into the named run, else into one of its own."""
    if config.run is not None:
        from vismmoe.tracking import tracking_uri

        uri = tracking_uri(config.tracking_uri)
        with talking_to(uri) as client:
            client.log_artifacts(config.run, str(output), "report")
        return f"logged to MLflow run {config.run} in {uri}"
    with TrackedRun.start(config.experiment, config.tracking_uri, {"vismmoe.command": "report"}) as run:
        with talking_to(run.uri) as client:
            client.log_artifacts(run.run_id, str(output), "report")
        return f"logged to MLflow run {run.run_id} in {run.uri}"
