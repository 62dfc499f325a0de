"""What a lookahead predictor is made of, in plain types: part of every artifact's manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from vismmoe.errors import UsageError

Network = Literal["published", "guided"]
Head = Literal["single", "per-distance"]


@dataclass(frozen=True)
class PredictorConfig:
    """Shape and features of the network; the defaults are ours, `published()` is the paper's (VisMMoE §2)."""

    network: Network = "guided"
    window: int = 5  # W, MoE layers ahead
    gamma: float = 0.8  # decay of the target with distance
    hidden_sizes: tuple[int, int] = (128, 128)
    dropout: float = 0.1
    head: Head = "per-distance"
    rank: int = 64  # guided: width of each layer's map from the token state to the later routers
    token_rank: int = 128  # directions of the token state that serving reads in decode; all, if it is no wider
    use_history: bool = True  # h_r, and the history of the layers ahead
    use_retained_mean: bool = True  # h_h
    use_visual_summary: bool = True  # h_v
    use_token_state: bool = True
    use_next_gate: bool = True
    use_layer: bool = True
    use_phase: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden_sizes", tuple(self.hidden_sizes))
        _require(self.network in get_args(Network), "network", self.network, f"one of {', '.join(get_args(Network))}")
        _require(self.head in get_args(Head), "head", self.head, f"one of {', '.join(get_args(Head))}")
        _require(1 <= self.window <= 64, "window", self.window, "1 to 64 layers")
        _require(0.0 < self.gamma <= 1.0, "gamma", self.gamma, "above 0 and at most 1")
        _require(0.0 <= self.dropout < 1.0, "dropout", self.dropout, "0 to below 1")
        _require(1 <= self.rank <= 8192, "rank", self.rank, "1 to 8192")
        _require(1 <= self.token_rank <= 65536, "token_rank", self.token_rank, "1 to 65536")
        features = (self.use_history, self.use_retained_mean, self.use_visual_summary, self.use_token_state)
        _require(any(features), "use_history", False, "on when all other states are off: nothing would be looked at")
        sizes_are_sane = len(self.hidden_sizes) == 2 and all(1 <= size <= 16384 for size in self.hidden_sizes)
        _require(sizes_are_sane, "hidden_sizes", self.hidden_sizes, "two widths of 1 to 16384")
        _require(self.network != "guided" or self.head == "per-distance", "head", self.head, "per-distance when guided")

    @classmethod
    def published(cls, **changes: Any) -> PredictorConfig:
        """Histogram, pooled retained tokens and visual summary into an MLP with one score per expert id."""
        base = cls(network="published", head="single", use_token_state=False, use_next_gate=False, use_layer=False)
        return replace(base, use_phase=False, **changes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "hidden_sizes": list(self.hidden_sizes)}

    @classmethod
    def from_json(cls, value: Any) -> PredictorConfig:
        """Raises UsageError on an unknown or missing key, a wrong type or a value out of range."""
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise UsageError(f"A predictor's config must have exactly the keys {', '.join(sorted(names))}.")
        for name, default in cls().to_json().items():
            wanted: Any = (int, float) if isinstance(default, float) else type(default)
            if not isinstance(value[name], wanted) or isinstance(value[name], bool) != isinstance(default, bool):
                raise UsageError(f"The predictor's config says {name}: {value[name]!r}, which is of the wrong type.")
        if not all(type(size) is int for size in value["hidden_sizes"]):
            raise UsageError("The predictor's config says hidden_sizes that are not whole numbers.")
        return cls(**value)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise UsageError(f"Predictor setting {name}: {value!r} does not work; it must be {wanted}.")
