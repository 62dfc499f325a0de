"""One writer at a time, and nothing left of the lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vismmoe.errors import UsageError
from vismmoe.exclusive import only_writer

HOLD = """
import sys
from pathlib import Path
from vismmoe.exclusive import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_process_is_told_to_wait_until_the_first_has_ended_however_it_ends(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="Another run is writing"), only_writer(output):
            pass
        other.kill()
    with only_writer(output):
        assert not output.exists()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_nothing_was_written_to_go_away_again(tmp_path: Path) -> None:
    with only_writer(tmp_path / "new" / "out"):
        pass
    assert list(tmp_path.iterdir()) == []
    with only_writer(tmp_path / "new" / "out"):
        (tmp_path / "new" / "out").write_text("kept")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["file/out", "a\0b", "/proc/nowhere/out"])
def test_a_place_that_cannot_be_written_to_is_told_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written to"), only_writer(tmp_path / name):
        pass
