"""What the pre-hooks hand to deeper layers."""

from __future__ import annotations

import torch

from vismmoe.models.hooks import add_deepstack, pruned_kwargs

KEPT = torch.tensor([0, 2, 5])


def kwargs(rows: int, columns: int, mask: bool) -> dict[str, object]:
    rotary = torch.arange(rows, dtype=torch.float32).view(1, rows, 1)
    held: dict[str, object] = {
        "position_embeddings": (rotary, rotary + 100),
        "position_ids": torch.arange(rows).view(1, rows),
        "attention_mask": None,
        "use_cache": True,
    }
    if mask:
        held["attention_mask"] = torch.arange(rows * columns).view(1, 1, rows, columns)
    return held


def test_prefill_takes_the_kept_rows_of_everything() -> None:
    told = pruned_kwargs(kwargs(6, 6, mask=True), KEPT, KEPT, known=6)
    cos, sin = told["position_embeddings"]
    assert cos.flatten().tolist() == [0, 2, 5]
    assert sin.flatten().tolist() == [100, 102, 105]
    assert told["position_ids"].tolist() == [[0, 2, 5]]
    assert told["attention_mask"].tolist() == [[[[0, 2, 5], [12, 14, 17], [30, 32, 35]]]]
    assert told["use_cache"] is True


def test_decode_keeps_its_own_row_and_loses_dropped_columns_only() -> None:
    held = kwargs(1, 8, mask=True)
    told = pruned_kwargs(held, None, KEPT, known=6)
    assert told["position_embeddings"] is held["position_embeddings"]
    assert told["position_ids"].tolist() == [[0]]
    assert told["attention_mask"].tolist() == [[[[0, 2, 5, 6, 7]]]]


def test_a_later_turn_takes_its_own_rows_and_the_columns_that_earlier_ones_left() -> None:
    held = torch.tensor([0, 3, 4, 6])  # of 4 earlier tokens 0 and 3; of 3 new ones the rows 0 and 2
    told = pruned_kwargs(kwargs(3, 7, mask=True), torch.tensor([0, 2]), held, known=7)
    assert told["position_embeddings"][0].flatten().tolist() == [0, 2]
    assert told["attention_mask"].tolist() == [[[[0, 3, 4, 6], [14, 17, 18, 20]]]]


def test_no_mask_stays_no_mask() -> None:
    assert pruned_kwargs(kwargs(6, 6, mask=False), KEPT, KEPT, known=6)["attention_mask"] is None


def test_deepstack_reaches_the_kept_visual_rows_only() -> None:
    mask = torch.tensor([[False, True, True, True, False]])
    embeds = torch.tensor([[1.0], [2.0], [3.0]])
    kept, kept_visual = torch.tensor([0, 1, 3, 4]), torch.tensor([0, 2])
    assert add_deepstack(torch.zeros(1, 4, 1), mask, embeds, kept, kept_visual).flatten().tolist() == [0, 1, 3, 0]
    assert add_deepstack(torch.zeros(1, 5, 1), mask, embeds, None, None).flatten().tolist() == [0, 1, 2, 3, 0]
