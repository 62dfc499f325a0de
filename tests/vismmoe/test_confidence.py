"""Chances of forecasts are learnt from what came true, absent and present experts apart, loaded or not."""

from __future__ import annotations

from vismmoe.confidence import Confidence, Place
from vismmoe.types import ExpertId


def teach(confidence: Confidence, place: Place, trials: int, hits: int) -> None:
    for number in range(trials):
        confidence.foreseen(7, [(ExpertId(7, 1), place)])
        confidence.learn(7, {ExpertId(7, 1)} if number < hits else set())


def test_a_place_that_never_comes_true_falls_and_one_that_always_does_rises() -> None:
    confidence = Confidence(top_k=4)
    never, always = Place(1, 0, present=False), Place(1, 1, present=False)
    before = confidence.chance(never)
    teach(confidence, never, trials=20, hits=0)
    teach(confidence, always, trials=20, hits=20)
    assert confidence.chance(never) < 0.15 < before < 0.9 < confidence.chance(always) <= 1.0


def test_absent_experts_have_a_table_of_their_own() -> None:
    confidence = Confidence(top_k=4)
    teach(confidence, Place(1, 0, present=True), trials=50, hits=50)
    assert confidence.chance(Place(1, 0, present=False)) == Confidence(4).chance(Place(1, 0, present=False))


def test_at_first_near_and_high_ranks_are_trusted_most() -> None:
    fresh = Confidence(top_k=4)
    near, far, low = (fresh.chance(Place(d, rank, False)) for d, rank in ((1, 0), (4, 0), (1, 6)))
    assert near > far > low > 0


def test_text_that_changes_is_followed() -> None:
    confidence, place = Confidence(top_k=4), Place(2, 0, False)
    teach(confidence, place, trials=2000, hits=2000)
    teach(confidence, place, trials=400, hits=0)
    assert confidence.chance(place) < 0.5


def test_a_layer_that_a_request_never_came_to_teaches_nothing() -> None:
    confidence, place = Confidence(top_k=4), Place(1, 0, False)
    before = confidence.chance(place)
    confidence.foreseen(7, [(ExpertId(7, 1), place)])
    confidence.begin_request()
    confidence.learn(7, set())
    assert confidence.chance(place) == before
