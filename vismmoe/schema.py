"""What a config dataclass says about itself: names, kinds, ranges, defaults, and the sentence under each field.

Flags, YAML keys, `--help` and range checks are all made from the list of options built here, so the dataclass is
the config, the flag and the doc. Nothing in this file imports torch: `--help` has to be instant.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import types
import typing
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from vismmoe.errors import UsageError
from vismmoe.sizes import parse_size


@dataclass(frozen=True)
class Within:
    """Marks a number as confined to [low, high]; with `above`, low itself is excluded."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def __contains__(self, value: float) -> bool:
        try:
            finite = math.isfinite(value)
        except OverflowError:  # a whole number beyond every float
            return False
        if not finite or (self.high is not None and value > self.high):
            return False
        return self.low is None or (value > self.low if self.above else value >= self.low)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'above' if self.above else 'at least'} {self.low:g}"
        high = "" if self.high is None else f"at most {self.high:g}"
        return " and ".join(filter(None, (low, high)))


@dataclass(frozen=True)
class Unit:
    """Names what a value is counted in; it stands in `--help` in place of the value."""

    name: str


SIZE = Unit("SIZE")
PIXELS = Unit("WxH")


@dataclass(frozen=True)
class Command:
    """One word after `vismmoe`: what it does, its class in vismmoe.config, its function in vismmoe.commands."""

    about: str
    config: str = ""  # without one it is not built yet
    function: str = ""
    positional: str = ""  # the field that is given without a flag
    example: str = ""


@dataclass(frozen=True)
class Option:
    """One field of a config dataclass, as flags and YAML see it."""

    name: str
    doc: str
    group: str  # what the class says that the field stands in
    kind: type  # str, int, float or bool: what one value is
    many: bool  # a tuple of them
    optional: bool  # None is allowed
    choices: tuple[str, ...]
    within: Within | None
    unit: str
    default: Any
    required: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def read(self, value: object, source: str) -> Any:
        """`value` as the field's type; `source` says where it was written. UsageError if it does not fit."""
        if value is None and self.optional:
            return None
        if self.many:
            values = value if isinstance(value, (list, tuple)) else (value,)
            return tuple(self._one(one, source) for one in values)
        return self._one(value, source)

    def check(self, value: Any) -> None:
        """UsageError when a number is outside its range, or nothing is named where something must be."""
        numbers = value if self.many else (value,)
        for number in numbers:
            if self.unit and isinstance(number, str) and not number.strip():
                # An unset shell variable, most often; as a path it would mean the working folder.
                raise UsageError(f"{self.flag} ({self.name} in a config) is empty: name {_article(self.unit)}.")
            if self.within is not None and number is not None and number not in self.within:
                raise UsageError(f"{self.flag} ({self.name} in a config) must be {self.within}, not {shown(number)}.")

    def _one(self, value: object, source: str) -> Any:
        if self.unit == PIXELS.name:
            return _pixels(value, source)
        if self.unit == SIZE.name and isinstance(value, (str, int)) and not isinstance(value, bool):
            try:
                return parse_size(value)
            except UsageError as error:
                raise UsageError(f"{source}: {error}") from None
        if self.choices:
            return self._choice(value, source)
        if self.kind is bool and isinstance(value, bool):
            return value
        if self.kind is str and isinstance(value, str):
            if self.unit and not value.strip():  # as a path it would mean the working folder
                raise UsageError(f"{source} is empty: give {self.unit}, or leave it out.")
            return value
        if self.kind in (int, float) and isinstance(value, (str, int, float)) and not isinstance(value, bool):
            return self._number(value, source)
        raise UsageError(f"{source} must be {self.wanted}, not {shown(value)}.")

    def _choice(self, value: object, source: str) -> str:
        if not isinstance(value, (str, bool, int, float)):
            raise UsageError(f"{source} must be one of {', '.join(self.choices)}, not {shown(value)}.")
        # YAML reads a bare `on` or `off` as a truth value.
        word = {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)
        if word not in self.choices:
            near = did_you_mean(word, self.choices)
            raise UsageError(f"{source} must be one of {', '.join(self.choices)}, not {shown(word)}.{near}")
        return word

    def _number(self, value: str | int | float, source: str) -> int | float:
        try:
            number: int | float = self.kind(value)
        except (ValueError, OverflowError):
            raise UsageError(f"{source} must be {self.wanted}, not {shown(value)}.") from None
        if self.kind is int and isinstance(value, float) and value != number:
            raise UsageError(f"{source} must be {self.wanted}, not {shown(value)}.")
        return number

    @property
    def wanted(self) -> str:
        return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[self.kind]


def shown(value: object) -> str:
    """`value` as a message may show it: a file may hold a list that is longer than the universe."""
    if isinstance(value, (list, tuple, dict, set)):
        return f"a {type(value).__name__} of {len(value)}" if value else f"an empty {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of more than 77 digits"
    return shortened(repr(value))


def shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]}…"


def _article(unit: str) -> str:
    return f"{'an' if unit[0] in 'AEIOU' else 'a'} {unit}"


def _pixels(value: object, source: str) -> tuple[int, int]:
    """(width, height) in pixels from `640x480`, or from a pair that was read before."""
    sides = value.lower().split("x") if isinstance(value, str) else value
    try:
        width, height = (int(side) for side in typing.cast(Iterable[Any], sides))
    except (TypeError, ValueError):
        raise UsageError(f"{source} must be width and height in pixels like 640x480, not {shown(value)}.") from None
    if width < 1 or height < 1:
        raise UsageError(f"{source} must be at least 1x1, not {width}x{height}.")
    return width, height


def options(config: type) -> tuple[Option, ...]:
    """The options of a config dataclass: its own fields first, then those of its bases."""
    return _options(typing.cast(Hashable, config))


@cache
def _options(config: Any) -> tuple[Option, ...]:
    hints = typing.get_type_hints(config, include_extras=True)
    docs = _field_docs(config)
    owners = {field.name: _owner(config, field.name) for field in dataclasses.fields(config)}
    order = sorted(dataclasses.fields(config), key=lambda field: config.__mro__.index(owners[field.name]))
    return tuple(
        _option(field, hints[field.name], docs.get(field.name, ""), inspect.getdoc(owners[field.name]) or "")
        for field in order
    )


def _option(field: dataclasses.Field[Any], hint: Any, doc: str, group: str) -> Option:
    hint, optional = _without_none(hint)
    hint, marks = _without_marks(hint)
    unit = next((mark.name for mark in marks if isinstance(mark, Unit)), "")
    many = typing.get_origin(hint) is tuple and unit != PIXELS.name
    if many:
        hint, inner = _without_marks(typing.get_args(hint)[0])
        marks += inner
    choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
    return Option(
        name=field.name,
        doc=doc,
        group=group.splitlines()[0].rstrip("."),
        kind=str if choices else hint if isinstance(hint, type) else tuple,
        many=many,
        optional=optional,
        choices=choices,
        within=next((mark for mark in marks if isinstance(mark, Within)), None),
        unit=unit or next((mark.name for mark in marks if isinstance(mark, Unit)), ""),
        default=None if field.default is dataclasses.MISSING else field.default,
        required=field.default is dataclasses.MISSING,
    )


def _without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        return rest[0], True
    return hint, False


def _without_marks(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if typing.get_origin(hint) is typing.Annotated:
        return typing.get_args(hint)[0], typing.get_args(hint)[1:]
    return hint, ()


def _field_docs(config: type) -> dict[str, str]:
    """The sentence that stands under each field, base classes included. Python drops it, so the source is read."""
    docs: dict[str, str] = {}
    for base in reversed(config.__mro__[:-1]):
        for field, text in itertools.pairwise(_class_body(base)):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(text):
                docs[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return docs


def _class_body(config: type) -> list[ast.stmt]:
    """Its source; that of a module is parsed once for all its classes, which every command waits for."""
    module = inspect.getmodule(config)
    found = {} if module is None else _classes(module)
    if config.__qualname__ in found:
        return found[config.__qualname__].body
    return typing.cast(ast.ClassDef, ast.parse(inspect.getsource(config)).body[0]).body


@cache
def _classes(module: types.ModuleType) -> dict[str, ast.ClassDef]:
    body = ast.parse(inspect.getsource(module)).body
    return {statement.name: statement for statement in body if isinstance(statement, ast.ClassDef)}


def _is_text(statement: ast.stmt) -> typing.TypeGuard[ast.Expr]:
    return isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str)


def _owner(config: type, field: str) -> type:
    """The class, of `config` and its bases, that brought the field in."""
    return next(base for base in reversed(config.__mro__) if field in inspect.get_annotations(base))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the nearest known name, or nothing when none is near."""
    near = difflib.get_close_matches(word[:120], list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""
