"""Which block goes next from a tier. Policies know order and nothing else; the index counts what holds a block.

Rows are the index's numbers for blocks. When each was last used is one column, shared by the policies of all tiers.
"""

import heapq
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.types import IntArray

BoolArray = npt.NDArray[np.bool_]

# Victims found by one scan. A scan of a million rows takes some 10 ms, so it must serve many evictions.
SCAN_VICTIMS = 16_384
# Rows looked at in one go: few enough that what is made of them stays in the cache.
SCAN_ROWS = 65_536


class Ticks:
    """A counter that all policies of one store share, so that recency compares across namespaces."""

    def __init__(self) -> None:
        self.now = 0

    def take(self, count: int) -> int:
        """`count` ticks are used up; returns the last one before them."""
        before = self.now
        self.now += count
        return before


class Stamps:
    """When each row was last used, in ticks; larger is later.

    Each use stamps its chain in falling order, so a parent is always younger than its children.
    """

    def __init__(self, ticks: Ticks) -> None:
        self.ticks = ticks
        self.column: IntArray = np.zeros(0, np.int64)

    def resize(self, num_rows: int) -> None:
        self.column = np.concatenate([self.column, np.zeros(num_rows - len(self.column), np.int64)])

    def touch(self, rows: IntArray) -> None:
        """These rows, a chain from its root, were just used; the last of them will be the first to go."""
        count = len(rows)
        before = self.ticks.take(count)
        self.column[rows] = np.arange(before + count, before, -1)

    def of(self, rows: IntArray) -> IntArray:
        stamps: IntArray = self.column.take(rows)
        return stamps


class Candidates(Protocol):
    """What a policy may ask of a tier."""

    def unheld(self, rows: slice) -> BoolArray:
        """`[n]`: in this tier, not leased, not pinned."""
        ...

    def take(self, row: int) -> bool:
        """The row is gone, if it may go now: unheld, and no block that follows it is in this tier; else False."""
        ...

    def take_all(self, rows: IntArray) -> bool:
        """These different rows, children before their parents, are gone, if all may go now; else False."""
        ...


class EvictionPolicy(Protocol):
    """An order of eviction from one tier, over the rows of one index."""

    def became_unheld(self, rows: IntArray) -> None:
        """These rows may be evictable now; before, they were not."""
        ...

    def became_childless(self, row: int) -> None:
        """No block that follows this row is in the tier any more, so it may be evictable now."""
        ...

    def victims(self, count: int, candidates: Candidates) -> list[int]:
        """Up to `count` rows, in the order in which they were taken from the candidates."""
        ...


class LRU:
    """Least recently used first, and within one use from leaf to root.

    The oldest rows are found by a partial sort, many at a time, and handed out in runs.
    The order is exact: a row used meanwhile has another stamp than its entry, which is then skipped, and a row
    that becomes evictable later is queued too, if its stamp is within what the scan covered.
    """

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._queue: IntArray = np.zeros(0, np.int64)  # rows, oldest first
        self._queued: IntArray = np.zeros(0, np.int64)  # the stamp of each when it was queued
        self._next = 0  # of the queue
        self._late: list[tuple[int, int]] = []  # (stamp, row) that became evictable later: a heap
        self._scanned = 0  # every evictable row with a stamp up to this one is queued
        self._passed = 0  # the youngest stamp that was handed out or skipped

    def became_unheld(self, rows: IntArray) -> None:
        if not self._scanned:
            return
        stamps = self._stamps.of(rows)
        covered = stamps <= self._scanned
        if covered.any():
            for stamp, row in zip(stamps[covered].tolist(), rows[covered].tolist(), strict=True):
                heapq.heappush(self._late, (stamp, row))

    def became_childless(self, row: int) -> None:
        stamp = int(self._stamps.column[row])
        if stamp <= self._passed:  # skipped for its child; a younger one has its turn before it
            heapq.heappush(self._late, (stamp, row))

    def victims(self, count: int, candidates: Candidates) -> list[int]:
        taken: list[int] = []
        one_by_one = 0  # entries for which a run was tried in vain
        while len(taken) < count and (self._next < len(self._queue) or self._late or self._scan(candidates)):
            if not self._late and not one_by_one:
                run = slice(self._next, self._next + count - len(taken))
                rows, stamps = self._queue[run], self._queued[run]
                current = rows[self._stamps.of(rows) == stamps]
                if candidates.take_all(current):
                    taken += current.tolist()
                    self._next += len(rows)
                    self._passed = max(self._passed, int(stamps[-1]))
                    continue
                one_by_one = len(rows)
            one_by_one = max(0, one_by_one - 1)
            stamp, row = self._pop()
            self._passed = max(self._passed, stamp)
            if stamp == self._stamps.column[row] and candidates.take(row):
                taken.append(row)
        return taken

    def _pop(self) -> tuple[int, int]:
        """The oldest entry: stamp and row. There is one."""
        if self._next < len(self._queue):
            head = int(self._queued[self._next]), int(self._queue[self._next])
            if not self._late or head <= self._late[0]:
                self._next += 1
                return head
        return heapq.heappop(self._late)

    def _scan(self, candidates: Candidates) -> bool:
        """The oldest rows beyond those scanned before are queued; False if there are none."""
        found = np.zeros(0, np.int64)
        column = self._stamps.column
        youngest = self._stamps.ticks.now
        for first in range(0, len(column), SCAN_ROWS):
            rows = slice(first, first + SCAN_ROWS)
            stamps = column[rows]
            beyond = (stamps > self._scanned) & (stamps <= youngest) & candidates.unheld(rows)
            found = np.concatenate([found, np.flatnonzero(beyond) + first])
            if len(found) > SCAN_VICTIMS:
                found = found[np.argpartition(column[found], SCAN_VICTIMS - 1)[:SCAN_VICTIMS]]
                youngest = int(column[found].max())
        if not len(found):
            # Nothing can go now. What becomes evictable later must be found, whatever its stamp.
            self._scanned = self._passed = self._stamps.ticks.now
            return False
        self._queue = found[np.argsort(column[found])]
        self._queued = column[self._queue]
        self._next = 0
        self._scanned = int(self._queued[-1])
        return True
