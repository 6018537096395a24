"""Compressed blocks in the disk tier: they take less room, come back as they were, and garble nothing."""

import errno
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import chain, records, spec
from disk_faults import (
    FIRST,
    LARGE,
    RANDOM,
    FailingFiles,
    check_usage,
    checksums_of,
    compressible,
    contents,
    filled,
    found,
    memory,
    open_tier,
    parents_of,
    served,
    store,
    store_packed,
)

from kvstore.errors import InvalidRequest
from kvstore.transport.memory import hash_pieces
from kvstore.types import BlockHash, IntArray, SlabId
from kvstore_server.table import NONE
from kvstore_server.tiers import records as tier_records
from kvstore_server.tiers import slab_files
from kvstore_server.tiers.catalog import SlabEntry
from kvstore_server.tiers.codec import NUMBERS, Codec, compress, load_blosc2
from kvstore_server.tiers.disk import DiskFailed, DiskTier, Files, Packed, Recovered
from kvstore_server.tiers.records import PAGE_BYTES, RecordLayout, chunks
from kvstore_server.tiers.slab import place_of, slab_of, slot_id

CODECS = [Codec.LZ4, Codec.ZSTD]
PACKED = compressible(LARGE)  # 30 pages plain, 15 compressed
LAYOUT = RecordLayout.of(PACKED)
MIXED = [*chain(4, seed=60), *sorted(RANDOM), *chain(3, seed=61)]  # some of it compressible


def room_of(tier: DiskTier, slot: int) -> int:
    """Bytes of data in each record of the slot's slab."""
    entry = tier.catalog.load().slabs[slab_of(slot)]
    return entry.size_bytes // entry.num_slots - LAYOUT.header_bytes


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("dtype", "part_bytes"),
    [
        ("bfloat16", 10),
        ("bfloat16", 3000),
        ("float32", 60_000),
        ("fp8_e4m3", 60_000),
        ("uint8", 60_000),  # here random, all of it
        ("bfloat16", 300_001),
    ],
)
def test_blocks_come_back_whatever_they_hold_and_whatever_codec_comes_next(
    tmp_path: Path, codec: Codec, dtype: str, part_bytes: int
) -> None:
    """Covers: A2, D2, D4."""
    kv = replace(spec(bytes_per_part=part_bytes), dtype=dtype)
    tier = open_tier(tmp_path, codec=codec, capacity_bytes=32 << 20)
    slots = store_packed(tier, kv, MIXED)
    assert served(tier, kv, slots, records(MIXED)) == [True] * len(MIXED)
    backwards = np.arange(len(slots))[::-1]
    assert all(served(tier, kv, slots[backwards], records(MIXED[::-1])))
    tier.close()
    more: list[BlockHash] = []
    for seed, other in enumerate([Codec.NONE, *CODECS, Codec.AUTO], start=70):
        tier = open_tier(tmp_path, codec=other, capacity_bytes=32 << 20)
        (recovered,) = tier.recover()
        assert found([recovered]) == {kv.namespace: [*MIXED, *more]}
        assert all(served(tier, kv, recovered.slots, recovered.hashes))
        check_usage(tier, [recovered])
        new = chain(3, seed=seed)
        taken = store_packed(tier, kv, new)
        assert not set(taken.tolist()) & set(recovered.slots.tolist())
        assert all(served(tier, kv, recovered.slots, recovered.hashes))
        more += new
        tier.close()


@pytest.mark.parametrize("codec", CODECS)
def test_compressed_blocks_take_less_of_the_disk(tmp_path: Path, codec: Codec) -> None:
    """Covers: E1."""
    taken = {}
    hashes = chain(24)
    for used in (Codec.NONE, codec):
        tier = open_tier(tmp_path / used, codec=used, capacity_bytes=16 << 20, slab_bytes=LAYOUT.record_bytes * 6)
        slots = store_packed(tier, PACKED, hashes)
        statistics = tier.statistics()
        assert statistics.used_bytes == 24 * PACKED.block_bytes
        tier.close()
        files = (tmp_path / used / "slabs").iterdir()
        taken[used] = sum(path.stat().st_size for path in files)
        assert statistics.slab_bytes == taken[used]
        assert len(slots) == 24
    assert taken[Codec.NONE] == 24 * LAYOUT.record_bytes
    assert taken[codec] == 3 * 11 * 16 * PAGE_BYTES  # three slabs of 11 records, each a page of header and 15 of data


def test_rooms_are_sixteenths_of_a_plain_block_in_whole_pages() -> None:
    for part_bytes in (10, 3000, 60_000, 1 << 20, 16 << 20):
        layout = RecordLayout.of(spec(bytes_per_part=part_bytes))
        assert layout.rooms[-1] == layout.data_bytes
        assert (layout.rooms % PAGE_BYTES == 0).all()
        assert (np.diff(layout.rooms) > 0).all()
        assert len(layout.rooms) == min(16, layout.data_bytes // PAGE_BYTES)
        sizes = np.arange(1, layout.spec.block_bytes, layout.spec.block_bytes // 20 + 1)
        rooms = layout.rooms_for(sizes)
        assert (rooms >= sizes).all()
        assert (rooms - sizes <= layout.data_bytes // 16 + PAGE_BYTES).all()
        assert layout.rooms_for(np.array([layout.data_bytes])) == [layout.data_bytes]
        assert (layout.rooms_for(layout.rooms) == layout.rooms).all()


def test_what_does_not_shrink_stays_where_it_is(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, codec=Codec.ZSTD)
    tier.open_space(PACKED)
    _, addresses = filled(PACKED, MIXED)
    packed = tier.pack(PACKED, addresses=addresses)
    is_random = np.array([one in RANDOM for one in MIXED])
    assert ((packed.addresses == addresses) == is_random).all()
    assert (packed.sizes[is_random] == PACKED.block_bytes).all()
    assert (packed.sizes[~is_random] < 0.6 * PACKED.block_bytes).all()
    assert packed.codecs.tolist() == [0 if one else NUMBERS[Codec.ZSTD] for one in is_random]
    assert ((packed.checksums == 0) == is_random).all()
    assert (packed.addresses % PAGE_BYTES == 0).all()
    part = packed[2:5]
    assert part.sizes.tolist() == packed.sizes[2:5].tolist()
    tier.close()


def test_what_was_packed_stays_as_long_as_some_of_it_is_needed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, codec=Codec.ZSTD)
    tier.open_space(PACKED)
    hashes = chain(3, seed=42)
    _, addresses = filled(PACKED, hashes)
    part = tier.pack(PACKED, addresses=addresses)[1:2]
    others, more = filled(PACKED, chain(20, seed=43))
    for _ in range(3):
        assert len(tier.pack(PACKED, addresses=more)) == len(others)
    slots = _write(tier, hashes[1:2], part)
    assert served(tier, PACKED, slots, records(hashes[1:2])) == [True]
    tier.close()


# Room.


def in_use(slots: IntArray) -> list[Recovered]:
    """For `check_usage`: these slots of PACKED."""
    return [Recovered(spec=PACKED, hashes=records([]), parents=records([]), slots=slots, stamps=slots)]


def _room_for(num_records: int, room_bytes: int) -> int:
    return num_records * (LAYOUT.header_bytes + room_bytes)


def test_a_block_takes_a_larger_slot_where_its_own_size_has_none(tmp_path: Path) -> None:
    """Covers: E1."""
    capacity_bytes = _room_for(6, LAYOUT.data_bytes)
    tier = open_tier(tmp_path, codec=Codec.ZSTD, capacity_bytes=capacity_bytes, slab_bytes=capacity_bytes)
    plain = store(tier, PACKED, chain(3, seed=1))  # a slab of plain records, which takes all there is
    hashes = chain(3, seed=2)
    slots = store_packed(tier, PACKED, hashes)
    assert {room_of(tier, slot) for slot in slots.tolist()} == {LAYOUT.data_bytes}
    assert served(tier, PACKED, slots, records(hashes)) == [True] * 3
    _, addresses = filled(PACKED, chain(1, seed=3))
    packed = tier.pack(PACKED, addresses=addresses)
    assert tier.allocate_for(PACKED, packed).tolist() == [NONE]
    check_usage(tier, in_use(np.concatenate([plain, slots])))
    tier.close()
    tier = open_tier(tmp_path, capacity_bytes=capacity_bytes)
    (recovered,) = tier.recover()
    assert all(served(tier, PACKED, recovered.slots, recovered.hashes))
    tier.close()


def test_large_blocks_are_given_slots_before_small_ones_that_could_take_them(tmp_path: Path) -> None:
    capacity_bytes = _room_for(2, LAYOUT.data_bytes)
    tier = open_tier(tmp_path, codec=Codec.ZSTD, capacity_bytes=capacity_bytes, slab_bytes=capacity_bytes)
    tier.open_space(PACKED)
    tier.free(tier.allocate(PACKED, 2))
    hashes = [*chain(2, seed=1), *sorted(RANDOM)]  # the small ones first
    tier.free(store(tier, PACKED, chain(2)))
    _, addresses = filled(PACKED, hashes)
    slots = tier.allocate_for(PACKED, tier.pack(PACKED, addresses=addresses))
    assert (slots != NONE).tolist() == [False, False, True, True]
    tier.free(slots[2:])
    tier.close()


def test_empty_slabs_of_one_size_make_room_for_another(tmp_path: Path) -> None:
    """Covers: E1."""
    capacity_bytes = _room_for(8, LAYOUT.data_bytes)
    tier = open_tier(
        tmp_path, codec=Codec.ZSTD, capacity_bytes=capacity_bytes, slab_bytes=_room_for(4, LAYOUT.data_bytes)
    )
    small = chain(14, seed=41)
    slots = store_packed(tier, PACKED, small)  # two slabs of records that nothing plain fits into
    assert tier.empty_slabs(PACKED) == []
    _, addresses = filled(PACKED, sorted(RANDOM))
    packed = tier.pack(PACKED, addresses=addresses)
    assert tier.allocate_for(PACKED, packed).tolist() == [NONE, NONE]
    gone = slots[(slots >> 20) == slots[0] >> 20]
    tier.forget(PACKED, records(small[: len(gone)]))
    tier.free(gone)
    assert tier.empty_slabs(PACKED) == [slab_of(int(slots[0]))]
    for slab in tier.empty_slabs(PACKED):
        tier.close_slab(slab)
        tier.delete_slab(slab)
        tier.slab_deleted(slab)
    large = store_packed(tier, PACKED, sorted(RANDOM))
    assert served(tier, PACKED, large, records(sorted(RANDOM))) == [True, True]
    assert all(served(tier, PACKED, slots[len(gone) :], records(small[len(gone) :])))
    check_usage(tier, in_use(np.concatenate([slots[len(gone) :], large])))
    tier.close()


def test_slots_of_several_sizes_are_freed_at_once_and_given_out_again(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, codec=Codec.LZ4)
    slots = store_packed(tier, PACKED, MIXED)
    assert len({room_of(tier, slot) for slot in slots.tolist()}) == 2
    tier.forget(PACKED, records(MIXED))
    tier.free(slots)
    tier.arena.validate()
    assert tier.statistics().used_bytes == 0
    again = store_packed(tier, PACKED, MIXED)
    assert set(again.tolist()) == set(slots.tolist())
    assert all(served(tier, PACKED, again, records(MIXED)))
    tier.close()


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_stored_and_freed_in_whatever_order_is_accounted_for(tmp_path: Path, seed: int) -> None:
    """Compressed and plain blocks on a disk that is full most of the time.  Covers: A16, E1."""
    rng = np.random.default_rng(seed)
    capacity_bytes = _room_for(12, LAYOUT.data_bytes)
    settings = {"capacity_bytes": capacity_bytes, "slab_bytes": _room_for(3, LAYOUT.data_bytes)}
    tier = open_tier(tmp_path, codec=Codec.ZSTD, **settings)
    hashes = chain(200, seed=50)
    _memory, addresses = filled(PACKED, hashes)
    tier.open_space(PACKED)
    compressed, plain = tier.pack(PACKED, addresses=addresses), Packed.plain(PACKED, addresses)
    held: dict[int, int] = {}  # slot -> number of the block
    refused = 0
    for first in range(0, 200, 8):
        numbers = np.arange(first, first + int(rng.integers(1, 9)))
        packed = (compressed if rng.random() < 0.6 else plain)[numbers]
        slots = tier.allocate_for(PACKED, packed)
        has_slot = slots != NONE
        refused += int((~has_slot).sum())
        numbers, slots, packed = numbers[has_slot], slots[has_slot], packed[has_slot]
        assert held.keys().isdisjoint(slots.tolist())
        tier.write(
            PACKED,
            slots=slots,
            hashes=records([hashes[number] for number in numbers]),
            parents=records([hashes[number] for number in numbers]),
            addresses=addresses[numbers],
            checksums=checksums_of(PACKED, addresses[numbers]),
            packed=packed,
        )
        held |= dict(zip(slots.tolist(), numbers.tolist(), strict=True))
        gone = np.array([slot for slot in held if rng.random() < 0.4], np.int64)
        tier.forget(PACKED, records([hashes[held.pop(slot)] for slot in gone.tolist()]))
        tier.free(gone)
        for slab in tier.empty_slabs(PACKED):
            tier.close_slab(slab)
            tier.delete_slab(slab)
            tier.slab_deleted(slab)
        there = np.array(list(held), np.int64)
        assert served(tier, PACKED, there, records([hashes[number] for number in held.values()])) == [True] * len(held)
        check_usage(tier, in_use(there))
    assert refused, "the disk was never full"
    tier.close()
    again = open_tier(tmp_path, capacity_bytes=capacity_bytes)
    recovered = again.recover()
    assert {one.tobytes() for each in recovered for one in each.hashes} == {hashes[number] for number in held.values()}
    for each in recovered:
        assert all(served(again, PACKED, each.slots, each.hashes))
    check_usage(again, recovered)
    again.close()


# Calls.


@pytest.mark.parametrize(
    ("block_bytes", "count", "num_threads", "expected"),
    [
        (1 << 20, 64, 4, [8] * 8),  # two rounds for four threads
        (1 << 20, 32, 4, [8] * 4),
        (1 << 20, 8, 4, [2] * 4),  # no thread without work
        (1 << 20, 4, 4, [1] * 4),
        (1 << 20, 9, 4, [3] * 3),
        (16 << 20, 4, 4, [1] * 4),
        (64 << 10, 1024, 4, [128] * 8),
        (64 << 10, 20, 4, [16, 4]),  # calls of less than 1 MiB are not worth it
        (4096, 5, 4, [5]),
        (4096, 2048, 1, [512] * 4),  # as many buffers as a call takes
    ],
)
def test_threads_end_a_batch_together(block_bytes: int, count: int, num_threads: int, expected: list[int]) -> None:
    layout = RecordLayout.of(spec(layers=1, bytes_per_part=block_bytes))
    most = layout.records_per_call(count, num_threads=num_threads)
    assert [len(part) for part in chunks(np.arange(count), most=most)] == expected


class _Calls(Files):
    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []  # offset and size
        self.read: list[int] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = super().pwritev(fd, buffers, offset)
        self.written.append((offset, count))
        return count

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        count = super().preadv(fd, buffers, offset)
        self.read.append(count)
        return count


def test_no_more_than_the_compressed_record_is_read(tmp_path: Path) -> None:
    files = _Calls()
    tier = open_tier(tmp_path, codec=Codec.ZSTD, files=files)
    slots = store_packed(tier, PACKED, chain(4))
    record_bytes = LAYOUT.header_bytes + room_of(tier, int(slots[0]))
    assert record_bytes < 0.6 * LAYOUT.record_bytes
    assert all(served(tier, PACKED, slots, records(chain(4))))
    assert sum(files.read) == 4 * record_bytes
    assert files.written == [(0, 4 * record_bytes)]  # side by side, so one call
    tier.close()


def test_a_record_smaller_than_its_slot_ends_a_call(tmp_path: Path) -> None:
    """What lies behind it in the file is not what lies behind it in memory."""
    files = _Calls()
    tier = open_tier(tmp_path, codec=Codec.ZSTD, files=files, slab_bytes=12 * LAYOUT.record_bytes)
    tier.open_space(PACKED)
    slots = tier.allocate(PACKED, len(MIXED))  # large ones, for all of them
    store_packed(tier, PACKED, MIXED, slots=slots)
    assert all(served(tier, PACKED, slots, records(MIXED)))
    # Each compressed one ends a call, so there is one call for each of them, and none for the plain ones before.
    assert len(files.written) == len(MIXED) - len(RANDOM)
    tier.close()


class _Short(Files):
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, [buffers[0][:4096]], offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, [buffers[0][:4096]], offset)


def test_calls_that_do_only_part_of_it_are_gone_on_with(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, codec=Codec.ZSTD, files=_Short())
    slots = store_packed(tier, PACKED, MIXED)
    assert served(tier, PACKED, slots, records(MIXED)) == [True] * len(MIXED)
    tier.close()


# What goes wrong.


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """With the first four blocks of FIRST, compressed, in slab 1."""
    opened = open_tier(tmp_path, codec=Codec.ZSTD)
    slots = store_packed(opened, PACKED, FIRST[:4])
    assert slots.tolist() == (slot_id(SlabId(1), 0) + np.arange(4)).tolist()
    yield opened
    opened.close()


def first_slots() -> IntArray:
    return slot_id(SlabId(1), 0) + np.arange(4)


def _flip(tier: DiskTier, offset: int) -> None:
    """In the second record."""
    record_bytes = LAYOUT.header_bytes + room_of(tier, int(first_slots()[0]))
    with (tier.directory / "slabs" / "1.slab").open("r+b") as file:
        file.seek(record_bytes + offset)
        byte = file.read(1)[0]
        file.seek(record_bytes + offset)
        file.write(bytes([byte ^ 0x10]))


def stored_bytes(block_hash: BlockHash) -> int:
    return len(compress(Codec.ZSTD, contents(PACKED, block_hash).data, item_bytes=2))


# The header, then what blosc2 made: its header, its table, what it made of the block.
@pytest.mark.parametrize(
    "offset",
    [
        0,
        8,
        12,
        16,
        48,
        80,
        112,
        120,
        128,
        136,
        144,
        160,
        *(4096 + at for at in (0, 3, 4, 8, 12, 15, 20, 32, 36, 60_000)),
    ],
)
def test_a_flipped_bit_is_a_miss_of_that_block_alone(tier: DiskTier, offset: int) -> None:
    """Covers: A2, A25."""
    _flip(tier, offset)
    assert served(tier, PACKED, first_slots(), records(FIRST[:4])) == [True, False, True, True]


def test_what_is_garbled_is_not_given_to_the_decompressor(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: A2."""
    given: list[int] = []
    monkeypatch.setattr(tier_records, "decompress", lambda source, target: given.append(len(source)))
    _flip(tier, 4096 + 100)
    served(tier, PACKED, first_slots()[1:2], records(FIRST[1:2]))
    assert given == []
    served(tier, PACKED, first_slots()[:1], records(FIRST[:1]))
    assert given == [stored_bytes(FIRST[0])]


def test_the_last_byte_counts_and_what_comes_after_it_does_not(tier: DiskTier) -> None:
    """Covers: A25."""
    end = 4096 + stored_bytes(FIRST[1])
    for padding in (168, 4095, end, end + 1000):
        _flip(tier, padding)
    assert served(tier, PACKED, first_slots(), records(FIRST[:4])) == [True] * 4
    _flip(tier, end - 1)
    assert served(tier, PACKED, first_slots(), records(FIRST[:4])) == [True, False, True, True]


@pytest.mark.parametrize(
    ("codec", "size", "problem"),
    [
        (0, None, "another size"),
        (0, PACKED.block_bytes, "another size"),  # which a record as small as this cannot hold
        (3, None, "unknown codec"),
        (1 << 63, None, "unknown codec"),
        (2, 0, "another size"),
        (2, 1 << 40, "another size"),
        (2, (1 << 64) - 1, "another size"),
        (2, 15 * PAGE_BYTES + 1, "another size"),
    ],
)
def test_a_header_that_says_what_cannot_be_is_a_miss_and_nothing_is_read_beyond_the_record(
    tmp_path: Path, codec: int, size: int | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all checksums right: written so.  Covers: A2."""
    layout = RecordLayout.of(PACKED)
    (one,) = chain(1)
    chunk = compress(Codec.ZSTD, contents(PACKED, one).data, item_bytes=2)
    room_bytes = 15 * PAGE_BYTES
    headers = layout.headers(
        Packed(
            np.zeros(1, np.int64),
            np.array([len(chunk) if size is None else size], np.uint64).astype(np.int64),
            np.array([codec], np.uint64).astype(np.int64),
            np.zeros(1, np.uint64),
        ),
        hashes=records([one]),
        parents=records([one]),
        sequences=np.array([1], np.uint64),
        checksums=np.zeros((1, 2), np.uint64),
    )
    _, target = memory(PACKED, 1)
    _, stored = memory(PACKED, 1)
    wrong = layout.unpack(headers, hashes=records([one]), stored=stored, room_bytes=room_bytes, addresses=target)
    assert wrong.tolist() == [problem]


def _write(tier: DiskTier, hashes: list[BlockHash], packed: Packed) -> IntArray:
    slots = tier.allocate_for(PACKED, packed)
    _, addresses = filled(PACKED, hashes)
    tier.write(
        PACKED,
        slots=slots,
        hashes=records(hashes),
        parents=parents_of(hashes),
        addresses=addresses,
        checksums=checksums_of(PACKED, addresses),
        packed=packed,
    )
    return slots


def test_a_chunk_of_another_size_writes_nothing_beyond_its_block(tier: DiskTier) -> None:
    """Covers: A2."""
    hashes = chain(3, seed=30)
    _, addresses = filled(PACKED, hashes)
    packed = tier.pack(PACKED, addresses=addresses)
    larger, _ = filled(replace(PACKED, part_bytes=(2 * PACKED.block_bytes,) * 2), hashes[1:2])
    larger[:] = 1
    chunk = np.frombuffer(compress(Codec.ZSTD, larger[0].data, item_bytes=2), np.uint8)
    place, where = memory(PACKED, 1)
    place[0, : len(chunk)] = chunk
    for column, value in (
        (packed.addresses, where[0]),
        (packed.sizes, len(chunk)),
        (packed.checksums, hash_pieces(where, np.array([len(chunk)]))[0]),
    ):
        column[1] = value
    slots = _write(tier, hashes, packed)
    assert served(tier, PACKED, slots, records(hashes)) == [True, False, True]
    target, addresses = memory(PACKED, 3)
    good, _ = tier.read(PACKED, slots=slots[1:2], hashes=records(hashes[1:2]), addresses=addresses[1:2])
    assert not good.any()
    assert not target[0].any()
    assert not target[2].any()


def test_blocks_that_were_garbled_before_they_were_compressed_are_misses(tier: DiskTier) -> None:
    """Covers: A25."""
    hashes = chain(2, seed=31)
    _, addresses = filled(PACKED, chain(2, seed=32))  # other blocks
    slots = _write(tier, hashes, tier.pack(PACKED, addresses=addresses))
    assert served(tier, PACKED, slots, records(hashes)) == [False, False]


def test_an_entry_that_points_into_a_slab_of_another_size_is_a_miss(tier: DiskTier) -> None:
    """Covers: A2, A16."""
    plain = store(tier, PACKED, chain(2, seed=33))
    small, large = first_slots(), plain
    assert room_of(tier, int(small[0])) < room_of(tier, int(large[0]))
    free_small = slot_id(SlabId(1), 4)
    free_large = slot_id(slab_of(int(large[0])), 2)
    claimed = [chain(1, seed=33)[0], FIRST[0]]
    tier.catalog.put_blocks(
        PACKED.namespace,
        hashes=records(claimed),
        parents=records(claimed),
        slots=np.array([free_small, free_large]),
        sequences=np.array([90, 91], np.uint64),
        slabs={},
    )
    tier.close()
    again = open_tier(tier.directory)
    (recovered,) = again.recover()
    assert served(again, PACKED, recovered.slots, recovered.hashes).count(False) == 2
    assert served(again, PACKED, np.array([small[0], large[0]]), records(claimed[::-1])) == [True, True]
    assert served(again, PACKED, np.array([large[0], small[0]]), records(claimed[::-1])) == [False, False]
    again.close()


def test_a_read_of_anothers_slot_writes_nothing_beyond_its_block(tier: DiskTier) -> None:
    """Covers: A12."""
    small = spec(bytes_per_part=10)
    tier.open_space(small)
    target, addresses = memory(small, 3)
    target[:] = 7
    good, _ = tier.read(small, slots=first_slots()[:1], hashes=records(FIRST[:1]), addresses=addresses[1:2])
    assert not good.any()
    assert (target[[0, 2]] == 7).all()


@pytest.mark.parametrize("pages", [1, 14, 16, 30])
def test_a_slab_entry_of_another_size_serves_nothing_wrong(tier: DiskTier, pages: int) -> None:
    """Rooms that there are, and some that there are not.  Covers: A17."""
    record_bytes = LAYOUT.header_bytes + pages * PAGE_BYTES
    num_slots = (tier.directory / "slabs" / "1.slab").stat().st_size // record_bytes
    tier.catalog.put_blocks(
        PACKED.namespace,
        hashes=records([]),
        parents=records([]),
        slots=np.array([], np.int64),
        sequences=np.array([], np.uint64),
        slabs={SlabId(1): SlabEntry(PACKED.namespace, num_slots, num_slots * record_bytes)},
    )
    tier.close()
    again = open_tier(tier.directory)
    recovered = again.recover()
    is_room = pages * PAGE_BYTES in LAYOUT.rooms
    assert len(recovered) == is_room
    for each in recovered:  # the first record lies at the same place whatever their size
        assert served(again, PACKED, each.slots, each.hashes)[1:] == [False] * (len(each.slots) - 1)
    again.close()


def test_a_file_that_is_cut_gives_misses_and_a_restart_gives_it_up(tier: DiskTier) -> None:
    """Covers: A17, D5."""
    record_bytes = LAYOUT.header_bytes + room_of(tier, int(first_slots()[0]))
    plain = store(tier, PACKED, chain(2, seed=33))
    for cut in (3 * record_bytes - 4096, record_bytes + LAYOUT.header_bytes, 100):
        os.truncate(tier.directory / "slabs" / "1.slab", cut)
        good = served(tier, PACKED, first_slots(), records(FIRST[:4]))
        assert good == [place_of(int(slot)) < cut // record_bytes for slot in first_slots()]
    assert served(tier, PACKED, plain, records(chain(2, seed=33))) == [True, True]
    tier.close()
    again = open_tier(tier.directory)
    assert found(again.recover()) == {PACKED.namespace: chain(2, seed=33)}
    again.close()


def test_without_blosc2_compressed_blocks_are_not_given_up(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: D2."""
    tier.close()
    load_blosc2.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "blosc2", None)
        again = open_tier(tier.directory)
        with pytest.raises(InvalidRequest, match=r"pip install 'kvstore\[codec\]'"):
            again.recover()
        again.close()
    again = open_tier(tier.directory)
    (recovered,) = again.recover()
    assert served(again, PACKED, recovered.slots, recovered.hashes) == [True] * 4
    again.close()


# Auto.


def test_auto_measures_the_disk_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_files, "PROBE_CALLS", 2)
    files = FailingFiles()
    tier = open_tier(tmp_path, codec=Codec.AUTO, files=files)
    assert tier.statistics().slab_bytes == 0
    slots = store_packed(tier, PACKED, chain(10))
    assert files.calls.count("preadv") == 2
    assert (
        sorted(path.name for path in (tmp_path / "slabs").iterdir())
        == ["1.slab", "2.slab", "3.slab", "4.slab"][: len({slab_of(slot) for slot in slots.tolist()})]
    )
    assert all(served(tier, PACKED, slots, records(chain(10))))
    tier.close()


@pytest.mark.parametrize("reserve_bytes", [0, 1 << 60])
def test_auto_on_a_full_disk_leaves_blocks_plain(tmp_path: Path, reserve_bytes: int) -> None:
    """Covers: E2."""
    files = FailingFiles()
    tier = open_tier(tmp_path, codec=Codec.AUTO, files=files, reserve_bytes=reserve_bytes)
    if not reserve_bytes:
        files.errors["pwritev"] = errno.ENOSPC
    tier.open_space(PACKED)
    _, addresses = filled(PACKED, chain(10))
    assert tier.pack(PACKED, addresses=addresses).codecs.tolist() == [0] * 10
    files.errors.clear()
    assert list((tmp_path / "slabs").iterdir()) == []
    tier.close()


@pytest.mark.parametrize("step", ["open", "pwritev", "fdatasync", "preadv", "unlink"])
def test_a_disk_that_fails_while_it_is_measured_is_not_used_any_more(tmp_path: Path, step: str) -> None:
    """Covers: D7."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    files = FailingFiles()
    tier = open_tier(tmp_path, codec=Codec.AUTO, files=files)
    tier.open_space(PACKED)
    _, addresses = filled(PACKED, chain(10))
    files.errors[step] = errno.EIO
    with pytest.raises(DiskFailed, match="cannot measure the disk"):
        tier.pack(PACKED, addresses=addresses)
    files.errors.clear()
    with pytest.raises(DiskFailed, match="cannot measure the disk"):
        tier.forget(PACKED, records(chain(1)))
    tier.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_codec_is_of_a_namespace(tmp_path: Path) -> None:
    other = compressible(spec(bytes_per_part=60_000, model="other"))
    tier = DiskTier(
        tmp_path,
        capacity_bytes=4 << 20,
        slab_bytes=400 << 10,
        reserve_bytes=0,
        num_threads=2,
        codec=lambda kv: Codec.ZSTD if kv.model == "large" else Codec.NONE,
    )
    compressed, plain = store_packed(tier, PACKED, chain(3)), store_packed(tier, other, chain(3))
    rooms = [room_of(tier, int(slots[0])) for slots in (compressed, plain)]
    assert rooms[0] < rooms[1] == LAYOUT.data_bytes
    for kv, slots in itertools.zip_longest([PACKED, other], [compressed, plain]):
        assert all(served(tier, kv, slots, records(chain(3))))
    tier.close()
