"""Who leaves the slabs first: one rule, one file, one verb."""

from __future__ import annotations

from collections.abc import Mapping

from vismmoe.errors import UsageError
from vismmoe.experts.policies.base import EvictionPolicy, Use
from vismmoe.experts.policies.least_stale import LeastStale
from vismmoe.experts.policies.lfu import LeastFrequent
from vismmoe.experts.policies.lru import LeastRecent
from vismmoe.experts.policies.published import Published

__all__ = ["DEFAULT_POLICY", "POLICIES", "EvictionPolicy", "Use", "get_policy"]

POLICIES: Mapping[str, EvictionPolicy] = {
    policy.name: policy for policy in (Published(), LeastRecent(), LeastFrequent(), LeastStale())
}
DEFAULT_POLICY = "lfu"  # measured: benchmarks/eviction.py


def get_policy(name: str) -> EvictionPolicy:
    """The policy of that name; UsageError for a name that is not one of POLICIES."""
    if name not in POLICIES:
        raise UsageError(f"There is no eviction policy {name!r}; there are {', '.join(POLICIES)}.")
    return POLICIES[name]
