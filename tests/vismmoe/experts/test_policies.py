"""The zoo of eviction rules: one name each, known to the command line."""

from __future__ import annotations

import typing

import pytest

from vismmoe.config import EngineConfig
from vismmoe.errors import UsageError
from vismmoe.experts.policies import DEFAULT_POLICY, POLICIES, Use, get_policy


def test_the_command_line_offers_every_policy_and_has_the_same_default() -> None:
    offered = typing.get_args(typing.get_type_hints(EngineConfig)["eviction"])
    assert set(offered) == set(POLICIES)
    assert EngineConfig().eviction == DEFAULT_POLICY


@pytest.mark.parametrize("name", ["published", "lru", "lfu"])  # least-stale prefers what was used earlier
def test_a_use_never_makes_an_expert_worth_less_than_a_stranger_of_the_same_age(name: str) -> None:
    policy = get_policy(name)
    used, stranger = Use(), Use()
    used.used(1)
    used.last = 1
    assert policy.worth(used) > policy.worth(stranger)


def test_an_unknown_policy_is_told_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="there are published, lru, lfu, least-stale"):
        get_policy("clock")
