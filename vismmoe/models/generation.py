"""What transformers' generate() is told: greedy decoding, where to stop, whom to hand the text to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vismmoe.models.checkpoint import Checkpoint


def stop_tokens(checkpoint: Checkpoint, processor: Any) -> list[int]:
    """Ids that end an answer, from generation_config.json, else config.json, else the tokenizer."""
    from transformers import GenerationConfig

    found: Any = None
    if (checkpoint.folder / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(str(checkpoint.folder)).eos_token_id
    if found is None:
        found = checkpoint.config.get_text_config().eos_token_id
    if found is None:
        found = processor.tokenizer.eos_token_id
    if found is None:
        return []
    return [int(token) for token in (found if isinstance(found, (list, tuple)) else [found])]


def greedy_config(stop: list[int], processor: Any, max_new_tokens: int) -> Any:
    """A GenerationConfig of our own: a checkpoint's sampling settings would make answers random."""
    from transformers import GenerationConfig

    pad = processor.tokenizer.pad_token_id
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=pad if pad is not None else (stop[0] if stop else 0),
    )


def text_stream(tokenizer: Any, on_text: Callable[[str], None]) -> Any:
    """A transformers streamer that hands over each finished piece of the answer, without special tokens."""
    from transformers import TextStreamer

    class Stream(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                on_text(text)

    return Stream(tokenizer, skip_prompt=True, skip_special_tokens=True)
