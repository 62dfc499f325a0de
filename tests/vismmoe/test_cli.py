from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from vismmoe import cli, commands
from vismmoe.config import InferConfig, PlanConfig
from vismmoe.errors import BudgetError, CheckpointError, ImageError, VisMMoEError

BUILT = [name for name, command in cli.COMMANDS.items() if command.config]
UNBUILT = [name for name, command in cli.COMMANDS.items() if not command.config]
ASK = ["infer", "--prompt", "What is this?"]


@pytest.fixture(autouse=True)
def untouched_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "quieten", lambda: None)


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(config: InferConfig, results: IO[str]) -> None:
        print("half a result", file=sys.stdout)
        raise error

    monkeypatch.setattr(commands, "infer", fail)


def test_the_overview_names_every_command_and_sets_the_unbuilt_ones_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    built, unbuilt = capsys.readouterr().out.split("not built yet:")
    assert [name for name in BUILT if f"\n  {name} " not in built] == []
    assert [name for name in UNBUILT if f"\n  {name} " not in unbuilt] == []


@pytest.mark.parametrize("name", BUILT)
def test_help_shows_every_flag_on_stdout(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "--config FILE.yaml" in captured.out
    assert "--debug" in captured.out
    assert cli.COMMANDS[name].example.split()[1] == name


@pytest.mark.parametrize("name", BUILT)
def test_every_example_in_help_parses(name: str) -> None:
    from vismmoe import config as configs
    from vismmoe.flags import parse, parser_for
    from vismmoe.settings import build

    kind = getattr(configs, cli.COMMANDS[name].config)
    flags = parse(parser_for(name, cli.COMMANDS[name], kind), shlex.split(cli.COMMANDS[name].example)[2:])
    assert flags
    assert build(kind, (), flags)


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in cli.COMMANDS)], ids=" ".join)
def test_help_is_instant_since_nothing_heavy_is_imported(words: list[str]) -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'PIL', 'lightning', 'mlflow', 'optuna', 'datasets'}"
    code = (
        "import sys; from vismmoe.cli import main; status = main(sys.argv[1:]);"
        f"heavy = {heavy} & set(sys.modules); sys.exit(f'imported {{heavy}}' if heavy else status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # no clock: how long it takes says more about the machine than about us


@pytest.mark.parametrize("name", UNBUILT)
def test_a_command_that_is_not_built_says_so_with_status_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--model", "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"vismmoe {name}: not built yet" in captured.err
    assert cli.main([name, "--help"]) == 0
    assert "not built yet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["infr"], "Did you mean infer?"),
        (["--vers"], "Unknown flag"),
        ([*ASK, "--imagee", "x.png"], "Did you mean --image?"),
        ([*ASK, "--keepratio=0.5"], "Did you mean --keep-ratio?"),
        ([*ASK, "--prefetc"], "Did you mean --prefetch?"),
        ([*ASK, "stray"], "stray"),
        ([*ASK, "--keep-ratio"], "--keep-ratio"),
        ([*ASK, "--keep-ratio", "1.5"], "--keep-ratio"),
        ([*ASK, "--keep-ratio", "-1"], "--keep-ratio"),
        ([*ASK, "--keep-ratio", "half"], "--keep-ratio"),
        ([*ASK, "--device", "gpu"], "auto, cpu, cuda"),
        ([*ASK, "--compressor", "afinity"], "Did you mean affinity?"),
        ([*ASK, "--device-memory", "lots"], "6GiB"),
        ([*ASK, "--max-new-tokens", "1.5"], "whole number"),
        ([*ASK, "--config", "none.yaml"], "none.yaml"),
        (["infer"], "--prompt"),
        (["register", "--name", "x"], "artifact"),
        (["plan", "--image-size", "640"], "640x480"),
        (["plan", "--image-size", "0x5"], "1x1"),
    ],
)
def test_wrong_usage_gets_status_2_and_a_sentence_that_helps(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ImageError("The image x.png is empty."), 3),
        (CheckpointError("No config.json."), 3),
        (BudgetError("16 bytes are too few."), 4),
        (MemoryError(), 4),
        (VisMMoEError("Something foreseen."), 1),
        (PermissionError(13, "Permission denied", "locked/x"), 1),
        (ZeroDivisionError("division by zero"), 1),
        (SystemExit("a library gave up"), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_each_kind_of_failure_has_its_status_and_one_line_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    fails_with(monkeypatch, error)
    assert cli.main(ASK) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.splitlines()[0] == "half a result"
    assert len(captured.err.splitlines()) == 2


@pytest.mark.parametrize("words", [["--debug", *ASK], [*ASK, "--debug"]])
def test_debug_shows_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    fails_with(monkeypatch, ZeroDivisionError("division by zero"))
    assert cli.main(words) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_training_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_with(monkeypatch, ModuleNotFoundError("No module named 'mlflow'", name="mlflow"))
    assert cli.main(ASK) == 1
    assert "vismmoe[train]" in capsys.readouterr().err


def test_flags_override_the_config_file_and_reach_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def show(config: InferConfig, results: IO[str]) -> None:
        print("chatter")
        fields = ("image", "keep_ratio", "trade_off", "prefetch", "device_memory")
        print(json.dumps({name: getattr(config, name) for name in fields}), file=results)

    monkeypatch.setattr(commands, "infer", show)
    (tmp_path / "a.yaml").write_text("keep_ratio: 0.5\ntrade_off: 3\nprefetch: true\n")
    words = ["--config", str(tmp_path / "a.yaml"), "--keep-ratio", "0.7", "--image", "-", "--image", "b.png"]
    assert cli.main([*ASK, *words, "--no-prefetch", "--device-memory", "16MiB"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "image": ["-", "b.png"],
        "keep_ratio": 0.7,
        "trade_off": 3.0,
        "prefetch": False,
        "device_memory": 16 * 2**20,
    }
    assert captured.err == "chatter\n"


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vismmoe {version('vismmoe')}\n"


def test_a_reader_that_has_gone_is_no_fault_worth_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "vismmoe.cli", "--help"], stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


PRINTS_ODD_LETTERS = """
import sys
from vismmoe import cli, commands
cli.quieten = lambda: None
def plan(config, results):
    print("talk \\u6f22", file=sys.stderr)
    print("answer \\u6f22 \\udcff", file=results)
commands.plan = plan
sys.exit(cli.main(sys.argv[1:]))
"""


def odd_letters(words: list[str], closing: str = "", **surroundings: str) -> subprocess.CompletedProcess[bytes]:
    """The program above, started by a shell that closes streams, in another encoding."""
    command = shlex.join([sys.executable, "-c", PRINTS_ODD_LETTERS, *words])
    return subprocess.run(
        ["sh", "-c", f"{command} {closing}"], capture_output=True, env={**os.environ, **surroundings}, check=False
    )


def test_letters_that_a_terminal_lacks_are_shown_as_escapes() -> None:
    done = odd_letters(["plan"], PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"answer \\u6f22 \\udcff\n", b"talk \\u6f22\n")


@pytest.mark.parametrize("closing", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_swallows_what_it_is_given_and_nothing_goes_elsewhere(closing: str) -> None:
    for words, status in ((["plan"], 0), (["plan", "--context", "0"], 2)):
        done = odd_letters(words, closing)
        assert done.returncode == status
        assert b"answer" not in done.stderr
        assert b"talk" not in done.stdout
        assert b"--context" not in done.stdout


def test_a_command_refuses_a_config_of_the_wrong_shape_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[PlanConfig] = []
    monkeypatch.setattr(commands, "plan", lambda config, results: ran.append(config))
    assert cli.main(["plan", "--context", "0"]) == 2
    assert ran == []
    assert cli.main(["plan"]) == 0
    assert ran == [PlanConfig()]
