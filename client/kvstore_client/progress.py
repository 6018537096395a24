"""How far a load has come: which parts of which blocks can be read, are in place, or will never be. Pure.

The caller holds a lock around each call.
"""

from collections.abc import Sequence

import numpy as np

from kvstore.errors import KVStoreError
from kvstore.types import AnyArray, IntArray


class Progress:
    """A grid of parts x blocks. A block with an error counts as done, and never as loaded."""

    def __init__(self, parts: Sequence[int], num_blocks: int) -> None:
        self.errors: dict[int, KVStoreError] = {}  # by block; the first one counts
        self.left = len(parts) * num_blocks  # pairs neither in place nor failed
        self._row_of = {part: row for row, part in enumerate(parts)}
        self._in_place: AnyArray = np.zeros((len(parts), num_blocks), bool)
        self._missing: IntArray = np.full(len(parts), num_blocks, np.int64)  # as `left`, for each part
        self._readable: AnyArray = np.ones((1, 1), bool)  # [parts, blocks], where something is followed
        self._failed: AnyArray = np.zeros(num_blocks, bool)

    def __repr__(self) -> str:
        return f"<Progress [{self.left} of {self._in_place.size} left, {len(self.errors)} errors]>"

    @property
    def total(self) -> int:
        return self._in_place.size

    def has(self, part: int) -> bool:
        """Whether the part was asked for."""
        return part in self._row_of

    def part_missing(self, part: int) -> int:
        """Blocks of which this part is neither in place nor given up."""
        return int(self._missing[self._row_of[part]])

    def in_place(self, part: int, block: int) -> bool:
        return bool(self._in_place[self._row_of[part], block])

    def complete(self) -> AnyArray:
        """`[num_blocks]` bool: of which blocks every part is in place."""
        complete: AnyArray = np.all(self._in_place, axis=0) & ~self._failed
        return complete

    def num_loaded(self) -> int:
        """Leading blocks of which every part is in place."""
        complete = self.complete()
        return len(complete) if complete.all() else int(complete.argmin())

    def without_error(self, blocks: IntArray) -> IntArray:
        """Those of these blocks that have no error."""
        return blocks[~self._failed[blocks]] if self.errors else blocks

    def follow(self, blocks: IntArray) -> None:
        """No part of these blocks can be read until `arrive` says so."""
        if len(blocks):
            self._readable = np.ones(self._in_place.shape, bool)
            self._readable[:, blocks] = False

    def arrive(self, part: int, blocks: IntArray) -> IntArray:
        """Those of these blocks whose part was asked for and can be read now, and could not before."""
        row = self._row_of.get(part)
        if row is None:
            return blocks[:0]
        fresh = np.unique(blocks)
        fresh = fresh[~self._readable[row, fresh]]
        self._readable[row, fresh] = True
        return self.without_error(fresh)

    def never_arrived(self) -> list[int]:
        """Blocks with a part that cannot be read."""
        unread: list[int] = np.flatnonzero(~np.all(self._readable, axis=0)).tolist()
        return unread

    def put(self, part: int, blocks: IntArray) -> None:
        """The part of these blocks, none of which was in place, is; those with an error are passed over."""
        blocks = self.without_error(blocks)
        row = self._row_of[part]
        self._in_place[row, blocks] = True
        self._missing[row] -= len(blocks)
        self.left -= len(blocks)

    def put_all(self, blocks: IntArray) -> None:
        """As `put`, for every part."""
        blocks = self.without_error(blocks)
        self._in_place[:, blocks] = True
        self._missing -= len(blocks)
        self.left -= len(blocks) * len(self._missing)

    def fail(self, block: int, error: KVStoreError) -> None:
        """The block will not be loaded: nothing of it is waited for. A block that there is not is ignored."""
        if not 0 <= block < len(self._failed) or self._failed[block]:
            return
        self.errors[block] = error
        self._failed[block] = True
        waiting = ~self._in_place[:, block]
        self._missing -= waiting
        self.left -= int(waiting.sum())
