"""`lmms_eval --model vismmoe --model_args model=DIR,device_memory=6GiB,keep_ratio=0.5 ...`: our engine in lmms-eval.

lmms-eval finds this by the entry point of the group `lmms_eval.models`. model_args are the fields of EngineConfig, and
predictor and tracking_uri; --batch_size questions share the loads of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest

from vismmoe.config import EngineConfig
from vismmoe.engine import Request
from vismmoe.errors import UsageError
from vismmoe.schema import options
from vismmoe.settings import build
from vismmoe_deploy.serve import load_engine

MANIFEST = ModelManifest(model_id="vismmoe", simple_class_path="vismmoe_deploy.lmms_eval_model.VisMMoE")
DEFAULT_TOKENS = 1024  # lmms-eval's tasks say what they allow, all but a few


class VisMMoE(lmms):  # type: ignore[misc]
    """lmms-eval's simple interface: context text, pictures, greedy answers."""

    is_simple = True

    def __init__(
        self,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        predictor: str | None = None,
        tracking_uri: str | None = None,
        **settings: Any,
    ) -> None:
        """settings: fields of EngineConfig as text; batch_size: questions that share the loads of experts."""
        super().__init__()
        if device is not None:
            settings["device"] = str(device).split(":")[0]
        known = {option.name for option in options(EngineConfig)}
        if strange := sorted(set(settings) - known):
            raise UsageError(f"--model_args holds {', '.join(strange)}; it may hold {', '.join(sorted(known))}.")
        self._batch = int(batch_size)
        self._engine = load_engine(build(EngineConfig, (), settings), predictor, tracking_uri)

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Answers in the order of the requests."""
        answers: list[str] = []
        for start in range(0, len(requests), self._batch):
            asked = [self._request(instance) for instance in requests[start : start + self._batch]]
            results = self._engine.generate_together([request for request, _ in asked])
            answers += [_cut(told.text, until) for told, (_, until) in zip(results, asked, strict=True)]
        return answers

    def _request(self, instance: Instance) -> tuple[Request, list[str]]:
        context, given, doc_to_visual, doc_id, task, split = instance.args
        pictures = doc_to_visual(self.task_dict[task][split][doc_id])
        config = self._engine.config
        tokens = int(given.get("max_new_tokens", DEFAULT_TOKENS))
        until = given.get("until") or []
        request = Request(tuple(pictures), context, tokens, config.keep_ratio, config.compressor)
        return request, [until] if isinstance(until, str) else list(until)

    def generate_until_multi_round(self, requests: Sequence[Instance]) -> list[str]:
        """Refused: the engine answers one question at a time."""
        raise UsageError("vismmoe answers single questions: choose a task without several rounds.")

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Refused: the engine generates, it does not weigh given answers."""
        raise UsageError("vismmoe generates answers: choose a task whose output_type is generate_until.")


def _cut(text: str, until: Sequence[str]) -> str:
    for end in until:
        if end:
            text = text.split(end)[0]
    return text
