"""One frozen dataclass a command. The sentence under each field is its `--help`; its name is its YAML key.

Numbers are checked when a config is made, whoever makes it: out of range is a UsageError (exit status 2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from vismmoe.errors import CheckpointError, UsageError
from vismmoe.schema import PIXELS, SIZE, Unit, Within, options
from vismmoe.types import Sampling

Size = Annotated[int, SIZE, Within(0)]
Pixels = Annotated[tuple[int, int], PIXELS]
Count = Annotated[int, Within(1)]
Index = Annotated[int, Within(0)]
Share = Annotated[float, Within(0, 1)]
Fraction = Annotated[float, Within(0, 1, above=True)]
Weight = Annotated[float, Within(0)]
Positive = Annotated[float, Within(0, above=True)]
PathText = Annotated[str, Unit("PATH")]
DirText = Annotated[str, Unit("DIR")]

REFERENCE_MODEL = "checkpoints/reference"


@dataclass(frozen=True)
class Config:
    """What all configs share: every number is checked against the range in its field's type."""

    def __post_init__(self) -> None:
        for option in options(type(self)):
            option.check(getattr(self, option.name))


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """Which model runs, and how much memory it may take."""

    model: Annotated[str, Unit("DIR")] = REFERENCE_MODEL
    """Checkpoint folder (config.json and safetensors as published)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where layers run; auto takes CUDA when there is one."""
    device_memory: Size | None = None
    """All that may be taken on the device, in bytes (6GiB, 512MiB, 1.5GB): backbone, vision tower, prefix, slabs, KV,
    activations, staging. Without it every expert stays resident."""
    host_memory: Size = 0
    """RAM for copies of experts below the device, in bytes; 0 reads them straight from disk."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of the arithmetic; auto keeps the checkpoint's, but float32 on CPUs without native bfloat16."""
    vision: Literal["resident", "streamed"] = "resident"
    """Whether the vision tower stays in memory, or is read block by block for each image so that its memory serves
    experts."""
    prefix_layers: Index | None = None
    """MoE layers at the front that see all visual tokens; the compressor takes effect after them. Default: what suits
    the model family."""
    readers: Count = 1
    """Threads that read experts from disk."""


@dataclass(frozen=True, kw_only=True)
class PixelConfig(ModelConfig):
    """How large a picture the model sees."""

    max_pixels: Count | None = None
    """Pixels that a picture is scaled down to before the vision tower sees it, at most; default: the checkpoint's."""
    min_pixels: Count | None = None
    """Pixels that a picture is scaled up to, at least; default: the checkpoint's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_pixels is not None and self.min_pixels is not None and self.min_pixels > self.max_pixels:
            raise UsageError(
                f"--min-pixels is {self.min_pixels} and --max-pixels {self.max_pixels}: no picture has so many and so "
                "few pixels."
            )

    def seen_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) in pixels of a picture of `size` within these limits, before it is rounded to patches."""
        pixels = size[0] * size[1]
        wanted = min(max(pixels, self.min_pixels or pixels), self.max_pixels or max(pixels, self.min_pixels or 0))
        scale = math.sqrt(wanted / pixels)
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


@dataclass(frozen=True, kw_only=True)
class FetchConfig(PixelConfig):
    """How experts are fetched, and what a compressor weighs."""

    salient_ratio: Share = 0.2
    """Share of the visual tokens that is kept for its saliency alone (alpha)."""
    trade_off: Weight = 2.0
    """Weight of new experts against saliency when choosing the rest (lambda)."""
    prefetch: bool = True
    """Load experts ahead, as the predictor foresees them; without a predictor there is nothing to load ahead."""
    lookahead_top: Count = 20
    """Experts that are prefetched after each layer, at most (B)."""
    eviction: Literal["published", "lru", "lfu", "least-stale"] = "lfu"
    """Which expert leaves the slabs first: the least predictor priority (published), the longest unused, the least
    often used, or the one left out most often when its layer ran."""
    hybrid: Literal["auto", "on", "off"] = "auto"
    """Run experts on the CPU where they lie in host memory instead of copying them: auto where that changes no bit (on
    the CPU device), on also beside a GPU, where a measured cost model decides."""
    direct_io: Literal["auto", "on", "off"] = "auto"
    """Read experts past the page cache; auto tries and falls back."""
    disk_rate: Annotated[int, SIZE, Within(1)] | None = None
    """Slow the reads of experts down to so many bytes a second, to see what a slower disk would do."""
    threads: Count | None = None
    """CPU threads for arithmetic; default: as many as this process may use, 1 where experts are under 256 KiB."""


CompressorName = Literal[
    "affinity",
    "affinity-bytes",
    "affinity-mass",
    "affinity-prompt",
    "affinity-resident",
    "diversity",
    "downsample",
    "prompt",
    "random",
    "saliency",
    "uniform",
]


DEFAULT_COMPRESSOR: CompressorName = "affinity-bytes"  # whom the rule in vismmoe_training/paper/choice.py names


@dataclass(frozen=True, kw_only=True)
class EngineConfig(FetchConfig):
    """How visual tokens are dropped."""

    compressor: CompressorName = DEFAULT_COMPRESSOR
    """How visual tokens are chosen after the prefix; affinity is the published method, affinity-bytes answers as well
    with fewer experts."""
    keep_ratio: Fraction = 1.0
    """Share of the visual tokens that the deeper layers see; 1 keeps them all."""


@dataclass(frozen=True, kw_only=True)
class InferConfig(EngineConfig):
    """Answer a question about images."""

    prompt: str | None = None
    """The question; this or --messages is required."""
    messages: Annotated[str, Unit("FILE.json")] | None = None
    """Conversation to go on with, in place of --prompt and --image: a JSON list of messages with role and content, as
    chat interfaces exchange them; an assistant's content of null is answered on the way."""
    image: tuple[Annotated[str, Unit("IMAGE")], ...] = ()
    """Image to ask about: path, URL, data URL or - for standard input; repeatable."""
    predictor: Annotated[str, Unit("SOURCE")] | None = None
    """Predictor that guides prefetching: an artifact folder or models:/name@alias."""
    max_new_tokens: Count = 64
    """Longest answer, in tokens."""
    prefill_chunk: Count | None = None
    """Tokens of the prompt that a layer takes at once, to need less memory for it; default: all of them."""
    temperature: Weight = 0.0
    """How freely tokens are drawn; 0 gives the likeliest answer, whatever the checkpoint's generation_config says."""
    top_p: Fraction | None = None
    """Draw from the likeliest tokens that together have this share of the probability; needs a temperature."""
    top_k: Count | None = None
    """Draw from so many of the likeliest tokens; needs a temperature."""
    seed: Index | None = None
    """Of the draw: the same seed gives the same answer; needs a temperature. Default: 0."""
    stream: bool = False
    """Print the answer while it is being generated."""
    json: bool = False
    """Print one JSON object with the answer and the whole report, and nothing else."""
    tracking_uri: Annotated[str, Unit("URI")] | None = None
    """MLflow server or database; default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stream and self.json:
            raise UsageError("--stream and --json exclude each other: a JSON object is printed once it is complete.")
        if (self.prompt is None) == (self.messages is None):
            raise UsageError("give either --prompt, the question, or --messages, a conversation that ends with one.")
        if self.messages is not None and self.image:
            raise UsageError("--image goes with --prompt: with --messages the file says where each image belongs.")
        idle = [f"--{name.replace('_', '-')}" for name in ("top_p", "top_k", "seed") if getattr(self, name) is not None]
        if idle and not self.temperature:
            raise UsageError(
                f"{' and '.join(idle)} would change nothing: at temperature 0 the likeliest answer is given. Add "
                "--temperature, such as 0.7."
            )
        self.sampling()

    def sampling(self) -> Sampling:
        """UsageError for a temperature that arithmetic does not bear."""
        top_p = 1.0 if self.top_p is None else self.top_p
        return Sampling(self.temperature, top_p, self.top_k, self.seed or 0)


@dataclass(frozen=True, kw_only=True)
class EvalConfig(FetchConfig):
    """Score a benchmark, and what dropping visual tokens costs on it."""

    benchmark: Literal["mme", "mmbench", "pope", "ocrbench", "textvqa"]
    """Which questions, prompts and scorers."""
    scorer: Literal["lmms-eval", "vlmevalkit", "official"] = "lmms-eval"
    """Whose way to read answers and add them up; they disagree on everything but clean answers."""
    prompts: Annotated[str, Unit("NAME")] | None = None
    """Whose way to ask: lmms-eval, vlmevalkit, vlmevalkit-qwen2, vlmevalkit-qwen3, official, plain and, for some
    benchmarks, evalscope or llava. Default: the scorer's."""
    data: Annotated[str, Unit("DATA")] | None = None
    """The benchmark: parquet, TSV or the original files (folder or file), or an id of the Hugging Face hub."""
    images: DirText | None = None
    """Folder of the pictures that the data names, where it is not beside them."""
    predictions: Annotated[str, Unit("FILE.json")] | None = None
    """Answers to score, in place of a model's: JSON or JSON lines of rows with "prediction", or MME result lists."""
    compressor: tuple[CompressorName, ...] = (DEFAULT_COMPRESSOR,)
    """Ways to choose visual tokens that are compared with keeping all."""
    keep_ratio: tuple[Fraction, ...] = ()
    """Shares of the visual tokens to keep; each is run with each compressor, besides a run that keeps all."""
    limit: Count | None = None
    """Evaluate so many images (MME), questions (MMBench) or rows, evenly spread; default: all."""
    batch_size: Count = 1
    """Questions that go through the layers together, so that an expert is loaded once for all of them."""
    max_new_tokens: Count | None = None
    """Longest answer, in tokens; default: what the scorer's harness allows."""
    predictor: Annotated[str, Unit("SOURCE")] | None = None
    """Predictor that guides prefetching: an artifact folder or models:/name@alias."""
    output: DirText | None = None
    """Folder for answers, scores and the report; a run that was killed goes on there."""
    json: bool = False
    """Print one JSON object and nothing else."""
    tracking_uri: Annotated[str, Unit("URI")] | None = None
    """MLflow server or database; default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.data is None) == (self.predictions is None):
            raise UsageError("give either --data, to answer its questions, or --predictions, to score answers.")
        if self.predictions is not None and self.keep_ratio:
            raise UsageError("--keep-ratio needs a model that answers: give --data in place of --predictions.")

    def engine_config(self) -> EngineConfig:
        """The same without what belongs to the evaluation."""
        return EngineConfig(**{field.name: getattr(self, field.name) for field in fields(FetchConfig)})


@dataclass(frozen=True, kw_only=True)
class PlanConfig(PixelConfig):
    """Say what goes where, in bytes, before anything is loaded."""

    image_size: Pixels = (256, 256)
    """Largest image, in pixels."""
    context: Count = 1024
    """Tokens of one request, prompt and answer together."""
    max_new_tokens: Index = 0
    """Tokens of the context that are the answer: they are cached, but do not go through the layers at once."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig(ModelConfig):
    """Answer one question by ours and by other systems, side by side."""

    baseline: tuple[Literal["accelerate", "mmap", "resident"], ...] = ("resident", "mmap")
    """What is measured beside ours: Accelerate's disk offload, transformers over mapped weights,
    all experts resident."""
    image: Annotated[str, Unit("IMAGE")] | None = None
    """Image to ask about: path or URL; without one the question stands alone."""
    prompt: str = "Describe the image."
    """The question."""
    max_new_tokens: Count = 16
    """Longest answer, in tokens."""
    predictor: Annotated[str, Unit("SOURCE")] | None = None
    """Predictor of an arm of its own: an artifact folder or models:/name@alias."""
    routing: DirText | None = None
    """Routing logs that are replayed in place of what the routers say; default: the model routes for itself."""
    repeats: Count = 3
    """Rounds, every other one in reverse order; medians are reported."""
    cap: Size | None = None
    """Memory of each process, page cache included, by a cgroup; default: none but --device-memory for ours."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass(frozen=True, kw_only=True)
class CollectConfig(EngineConfig):
    """Run the model over a corpus and log its routing."""

    images: Annotated[str, Unit("CORPUS")]
    """Corpus: folder of images, parquet, webdataset, LLaVA or COCO json, or a hub id (org/name, org/name:split)."""
    image_folder: DirText | None = None
    """Where the files lie that a json names; default: beside the json."""
    output: DirText
    """Folder for the routing logs."""
    prompt: str = "Describe the image."
    """What is asked where the corpus has no question of its own."""
    limit: Count | None = None
    """Stop after so many items; default: the whole corpus."""
    max_new_tokens: Count = 16
    """Longest answer, in tokens."""
    resume: bool = False
    """Go on where an interrupted run into the same folder stopped."""
    shard_items: Count = 64
    """Items in one file of the logs; at most so many are lost when the machine dies."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """Train a lookahead predictor on routing logs."""

    traces: tuple[DirText, ...]
    """Folders of routing logs, one or more."""
    output: DirText
    """Folder for the artifact."""
    window: Annotated[int, Within(1, 16)] = 5
    """Layers ahead that are foreseen (W)."""
    gamma: Fraction = 0.8
    """Decay of the training target with each further layer."""
    network: Literal["guided", "published"] = "guided"
    """Guided starts from the next layers' routers and learns how the state drifts; published is the paper's network."""
    head: Literal["per-distance", "single"] = "per-distance"
    """One row of scores per layer ahead, or one row for all as published."""
    hidden: Count = 128
    """Width of the two hidden layers."""
    rank: Count = 64
    """Width of each layer's map from the token state to the later layers' experts; guided network only."""
    dropout: Annotated[float, Within(0, 0.95)] = 0.1
    """Share of hidden units dropped in training."""
    token_rank: Count = 128
    """Directions of the token state that serving reads in decode; a narrower state is read whole."""
    use_history: bool = True
    """Give the predictor the histogram of recent expert activations."""
    use_retained_mean: bool = True
    """Give the predictor the mean state of the retained visual tokens at each layer."""
    use_visual_summary: bool = True
    """Give the predictor the mean embedding of the retained visual tokens."""
    use_token_state: bool = True
    """Give the predictor the state of the current token."""
    use_next_gate: bool = True
    """Give the predictor the scores of the next layers' routers on the present state."""
    use_layer: bool = True
    """Tell the predictor which layer it is asked at."""
    use_phase: bool = True
    """Tell the predictor whether it is asked in prefill or in decode."""
    learning_rate: Positive = 3e-4
    """Step size of the optimiser."""
    weight_decay: Weight = 1e-2
    """Weight decay of the optimiser."""
    batch_size: Annotated[int, Within(2)] = 256
    """Rows a step."""
    max_epochs: Count = 30
    """Longest training, in passes over the logs."""
    patience: Count = 5
    """Passes without a better held-out recall before training stops."""
    val_fraction: Annotated[float, Within(0.01, 0.45)] = 0.15
    """Share of the images held out to stop by; rows of one image never stand on both sides."""
    test_fraction: Annotated[float, Within(0.01, 0.45)] = 0.15
    """Share of the images held out to measure on, seen by nothing before."""
    seed: Index = 0
    """Seed of the split and of training."""
    resume: bool = False
    """Go on from the last checkpoint of an interrupted run with the same output."""
    register: Annotated[str, Unit("NAME")] | None = None
    """Register the artifact in MLflow under this name when done."""
    alias: Annotated[str, Unit("NAME")] | None = None
    """Alias that the registered version gets."""
    experiment: Annotated[str, Unit("NAME")] = "vismmoe"
    """MLflow experiment of the run."""
    tracking_uri: Annotated[str, Unit("URI")] | None = None
    """MLflow server or database; default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder."""
    threads: Count | None = None
    """CPU threads for arithmetic; default: 1 for a small network, which more would only slow down."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alias is not None and self.register is None:
            raise UsageError(
                f"--alias {self.alias} needs --register NAME: an alias points to a version of a registered model."
            )


@dataclass(frozen=True, kw_only=True)
class TuneConfig(Config):
    """Search for the settings that keep simulated stall low and answers right."""

    traces: tuple[DirText, ...]
    """Folders of routing logs that predictors are trained on, one or more."""
    output: Annotated[str, Unit("FILE.yaml")]
    """File for the recommended settings, read by collect, train and infer; each point of the Pareto front goes to a
    numbered file beside it."""
    trials: Count = 20
    """Trials in all; a study that is resumed counts those it has."""
    workers: Count = 1
    """Processes that share the study."""
    storage: Annotated[str, Unit("URL")] = "sqlite:///tune.db"
    """Database of the study; the same one resumes it."""
    study: Annotated[str, Unit("NAME")] = "vismmoe"
    """Name of the study within the database."""
    model: Annotated[str, Unit("DIR")] = REFERENCE_MODEL
    """Checkpoint folder whose answers are judged; the logs must be its own."""
    images: Annotated[str, Unit("CORPUS")] = "datasets/scenes/heldout"
    """Folder of images with questions and right answers, none of them in the logs."""
    questions: Count = 32
    """Questions that each trial answers."""
    profile: Annotated[str, Unit("FILE.yaml")] = "configs/devices/cpu-2-cores.yaml"
    """Device whose stall is simulated; see configs/devices."""
    slots: Count | None = None
    """Slabs that the deeper layers share in the simulation; default: a quarter of their experts."""
    expert_bytes: Size | None = None
    """Size of one expert in the simulation, to see the same routing in a larger model; default: that of the logged
    model in two bytes a weight, which may be too small to stall on anything."""
    max_epochs: Count = 8
    """Longest training of one trial, in passes over the logs."""
    val_fraction: Annotated[float, Within(0.01, 0.45)] = 0.15
    """Share of the logged images held out to stop training and to prune trials by."""
    test_fraction: Annotated[float, Within(0.01, 0.45)] = 0.15
    """Share of the logged images that no trial sees; `vismmoe train` measures on them."""
    seed: Index = 0
    """Seed of the split, of training and of the search."""
    experiment: Annotated[str, Unit("NAME")] = "vismmoe"
    """MLflow experiment; each trial is a nested run."""
    tracking_uri: Annotated[str, Unit("URI")] | None = None
    """MLflow server or database; default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder."""
    threads: Count | None = 1
    """CPU threads of one worker."""


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(Config):
    """Replay routing logs against devices and cache rules."""

    traces: tuple[DirText, ...] = ()
    """Folders of routing logs, one or more."""
    profile: tuple[Annotated[str, Unit("FILE.yaml")], ...] = ("configs/devices/cpu-2-cores.yaml",)
    """Device profiles, one or more; see configs/devices."""
    policy: tuple[Literal["published", "lru", "lfu", "least-stale"], ...] = ("published", "lru", "lfu", "least-stale")
    """Rules of eviction, one or more. Belady's, with perfect prefetching, is always the last line."""
    predictor: tuple[Annotated[str, Unit("SOURCE")], ...] = ("none", "next-gate")
    """What foresees experts: none, chance, frequency, previous, next-gate, an artifact folder or models:/name@alias."""
    slots: tuple[Count, ...] = ()
    """Slabs that the deeper layers share, one or more counts; default: a quarter of their experts."""
    pinned_layers: Index | None = None
    """MoE layers from the front whose experts are all resident; default: the prefix of the logs."""
    expert_bytes: Annotated[int, SIZE, Within(1)] | None = None
    """Size of one expert, to see the same routing in a larger model; default: that of the logged model in two bytes a
    weight."""
    limit: Count | None = None
    """Replay so many requests of the logs; default: all."""
    readers: Count = 1
    """Threads that read experts."""
    lookahead_top: Count = 20
    """Experts that are prefetched after each layer, at most (B)."""
    measure_profile: Annotated[str, Unit("FILE.yaml")] | None = None
    """Measure this machine with --model and write its profile, instead of replaying."""
    model: Annotated[str, Unit("DIR")] = REFERENCE_MODEL
    """Checkpoint folder that --measure-profile runs."""
    json: bool = False
    """Print one JSON object and nothing else."""
    tracking_uri: Annotated[str, Unit("URI")] | None = None
    """MLflow server or database; default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.traces and self.measure_profile is None:
            raise UsageError(
                "--traces is missing: name folders of routing logs, which `vismmoe collect` writes; or measure this "
                "machine with --measure-profile FILE."
            )
        if self.traces and self.measure_profile is not None:
            raise UsageError("--traces and --measure-profile exclude each other: measure first, then replay.")


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Config):
    """Draw pictures of logs, artifacts and runs."""

    output: DirText
    """Folder for the page (report.html) and its pictures."""
    traces: tuple[DirText, ...] = ()
    """Folders of routing logs, one or more."""
    artifact: DirText | None = None
    """Predictor's artifact folder, to be compared with the trivial rules."""
    run: Annotated[str, Unit("RUN_ID")] | None = None
    """MLflow run of a training: its predictor is shown, and the report is logged into it."""
    study: Annotated[str, Unit("NAME")] | None = None
    """Tuning study whose Pareto front is shown; without one it is that of memory against stall."""
    storage: Annotated[str, Unit("URL")] = "sqlite:///tune.db"
    """Database of the study."""
    model: Annotated[str, Unit("DIR")] = REFERENCE_MODEL
    """Checkpoint folder of the logged model, which is asked about some pictures."""
    images: Annotated[str, Unit("CORPUS")] = "datasets/scenes/heldout"
    """Folder of these pictures."""
    limit: Count = 8
    """Pictures that the model is asked about, and requests of the logs that are replayed."""
    keep_ratio: Fraction = 0.5
    """Share of the visual tokens that is kept in the pictures of kept tokens."""
    compressor: CompressorName = DEFAULT_COMPRESSOR
    """How they are chosen."""
    profile: Annotated[str, Unit("FILE.yaml")] = "configs/devices/cpu-2-cores.yaml"
    """Device that the logs are replayed on; see configs/devices."""
    slots: Count | None = None
    """Slabs of the request whose time line is drawn; default: a quarter of the deeper layers' experts."""
    expert_bytes: Annotated[int, SIZE, Within(1)] | None = None
    """Size of one expert in replays; default: that of the logged model in two bytes a weight."""
    log: bool = True
    """Log the report to MLflow: into --run, else into a run of its own."""
    experiment: Annotated[str, Unit("NAME")] = "vismmoe"
    """MLflow experiment of a run of its own."""
    tracking_uri: Annotated[str, Unit("URI")] | None = None
    """MLflow server or database; default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.traces and self.artifact is None and self.run is None:
            raise UsageError("Nothing to report on: name --traces, --artifact or --run.")
        if self.artifact is not None and self.run is not None:
            raise UsageError("--artifact and --run both name a predictor: give one of them.")


@dataclass(frozen=True, kw_only=True)
class RegisterConfig(Config):
    """Put an artifact into the model registry."""

    artifact: Annotated[str, Unit("ARTIFACT_DIR")]
    """Artifact folder that `vismmoe train` wrote."""
    name: Annotated[str, Unit("NAME")]
    """Name of the registered model."""
    alias: Annotated[str, Unit("NAME")] | None = None
    """Alias that the new version gets, for models:/name@alias."""
    tracking_uri: Annotated[str, Unit("URI")] | None = None
    """MLflow server or database; default: MLFLOW_TRACKING_URI, else mlflow.db in the working folder."""


def in_clone(relative: str) -> Path | None:
    """A folder that the project ships: in the working folder, or beside an editable install; None in neither."""
    places = (Path(relative), Path(__file__).resolve().parent.parent / relative)
    return next((place for place in places if place.is_dir()), None)


def resolve_model(model: str) -> str:
    """The folder meant by `model`; the reference model is found from anywhere, see `in_clone`.

    CheckpointError when the reference model is asked for and is not there.
    """
    try:
        Path(model).stat()
    except FileNotFoundError:
        pass  # whoever opens it says so
    except (OSError, ValueError) as error:  # a name that is too long, a zero byte in it, a folder that may not be read
        raise CheckpointError(f"The model {model:.200} cannot be opened: {error}.") from None
    found = in_clone(model) if model == REFERENCE_MODEL else Path(model)
    if found is None:
        raise CheckpointError(
            f"The reference model {REFERENCE_MODEL} is neither in {Path.cwd()} nor beside the installed package. "
            "Name a model with --model DIR, or run from a clone of the project."
        )
    return model if model != REFERENCE_MODEL else str(found)
