"""Static frequency: the experts that a layer used most often over a corpus, whatever the input."""

from __future__ import annotations

from torch import Tensor

from vismmoe.predictors.features import rows_ahead
from vismmoe.types import LayerState, ModelSpec


class Frequency:
    """Implements types.Predictor. table: (2, L_moe, E) float32, how often each expert ran, prefill then decode."""

    kind = "frequency"

    def __init__(self, spec: ModelSpec, table: Tensor, window: int = 5) -> None:
        self.window = window
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}
        self._table = table

    def predict(self, state: LayerState) -> Tensor:
        return rows_ahead(self._table[int(state.phase == "decode")], self._rows[state.layer], self.window)
