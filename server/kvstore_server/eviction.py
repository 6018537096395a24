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
SCAN_VICTIMS = 16_384


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

    def take(self, row: int) -> bool:
        """The row is gone, if it may go now: unheld, and no block that follows it is stored; else False."""
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

    def became_childless(self, row: int) -> None:
        """No block that follows this row is stored any more, so it may be evictable now."""
        ...

    def victims(self, count: int, candidates: Candidates) -> list[int]:
        """Up to `count` rows, in the order in which they were taken from the candidates."""
        ...


class LRU:
    """Least recently used first, and within one use from leaf to root.

    Each use stamps its chain in falling order, so a parent is always younger than its children and a chain is
    evicted from its end. The oldest rows are found by a partial sort, many at a time, and handed out one by one.
    The order is exact: a row used meanwhile has another stamp than its entry, which is then skipped, and a row
    that becomes evictable later is queued too, if its stamp is within what the scan covered.
    """

    def __init__(self, ticks: Ticks) -> None:
        self._ticks = ticks
        self._stamps: IntArray = np.zeros(0, np.int64)
        self._queue: list[tuple[int, int]] = []  # (stamp, row), oldest last
        self._late: list[tuple[int, int]] = []  # the same, for rows that became evictable later: a heap
        self._scanned = 0  # every evictable row with a stamp up to this one is queued
        self._passed = 0  # the youngest stamp that was handed out or skipped

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
                heapq.heappush(self._late, (stamp, row))

    def became_childless(self, row: int) -> None:
        stamp = int(self._stamps[row])
        if stamp <= self._passed:  # skipped for its child; a younger one has its turn before it
            heapq.heappush(self._late, (stamp, row))

    def victims(self, count: int, candidates: Candidates) -> list[int]:
        taken: list[int] = []
        while len(taken) < count and (self._queue or self._late or self._scan(candidates)):
            late_is_older = self._late and (not self._queue or self._late[0] < self._queue[-1])
            stamp, row = heapq.heappop(self._late) if late_is_older else self._queue.pop()
            self._passed = max(self._passed, stamp)
            if stamp == self._stamps[row] and candidates.take(row):
                taken.append(row)
        return taken

    def stamp(self, rows: IntArray) -> IntArray:
        """When these rows were last used, in ticks; larger is later."""
        stamps: IntArray = self._stamps[rows]
        return stamps

    def _scan(self, candidates: Candidates) -> bool:
        """The oldest rows beyond those scanned before are queued; False if there are none."""
        beyond = candidates.unheld() & (self._stamps > self._scanned)
        stamps = self._stamps[beyond]
        if not len(stamps):
            # Nothing can go now. What becomes evictable later must be found, whatever its stamp.
            self._scanned = self._passed = self._ticks.now
            return False
        count = min(len(stamps), SCAN_VICTIMS)
        limit = np.partition(stamps, count - 1)[count - 1]
        rows = np.flatnonzero(beyond & (self._stamps <= limit))
        rows = rows[np.argsort(-self._stamps[rows])]
        self._queue = list(zip(self._stamps[rows].tolist(), rows.tolist(), strict=True))
        self._scanned = self._queue[0][0]
        return True
