"""Reading what others wrote: JSON that may be anything, and the description of a model within it.

Python's own reader recurses without end, takes NaN and numbers that are infinite, waits for ever at a named pipe, and
raises three kinds of errors. Here it is one: ValueError with a reason, for the caller to say which file is meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vismmoe.types import ModelSpec

MAX_JSON_BYTES = 1 << 30
MAX_SIZE = 1 << 24  # of any one number in a model's description: sizes of tensors are made from them


def parse_json(text: str | bytes, *, infinite: bool = False) -> Any:
    """The value that `text` holds. infinite: NaN and Infinity may stand there, as transformers writes them.

    Raises ValueError with a reason for everything else.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        if infinite:
            return json.loads(text)
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def read_json(file: Path, *, infinite: bool = False) -> Any:
    """The value that `file` holds. Raises ValueError with a reason, also when it cannot be read."""
    return parse_json(read_text(file), infinite=infinite)


def read_text(file: Path) -> str:
    """The text of a regular file of UTF-8. Raises ValueError with a reason."""
    try:
        if file.exists() and not file.is_file():
            raise ValueError("it is no regular file")
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"it is larger than {MAX_JSON_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None


def spec_from_json(value: Any) -> ModelSpec:
    """The ModelSpec whose fields `value` holds. Raises ValueError when it is incomplete or makes no sense."""
    fields = set(ModelSpec.__dataclass_fields__)
    if not isinstance(value, Mapping) or set(value) != fields:
        raise ValueError("its description of the model is incomplete or has surplus keys")
    layers = value["moe_layers"]
    texts = {"family", "fingerprint"}
    sound = (
        all(isinstance(value[name], str) for name in texts)
        and all(type(value[name]) is int and 0 < value[name] <= MAX_SIZE for name in fields - texts - {"moe_layers"})
        and value["top_k"] <= value["num_experts"]
        and isinstance(layers, list)
        and all(type(layer) is int and 0 <= layer < value["num_layers"] for layer in layers)
        and layers == sorted(set(layers)) != []
    )
    if not sound:
        raise ValueError("its description of the model makes no sense")
    return ModelSpec(**{**value, "moe_layers": tuple(layers)})


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is beyond every number")
    return number
