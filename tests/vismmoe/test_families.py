"""Every way in which families differ, on tiny random checkpoints in their published layouts.

`python benchmarks/families` tries all families with the same code; here stands one of each kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vismmoe.compressors import get_compressor
from vismmoe.errors import CheckpointError, UsageError
from vismmoe.models.catalogue import FAMILIES, REFUSED, check_compression, family_of

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "families"
KINDS = (
    "qwen3_vl_moe", "glm4v_moe", "qwen3_5_moe",  # images: DeepStack, positions in three axes, linear attention
    "gemma4",  # sliding windows under compression, heads of two sizes, a tower that does not tell saliency
    "hy_v4_vl",  # no visual token can be dropped; tokens at the ends of rows
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
    vision = FAMILIES[name].vision
    assert bool(row.pruned) == (vision is not None and vision.keeps_all is None)
    if row.pruned and name != "qwen3_5_moe":  # what a running state has seen cannot be hidden from it afterwards
        assert row.masked is not None
        assert row.masked <= 1e-4, row


def test_dropping_tokens_is_refused_with_the_reason_where_a_family_or_its_tower_does_not_allow_it() -> None:
    with pytest.raises(UsageError, match=r"no visual token of hy_v4_vl can be dropped: .*leave the keep ratio at 1"):
        check_compression(FAMILIES["hy_v4_vl"], get_compressor("uniform"), 0.5)
    with pytest.raises(UsageError, match=r"gemma4 does not tell what it attends to, .*'affinity'.* uniform, random"):
        check_compression(FAMILIES["gemma4"], get_compressor("affinity"), 0.5)
    check_compression(FAMILIES["hy_v4_vl"], get_compressor("downsample"), 0.5)  # a smaller picture drops no token
    check_compression(FAMILIES["gemma4"], get_compressor("random"), 0.5)
    check_compression(FAMILIES["gemma4"], get_compressor("affinity"), 1.0)
    check_compression(FAMILIES["mixtral"], get_compressor("affinity"), 0.5)  # no images: nothing to drop


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_family_that_is_not_run_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' is not run: ."):
        family_of(name)


def test_no_family_is_both_run_and_refused() -> None:
    assert not set(FAMILIES) & set(REFUSED)
