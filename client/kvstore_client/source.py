"""Where the blocks of a load lie in mapped slabs, and copying them out piece by piece, checked.

The header of a slot is compared with generation and hash of the block before and after each copy: whatever
the daemon did meanwhile, foreign or torn bytes are noticed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from kvstore.errors import BlockCorrupt, BlockMissing, KVStoreError
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, copy_and_hash_pieces, copy_pieces, hash_pieces
from kvstore.types import AnyArray, BlockHash, ByteArray, IntArray, Location
from kvstore_client.buffers import Rows
from kvstore_client.cuda_arrays import CudaRows
from kvstore_client.slabs import Slab

PIECE_BYTES: Final = 16 << 20  # of one piece, if it has more than one block: what a cancel waits for
PIECE_BLOCKS: Final = 1024
CALL_BYTES: Final = 8 << 20  # of one copy call, so that a huge part can be stopped half way


class Source:
    """The blocks of one load, by their index in it. Immutable; any thread may copy from it."""

    in_place = True

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
        self._columns: dict[int, dict[int, ByteArray]] = {}  # by part, then slab: `[num_slots, part_bytes]`
        self.tables = {number: slab.table for number, slab in slabs.items()}

    def piece_blocks(self, part: int) -> int:
        """How many blocks of this part make a piece."""
        return min(PIECE_BLOCKS, max(1, PIECE_BYTES // self._ranges[part][1]))

    def view(self, block: int, part: int) -> ByteArray:
        """`[part_bytes]` in place, read-only, not checked. Raises: IndexError, KeyError, if there is none."""
        columns = self._columns.get(part)
        if columns is None:  # sliced once for all blocks: one more index on each view would double its cost
            begin, size_bytes = self._ranges[part]
            columns = {number: table[:, begin : begin + size_bytes] for number, table in self.tables.items()}
            self._columns[part] = columns
        row: ByteArray = columns[self.slab_numbers[block]][self.slots[block]]
        return row

    def held(self, blocks: IntArray) -> AnyArray:
        """`[n]` bool: which of these blocks are, at this moment, where they were located."""
        still = np.zeros(len(blocks), bool)
        for slab, chosen in self._by_slab(blocks):
            still[chosen] = self._holds(slab, blocks[chosen])
        return still

    def copy(
        self, part: int, blocks: IntArray, into: Rows | CudaRows | None, *, checksums: bool, stopped: Callable[[], bool]
    ) -> dict[int, KVStoreError]:
        """The part of these blocks is in `into` (row i: block i) and checked, but for the blocks returned.

        Without `into` they are only checked, in place. Ends early once `stopped` says so.
        """
        assert not isinstance(into, CudaRows), "no CUDA region is usable over shared memory"
        errors: dict[int, KVStoreError] = {}
        for slab, chosen in self._by_slab(blocks):
            mine = blocks[chosen]
            before = self._holds(slab, mine)
            good = mine if before.all() else mine[before]
            targets = into.addresses(good) if into is not None else None
            if checksums:
                wrong = self._checksum_failures(slab, part, good, targets, stopped)
            else:
                wrong = good[:0]
                if targets is not None:
                    self._copy(slab, part, good, targets, stopped)
            after = self._holds(slab, good)
            for block in mine[~before].tolist():
                errors[block] = self.missing(block)
            for block in good[~after].tolist():
                errors[block] = self.missing(block)
            for block in wrong.tolist():
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

    def interrupt(self) -> None:
        """Nothing here waits."""

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

    def _addresses(self, slab: Slab, part: int, blocks: IntArray) -> IntArray:
        first = address_of(slab.table) + self._ranges[part][0]
        addresses: IntArray = first + self._located.slots[blocks] * slab.table.strides[0]
        return addresses

    def _copy(self, slab: Slab, part: int, blocks: IntArray, targets: IntArray, stopped: Callable[[], bool]) -> None:
        size_bytes = self._ranges[part][1]
        sources = self._addresses(slab, part, blocks)
        for rows in _runs(len(blocks), size_bytes):
            for offset in range(0, size_bytes, CALL_BYTES):
                if stopped():
                    return
                width = min(CALL_BYTES, size_bytes - offset)
                copy_pieces(targets[rows] + offset, sources[rows] + offset, np.full(len(targets[rows]), width))

    def _checksum_failures(
        self, slab: Slab, part: int, blocks: IntArray, targets: IntArray | None, stopped: Callable[[], bool]
    ) -> IntArray:
        """Those of the blocks whose part is not what its checksum says; copied to `targets`, where there are some."""
        sources = self._addresses(slab, part, blocks)
        sizes = np.full(len(blocks), self._ranges[part][1])
        expected = slab.checksums[self._located.slots[blocks], part]
        found = expected.copy()
        for rows in _runs(len(blocks), self._ranges[part][1]):
            if stopped():
                break
            if targets is None:
                found[rows] = hash_pieces(sources[rows], sizes[rows])
            else:
                found[rows] = copy_and_hash_pieces(targets[rows], sources[rows], sizes[rows])
        wrong: IntArray = blocks[found != expected]
        return wrong


def _runs(num_rows: int, row_bytes: int) -> Iterator[slice]:
    step = max(1, CALL_BYTES // row_bytes)
    for first in range(0, num_rows, step):
        yield slice(first, first + step)
