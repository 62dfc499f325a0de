"""The parts of the demo that need no model; the whole of it is run by .ci/run on a reduced corpus."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from vismmoe import config as configs
from vismmoe.cli import COMMANDS
from vismmoe.errors import CorpusError
from vismmoe.flags import parse, parser_for
from vismmoe.metrics import PhaseCounters
from vismmoe.settings import build
from vismmoe_training.arms import Arm, ArmResult, Asked, answer_all, arms_table, read_questions, same
from vismmoe_training.demo import REDUCED, Demo, as_command, main

ARM = Arm("vanilla", small=False)
RESULT = ArmResult(ARM, ("two", "red"), 1, PhaseCounters(), PhaseCounters(), 128, 10.0)


def write_corpus(folder: Path, images: int = 3) -> Path:
    styles = ("count", "colour")
    folder.mkdir()
    lines = [
        json.dumps({
            "file_name": f"{index}.png",
            "questions": [{"style": style, "prompt": f"{style} {index}?", "answer": "two"} for style in styles],
        })
        for index in range(images)
    ]  # fmt: skip
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_questions_go_through_images_and_styles_in_turn(tmp_path: Path) -> None:
    asked = read_questions(write_corpus(tmp_path / "c"), 6)
    assert [question.image.name for question in asked] == ["0.png", "1.png", "2.png"] * 2
    assert len({question.prompt for question in asked}) == 6


def test_a_corpus_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"metadata\.jsonl"):
        read_questions(tmp_path, 1)


@pytest.mark.parametrize(
    ("answer", "right", "alike"),
    [("two", "two", True), (" Two. ", "two", True), ("two", "twos", False), ("", "two", False), ("B", "b", True)],
)
def test_exact_match_forgives_case_space_and_a_full_stop_only(answer: str, right: str, alike: bool) -> None:
    assert same(answer, right) is alike


class FakeEngine:
    """Answers `two` whatever is asked."""

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def generate(self, request: Any) -> Any:
        counts = PhaseCounters(accesses=4, hits=1, demand_loads=3, bytes_loaded=2**20, stall_ms=2.0)
        return SimpleNamespace(
            text="two",
            usage=SimpleNamespace(kept_visual_tokens=32),
            timing_ms=SimpleNamespace(total=5.0),
            experts=SimpleNamespace(prefill=counts, decode=PhaseCounters()),
        )


def test_an_arm_sums_what_its_questions_cost() -> None:
    questions = [Asked(Path("0.png"), "count", "How many?", right) for right in ("two", "three")]
    result = answer_all(ARM, FakeEngine, questions, 4)  # type: ignore[arg-type]
    assert (result.answers, result.correct, result.kept_tokens, result.total_ms) == (("two", "two"), 1, 64, 10.0)
    assert (result.prefill.accesses, result.prefill.bytes_loaded, result.decode.accesses) == (8, 2**21, 0)


def test_the_table_compares_with_the_first_arm_and_claims_no_hit_rate_without_accesses() -> None:
    moved = PhaseCounters(accesses=4, hits=1, demand_loads=3, prefetched=10, prefetched_used=4, bytes_loaded=2**21)
    other = replace(RESULT, arm=Arm("small"), answers=("two", "blue"), prefill=moved)
    first, second = arms_table([RESULT, other]).splitlines()[2:4]
    assert first.split() == ["vanilla", "50%", "100%", "64", "-", "-", "-", "0.00", "0.0", "5"]
    assert second.split() == ["small", "50%", "50%", "64", "25%", "-", "40%", "1.00", "0.0", "5"]


@pytest.mark.parametrize("name", ["collect", "train"])
def test_the_printed_commands_do_what_the_demo_does(name: str, tmp_path: Path) -> None:
    demo = Demo("some/model", tmp_path / "scenes", tmp_path / "out", REDUCED)
    config = demo.collected if name == "collect" else demo.trained
    words = shlex.split(as_command(name, config))
    kind = getattr(configs, COMMANDS[name].config)
    assert build(kind, (), parse(parser_for(name, COMMANDS[name], kind), words[2:])) == config


def test_a_demo_away_from_its_corpus_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--corpus", str(tmp_path / "none"), "--reduced"]) == 3
    assert "train and heldout" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
