"""Progress is told on stderr and changes nothing."""

from __future__ import annotations

import sys

import pytest

from vismmoe_training import progress


def test_without_a_terminal_a_line_is_told_every_so_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert list(progress.track("abc", 3, "collect")) == ["a", "b", "c"]
    told = capsys.readouterr()
    assert told.out == ""
    assert "collect: 2 of 3 items" in told.err
    assert "items/s" in told.err


def test_on_a_terminal_a_bar_is_drawn_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert list(progress.track([1, 2], 2, "collect")) == [1, 2]
    told = capsys.readouterr()
    assert told.out == ""
    assert "2/2" in told.err
