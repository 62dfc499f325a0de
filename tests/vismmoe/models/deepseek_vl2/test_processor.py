"""Prompts, views and padding are those of the official processor."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vismmoe.models.deepseek_vl2 import DeepseekVL2Processor
from vismmoe.models.deepseek_vl2.tiling import best_resolution

from .conftest import PART, processor_of


def picture(width: int, height: int, gray: bool = False) -> Image.Image:
    """The formula that the vectors name."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    pattern = ((x // 8) * 29 + (y // 8) * 53) % 256
    if gray:
        return Image.fromarray(pattern.astype(np.uint8)).convert("RGB")
    red, green = (x * 255) // max(width - 1, 1), (y * 255) // max(height - 1, 1)
    return Image.fromarray(np.stack((red, green, pattern), -1).astype(np.uint8))


def rle(values: Any) -> list[list[int]]:
    out: list[list[int]] = []
    for value in values.int().tolist():
        if out and out[-1][0] == value:
            out[-1][1] += 1
        else:
            out.append([value, 1])
    return out


def pictures(case: dict[str, Any]) -> list[Image.Image]:
    gray = case.get("grayscale_converted", [False] * len(case["image_sizes_wh"]))
    return [picture(*size, converted) for size, converted in zip(case["image_sizes_wh"], gray, strict=True)]


def read(told: Path) -> Any:
    return json.loads((told / "processor.json").read_text())


def test_single_prompts_give_the_official_ids_masks_tiles_and_pixels(told: Path) -> None:
    for case in read(told)["cases"]:
        message = [{"role": "<|User|>", "content": case["user_content"]}, {"role": "<|Assistant|>", "content": ""}]
        ours = processor_of(told)(images=pictures(case), conversations=message)
        assert rle(ours["input_ids"][0]) == case["input_ids_rle"], case["name"]
        assert rle(ours["images_seq_mask"][0]) == case["images_seq_mask_rle"]
        assert list(ours["images"].shape[1:]) == case["images_shape"]
        assert ours["images_spatial_crop"][0].tolist() == (case["tiles_w_h"] or [[0, 0]])
        sums = [hashlib.sha256(view.numpy().tobytes()).hexdigest() for view in ours["images"][0]]
        checks = case.get("tile_checks") or {"tiles": []}
        for number, tile in enumerate(checks["tiles"]):
            if sums[number] != tile["sha256_f32"]:  # another Pillow may round by one step
                for (row, column), wanted in zip(checks["points_row_col"], tile["corner_rgb"], strict=True):
                    found = ours["images"][0, number, :, row, column]
                    assert torch.allclose(found, torch.tensor(wanted), atol=1 / 127), case["name"]


def test_conversations_give_the_official_ids(told: Path) -> None:
    for case in read(told)["multi_turn"]:
        ours = processor_of(told)(images=pictures(case), conversations=case["conversations"])
        assert rle(ours["input_ids"][0]) == case["input_ids_rle"], case["name"]


def test_formatted_text_gives_the_official_ids(told: Path) -> None:
    for case in read(told)["prompt_path"]:
        ours = processor_of(told)(images=picture(384, 384), text=case["formatted"])
        assert rle(ours["input_ids"][0]) == case["input_ids_rle"]


def test_prompts_of_different_length_are_padded_on_the_left(told: Path) -> None:
    held = read(told)
    by_name = {case["name"]: case for case in held["cases"]}
    texts = [by_name[name]["formatted"] for name in ("s100", "text_only")]
    ours = processor_of(told)(images=[picture(100, 100)], text=texts)
    wanted = held["batchify_left_pad"]
    assert [rle(row) for row in ours["input_ids"]] == wanted["input_ids_rle"]
    assert [rle(row) for row in ours["attention_mask"]] == wanted["attention_mask_rle"]
    assert [rle(row) for row in ours["images_seq_mask"]] == wanted["images_seq_mask_rle"]
    assert list(ours["images"].shape) == wanted["images_shape"]
    assert ours["images_spatial_crop"].tolist() == wanted["images_spatial_crop"]


def test_the_resolution_is_chosen_as_officially(told: Path) -> None:
    held = read(told)
    for width, height, *wanted in held["resolution_table_w_h_bw_bh"]:
        assert list(best_resolution((width, height), held["candidate_resolutions"])) == wanted, (width, height)


@pytest.mark.parametrize("count", [0, 2])
def test_marks_and_images_must_match(count: int) -> None:
    with pytest.raises(ValueError, match=f"1 <image> marks for {count} images"):
        processor_of(PART / "processor")(images=[picture(9, 9)] * count, text="<|User|>: <image>\nWhat?")


def test_gray_and_transparent_pictures_are_converted() -> None:
    for mode in ("L", "RGBA"):
        ours = processor_of(PART / "processor")(images=picture(40, 30).convert(mode), text="<image>")
        assert ours["images"].shape == (1, 2, 3, 384, 384)


def test_a_saved_processor_loads_again(tmp_path: Path) -> None:
    first = processor_of(PART / "processor")
    first.save_pretrained(tmp_path)
    second = DeepseekVL2Processor.from_pretrained(tmp_path)
    for name, value in first(images=picture(500, 90), text="<image>\nWhat?").items():
        assert torch.equal(second(images=picture(500, 90), text="<image>\nWhat?")[name], value)


def test_a_folder_without_resolutions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ValueError, match="candidate_resolutions"):
        DeepseekVL2Processor.from_pretrained(tmp_path)
