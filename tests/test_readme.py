"""The README shows commands that exist, and says no more than what is built."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from vismmoe import config as configs
from vismmoe.cli import COMMANDS
from vismmoe.flags import parse, parser_for
from vismmoe.settings import build

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown(program: str) -> Iterator[list[str]]:
    """Words of every command of `program` in a code block, continued lines joined, `$` dropped."""
    for block in re.findall(r"```[a-z]*\n(.*?)```", README, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.strip().removeprefix("$ ").split("  #")[0]
            if words.startswith(f"{program} "):
                yield shlex.split(words)


VISMMOE = list(shown("vismmoe"))
MAKE = list(shown("make"))


def test_the_first_screen_shows_the_two_commands() -> None:
    assert {"demo", "test"} <= {words[1] for words in MAKE}
    assert "make demo" in "\n".join(README.splitlines()[:40])
    assert "make test" in "\n".join(README.splitlines()[:40])


@pytest.mark.parametrize("words", VISMMOE, ids=lambda words: " ".join(words[:3]))
def test_every_shown_command_parses(words: list[str]) -> None:
    command = COMMANDS[words[1]]
    kind = getattr(configs, command.config)
    flags = parse(parser_for(words[1], command, kind), words[2:])
    assert flags is not None
    build(kind, [str(ROOT / file) for file in flags.pop("config", ())], flags)


@pytest.mark.parametrize("words", MAKE, ids=" ".join)
def test_every_shown_make_target_exists(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(words[1])}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_named_and_unbuilt_ones_are_said_to_be_unbuilt(name: str) -> None:
    assert f"`vismmoe {name}`" in README or any(words[1] == name for words in VISMMOE)
    if not COMMANDS[name].config:
        said = next(line for line in README.splitlines() if f"`vismmoe {name}`" in line)
        assert "not built yet" in said.lower()


def test_every_room_on_the_map_exists() -> None:
    rooms = re.findall(r"^\| `([a-z_/.]+)` \|", README, flags=re.MULTILINE)
    assert len(rooms) > 8
    assert [room for room in rooms if not (ROOT / room).exists()] == []


def test_links_to_files_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_flag_in_running_text_exists() -> None:
    flags = set(re.findall(r"`(--[a-z-]+)", README))
    known = {
        action
        for name, command in COMMANDS.items()
        if command.config
        for action in parser_for(name, command, getattr(configs, command.config))._option_string_actions
    }
    assert flags - known - {"--reduced"} == set()


def test_the_first_screen_says_how_to_have_the_command_and_shows_what_it_answers() -> None:
    screen = "\n".join(README.splitlines()[:40])
    assert screen.index(".venv/bin/activate") < screen.index("$ vismmoe infer")
    assert "experts found" in screen


def test_lines_of_text_fit_a_page() -> None:
    assert [line for line in README.splitlines() if len(line) > 125 and not line.startswith(("|", "$"))] == []


def test_the_python_that_is_shown_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(code, {})
    answer, hit_rate = capsys.readouterr().out.split()
    assert answer.isdigit()
    assert 0 <= float(hit_rate) <= 1
