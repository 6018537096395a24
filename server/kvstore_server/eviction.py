"""Which block goes next. Policies know order and nothing else; the index counts what holds a block.

Rows are the index's numbers for blocks. A policy keeps one column beside the index's, resized with it.
"""

import heapq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.types import IntArray

BoolArray = npt.NDArray[np.bool_]

# Victims found by one scan. A scan of a million rows takes some 10 ms, so it must serve many evictions.
SCAN_VICTIMS = 8192


class Ticks:
    """A counter that all policies of one store share, so that recency compares across namespaces."""

    def __init__(self) -> None:
        self.now = 0

    def take(self, count: int) -> int:
        """`count` ticks are used up; returns the last one before them."""
        before = self.now
        self.now += count
        return before


class Candidates(Protocol):
    """What a policy may ask of the index."""

    def unheld(self) -> BoolArray:
        """`[num_rows]`: committed, not leased, not pinned."""
        ...

    def evictable(self, row: int) -> bool:
        """Whether the row may go now: unheld, and no block that follows it is stored."""
        ...


class EvictionPolicy(Protocol):
    """An order of eviction over the rows of one index."""

    def resize(self, num_rows: int) -> None:
        """Rows below `num_rows` exist."""
        ...

    def touch(self, rows: IntArray) -> None:
        """These rows, a chain from its root, were just used; the last of them will be the first to go."""
        ...

    def became_unheld(self, rows: IntArray) -> None:
        """These rows may be evictable now; before, they were not."""
        ...

    def next_victim(self, candidates: Candidates) -> int | None:
        """The row to evict next, or None if nothing can go. The caller evicts it before asking again."""
        ...


class LRU:
    """Least recently used first, and within one use from leaf to root.

    Each use stamps its chain in falling order, so a parent is always younger than its children and a chain is
    evicted from its end. The oldest rows are found by a partial sort, many at a time, and handed out from a heap.
    The order is exact: a row used meanwhile has another stamp than its entry, which is then skipped, and a row
    that becomes evictable later is added to the heap if its stamp is within what the scan covered.
    """

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks
        self._stamps: IntArray = np.zeros(0, np.int64)
        self._heap: list[tuple[int, int]] = []  # (stamp, row)
        self._scanned = 0  # every evictable row with a stamp up to this one is in the heap

    def resize(self, num_rows: int) -> None:
        self._stamps = np.concatenate([self._stamps, np.zeros(num_rows - len(self._stamps), np.int64)])

    def touch(self, rows: IntArray) -> None:
        count = len(rows)
        before = self._ticks.take(count)
        self._stamps[rows] = np.arange(before + count, before, -1)

    def became_unheld(self, rows: IntArray) -> None:
        stamps = self._stamps[rows]
        covered = stamps <= self._scanned
        if covered.any():
            for stamp, row in zip(stamps[covered].tolist(), rows[covered].tolist(), strict=True):
                heapq.heappush(self._heap, (stamp, row))

    def next_victim(self, candidates: Candidates) -> int | None:
        while self._heap or self._scan(candidates):
            stamp, row = heapq.heappop(self._heap)
            if stamp == self._stamps[row] and candidates.evictable(row):
                return row
        return None

    def stamp(self, rows: IntArray) -> IntArray:
        """When these rows were last used, in ticks; larger is later."""
        stamps: IntArray = self._stamps[rows]
        return stamps

    def _scan(self, candidates: Candidates) -> bool:
        """The oldest rows beyond those scanned before are in the heap; False if there are none."""
        rows = np.flatnonzero(candidates.unheld() & (self._stamps > self._scanned))
        if not len(rows):
            # Nothing can go now. What becomes evictable later must be found, whatever its stamp.
            self._scanned = self._ticks.now
            return False
        stamps = self._stamps[rows]
        count = min(len(rows), SCAN_VICTIMS)
        oldest = np.argpartition(stamps, count - 1)[:count]
        oldest = oldest[np.argsort(stamps[oldest])]
        self._heap = list(zip(stamps[oldest].tolist(), rows[oldest].tolist(), strict=True))
        self._scanned = self._heap[-1][0]
        return True
