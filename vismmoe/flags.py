"""Flags and `--help` from a config dataclass, through argparse.

jsonargparse was tried for this: it takes 0.2 s to import, and its messages name neither the nearest flag nor the
nearest key, so both would have been written anyway.
"""

from __future__ import annotations

import argparse
from typing import Any

from vismmoe.errors import UsageError
from vismmoe.schema import Command, Option, did_you_mean, options


def parse(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any] | None:
    """Field name -> raw value for the flags that were given, plus `config` and `debug`. None when help was printed."""
    try:
        known, unknown = parser.parse_known_args(words)
    except SystemExit:
        return None
    if unknown:
        word = unknown[0].split("=")[0]
        nearest = did_you_mean(word, parser._option_string_actions)
        what = "Unknown flag" if word.startswith("-") else "Unexpected word"
        raise UsageError(f"{what} {word!r}.{nearest} `{parser.prog} --help` lists the flags.")
    return vars(known)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"{message[0].upper()}{message[1:]}. `{self.prog} --help` lists the flags.")


def parser_for(name: str, command: Command, config: type) -> argparse.ArgumentParser:
    """argparse's parser for one command, made from its config's fields."""
    parser = _Parser(
        prog=f"vismmoe {name}",
        description=f"{command.about[0].upper()}{command.about[1:]}.",
        epilog=f"example: {command.example}",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE.yaml",
        help="settings by field name (keep_ratio: 0.5); flags and later files override them; repeatable",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options(config):
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group[0].lower() + option.group[1:])
        _add(groups[option.group], option, positional=option.name == command.positional)
    parser.add_argument("--debug", action="store_true", help="show the traceback when something fails")
    return parser


def _add(parser: argparse._ArgumentGroup, option: Option, positional: bool) -> None:
    text = _help(option).replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(option.flag, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = option.unit or ("{" + ",".join(option.choices) + "}" if option.choices else _METAVARS[option.kind])
    if positional:
        parser.add_argument(option.name, nargs="?", metavar=metavar, help=text)
    elif option.many:
        parser.add_argument(option.flag, action="extend", nargs="+", metavar=metavar, help=text)
    else:
        parser.add_argument(option.flag, metavar=metavar, help=text)


_METAVARS = {str: "TEXT", int: "N", float: "X"}


def _help(option: Option) -> str:
    notes = [str(option.within)] if option.within is not None and str(option.within) != "at least 0" else []
    if option.required:
        notes.append("required")
    elif option.default not in (None, ()):
        notes.append(f"default: {_shown(option.default)}")
    return option.doc + (f" ({'; '.join(notes)})" if notes else "")


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return "x".join(map(str, default)) if isinstance(default, tuple) else str(default)
