"""Foreseeing which experts the next layers need: one rule, one file; and making an artifact run."""

from __future__ import annotations

import torch
from torch import Tensor

from vismmoe.artifact import Artifact
from vismmoe.errors import ArtifactError, UsageError
from vismmoe.predictors.chance import Chance
from vismmoe.predictors.frequency import Frequency
from vismmoe.predictors.lookahead import LookaheadNet, LookaheadPredictor
from vismmoe.predictors.next_gate import NextGate
from vismmoe.predictors.options import PredictorConfig
from vismmoe.predictors.previous import Previous

__all__ = [
    "Chance",
    "Frequency",
    "LookaheadNet",
    "LookaheadPredictor",
    "NextGate",
    "PredictorConfig",
    "Previous",
    "build_predictor",
]


def build_predictor(artifact: Artifact, gate: NextGate | None = None) -> LookaheadPredictor:
    """The predictor that an artifact describes; `gate` may also be handed over later with `bind`.

    Raises ArtifactError for an unknown kind, settings that make no sense, or tensors that do not fit them.
    """
    if artifact.kind != LookaheadPredictor.kind:
        raise ArtifactError(f"The artifact holds a predictor of kind {artifact.kind!r}, unknown to this release.")
    try:
        config = PredictorConfig.from_json(dict(artifact.config))
    except UsageError as error:
        raise ArtifactError(f"The artifact's settings make no sense: {error}") from None
    if config.window != artifact.window:
        raise ArtifactError(f"The artifact says window {artifact.window} and {config.window}; it is damaged.")
    with torch.device("meta"):  # shapes only: a wrong manifest must not take memory
        net = LookaheadNet(config, artifact.spec, folded=True)
    _check_tensors(net.state_dict(), dict(artifact.tensors))
    net.load_state_dict(dict(artifact.tensors), assign=True)
    return LookaheadPredictor(net, artifact.spec, gate)


def _check_tensors(wanted: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    strange = sorted(set(wanted) ^ set(given))
    if strange:
        raise ArtifactError(f"The artifact's weights lack or add {', '.join(strange[:5])}.")
    for name, tensor in given.items():
        if tensor.dtype != torch.float32 or tensor.shape != wanted[name].shape:
            raise ArtifactError(
                f"The artifact's {name} is {str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}, "
                f"its settings ask for float32 of shape {tuple(wanted[name].shape)}."
            )
        if not torch.isfinite(tensor).all():
            raise ArtifactError(f"The artifact's {name} holds values that are not finite.")
