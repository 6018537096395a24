"""Where the blocks of a load lie in mapped slabs, and copying them out piece by piece, checked.

The header of a slot is compared with generation and hash of the block before and after each copy: whatever
the daemon did meanwhile, foreign or torn bytes are noticed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import xxhash

from kvstore.errors import BlockCorrupt, BlockMissing, KVStoreError
from kvstore.spec import KVSpec
from kvstore.types import AnyArray, BlockHash, ByteArray, IntArray, Location
from kvstore_client.buffers import Rows
from kvstore_client.slabs import Slab

PIECE_BYTES: Final = 16 << 20  # of one piece, if it has more than one block: what a cancel waits for
PIECE_BLOCKS: Final = 1024
COLUMN_BYTES: Final = 8 << 20  # of one copy call, so that a huge part can be stopped half way


class Source:
    """The blocks of one load, by their index in it. Immutable; any thread may copy from it."""

    def __init__(
        self,
        spec: KVSpec,
        hashes: Sequence[BlockHash],
        packed: bytes,
        located: Location,
        slabs: dict[int, Slab],
        parts: Sequence[int],
    ) -> None:
        self.hashes = hashes
        self._expected: AnyArray = np.frombuffer(packed, f"V{len(packed) // max(1, len(hashes))}")
        self._located = located
        self._slabs = slabs
        self._ranges = {part: spec.part_range(part) for part in parts}
        self._only = next(iter(slabs.values())) if len(slabs) == 1 else None
        self.slab_numbers: list[int] = located.slabs.tolist()
        self.slots: list[int] = located.slots.tolist()
        self.tables = {number: slab.table for number, slab in slabs.items()}

    def piece_blocks(self, part: int) -> int:
        """How many blocks of this part make a piece."""
        return min(PIECE_BLOCKS, max(1, PIECE_BYTES // self._ranges[part][1]))

    def view(self, block: int, part: int) -> ByteArray:
        """`[part_bytes]` in place, read-only, not checked. Raises: IndexError, KeyError, if there is none."""
        begin, size_bytes = self._ranges[part]
        return self.tables[self.slab_numbers[block]][self.slots[block], begin : begin + size_bytes]

    def held(self, blocks: IntArray) -> AnyArray:
        """`[n]` bool: which of these blocks are, at this moment, where they were located."""
        still = np.zeros(len(blocks), bool)
        for slab, chosen in self._by_slab(blocks):
            still[chosen] = self._holds(slab, blocks[chosen])
        return still

    def copy(
        self, part: int, blocks: IntArray, into: Rows | None, *, checksums: bool, stopped: Callable[[], bool]
    ) -> dict[int, KVStoreError]:
        """The part of these blocks is in `into` (row i: block i) and checked, but for the blocks returned.

        Without `into` they are only checked, in place. Ends early once `stopped` says so.
        """
        errors: dict[int, KVStoreError] = {}
        for slab, chosen in self._by_slab(blocks):
            mine = blocks[chosen]
            before = self._holds(slab, mine)
            good = mine if before.all() else mine[before]
            if into is not None and len(good):
                self._copy_rows(slab, part, good, into, stopped)
            wrong = self._checksum_failures(slab, part, good, into, stopped) if checksums else ()
            after = self._holds(slab, good)
            for block in mine[~before].tolist():
                errors[block] = self.missing(block)
            for block in good[~after].tolist():
                errors[block] = self.missing(block)
            for block in wrong:
                errors.setdefault(
                    block,
                    BlockCorrupt(
                        f"block {self.name(block)}: part {part} does not match its checksum; recompute it, "
                        "the store is told to drop it"
                    ),
                )
        return errors

    def missing(self, block: int) -> BlockMissing:
        return BlockMissing(
            f"block {self.name(block)}: expected generation {self._located.generations[block]} in its slot, "
            "got another block or none; recompute it"
        )

    def name(self, block: int) -> str:
        return f"{block} ({self.hashes[block].hex()[:12]}…)"

    def _by_slab(self, blocks: IntArray) -> Iterator[tuple[Slab, AnyArray | slice]]:
        """Each slab that holds some of the blocks, and which of them it holds."""
        if self._only is not None:
            yield self._only, slice(None)
            return
        slabs = self._located.slabs[blocks]
        first = int(slabs[0]) if len(slabs) else 0
        if len(slabs) and (slabs == first).all():
            yield self._slabs[first], slice(None)
            return
        for number in np.unique(slabs).tolist():
            yield self._slabs[number], slabs == number

    def _holds(self, slab: Slab, blocks: IntArray) -> AnyArray:
        located = self._located
        return slab.holds(located.slots[blocks], located.generations[blocks], self._expected[blocks])

    def _copy_rows(self, slab: Slab, part: int, blocks: IntArray, into: Rows, stopped: Callable[[], bool]) -> None:
        begin, size_bytes = self._ranges[part]
        table = slab.table
        slots = self._located.slots[blocks]
        if into.array is not None and size_bytes <= COLUMN_BYTES:
            # Runs of neighbours in both places are one call each.
            breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(blocks) != 1)) + 1
            if len(breaks) < len(blocks) - 1:
                end = begin + size_bytes
                bounds = [0, *breaks.tolist(), len(blocks)]
                for first, last in pairwise(bounds):
                    if stopped():
                        return
                    block, slot, count = int(blocks[first]), int(slots[first]), last - first
                    np.copyto(into.array[block : block + count], table[slot : slot + count, begin:end])
                return
        rows = into.rows
        for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
            for offset in range(0, size_bytes, COLUMN_BYTES):
                if stopped():
                    return
                end = min(offset + COLUMN_BYTES, size_bytes)
                np.copyto(rows[block][offset:end], table[slot, begin + offset : begin + end])

    def _checksum_failures(
        self, slab: Slab, part: int, blocks: IntArray, into: Rows | None, stopped: Callable[[], bool]
    ) -> list[int]:
        begin, size_bytes = self._ranges[part]
        wrong = []
        slots = self._located.slots[blocks]
        expected = slab.checksums[slots, part].tolist()
        for block, slot, checksum in zip(blocks.tolist(), slots.tolist(), expected, strict=True):
            if stopped():
                break
            data: ByteArray = slab.table[slot, begin : begin + size_bytes] if into is None else into.rows[block]
            if xxhash.xxh3_64_intdigest(data.data) != checksum:
                wrong.append(block)
        return wrong
