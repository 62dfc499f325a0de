"""A small byte-level BPE tokenizer in Qwen's form, learnt from the scenes' own language."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vismmoe_training.scenes import CELLS, COLOUR_NAMES, KINDS, WORDS

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# The pre-tokenizer of the Qwen family: words carry their leading space, digits stand alone.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
FRAMES = (
    "Is there a {} in the image?",
    "Is there an {} in the image?",
    "How many objects of kind {} are in the image?",
    "How many objects are in the image?",
    "Where is the {}?",
    "What colour is the {}?",
    "What word is written in the image?",
    "What number is written in the image?",
    "Which of these is in the image?\nA. {}\nB. {}\nC. {}\nD. {}\nAnswer with the letter.",
    "Describe the image. Please answer yes or no.\nAnswer the question using a single word or phrase.",
    "{}",
    "A {} and the {}.",
)


def special_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Id of a special token."""
    return int(tokenizer.convert_tokens_to_ids(token))


def build_tokenizer(vocab_size: int = 896) -> PreTrainedTokenizerBase:
    """Train the tokenizer; every word of the scenes becomes one token, with and without a leading space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=8192
    )


def _sentences() -> Iterator[str]:
    parts = tuple(dict.fromkeys(part for cell in CELLS for part in cell.split()))
    for word in (*KINDS, *COLOUR_NAMES, *parts, *CELLS, *WORDS, "yes", "no"):
        for frame in FRAMES:
            yield frame.format(*[word] * frame.count("{}"))
    yield from ("user", "assistant") * 64  # as common as the chat template makes them
