"""Ctrl-C at awkward moments, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

HANG_S = 600  # a guard against waiting for ever, never a measure of speed
START = f"""
import sys, threading, time
HANG_S = {HANG_S}
from vismmoe import cli, commands, interrupts
cli.quieten = lambda: None
def ready():
    print("ready", file=sys.__stdout__, flush=True)  # stdout itself is kept for results
"""
END = """
commands.plan = plan
sys.exit(cli.main(["plan"]))
"""
WAITING = """
def plan(config, results):
    ready()
    time.sleep(HANG_S)
"""
HALF_AN_IMPORT = """
def plan(config, results):
    ready()
    try:
        time.sleep(HANG_S)
    except KeyboardInterrupt:
        raise ImportError("cannot import name 'x' from partially initialized module 'y'")
"""
LIGHTNING = """
def plan(config, results):
    ready()
    try:
        time.sleep(HANG_S)
    except KeyboardInterrupt:
        sys.exit(1)
"""
SWALLOWED = """
interrupts.GRACE_S = 0.5
def plan(config, results):
    ready()
    while True:
        try:
            time.sleep(0.1)
        except:
            pass
"""
STUBBORN_THREAD = """
interrupts.GRACE_S = 0.5
def plan(config, results):
    threading.Thread(target=time.sleep, args=(HANG_S,)).start()
    ready()
    time.sleep(HANG_S)
"""
DESTRUCTOR = """
class Noisy:
    def __del__(self):
        raise RuntimeError("half torn down")
def plan(config, results):
    held = Noisy()
    ready()
    time.sleep(HANG_S)
"""


HALF_OF_OURS = f"""
import sys, time
HANG_S = {HANG_S}
from types import ModuleType
class Slow(ModuleType):
    def __getattr__(self, name):
        print("ready", flush=True)
        time.sleep(HANG_S)
sys.modules["vismmoe.cli"] = Slow("vismmoe.cli")
from vismmoe.__main__ import main
sys.exit(main())
"""

TORN_DOWN = """
import atexit, sys
from vismmoe import cli
cli.main = lambda: 0
def slowly():
    print("ready", flush=True)
    sys.stdin.read()  # ends when the signal has been sent
atexit.register(slowly)
from vismmoe.__main__ import main
sys.exit(main())
"""


def interrupted(code: str) -> tuple[int, str]:
    """Exit status and stderr of a program that gets SIGINT once it has said `ready`."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=HANG_S)
    return process.returncode, err


@pytest.mark.parametrize(
    "body",
    [WAITING, HALF_AN_IMPORT, LIGHTNING, SWALLOWED, STUBBORN_THREAD, DESTRUCTOR],
    ids=["waiting", "half an import", "turned into an exit", "swallowed", "a thread that stays", "a noisy destructor"],
)
def test_ctrl_c_ends_with_status_130_and_one_line(body: str) -> None:
    assert interrupted(START + body + END) == (130, "vismmoe: interrupted.\n")


def test_ctrl_c_while_the_command_line_itself_is_imported_ends_the_same_way() -> None:
    assert interrupted(HALF_OF_OURS) == (130, "vismmoe: interrupted.\n")


def test_ctrl_c_after_a_command_has_ended_well_leaves_its_exit_status() -> None:
    assert interrupted(TORN_DOWN) == (0, "")


def test_the_former_handler_is_back_after_a_command_that_ended_well() -> None:
    from vismmoe.interrupts import Interrupts

    before = signal.getsignal(signal.SIGINT)
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
