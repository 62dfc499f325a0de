"""Rows for training, validation and test: split by image, shuffled by seed and epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from vismmoe.errors import CorpusError
from vismmoe_training.row_table import Batch, RowTable

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, Split, Split] = ("train", "val", "test")


def split_items(items: Sequence[str], val: float, test: float, seed: int) -> dict[str, Split]:
    """Each item to one side by a hash of its name, so that an image stays on its side when the corpus grows.

    Where a side would stay empty (tiny corpora), the items with the nearest hashes go there. Raises CorpusError for
    fewer than three items.
    """
    names = sorted(set(items), key=lambda name: _hash(name, seed))
    if len(names) < 3:
        raise CorpusError(
            f"The routing logs hold {len(names)} image(s); at least 3 are needed to train, to choose and to test."
        )
    places = [_hash(name, seed) for name in names]
    tests = min(max(sum(place < test for place in places), 1), len(names) - 2)
    held_out = min(max(sum(place < test + val for place in places), tests + 1), len(names) - 1)
    return {
        name: "test" if index < tests else "val" if index < held_out else "train" for index, name in enumerate(names)
    }


class LookaheadData(LightningDataModule):
    """Training, validation and test rows, split by image."""

    def __init__(
        self,
        table: RowTable,
        batch_size: int,
        val: float,
        test: float,
        seed: int,
        test_corpora: frozenset[str] = frozenset(),
    ) -> None:
        """val, test: shares of the images. test_corpora: folders of logs to test on, whole and alone, instead."""
        super().__init__()
        self.table, self._batch_size, self._seed = table, batch_size, seed
        self.side_of = split_items(table.items(), val, test, seed)
        sides = torch.tensor([SPLITS.index(self.side_of[item]) for item in table.items()])
        if test_corpora:
            apart = torch.tensor([corpus in test_corpora for corpus in table.corpora()])
            sides = torch.where(apart, SPLITS.index("test"), (sides == SPLITS.index("val")).long())
        side = torch.where(table.useful(), sides[table.request()], -1)
        self.rows: dict[Split, Tensor] = {name: (side == at).nonzero().flatten() for at, name in enumerate(SPLITS)}
        for name, rows in self.rows.items():
            if len(rows) < 2:
                raise CorpusError(f"The routing logs leave no row to {name} on: collect more images.")

    def train_dataloader(self) -> DataLoader[Batch]:
        return _loader(self.table, EpochBatches(self.rows["train"], self._batch_size, self._seed))

    def val_dataloader(self) -> DataLoader[Batch]:
        return _loader(self.table, EpochBatches(self.rows["val"], 4 * self._batch_size))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch  # rows are gathered where the network is; Lightning cannot look into frozen dataclasses

    def batches(self, split: Split) -> Iterator[tuple[Tensor, Batch]]:
        """Rows of one side in order, with their row numbers."""
        for rows in EpochBatches(self.rows[split], 4 * self._batch_size):
            yield rows, self.table[rows]


class EpochBatches(Sampler[Tensor]):
    """Batches of row numbers, shuffled by seed and epoch: an epoch repeats exactly, whoever starts it.

    Lightning calls `set_epoch`. A last batch of one row is left out, BatchNorm cannot use it.
    """

    def __init__(self, rows: Tensor, batch_size: int, seed: int | None = None) -> None:
        self._rows, self._batch_size, self._seed, self._epoch = rows, batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._split(self._rows))

    def __iter__(self) -> Iterator[Tensor]:
        # A generator on purpose: after a resume Lightning asks for the iterator first and calls set_epoch then.
        rows = self._rows
        if self._seed is not None:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
            rows = rows[torch.randperm(len(rows), generator=generator)]
        yield from self._split(rows)

    def _split(self, rows: Tensor) -> list[Tensor]:
        parts = list(torch.split(rows, self._batch_size))
        return parts[:-1] if self._seed is not None and len(parts[-1]) == 1 else parts


def _hash(name: str, seed: int) -> float:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def _loader(table: RowTable, batches: EpochBatches) -> DataLoader[Batch]:
    # batch_size=None: the sampler's tensors are handed to the table as they are, one gather a batch
    return DataLoader(table, sampler=batches, batch_size=None, num_workers=0)
