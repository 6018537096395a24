"""How often each block was used: a column of counts, and a memory of the counts of blocks that are gone."""

from typing import Final

import numpy as np

from kvstore.types import AnyArray, HashArray, IntArray
from kvstore_server.eviction import Stamps

MOST: Final = 4  # more uses than these tell little more, and what was once used very often would stay too long
_ENTRIES_PER_ROW: Final = 8
# Two uses are one, if no more blocks than this share of the rows were used in between: what a request matches it
# stores again, and an engine may ask for it more than once while it waits.
_APART: Final = 8


class Uses:
    """Uses of each row. A parent has at least as many as those that follow it.

    What a block had when it was forgotten is found again if it comes back soon: as a rule, before four times as
    many others were forgotten as there are rows.
    """

    def __init__(self, stamps: Stamps) -> None:
        self.stamps = stamps
        self.column: AnyArray = np.zeros(0, np.uint8)
        # By the low bits of the hash: 24 other bits of it, so that few are taken for another, and 8 of its count.
        self._forgotten: AnyArray = np.zeros(1, np.uint32)

    def resize(self, num_rows: int) -> None:
        """For so many rows, which are a power of two."""
        self.column = np.concatenate([self.column, np.zeros(num_rows - len(self.column), np.uint8)])
        # One more bit counts: an entry is found at either of its two places.
        self._forgotten = np.tile(self._forgotten, num_rows * _ENTRIES_PER_ROW // len(self._forgotten))

    def begin(self, rows: IntArray, hashes: HashArray) -> None:
        """These rows are of these blocks, which are used now, and were used as often as is remembered."""
        places, marks = self._places(hashes)
        entries = self._forgotten[places]
        known = entries & ~np.uint32(0xFF) == marks
        before = np.where(known, entries & np.uint32(0xFF), np.uint32(0))
        self.column[rows] = np.minimum(before + 1, MOST)
        self.stamps.column[rows] = self.stamps.ticks.now  # so that the touch that comes next is the same use

    def end(self, rows: IntArray, hashes: HashArray) -> None:
        """The blocks of these rows are forgotten, but for how often they were used."""
        places, marks = self._places(hashes)
        self._forgotten[places] = marks | self.column[rows]

    def touch(self, rows: IntArray) -> None:
        """These rows, a chain from its root, are used now; to be called before they are stamped."""
        apart = self.stamps.ticks.now - self.stamps.of(rows) > len(self.column) // _APART
        counts = np.minimum(self.column.take(rows) + apart, MOST).astype(np.uint8)
        self.column[rows] = np.maximum.accumulate(counts[::-1])[::-1]

    def _places(self, hashes: HashArray) -> tuple[AnyArray, AnyArray]:
        """`[n]` places among the forgotten, and what marks each there."""
        words = np.bitwise_xor.reduce(np.ascontiguousarray(hashes).view(np.uint64).reshape(len(hashes), -1), axis=1)
        marks = (words >> np.uint64(32)).astype(np.uint32) & ~np.uint32(0xFF)
        return words & np.uint64(len(self._forgotten) - 1), marks
