"""Every way in which families differ, on tiny random checkpoints in their published layouts.

`python benchmarks/families` tries all families with the same code; here stands one of each kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vismmoe.errors import CheckpointError
from vismmoe.models.catalogue import FAMILIES, REFUSED, family_of

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "families"
KINDS = (
    "qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe",  # images: DeepStack, positions in three axes, linear attention
    "qwen3_moe", "mixtral",  # one linear an expert, under two kinds of names
    "gpt_oss",  # transposed, biases, gate and up interleaved
    "aria_text",  # transposed in memory
    "nemotron_h",  # no gate; Mamba layers
    "granitemoe",  # packed under another name
    "deepseek_v3",  # latent attention, shared experts, router bias
)  # fmt: skip


@pytest.fixture(scope="module")
def row_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    sys.path.insert(0, str(BENCHMARK))
    try:
        import matrix
    finally:
        sys.path.remove(str(BENCHMARK))
    found: Callable[..., Any] = matrix.row_of
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_family_streams_with_the_bits_of_the_resident_model_and_the_logits_of_transformers(
    row_of: Any, tmp_path: Path, name: str
) -> None:
    row = row_of(FAMILIES[name], tmp_path)
    assert row.streamed, row
    assert row.loads > 0, row
    assert row.difference <= 1e-4, row
    assert row.together, row
    if FAMILIES[name].vision is not None:
        assert "11 of 22" in row.pruned
        assert "8 of 12" in row.pruned


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_is_not_run_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' is not run: ."):
        family_of(name)


def test_no_family_is_both_run_and_refused() -> None:
    assert not set(FAMILIES) & set(REFUSED)
