"""A disk tier for tests: blocks in page-aligned memory, and file systems that fail, kill or lose power on request."""

import mmap
from pathlib import Path

import numpy as np
from builders import block_bytes, chain, records

from kvstore.hashing import pack, unpack
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import AnyArray, BlockHash, ByteArray, HashArray, IntArray
from kvstore_server.tiers.disk import DiskTier, Files, Recovered
from kvstore_server.tiers.records import PAGE_BYTES, RecordLayout, round_up


def open_tier(directory: Path, *, files: Files | None = None, capacity_bytes: int = 4 << 20, **fields: int) -> DiskTier:
    settings = {"slab_bytes": 128 << 10, "reserve_bytes": 0, "num_threads": 2, **fields}
    return DiskTier(directory, capacity_bytes=capacity_bytes, files=files, **settings)


def memory(kv: KVSpec, count: int) -> tuple[ByteArray, IntArray]:
    """`[count, room]` bytes and their addresses, as the disk tier wants them."""
    room = round_up(kv.block_bytes, PAGE_BYTES)
    array = np.frombuffer(mmap.mmap(-1, max(1, count) * room), np.uint8).reshape(-1, room)[:count]
    return array, address_of(array) + room * np.arange(count)


def checksums_of(kv: KVSpec, addresses: IntArray) -> AnyArray:
    layout = RecordLayout.of(kv)
    pieces = addresses[:, None] + layout.part_offsets
    return hash_pieces(pieces.ravel(), np.tile(layout.part_sizes, len(addresses))).reshape(pieces.shape)


def parents_of(hashes: list[BlockHash]) -> HashArray:
    """Each block's parent is the one before it in the list; the first has none."""
    return unpack(pack([BlockHash(bytes(32)), *hashes])[: 32 * len(hashes)])


def store(tier: DiskTier, kv: KVSpec, hashes: list[BlockHash], *, slots: IntArray | None = None) -> IntArray:
    """The blocks, with the bytes that belong to them, are written; returns their slots."""
    tier.open_space(kv)
    slots = tier.allocate(kv, len(hashes)) if slots is None else slots
    assert len(slots) == len(hashes)
    array, addresses = memory(kv, len(hashes))
    for row, block_hash in zip(array, hashes, strict=True):
        row[: kv.block_bytes] = block_bytes(kv, block_hash)
    tier.write(
        kv,
        slots=slots,
        hashes=records(hashes),
        parents=parents_of(hashes),
        addresses=addresses,
        checksums=checksums_of(kv, addresses),
    )
    return slots


def served(tier: DiskTier, kv: KVSpec, slots: IntArray, hashes: HashArray) -> list[bool]:
    """Which of the blocks are read; none of them is wrong."""
    array, addresses = memory(kv, len(slots))
    good, checksums = tier.read(kv, slots=slots, hashes=hashes, addresses=addresses)
    for row, block_hash, is_good in zip(array, hashes, good, strict=True):
        expected = block_bytes(kv, BlockHash(block_hash.tobytes()))
        assert not is_good or (row[: kv.block_bytes] == expected).all(), "another block was served"
    assert (checksums[good] == checksums_of(kv, addresses)[good]).all()
    return good.tolist()


def found(recovered: list[Recovered]) -> dict[bytes, list[bytes]]:
    """namespace -> the hashes that were found in it, the oldest first."""
    return {each.spec.namespace: [one.tobytes() for one in each.hashes] for each in recovered}


__all__ = ["chain", "checksums_of", "found", "memory", "open_tier", "parents_of", "records", "served", "store"]
