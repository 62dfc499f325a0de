"""`vismmoe simulate` on logs that were written to disk, with rules and with a trained predictor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vismmoe.cli import main
from vismmoe.config import TrainConfig
from vismmoe.predictors import NextGate, build_predictor
from vismmoe.simulate import LearnedForesight
from vismmoe.simulate.rows import layer_states, requests_of
from vismmoe.trace import read_traces
from vismmoe_deploy import resolve
from vismmoe_training.train import train


@pytest.fixture
def trained(write_logs: Any, tmp_path: Path) -> tuple[str, str]:
    """(logs, artifact)."""
    logs = str(write_logs(items=12))
    config = TrainConfig(
        traces=(logs,),
        output=str(tmp_path / "artifact"),
        window=3,
        hidden=16,
        rank=8,
        max_epochs=2,
        tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}",
    )
    train(config)
    return logs, config.output


def test_every_rule_on_every_device_and_the_limit_last(
    trained: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    logs, artifact = trained
    words = ["--traces", logs, "--policy", "lru", "lfu", "--predictor", "none", "next-gate", artifact, "--slots", "16"]
    devices = ["configs/devices/cpu-2-cores.yaml", "configs/devices/jetson-agx-orin.yaml"]
    assert main(["simulate", *words, "--profile", *devices, "--expert-bytes", "9MB", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["predictor"], row["policy"]) for row in rows[:7]] == [
        ("none", "lru"), ("none", "lfu"), ("next-gate", "lru"), ("next-gate", "lfu"),
        ("lookahead", "lru"), ("lookahead", "lfu"), ("perfect", "belady"),
    ]  # fmt: skip
    assert {row["profile"] for row in rows[:7]} == {"2 CPU cores"}
    assert {row["profile"] for row in rows[7:]} == {"Jetson AGX Orin 32 GB"}
    assert all(row["requests"] == 12 and row["slots"] == 16 for row in rows)
    assert min(rows[:7], key=lambda row: row["stall_ms"])["policy"] == "belady"
    learned = [row for row in rows if row["predictor"] == "lookahead"]
    assert all(row["decode"]["prefetched_used"] > 0 for row in learned)


def test_the_table_is_for_people_and_wrong_words_are_told(
    trained: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    logs, _ = trained
    assert main(["simulate", "--traces", logs, "--limit", "2", "--policy", "lru"]) == 0
    out = capsys.readouterr().out
    assert "2 requests, 8 decoded tokens" in out
    assert "perfect    belady" in out
    assert main(["simulate", "--traces", logs, "--predictor", "next_gate"]) == 3
    assert "next_gate" in capsys.readouterr().err
    assert main(["simulate", "--traces", logs, "--slots", "160", "--expert-bytes", "1GB"]) == 4
    assert "Give fewer --slots" in capsys.readouterr().err
    assert main(["simulate", "--traces", logs, "--slots", "0"]) == 2
    assert main(["simulate"]) == 2
    assert main(["simulate", "--traces", logs, "--expert-bytes", "0"]) == 2
    assert main(["simulate", "--traces", logs, "--measure-profile", "x.yaml"]) == 2
    assert main(["simulate", "--traces", logs, "--profile", "configs/infer/cpu-3gib.yaml"]) == 2
    assert "is no device profile" in capsys.readouterr().err


def test_replayed_scores_are_those_that_serving_gives(trained: tuple[str, str], imagined_gate: NextGate) -> None:
    """All rows of a request in one call, from what the log says of the routers, against one call a layer with them.
    Logs keep states in half precision, and of a prefill only the last token."""
    logs, artifact = trained
    traces = read_traces([logs])
    predictor = build_predictor(resolve(artifact, None, traces.header.spec).artifact, imagined_gate)
    rows = next(requests_of(traces))
    found = LearnedForesight(predictor).scores(traces, rows)
    for row, state, score in zip(rows, layer_states(traces, rows), found, strict=True):
        if row.phase == "decode":
            torch.testing.assert_close(score, predictor.predict(state), atol=5e-3, rtol=0)
