"""Scenes: what is sampled, how it is drawn and how its tokens are labelled."""

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from vismmoe_training.scenes import (
    CELLS,
    COLOUR_NAMES,
    KINDS,
    THEMES,
    WORDS,
    Scene,
    SceneObject,
    SceneSpec,
    draw_scene,
    kind_weights,
    label_tokens,
    render,
    sample_scene,
    token_owners,
)
from vismmoe_training.scenes.background import sample_background
from vismmoe_training.scenes.kinds import box_size
from vismmoe_training.scenes.placement import visible_shares
from vismmoe_training.scenes.scene import centre, overlap_px


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = np.random.default_rng(7)
    return [sample_scene(rng) for _ in range(400)]


def scene_of(*objects: SceneObject) -> Scene:
    return Scene(128, 128, sample_background(np.random.default_rng(3)), objects, None, 11)


def lone(kind: str, colour: str) -> Scene:
    width, height = box_size(kind, 28)
    return scene_of(SceneObject(kind, colour, (40, 40, 40 + width, 40 + height)))


def test_the_vocabulary_has_no_ambiguous_word() -> None:
    spoken = {*KINDS, *COLOUR_NAMES, "yes", "no", *" ".join(CELLS).split()}
    assert len(KINDS) == len(set(KINDS)) == 28
    assert len(WORDS) == len(set(WORDS)) == 24
    assert not spoken & set(WORDS)
    assert all(3 <= len(word) <= 5 and word.isalpha() and word.islower() for word in WORDS)
    assert sorted(kind for theme in THEMES for kind in theme) == sorted(KINDS)


def test_the_most_popular_kind_is_four_times_as_likely_as_the_rarest() -> None:
    weights = kind_weights()
    assert weights.sum() == pytest.approx(1)
    assert weights.max() / weights.min() == pytest.approx(4)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    first, again, other = (sample_scene(np.random.default_rng(seed)) for seed in (5, 5, 6))
    assert first == again
    assert draw_scene(first).tobytes() == draw_scene(again).tobytes()
    assert first != other


def test_sizes_and_counts_stay_within_the_spec(scenes: list[Scene]) -> None:
    spec = SceneSpec()
    for scene in scenes:
        assert spec.min_objects <= len(scene.objects) <= spec.max_objects
        for side in (scene.width_px, scene.height_px):
            assert spec.min_side_px <= side <= spec.max_side_px
            assert side % spec.side_step_px == 0
        assert all(spec.min_object_px <= max(item.size_px) <= spec.max_object_px for item in scene.objects)
    assert 22_000 < np.mean([scene.width_px * scene.height_px for scene in scenes]) < 27_000


def test_objects_stay_visible_off_the_text_and_clear_of_cell_borders(scenes: list[Scene]) -> None:
    overlapping = 0
    for scene in scenes:
        shares = visible_shares(scene.objects, scene.width_px, scene.height_px)
        overlapping += min(shares) < 1
        assert min(shares) >= 0.7
        for item in scene.objects:
            assert scene.text is None or not overlap_px(item.box_px, scene.text.box_px)
            for middle, side in zip(centre(item.box_px), (scene.width_px, scene.height_px), strict=True):
                assert min(abs(middle / side - 1 / 3), abs(middle / side - 2 / 3)) >= 0.04
    assert overlapping > len(scenes) / 50


def test_kinds_repeat_often_enough_to_be_counted(scenes: list[Scene]) -> None:
    counts = Counter(scene.count(kind) for scene in scenes for kind in scene.kinds())
    assert all(counts[number] for number in (1, 2, 3, 4))


def test_a_spec_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="no room"):
        sample_scene(np.random.default_rng(0), SceneSpec(min_objects=40, max_objects=40, max_side_px=128))
    with pytest.raises(ValueError, match="min_objects"):
        SceneSpec(min_objects=3, max_objects=2)


def test_every_kind_and_every_colour_is_drawn_differently() -> None:
    by_kind = [np.asarray(draw_scene(lone(kind, "red")), dtype=float)[40:68, 40:68] for kind in KINDS]
    by_colour = [np.asarray(draw_scene(lone("circle", name)), dtype=float)[48:60, 48:60] for name in COLOUR_NAMES]
    for pictures, least in ((by_kind, 8.0), (by_colour, 25.0)):
        for index, picture in enumerate(pictures):
            assert all(np.abs(picture - other).mean() > least for other in pictures[:index])


def test_a_mask_covers_just_the_pixels_that_its_object_changes() -> None:
    for kind in KINDS:
        scene = lone(kind, "blue")
        rendering = render(scene)
        changed = np.abs(np.asarray(rendering.image, float) - np.asarray(draw_scene(scene_of()), float)).max(2) > 90
        assert rendering.masks.shape == (1, 128, 128)
        assert (changed & ~rendering.masks[0]).sum() <= 0.2 * rendering.masks[0].sum()
        assert rendering.masks[0].sum() > 90


def test_drawings_fill_their_boxes() -> None:
    for kind in KINDS:
        for tilt in (0, 17):
            box = (30, 30, 30 + box_size(kind, 44)[0], 30 + box_size(kind, 44)[1])
            mask = render(scene_of(SceneObject(kind, "green", box, tilt))).masks[0]
            rows, cols = np.nonzero(mask)
            tight = (cols.min(), rows.min(), cols.max() + 1, rows.max() + 1)
            assert max(abs(a - b) for a, b in zip(tight, box, strict=True)) <= 1


def test_token_labels_agree_with_masks_and_ground_truth(scenes: list[Scene]) -> None:
    for scene in scenes[:100]:
        labels, owners, masks = label_tokens(scene), token_owners(scene), render(scene).masks
        for row, col in np.ndindex(owners.shape):
            window = masks[:, 16 * row : 16 * row + 16, 16 * col : 16 * col + 16].mean((1, 2))
            owner = int(owners[row, col])
            if owner < 0:
                assert window.max() < 0.15
                assert labels.kind[row, col] == labels.colour[row, col] == labels.cell[row, col] == 0
                continue
            item = scene.objects[owner]
            assert window[owner] >= 0.25 or window[owner] == window.max() >= 0.15
            assert KINDS[labels.kind[row, col] - 1] == item.kind
            assert COLOUR_NAMES[labels.colour[row, col] - 1] == item.colour
            assert labels.cell[row, col] - 1 == scene.cell_of(item)


def test_token_labels_spell_the_text_and_count_the_objects(scenes: list[Scene]) -> None:
    for scene in scenes:
        labels = label_tokens(scene)
        assert labels.count_centre.sum() == len(scene.objects)
        for field in fields(labels):
            values = getattr(labels, field.name)
            assert values.dtype == np.int64
            assert values.shape == (scene.height_px // 16, scene.width_px // 16)
        assert (labels.text.max() > 0) == (scene.text is not None)
        if scene.text is not None and scene.text.is_number:
            assert f"{labels.tens.max() - 1}{labels.ones.max() - 1}" == scene.text.text
        elif scene.text is not None:
            assert WORDS[labels.text.max() - 2] == scene.text.text


def test_the_centre_token_holds_the_centre_and_moves_aside_where_it_is_taken() -> None:
    below = SceneObject("square", "red", (24, 24, 56, 56))
    above = SceneObject("circle", "blue", (26, 26, 58, 58))
    assert np.argwhere(label_tokens(scene_of(below)).count_centre).tolist() == [[2, 2]]
    marks = np.argwhere(label_tokens(scene_of(below, above)).count_centre).tolist()
    assert len(marks) == 2
    assert [2, 2] in marks


def test_tokens_that_do_not_tile_the_scene_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        label_tokens(lone("star", "pink"), token_px=24)


def test_an_empty_scene_has_only_background_tokens() -> None:
    labels = label_tokens(scene_of())
    assert not any(getattr(labels, field.name).any() for field in fields(labels))
