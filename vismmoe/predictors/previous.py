"""Previous token: a layer will use what it used for the token before; older steps fill the rest of the list."""

from __future__ import annotations

from torch import Tensor

from vismmoe.predictors.features import rows_ahead
from vismmoe.types import LayerState, ModelSpec


class Previous:
    """Implements types.Predictor from the decayed histogram, whose decay lets the last step outrank all older ones."""

    kind = "previous"

    def __init__(self, spec: ModelSpec, window: int = 5) -> None:
        self.window = window
        self._rows = {layer: row for row, layer in enumerate(spec.moe_layers)}

    def predict(self, state: LayerState) -> Tensor:
        return rows_ahead(state.history, self._rows[state.layer], self.window)
