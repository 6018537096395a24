"""Which block goes next from a tier. Policies know order and nothing else; the index counts what holds a block.

Rows are the index's numbers for blocks. When each was last used is one column, shared by the policies of all tiers.
Here is LRU; another policy is in `lfu.py`.
"""

import heapq
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.types import IntArray

BoolArray = npt.NDArray[np.bool_]

# Victims found by one scan. A scan of a million rows takes some 10 ms, so it must serve many evictions.
SCAN_VICTIMS = 16_384
# In a small tier not more than this share of the rows, so that what was found is not long out of date.
SCAN_SHARE: Final = 16
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

    def at(self, row: int) -> int:
        return int(self.column[row])

    def within(self, rows: slice) -> IntArray:
        return self.column[rows]

    def num_rows(self) -> int:
        return len(self.column)


class Keys(Protocol):
    """What decides a row's turn, in ticks: the smallest goes first. A parent's is larger than its children's."""

    def of(self, rows: IntArray) -> IntArray: ...

    def at(self, row: int) -> int: ...

    def within(self, rows: slice) -> IntArray: ...

    def num_rows(self) -> int: ...


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
        """These rows may be evictable now, and before they were not; or they were used, and their turn is another."""
        ...

    def became_childless(self, row: int) -> None:
        """No block that follows this row is in the tier any more, so it may be evictable now."""
        ...

    def victims(self, count: int, candidates: Candidates) -> list[int]:
        """Up to `count` rows, in the order in which they were taken from the candidates."""
        ...


class LRU:
    """Least recently used first, and within one use from leaf to root: by `Stamps`. With other keys, by those.

    The rows with the smallest keys are found by a partial sort, many at a time, and handed out in runs.
    The order is exact: a row used meanwhile has another key than its entry, which is then skipped, and a row
    that becomes evictable later is queued too, if its key is within what the scan covered.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.start_over()

    def start_over(self) -> None:
        """What was found before is forgotten: the keys are others."""
        self._queue: IntArray = np.zeros(0, np.int64)  # rows, smallest key first
        self._queued: IntArray = np.zeros(0, np.int64)  # the key of each when it was queued
        self._next = 0  # of the queue
        self._late: list[tuple[int, int]] = []  # (key, row) that became evictable later: a heap
        self._scanned = 0  # every evictable row with a key up to this one is queued
        self.passed = 0  # the largest key that was handed out or skipped

    @property
    def is_used_up(self) -> bool:
        """All that was found has been handed out or skipped."""
        return self._next == len(self._queue) and not self._late

    def became_unheld(self, rows: IntArray) -> None:
        if not self._scanned:
            return
        keys = self._keys.of(rows)
        covered = keys <= self._scanned
        if covered.any():
            for key, row in zip(keys[covered].tolist(), rows[covered].tolist(), strict=True):
                heapq.heappush(self._late, (key, row))

    def became_childless(self, row: int) -> None:
        key = self._keys.at(row)
        if key <= self.passed:  # skipped for its child; one with a larger key has its turn before it
            heapq.heappush(self._late, (key, row))

    def victims(self, count: int, candidates: Candidates) -> list[int]:
        taken: list[int] = []
        one_by_one = 0  # entries for which a run was tried in vain
        while len(taken) < count and (not self.is_used_up or self._scan(candidates)):
            if not self._late and not one_by_one:
                run = slice(self._next, self._next + count - len(taken))
                rows, keys = self._queue[run], self._queued[run]
                current = rows[self._keys.of(rows) == keys]
                if candidates.take_all(current):
                    taken += current.tolist()
                    self._next += len(rows)
                    self.passed = max(self.passed, int(keys[-1]))
                    continue
                one_by_one = len(rows)
            one_by_one = max(0, one_by_one - 1)
            key, row = self._pop()
            self.passed = max(self.passed, key)
            if key == self._keys.at(row) and candidates.take(row):
                taken.append(row)
        return taken

    def _pop(self) -> tuple[int, int]:
        """The entry with the smallest key: key and row. There is one."""
        if self._next < len(self._queue):
            head = int(self._queued[self._next]), int(self._queue[self._next])
            if not self._late or head <= self._late[0]:
                self._next += 1
                return head
        return heapq.heappop(self._late)

    def _scan(self, candidates: Candidates) -> bool:
        """The rows with the smallest keys beyond those scanned before are queued; False if there are none."""
        found = found_keys = np.zeros(0, np.int64)
        largest = np.iinfo(np.int64).max
        most = min(SCAN_VICTIMS, self._keys.num_rows() // SCAN_SHARE)
        for first in range(0, self._keys.num_rows(), SCAN_ROWS):
            rows = slice(first, first + SCAN_ROWS)
            keys = self._keys.within(rows)
            beyond = np.flatnonzero((keys > self._scanned) & (keys <= largest) & candidates.unheld(rows))
            found = np.concatenate([found, beyond + first])
            found_keys = np.concatenate([found_keys, keys[beyond]])
            if len(found) > most:
                largest = int(np.partition(found_keys, most - 1)[most - 1])
                smallest = found_keys <= largest  # and all that are equal, which would be passed over later
                found, found_keys = found[smallest], found_keys[smallest]
        if not len(found):
            return False
        order = np.argsort(found_keys)
        self._queue, self._queued = found[order], found_keys[order]
        self._next = 0
        self._scanned = int(self._queued[-1])
        return True
