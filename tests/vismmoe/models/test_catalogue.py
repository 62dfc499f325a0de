"""Families are known by name, with the published depth of prefix."""

from __future__ import annotations

import pytest

from vismmoe.errors import CheckpointError
from vismmoe.models.catalogue import FAMILIES, default_prefix_layers, family_of


def test_another_family_is_refused_with_those_that_run() -> None:
    with pytest.raises(CheckpointError, match=r"'no_such_model' is not built yet.*qwen3_vl_moe"):
        family_of("no_such_model")


@pytest.mark.parametrize(("layers", "prefix"), [(48, 10), (24, 6), (12, 3), (6, 1), (2, 1)])
def test_the_prefix_is_the_published_one_or_a_quarter(layers: int, prefix: int) -> None:
    assert default_prefix_layers(FAMILIES["qwen3_vl_moe"], layers) == prefix
