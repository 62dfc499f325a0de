"""Wide prefills need nearly every expert of every layer: they are read ahead in the order of the file (ours).

No predictor is asked. Readers go on with the next layer while this one runs, and with the first one while the vision
tower, or even the backbone, is still being loaded; what a router asks for goes before all of it. What is read ahead
passes through the slabs, so that decode's working set stays where it is.
"""

from __future__ import annotations

from collections import deque

from vismmoe.guesses import Guesses
from vismmoe.session import Asker
from vismmoe.types import ExpertId, ModelSpec

WIDE = 0.75  # share of a layer's experts from which on the next layer is read whole: one read of four is in vain then


def expected_share(tokens: int, spec: ModelSpec) -> float:
    """Share of a layer's experts that so many tokens choose when they choose evenly: what a prompt asks at the most."""
    return 1.0 - (1.0 - spec.top_k / spec.num_experts) ** tokens


class ReadAhead:
    """One layer at a time: the next one that a wide prefill comes to."""

    def __init__(self, spec: ModelSpec, first_deep: int, guesses: Guesses, *, on: bool) -> None:
        """first_deep: rank of the first MoE layer whose experts are not pinned. on: False never reads anything."""
        self._spec = spec
        self._deep = spec.moe_layers[first_deep:] if on else ()
        self._guesses = guesses
        self._left: deque[ExpertId] = deque()  # of the layer that is read ahead: not begun yet

    def begin_request(self, tokens: int) -> None:
        """A prompt of so many tokens is about to come: begin with its first deep layer, or drop what was begun."""
        self._left.clear()
        if expected_share(tokens, self._spec) < WIDE:
            self._guesses.drop(None, lambda _: False)
        elif self._deep:
            self._take(self._deep[0])
            self.go_on(None)

    def is_wide(self, asker: Asker, experts: int) -> bool:
        """Whether a layer that needs so many experts says that the next one will need nearly all."""
        return asker.phase == "prefill" and bool(self._deep) and experts >= WIDE * self._spec.num_experts

    def follow(self, asker: Asker, layer: int) -> None:
        """The router of `layer` has spoken: drop what was read ahead for it in vain; go_on() is for the next layer."""
        self._guesses.drop(asker, lambda expert: expert.layer != layer)
        following = next((deep for deep in self._deep if deep > layer), None)
        if self._left and self._left[0].layer == following:
            return
        self._left.clear()
        if following is not None:
            self._take(following)

    def go_on(self, asker: Asker | None) -> None:
        """Start as many reads as slabs have become free for."""
        if self._left:
            done = self._guesses.start(asker, ((expert, 0.0) for expert in self._left), passing=True)
            for _ in range(done):
                self._left.popleft()

    def _take(self, layer: int) -> None:
        self._left.extend(ExpertId(layer, expert) for expert in range(self._spec.num_experts))
