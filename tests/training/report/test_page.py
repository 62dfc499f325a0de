"""The page trusts no text, needs no network and no script, and pictures come out the same twice."""

from __future__ import annotations

import re

from matplotlib.figure import Figure

from vismmoe_training.report.figures import svg
from vismmoe_training.report.page import Picture, Section, page

EVIL = "<script>alert(1)</script> & \"quoted\" 'words' <img src=x onerror=y>"


def made() -> str:
    figure = Figure()
    figure.subplots().set_title("title")
    picture = Picture("one", svg(figure), EVIL)
    return page(EVIL, [EVIL], [Section(EVIL, EVIL, [picture], EVIL), Section("Lacking", EVIL)])


def test_whatever_comes_from_outside_is_escaped() -> None:
    text = made()
    assert "<script" not in text
    assert "onerror" in text  # as words, not as a tag:
    assert re.findall(r"<img[^>]*>", text) == [re.search(r'<img alt="[^"]*" src="data:[^"]*">', text)[0]]  # type: ignore[index]
    assert text.count("&lt;script&gt;") == 10


def test_nothing_is_fetched_from_anywhere() -> None:
    text = made()
    assert "default-src 'none'" in text
    assert re.findall(r"(?:src|href)=\"(?!data:|#)", text) == []
    assert "@import" not in text
    assert "http" not in re.sub(r"http-equiv", "", text)


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert made() == made()
