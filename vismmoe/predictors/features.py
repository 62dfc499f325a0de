"""The input of the lookahead predictor: the same functions for training (many rows) and serving (one row).

VisMMoE §2: x_l = [h_r ; h_h ; h_v]. Ours beside it: the current token's state, the layer, the phase, and for the
guided network the history of the layers ahead and the next gate's opinion of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vismmoe.predictors.options import PredictorConfig
from vismmoe.types import LayerState

HISTORY_DECAY = 0.5  # at most 1/2: whatever the last step chose then outranks everything older
# Added to shares before their logarithm. One token: far below what ranks experts. Many tokens: an expert that none of
# them chose is simply not wanted, how little matters not.
PREFILL_FLOOR, DECODE_FLOOR = 1e-3, 1e-12


@dataclass(frozen=True)
class PredictorInputs:
    """B calls of a predictor, all float32. W: window, E: experts a layer, H: hidden size."""

    row: Tensor  # (B,) int64 position of the layer among the MoE layers
    decode: Tensor  # (B,) bool
    token: Tensor  # (B, H) MoE input of the last token of the forward
    retained_mean: Tensor  # (B, H) h_h: mean over the retained visual tokens at this layer
    visual_summary: Tensor  # (B, H) h_v: mean embedding of the retained visual tokens
    recent: Tensor  # (B, E) h_r: recent activations of this layer and the window before it
    ahead: Tensor  # (B, W, E) recent activations of the W layers ahead; zeros past the last layer
    next_gate: Tensor  # (B, W, E) gate mass if the routers ahead saw this layer's state; zeros past the last layer


def advance_history(row: Tensor, counts: Tensor, top_k: int) -> Tensor:
    """One layer's decayed histogram after one more forward.

    row: (..., E) float32; counts: (..., E) tokens of this forward that chose each expert. What is added is the share
    of tokens that chose the expert, in [0, 1]: 0 or 1 in decode. Returns (..., E) float32.
    """
    tokens = counts.sum(-1, keepdim=True).clamp(min=1) / top_k
    return row * HISTORY_DECAY + counts.to(torch.float32) / tokens


def recent_histogram(history: Tensor, row: int, window: int) -> Tensor:
    """h_r: mean of the histograms of this layer and the `window - 1` before it. (..., L, E) -> (..., E)."""
    return history[..., max(0, row - window + 1) : row + 1, :].mean(-2)


def rows_ahead(table: Tensor, row: int, window: int) -> Tensor:
    """Rows row+1 .. row+window of a (..., L, E) table, zeros past its end. Returns (..., W, E)."""
    found = table[..., row + 1 : row + 1 + window, :]
    missing = window - found.shape[-2]
    return found if missing == 0 else torch.nn.functional.pad(found, (0, 0, 0, missing))


def inputs_from_state(state: LayerState, row: int, next_gate: Tensor) -> PredictorInputs:
    """One serving call as a batch of one. next_gate: (W, E); row: position of state.layer among the MoE layers."""
    window = next_gate.shape[0]
    return PredictorInputs(
        row=torch.tensor([row]),
        decode=torch.tensor([state.phase == "decode"]),
        token=state.hidden[-1:].to(torch.float32),
        retained_mean=state.retained_mean.to(torch.float32).unsqueeze(0),
        visual_summary=state.visual_summary.to(torch.float32).unsqueeze(0),
        recent=recent_histogram(state.history, row, window).unsqueeze(0),
        ahead=rows_ahead(state.history, row, window).unsqueeze(0),
        next_gate=next_gate.unsqueeze(0),
    )


def trunk_features(inputs: PredictorInputs, config: PredictorConfig, num_layers: int) -> Tensor:
    """The vector x_l for the MLP, (B, F) with F = feature_count(...), in the order of `columns`."""
    given = {
        "recent": inputs.recent,
        "retained_mean": inputs.retained_mean,
        "visual_summary": inputs.visual_summary,
        "token": inputs.token,
        "layer": torch.nn.functional.one_hot(inputs.row, num_layers).to(torch.float32),
        "phase": inputs.decode.to(torch.float32).unsqueeze(-1),
    }
    return torch.cat([given[name] for name in columns(config, num_layers, 0, 0)], dim=-1)


def columns(config: PredictorConfig, num_layers: int, num_experts: int, hidden_size: int) -> dict[str, slice]:
    """Where each feature that is switched on stands in the vector: h_r, h_h, h_v, token, layer, phase."""
    widths = {
        "recent": num_experts if config.use_history else None,
        "retained_mean": hidden_size if config.use_retained_mean else None,
        "visual_summary": hidden_size if config.use_visual_summary else None,
        "token": hidden_size if config.use_token_state else None,
        "layer": num_layers if config.use_layer else None,
        "phase": 1 if config.use_phase else None,
    }
    found, start = {}, 0
    for name, width in widths.items():
        if width is not None:
            found[name] = slice(start, start + width)
            start += width
    return found


def feature_count(config: PredictorConfig, num_layers: int, num_experts: int, hidden_size: int) -> int:
    """F, the width of `trunk_features`."""
    return max((part.stop for part in columns(config, num_layers, num_experts, hidden_size).values()), default=0)


def gate_evidence(gate: Tensor, decode: Tensor) -> Tensor:
    """Log of each expert's share in a gate's mass, against the uniform share: 0 means "as any other".

    gate: (B, ..., E) >= 0; decode: (B,) bool. Returns (B, ..., E) float32; a row of zeros (no such layer) gives zeros.
    """
    total = gate.sum(-1, keepdim=True)
    floor = torch.where(decode, DECODE_FLOOR, PREFILL_FLOOR).view(-1, *(1,) * (gate.dim() - 1))
    share = gate / total.clamp(min=DECODE_FLOOR)
    return ((share + floor) * gate.shape[-1]).log() * (total > 0)


def history_evidence(ahead: Tensor) -> Tensor:
    """Histogram with its fast decay softened (0.5 ** 0.3 = 0.81 a step), so that eight steps ago still show."""
    return ahead.pow(0.3)
