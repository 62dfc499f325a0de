"""What transformers' generate() is told: how to choose tokens, where to stop, whom to hand the text to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vismmoe.errors import CheckpointError
from vismmoe.models.checkpoint import Checkpoint
from vismmoe.models.load import tokenizer_of
from vismmoe.types import Sampling
from vismmoe.untrusted import read_json

MAX_TOKEN = 1 << 31


class ModelState:
    """What transformers' models keep in their own attributes between two forwards of one request.

    Requests that take turns on one model take theirs with them: take() before another one runs, put() afterwards.
    """

    NAMES = ("rope_deltas",)  # by how far the rotary position of a decoded token differs from its place in the cache

    def __init__(self, model: nn.Module) -> None:
        self._places = [(module, name) for module in model.modules() for name in self.NAMES if name in vars(module)]

    def take(self) -> list[Any]:
        """The values now."""
        return [getattr(module, name) for module, name in self._places]

    def put(self, values: list[Any]) -> None:
        """Set what take() returned."""
        for (module, name), value in zip(self._places, values, strict=True):
            setattr(module, name, value)


def stop_tokens(checkpoint: Checkpoint, processor: Any) -> list[int]:
    """Ids that end an answer, from generation_config.json, else config.json, else the tokenizer."""
    file = checkpoint.folder / "generation_config.json"
    found: Any = None
    if file.is_file():
        try:
            told = read_json(file, infinite=True)
        except ValueError as error:
            raise CheckpointError(f"{file} cannot be used: {error}") from None
        found = told.get("eos_token_id") if isinstance(told, dict) else None
    if found is None:
        found = checkpoint.config.get_text_config().eos_token_id
    if found is None:
        found = tokenizer_of(processor).eos_token_id
    if found is None:
        return []
    listed = list(found) if isinstance(found, (list, tuple)) else [found]
    if not all(type(token) is int and 0 <= token < MAX_TOKEN for token in listed):
        raise CheckpointError(f"{checkpoint.folder} ends answers with {listed!r:.80}, which are no ids of tokens")
    return listed


def greedy_config(stop: list[int], processor: Any, max_new_tokens: int) -> Any:
    """A GenerationConfig of our own: a checkpoint's sampling settings would make answers random.

    Sampling, where it is asked for, comes with `token_chooser`.
    """
    from transformers import GenerationConfig

    pad = tokenizer_of(processor).pad_token_id
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=pad if pad is not None else (stop[0] if stop else 0),
    )


def positions_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Positions (..., 1, T) of a whole conversation, as transformers' generate() numbers them."""
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    positions: Tensor = model._prepare_position_ids_for_generation(inputs["input_ids"], rest)  # type: ignore[operator]
    return positions


def token_chooser(sampling: Sampling) -> Any:
    """Logits processors for generate() in greedy mode; with a temperature they leave one drawn token to choose.

    transformers' own sampling draws from the process's one generator, which requests that take turns would share.
    This one is the request's own, and draws what transformers draws after torch.manual_seed(seed) on a CPU.
    """
    from transformers import LogitsProcessor, LogitsProcessorList

    if not sampling.temperature:
        return LogitsProcessorList()

    class Draw(LogitsProcessor):  # type: ignore[misc]
        def __init__(self) -> None:
            self._chance = torch.Generator().manual_seed(sampling.seed)

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            """scores: (1, V) float32."""
            likely = torch.nn.functional.softmax(scores, dim=-1).cpu()
            drawn = torch.multinomial(likely, 1, generator=self._chance).to(scores.device)
            return torch.full_like(scores, -torch.inf).scatter_(-1, drawn, 0.0)

    return LogitsProcessorList([*_warpers(sampling), Draw()])


def _warpers(sampling: Sampling) -> list[Any]:
    """In transformers' own order."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    return warpers


def text_stream(tokenizer: Any, on_text: Callable[[str], None]) -> Any:
    """A transformers streamer that hands over each finished piece of the answer, without special tokens."""
    from transformers import TextStreamer

    class Stream(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    return Stream(tokenizer, skip_prompt=True, skip_special_tokens=True)
