from __future__ import annotations

import dataclasses
import errno
import os
import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from vismmoe.errors import CheckpointError
from vismmoe.experts import files as files_module
from vismmoe.experts.files import staging_bytes
from vismmoe.experts.slabs import SlabPool
from vismmoe.experts.store import ExpertStore
from vismmoe.types import ExpertId, ExpertLayout, ExpertRange, PartShape


def read_all(store: ExpertStore, masters: Any) -> None:
    """Read every expert, alone and all together, and compare its bytes."""
    pool = SlabPool(len(masters.truth), masters.layout)
    for slot, (expert, expected) in enumerate(masters.truth.items()):
        store.read_into(expert, pool.bytes(slot))
        assert held(pool, slot, expert) == expected
        pool.bytes(slot).zero_()
    store.read_batch([(expert, pool.buffer(slot)) for slot, expert in enumerate(masters.truth)])
    for slot, (expert, expected) in enumerate(masters.truth.items()):
        assert held(pool, slot, expert) == expected


def held(pool: SlabPool, slot: int, expert: ExpertId) -> bytes:
    """The expert's own bytes in its slab."""
    return b"".join(bytes(part.numpy()) for part in pool.parts(slot, expert))


@pytest.mark.parametrize("direct_io", ["auto", "on", "off"])
@pytest.mark.parametrize("lead", [0, 1, 123, 4096, 8191])
def test_every_expert_comes_out_byte_for_byte(make_masters: Callable[..., Any], direct_io: Any, lead: int) -> None:
    masters = make_masters(lead=lead)
    with ExpertStore.open(masters.layout, direct_io=direct_io) as store:
        read_all(store, masters)


def test_direct_reads_of_whole_pages_and_of_more_than_one_buffer_are_exact(
    make_masters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "STAGING_BYTES", 8192)  # an expert then takes several rounds
    for lead in (4096, 4097):
        masters = make_masters(layers=1, rows=512, dtype=torch.float32, lead=lead)
        with ExpertStore.open(masters.layout, direct_io="on") as store:
            if not store.direct:
                pytest.skip(store.fallbacks[0])
            read_all(store, masters)


def test_neighbours_in_a_file_are_read_at_one_go(
    make_masters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masters = make_masters(layers=2, experts=4)
    reads: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(len(buffers))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    pool = SlabPool(4, masters.layout)
    wanted = [ExpertId(0, 3), ExpertId(0, 1), ExpertId(1, 0), ExpertId(0, 2)]
    with ExpertStore.open(masters.layout) as store:
        store.read_batch([(expert, pool.buffer(slot)) for slot, expert in enumerate(wanted)])
    # Layer 0: three neighbours in each of two tensors; layer 1: one expert in each of two.
    assert sorted(reads) == [1, 1, 3, 3]
    assert [bytes(pool.buffer(slot)) for slot in range(4)] == [masters.truth[expert] for expert in wanted]


def test_short_reads_are_continued(make_masters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    masters = make_masters()
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:100]], offset))
    with ExpertStore.open(masters.layout) as store:
        read_all(store, masters)


def test_a_missing_file_is_named(make_masters: Callable[..., Any]) -> None:
    masters = make_masters()
    masters.files[1].unlink()
    with pytest.raises(CheckpointError, match=masters.files[1].name):
        ExpertStore.open(masters.layout)


def test_a_truncated_file_is_refused_before_anything_is_read(make_masters: Callable[..., Any]) -> None:
    masters = make_masters()
    os.truncate(masters.files[0], 500)
    with pytest.raises(CheckpointError, match=r"model-0.*500 bytes.*truncated"):
        ExpertStore.open(masters.layout)


@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_a_file_truncated_afterwards_is_an_error_and_not_wrong_bytes(
    make_masters: Callable[..., Any], direct_io: Any
) -> None:
    masters = make_masters()
    pool = SlabPool(1, masters.layout)
    with ExpertStore.open(masters.layout, direct_io=direct_io) as store:
        os.truncate(masters.files[0], 500)
        with pytest.raises(CheckpointError, match="ends at byte"):
            store.read_into(ExpertId(0, 3), pool.bytes(0))
        store.read_into(ExpertId(1, 3), pool.bytes(0))
        assert bytes(pool.buffer(0)) == masters.truth[ExpertId(1, 3)]


def test_an_io_error_of_the_disk_is_told(make_masters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    masters = make_masters()
    with ExpertStore.open(masters.layout) as store:

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.read_into(ExpertId(0, 0), SlabPool(1, masters.layout).bytes(0))


def test_a_file_system_that_refuses_direct_io_is_read_normally_and_said_once(
    make_masters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masters = make_masters(layers=3)
    real_open = os.open

    def refusing(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refusing)
    with ExpertStore.open(masters.layout, direct_io="on") as store:
        assert not store.direct
        assert len(store.fallbacks) == 1
        assert "Invalid argument" in store.fallbacks[0]
        read_all(store, masters)


def test_direct_io_that_returns_other_bytes_is_found_out(
    make_masters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masters = make_masters()
    preadv = os.preadv

    def garbled(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = preadv(fd, buffers, offset)
        buffers[0][0] ^= 1
        return got

    monkeypatch.setattr(os, "preadv", garbled)
    store = ExpertStore.open(masters.layout, direct_io="on")
    monkeypatch.undo()
    with store:
        assert not store.direct
        assert "other bytes" in store.fallbacks[0]
        read_all(store, masters)


def test_a_memory_file_system_works_whether_or_not_it_has_direct_io(make_masters: Callable[..., Any]) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("no memory file system here")
    with tempfile.TemporaryDirectory(prefix="vismmoe-test-", dir=shared) as folder:
        masters = make_masters(folder=Path(folder))
        with ExpertStore.open(masters.layout, direct_io="on") as store:
            read_all(store, masters)
            assert store.direct or len(store.fallbacks) == 1


def test_direct_io_is_left_to_large_experts_unless_asked_for(make_masters: Callable[..., Any]) -> None:
    masters = make_masters()
    with ExpertStore.open(masters.layout, direct_io="auto") as store:
        assert not store.direct
        assert store.fallbacks == []


LARGE_ROWS = 5555  # 266,640 bytes an expert, in parts that are no whole blocks


@pytest.mark.parametrize("lead", [0, 8, 123, 124, 4096, 5000])
def test_large_parts_come_straight_to_their_place(make_masters: Callable[..., Any], lead: int) -> None:
    """Only numbers that begin at an odd byte of the file are copied, since no tensor can begin there."""
    masters = make_masters(layers=1, experts=3, rows=LARGE_ROWS, lead=lead)
    with ExpertStore.open(masters.layout) as store:
        if not store.direct:
            pytest.skip(store.fallbacks[0])
        store._staging._free.clear()
        read_all(store, masters)
        assert (store._staging._free == []) == (lead % 2 == 0), "staging is borrowed where something has to be copied"
        assert (staging_bytes(masters.layout, 1) == 0) == (lead % 2 == 0)


def test_what_comes_with_a_large_part_stays_within_its_slab(make_masters: Callable[..., Any]) -> None:
    masters = make_masters(layers=1, experts=4, rows=LARGE_ROWS, lead=4094)
    pool = SlabPool(3, masters.layout)
    for slot in (0, 2):
        pool.bytes(slot).fill_(7)
    with ExpertStore.open(masters.layout) as store:
        for expert in masters.truth:
            store.read_into(expert, pool.bytes(1))
            assert held(pool, 1, expert) == masters.truth[expert]
    assert all(bool((pool.bytes(slot) == 7).all()) for slot in (0, 2))


@pytest.mark.parametrize("apart", [0, 2, 4096, 4096 * 3 + 2])
@pytest.mark.parametrize("direct_io", ["on", "off"])
@pytest.mark.parametrize("lead", [0, 10, 4095])
def test_two_ranges_become_one_part(tmp_path: Path, apart: int, direct_io: Any, lead: int) -> None:
    """Gate and up lie `apart` bytes from each other; what lies between is in nobody's way."""
    half = 131_080  # bytes: no whole blocks
    content = random.Random(lead + apart).randbytes(lead + 2 * half + apart + half + 5)
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    ranges = tuple(ExpertRange(file, lead + start, half) for start in (0, half + apart, 2 * half + apart))
    parts = (PartShape("gate_up_proj", (4, half // 4), False), PartShape("down_proj", (half // 2,), False))
    expert, other = ExpertId(0, 0), ExpertId(0, 1)
    layout = ExpertLayout(torch.bfloat16, parts, {expert: ranges, other: tuple(reversed(ranges))}, 3 * half)
    pool = SlabPool(1, layout)
    with ExpertStore.open(layout, direct_io) as store:
        for each in (expert, other, expert):
            store.read_into(each, pool.bytes(0))
            wanted = b"".join(content[r.offset : r.offset + r.length] for r in layout.ranges[each])
            assert held(pool, 0, each) == wanted


@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_of_a_large_expert_every_bit_is_watched_and_its_neighbours_are_not(
    make_masters: Callable[..., Any], direct_io: Any
) -> None:
    lead = 5000
    masters = make_masters(layers=1, experts=2, rows=LARGE_ROWS, lead=lead)
    pool, first = SlabPool(1, masters.layout), ExpertId(0, 0)
    up, down = masters.layout.ranges[first]
    inside = [r.offset + place for r in (up, down) for place in (0, 1, r.length // 2, r.length - 1)]
    outside = [lead - 1, up.offset + up.length, down.offset - 1, down.offset + down.length]
    with ExpertStore.open(masters.layout, direct_io) as store:
        store.read_into(first, pool.bytes(0))
        was = masters.files[0].read_bytes()
        for place in (*inside, *outside):
            masters.files[0].write_bytes(was[:place] + bytes([was[place] ^ 16]) + was[place + 1 :])
            if place in outside:
                store.read_into(first, pool.bytes(0))
            else:
                with pytest.raises(CheckpointError, match="Expert 0 of layer 0 has other bytes"):
                    store.read_into(first, pool.bytes(0))


@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_a_large_expert_whose_file_ends_early_is_an_error(make_masters: Callable[..., Any], direct_io: Any) -> None:
    masters = make_masters(layers=1, experts=2, rows=LARGE_ROWS)
    last = masters.layout.ranges[ExpertId(0, 1)][-1]
    pool = SlabPool(1, masters.layout)
    with ExpertStore.open(masters.layout, direct_io) as store:
        for size in (last.offset + last.length - 1, last.offset + 4096, last.offset - 1):
            os.truncate(masters.files[0], size)
            with pytest.raises(CheckpointError, match="ends at byte"):
                store.read_into(ExpertId(0, 1), pool.bytes(0))


def test_a_read_in_place_that_is_cut_short_goes_on(
    make_masters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masters = make_masters(layers=1, experts=2, rows=LARGE_ROWS, lead=4095)
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:8192]], offset))
    with ExpertStore.open(masters.layout) as store:
        read_all(store, masters)


@pytest.mark.parametrize("direct_io", ["on", "off"])
def test_a_bit_that_flips_after_the_first_read_is_an_error_and_the_store_goes_on(
    make_masters: Callable[..., Any], direct_io: Any
) -> None:
    masters = make_masters()
    pool = SlabPool(1, masters.layout)
    with ExpertStore.open(masters.layout, direct_io=direct_io) as store:
        read_all(store, masters)
        was = masters.files[0].read_bytes()
        masters.files[0].write_bytes(was[:200] + bytes([was[200] ^ 4]) + was[201:])
        with pytest.raises(CheckpointError, match=r"Expert 0 of layer 0 has other bytes.*model-0"):
            store.read_into(ExpertId(0, 0), pool.bytes(0))
        store.read_into(ExpertId(0, 2), pool.bytes(0))  # its own bytes are those of before
        assert bytes(pool.buffer(0)) == masters.truth[ExpertId(0, 2)]
        masters.files[0].write_bytes(was)
        read_all(store, masters)


def test_a_file_that_is_written_to_before_an_expert_s_first_read_is_refused(make_masters: Callable[..., Any]) -> None:
    masters = make_masters()
    pool = SlabPool(1, masters.layout)
    with ExpertStore.open(masters.layout) as store:
        os.utime(masters.files[0], ns=(1, 1))
        with pytest.raises(CheckpointError, match=r"model-0.*written to while it is in use"):
            store.read_into(ExpertId(0, 3), pool.bytes(0))
        store.read_into(ExpertId(1, 3), pool.bytes(0))


def test_what_was_garbled_on_the_way_is_read_once_more(
    make_masters: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    masters = make_masters()
    pool = SlabPool(1, masters.layout)
    preadv, calls = os.preadv, [0]

    def garbled_once(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = preadv(fd, buffers, offset)
        calls[0] += 1
        if calls[0] == 1:
            buffers[0][0] ^= 1
        return got

    with ExpertStore.open(masters.layout, direct_io="off") as store:
        read_all(store, masters)
        monkeypatch.setattr(os, "preadv", garbled_once)
        store.read_into(ExpertId(0, 1), pool.bytes(0))
    assert bytes(pool.buffer(0)) == masters.truth[ExpertId(0, 1)]


def test_many_threads_read_at_once(make_masters: Callable[..., Any]) -> None:
    masters = make_masters(layers=3, experts=8, rows=256)
    errors: list[BaseException] = []

    def reader(store: ExpertStore) -> None:
        try:
            for _ in range(5):
                read_all(store, masters)
        except BaseException as error:
            errors.append(error)

    for direct_io in ("on", "off"):
        with ExpertStore.open(masters.layout, direct_io) as store:  # type: ignore[arg-type]
            threads = [threading.Thread(target=reader, args=(store,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert errors == []


def test_a_layout_whose_bytes_do_not_add_up_is_refused(make_masters: Callable[..., Any]) -> None:
    masters = make_masters()
    ranges = dict(masters.layout.ranges)
    ranges[ExpertId(0, 1)] = (ExpertRange(masters.files[0], 0, 10),)
    with pytest.raises(CheckpointError, match="Expert 1 of layer 0 has 10 bytes"):
        ExpertStore.open(dataclasses.replace(masters.layout, ranges=ranges))


def open_files(folder: Path) -> list[str]:
    """Files of this folder that this process holds open."""
    held = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the listing itself is closed by now
            held.append(os.readlink(link))
    return [name for name in held if Path(name).is_relative_to(folder.resolve())]


def test_closing_twice_is_harmless_and_leaves_no_file_open(make_masters: Callable[..., Any]) -> None:
    masters = make_masters()
    store = ExpertStore.open(masters.layout, direct_io="on")
    assert open_files(masters.files[0].parent) != []
    store.close()
    store.close()
    os.truncate(masters.files[1], 10)
    with pytest.raises(CheckpointError):
        ExpertStore.open(masters.layout)
    assert open_files(masters.files[0].parent) == []
