"""A pool of rendered scenes: patches as the vision tower wants them, labels and questions beside them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vismmoe_training.scenes import (
    Scene,
    SceneSpec,
    TokenLabels,
    draw_scene,
    label_tokens,
    object_masks,
    scene_from_seed,
    token_owners,
)

OUTLINE_VALUES = 20
CHUNK = 64  # scenes a worker renders at a time
LABELS = tuple(field.name for field in fields(TokenLabels))


@dataclass(frozen=True)
class PooledScene:
    """One scene, ready to train on; N visual tokens, each of merge x merge patches."""

    scene: Scene
    patches: npt.NDArray[np.uint8]  # (4 N, 3, patch, patch), grouped by visual token
    labels: npt.NDArray[np.uint8]  # (len(LABELS), N) in LABELS' order
    outlines: npt.NDArray[np.float32]  # (N, OUTLINE_VALUES), see `token_outlines`

    @property
    def tokens(self) -> int:
        """Number of visual tokens."""
        return int(self.labels.shape[1])


def cut_patches(image: npt.NDArray[np.uint8], patch_px: int, merge: int) -> npt.NDArray[np.uint8]:
    """(H, W, 3) -> (patches, 3, patch, patch) in Qwen's order: the patches of one visual token lie together."""
    rows, cols = image.shape[0] // (patch_px * merge), image.shape[1] // (patch_px * merge)
    grid = image.reshape(rows, merge, patch_px, cols, merge, patch_px, 3)
    return np.ascontiguousarray(grid.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch_px, patch_px))


def token_outlines(scene: Scene, token_px: int) -> npt.NDArray[np.float32]:
    """What part of its object each token shows: (N, OUTLINE_VALUES), zeros on the background.

    The first 16 values say which cells of a 4 x 4 grid over the token lie inside the object; then come the token's
    place relative to the object's centre (x, y, in half sides of its box) and the sides of the box (in 64 px).
    """
    owner, cell = token_owners(scene, token_px), token_px // 4
    rows, cols = owner.shape
    masks = object_masks(scene).reshape(-1, rows, 4, cell, cols, 4, cell).mean((3, 6)) > 0.5
    boxes = np.array([item.box_px for item in scene.objects], dtype=np.float32)
    sides = boxes[:, 2:] - boxes[:, :2]
    y, x = np.meshgrid((np.arange(rows) + 0.5) * token_px, (np.arange(cols) + 0.5) * token_px, indexing="ij")
    centres = (boxes[owner, 2:] + boxes[owner, :2]) / 2
    place = (np.stack([x, y], axis=-1) - centres) / (sides[owner] / 2)
    inside = masks[owner, np.arange(rows)[:, None], :, np.arange(cols)[None, :], :].reshape(rows, cols, 16)
    values = np.concatenate([inside, np.clip(place, -2, 2), sides[owner] / 64], axis=-1) * (owner >= 0)[..., None]
    return values.reshape(-1, OUTLINE_VALUES).astype(np.float32)


def pool_scene(seed: int, spec: SceneSpec, patch_px: int = 8, merge: int = 2) -> PooledScene:
    """Draw and label the scene of this seed."""
    scene = scene_from_seed(seed, spec)
    labels = label_tokens(scene, patch_px * merge)
    stacked = np.stack([getattr(labels, name).reshape(-1) for name in LABELS]).astype(np.uint8)
    patches = cut_patches(np.asarray(draw_scene(scene)), patch_px, merge)
    return PooledScene(scene, patches, stacked, token_outlines(scene, patch_px * merge))


def scene_seeds(count: int, seed: int, specs: Sequence[SceneSpec]) -> list[tuple[int, SceneSpec]]:
    """Seed and spec of `count` scenes, `specs` taken in turn by chunks."""
    seeds = np.random.default_rng(seed).integers(2**62, size=count).tolist()
    return [(own, specs[i // CHUNK % len(specs)]) for i, own in enumerate(seeds)]


def _pool_chunk(work: Sequence[tuple[int, SceneSpec]]) -> list[PooledScene]:
    return [pool_scene(seed, spec) for seed, spec in work]


def build_pool(count: int, seed: int, specs: Sequence[SceneSpec], workers: int = 2) -> list[PooledScene]:
    """The scenes of `scene_seeds`, rendered; the same on any number of workers."""
    work = scene_seeds(count, seed, specs)
    chunks = [work[start : start + CHUNK] for start in range(0, count, CHUNK)]
    if workers < 2:
        return [scene for chunk in chunks for scene in _pool_chunk(chunk)]
    with multiprocessing.get_context("fork").Pool(workers) as processes:
        return [scene for chunk in processes.imap(_pool_chunk, chunks) for scene in chunk]


def pixel_values(scenes: Sequence[PooledScene]) -> tuple[Tensor, Tensor]:
    """Patches of several scenes -> float32 (P, 3 * 2 * patch * patch) as Qwen's processor gives, and (B, 3) grids."""
    patch_px = scenes[0].patches.shape[-1]
    grids = [(1, s.scene.height_px // patch_px, s.scene.width_px // patch_px) for s in scenes]
    return frames_of([scene.patches for scene in scenes]), torch.tensor(grids)


def frames_of(patches: Sequence[npt.NDArray[np.uint8]]) -> Tensor:
    """(n, 3, patch, patch) each -> (P, 3 * 2 * patch * patch) from -1 to 1: a still is two equal frames."""
    pixels = torch.from_numpy(np.concatenate(patches)).float().div_(127.5).sub_(1.0)
    return pixels.unsqueeze(2).expand(-1, -1, 2, -1, -1).reshape(pixels.shape[0], -1)


def batches_of_like_size(
    sizes: npt.NDArray[np.int64], batch: int, rng: np.random.Generator, window: int = 16
) -> Iterator[npt.NDArray[np.int64]]:
    """One pass over all indices in random batches whose members are of similar size, so that little is padded."""
    order = rng.permutation(len(sizes))
    groups: list[npt.NDArray[np.int64]] = []
    for start in range(0, len(order), batch * window):
        chunk = order[start : start + batch * window]
        chunk = chunk[np.argsort(sizes[chunk], kind="stable")]
        groups += [chunk[i : i + batch] for i in range(0, len(chunk), batch)]
    for index in rng.permutation(len(groups)):
        yield groups[int(index)]
