"""Blocks that were used more often stay longer: a policy for a tier too small for its working set (docs/adr/0010)."""

from typing import Final

import numpy as np

from kvstore.types import IntArray
from kvstore_server.eviction import LRU, Candidates
from kvstore_server.uses import MOST, Uses

# How long a block stays after its last use, by how often it was used: in lifetimes of one that was used once.
LIFETIMES: Final = np.maximum(np.arange(MOST + 1), 1) ** 2
_SMOOTHING: Final = 4  # what was learnt last counts for a quarter


class LFU:
    """LFU with dynamic aging: a block that was used u times stays u**2 times as long as one that was used once.

    What is evicted is the block with the smallest key, its last stamp plus what its uses are worth in ticks. Their
    worth is measured: how long blocks that are used once do stay. So uses count for nothing in a tier that
    is not full, and nothing is kept for ever.

    Source: LFU-DA (Dilley and Arlitt, 1999), with the age as a time and not as a count.
    """

    def __init__(self, uses: Uses) -> None:
        self._keys = _Keys(uses)
        self._order = LRU(self._keys)
        self._age = 0  # of what was evicted last, for a block used once

    def became_unheld(self, rows: IntArray) -> None:
        self._order.became_unheld(rows)

    def became_childless(self, row: int) -> None:
        self._order.became_childless(row)

    def victims(self, count: int, candidates: Candidates) -> list[int]:
        # Keys change only here, where nothing that was sorted by them is left.
        if self._order.is_used_up:
            self._keys.learn(self._age)
            self._order.start_over()
        taken = self._order.victims(count, candidates)
        if taken:
            self._age = max(0, self._keys.now - self._order.passed)
        return taken


class _Keys:
    """The stamp of each row, and for each use more what that is worth."""

    def __init__(self, uses: Uses) -> None:
        self._uses = uses
        self._lifetime = 0
        self._worth: IntArray = np.zeros(MOST + 1, np.int64)

    @property
    def now(self) -> int:
        return self._uses.stamps.ticks.now

    def learn(self, age: int) -> None:
        """A block that is used once stays about so many ticks."""
        self._lifetime += (age - self._lifetime) // _SMOOTHING
        self._worth = (LIFETIMES - 1) * self._lifetime

    def of(self, rows: IntArray) -> IntArray:
        keys: IntArray = self._uses.stamps.of(rows) + self._worth.take(self._uses.column.take(rows))
        return keys

    def at(self, row: int) -> int:
        return self._uses.stamps.at(row) + int(self._worth[self._uses.column[row]])

    def within(self, rows: slice) -> IntArray:
        keys: IntArray = self._uses.stamps.within(rows) + self._worth.take(self._uses.column[rows])
        return keys

    def num_rows(self) -> int:
        return self._uses.stamps.num_rows()
