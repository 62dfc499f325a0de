"""Routing of the reference model in a conversation about pictures, and a predictor that was trained on other pictures.

The replay is the prefill of the first question about the first held-out picture, then the decoded tokens of the answers
to all questions about this and the following pictures, one after the other.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vismmoe.bench.replay import replay_of
from vismmoe.config import CollectConfig, EngineConfig, TrainConfig
from vismmoe.engine import Engine, Request
from vismmoe.predictors import build_predictor
from vismmoe.session import Session
from vismmoe.simulate.foresight import LearnedForesight, LoggedGate
from vismmoe.trace import TraceHeader, TraceWriter, read_traces
from vismmoe.types import LayerState
from vismmoe_deploy.resolve import resolve
from vismmoe_training.collect import collect
from vismmoe_training.train import train

WINDOW = 5
ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Scene:
    """What is asked first."""

    image: Path
    prompt: str


def first_scene(corpus: Path) -> Scene:
    """Of the held-out pictures."""
    picture, questions = _pictures(corpus)[0]
    return Scene(picture, questions[0])


def write_replay(work: Path, model: str, corpus: Path, layers: int, tokens: int, images: int, epochs: int) -> Path:
    """Collect, train and replay, or take what an earlier run has left there."""
    file = work / f"replay-{layers}-{tokens}.safetensors"
    if file.is_file():
        return file
    artifact = _predictor(work, model, corpus, images, epochs)
    talk = work / f"talk-{tokens}"
    _talk(talk, model, corpus, tokens)
    traces = read_traces([talk])
    learned = build_predictor(resolve(str(artifact), None, traces.header.spec).artifact)
    partial = file.with_suffix(".partial")
    foresights = {"predictor": LearnedForesight(learned), "next-gate": LoggedGate(WINDOW)}
    replay_of(traces, layers, tokens, foresights, _prefill(model, first_scene(corpus))).save(partial)
    partial.replace(file)
    return file


def _prefill(model: str, scene: Scene) -> Tensor:
    """(MoE layers, T, k) what each token of the first prompt chose."""
    chosen: list[Tensor] = []

    def note(session: Session, state: LayerState, index: Tensor, weights: Tensor) -> None:
        if state.phase == "prefill":
            chosen.append(index.cpu().clone())

    with Engine.load(EngineConfig(model=model, device="cpu")) as engine:
        engine.watch(Request((scene.image,), scene.prompt, 1), note)
    return torch.stack(chosen)


def _predictor(work: Path, model: str, corpus: Path, images: int, epochs: int) -> Path:
    artifact = work / "predictor"
    if not artifact.is_dir():
        shutil.rmtree(work / "traces", ignore_errors=True)
        config = CollectConfig(
            model=model, device="cpu", images=str(corpus / "train"), output=str(work / "traces"), limit=images,
            max_new_tokens=ANSWER_TOKENS,
        )  # fmt: skip
        print(collect(config))
        tracking = f"sqlite:///{(work / 'mlflow.db').absolute()}"
        train(TrainConfig(traces=(config.output,), output=str(artifact), max_epochs=epochs, tracking_uri=tracking))
    return artifact


def _talk(folder: Path, model: str, corpus: Path, tokens: int) -> None:
    """Log as many answers as `tokens` forwards take."""
    shutil.rmtree(folder, ignore_errors=True)
    with Engine.load(EngineConfig(model=model, device="cpu")) as engine:
        header = TraceHeader(engine.spec, keep_ratio=1.0, compressor="affinity", window=WINDOW)
        with TraceWriter(folder, header) as writer:
            decoded = 0
            for picture, questions in _pictures(corpus):
                for number, question in enumerate(questions):
                    request = Request((picture,), question, ANSWER_TOKENS)
                    told = engine.record(request, item=f"{picture.name}-{number}", window=WINDOW)
                    writer.add(told.request, told.routing)
                    decoded += told.request.completion_tokens - 1
                    if decoded >= tokens:
                        return


def _pictures(corpus: Path) -> list[tuple[Path, list[str]]]:
    folder = corpus / "heldout" / "images"
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text("utf-8").splitlines()]
    return [(folder / line["file_name"], [asked["prompt"] for asked in line["questions"]]) for line in lines]
