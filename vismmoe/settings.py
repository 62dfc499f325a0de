"""From YAML files and flags to one config object: later files override earlier ones, flags override files.

Reading is strict: an unknown key, a key written twice or a value of the wrong kind is a UsageError that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from vismmoe.config import Config
from vismmoe.errors import UsageError
from vismmoe.schema import did_you_mean, options, shortened, shown

C = TypeVar("C", bound=Config)
SHARED = "commands"  # key of a file that is written for several commands: each takes the settings that it has
PROFILE_KEYS = frozenset({"compute_rate", "memory_rate"})  # what only a device profile has


def build(config: type[C], files: Iterable[str] = (), flags: Mapping[str, Any] | None = None) -> C:
    """The config that `files` (YAML, in order) and then `flags` (field name -> raw value) ask for."""
    values: dict[str, Any] = {}
    for file in files:
        values.update(read_yaml(file, config))
    for option in options(config):
        if flags and option.name in flags:
            values[option.name] = option.read(flags[option.name], option.flag)
        elif option.required and option.name not in values:
            raise UsageError(f"{option.flag} is missing: {option.doc[0].lower()}{option.doc[1:]}")
    return config(**values)


def read_yaml(file: str | Path, config: type[Config]) -> dict[str, Any]:
    """Values of `file` as the fields of `config` want them."""
    known = {option.name: option for option in options(config)}
    values: dict[str, Any] = {}
    pairs = _load(Path(file))
    if not known.keys() & PROFILE_KEYS and PROFILE_KEYS & {key for key, _ in pairs}:
        raise UsageError(
            f"{file} is a device profile, which `vismmoe simulate --profile` reads, and holds no settings for "
            "--config; those of other commands are in configs/infer and its neighbours."
        )
    others = _shared_with(pairs, config, str(file))
    for key, value in pairs:
        if key == SHARED or (key not in known and key in others):
            continue
        if key not in known:
            near = did_you_mean(str(key), known)
            raise UsageError(f"{file}: unknown key {shown(key)}.{near} Known keys: {', '.join(sorted(known))}.")
        if key in values:
            raise UsageError(f"{file}: the key {key!r} stands there twice; keep one.")
        values[key] = known[key].read(value, f"{file}: {key}")
    return values


def _shared_with(pairs: Iterable[tuple[Any, Any]], config: type[Config], file: str) -> set[str]:
    """Names of the settings of the other commands that the file says it is for; none when it says nothing."""
    named = next((value for key, value in pairs if key == SHARED), None)
    if named is None:
        return set()
    commands = {found.__name__.removesuffix("Config").lower(): found for found in _commands(Config)}
    listed = named if isinstance(named, list) else [named]
    strange = [name for name in listed if not isinstance(name, str) or name not in commands]
    if strange or listed is not named:
        told = shown(strange[0] if strange else named)
        raise UsageError(f"{file}: {SHARED} must be a list of commands, such as [collect, train], not of {told}.")
    if config not in [commands[name] for name in named]:
        raise UsageError(f"{file} is written for {', '.join(named)} and for no other command.")
    return {option.name for name in named for option in options(commands[name])}


def _commands(base: type[Config]) -> list[type[Config]]:
    return [found for direct in base.__subclasses__() for found in (direct, *_commands(direct))]


def keys_of(file: str | Path) -> list[str]:
    """The keys that stand in `file`, whatever they mean. UsageError when it is no file of settings at all."""
    return [str(key) for key, _ in _load(Path(file))]


def _load(file: Path) -> list[tuple[Any, Any]]:
    """Key-value pairs of the file in their order; a plain dict would hide keys that are written twice."""
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        if "\0" in str(file):
            reason = "no file has such a name"
        raise UsageError(f"The config file {file} cannot be read: {reason}.") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except RecursionError:
        raise UsageError(f"{file} is nested too deeply: write `key: value` lines.") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError) as error:  # a date without such a day, a huge number
        raise UsageError(f"{file} is not valid YAML: {shortened(' '.join(str(error).split()))}.") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise UsageError(f"{file} must hold `key: value` lines, such as `keep_ratio: 0.5`.")
    keys = [key.value for key, _ in root.value]
    return [(key, values.get(key)) for key in keys] if set(keys) == set(values) else list(values.items())
