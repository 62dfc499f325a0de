"""From the name of a predictor to an Engine that uses it."""

from __future__ import annotations

from vismmoe_deploy.resolve import ResolvedArtifact, resolve
from vismmoe_deploy.serve import load_engine

__all__ = ["ResolvedArtifact", "load_engine", "resolve"]
