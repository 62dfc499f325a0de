"""Replay of routing logs against device profiles and cache rules."""

from __future__ import annotations

from vismmoe.simulate.foresight import LearnedForesight, rule_foresight
from vismmoe.simulate.profile import DeviceProfile, read_profile
from vismmoe.simulate.replay import Setting, belady_limit, simulate
from vismmoe.simulate.result import SimulationResult

__all__ = [
    "DeviceProfile",
    "LearnedForesight",
    "Setting",
    "SimulationResult",
    "belady_limit",
    "read_profile",
    "rule_foresight",
    "simulate",
]
