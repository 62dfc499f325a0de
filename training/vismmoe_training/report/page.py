"""One HTML page that holds everything: no script, no network, readable in print."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 Georgia, "Times New Roman", serif; color: #111; background: #fff; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-family: Helvetica, Arial, sans-serif; line-height: 1.2; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; }
nav { font-family: Helvetica, Arial, sans-serif; font-size: .85rem; margin: 1rem 0 0; }
nav a { margin-right: 1rem; color: #0072B2; }
figure { margin: .8rem 0; } img { width: 100%; height: auto; }
figcaption { font-size: .88rem; color: #333; }
pre { font: 12px/1.35 Menlo, Consolas, monospace; background: #f5f5f5; padding: .6rem .8rem; overflow-x: auto; }
.facts { font-family: Helvetica, Arial, sans-serif; font-size: .88rem; color: #333; }
.lacking { border-left: 3px solid #999; padding-left: .8rem; color: #333; }
@media print { body { margin: 0; max-width: none; font-size: 11pt; } nav { display: none; }
  figure, pre, p { break-inside: avoid; } h2, h2 + p { break-after: avoid; }
  pre { background: none; border: 1px solid #999; white-space: pre-wrap; } }
"""


@dataclass(frozen=True)
class Picture:
    """One figure, the words under it, and what it shows to those who cannot see it."""

    name: str  # of its file, without .svg
    svg: bytes
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, pictures, and the same numbers as text. Without pictures it says what is lacking."""

    title: str
    text: str
    pictures: Sequence[Picture] = ()
    numbers: str = ""


def page(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """The page; every text is escaped."""
    links = " ".join(f'<a href="#s{i}">{escape(section.title)}</a>' for i, section in enumerate(sections))
    body = "\n".join(_section(f"s{i}", section) for i, section in enumerate(sections))
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="facts">{"<br>".join(map(escape, facts))}</p>\n<nav>{links}</nav>\n{body}\n</body></html>\n'
    )


def _section(anchor: str, section: Section) -> str:
    kind = "" if section.pictures or section.numbers else ' class="lacking"'
    parts = [f'<section id="{anchor}">', f"<h2>{escape(section.title)}</h2>", f"<p{kind}>{escape(section.text)}</p>"]
    parts += [_figure(picture) for picture in section.pictures]
    if section.numbers:
        parts.append(f"<pre>{escape(section.numbers)}</pre>")
    return "\n".join((*parts, "</section>"))


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.svg).decode()
    caption = escape(picture.caption)
    return (
        f'<figure><img alt="{escape(picture.caption, quote=True)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
