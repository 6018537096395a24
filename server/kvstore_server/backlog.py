"""Blocks in memory that wait to be written to disk, in order, in batches of one namespace each."""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.types import IntArray
from kvstore_server.eviction import BoolArray
from kvstore_server.level import Level, State
from kvstore_server.values import Space

BATCH_BYTES: Final = 64 << 20  # of one write: large enough that flushing it costs little


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks of one namespace, `[n]` rows, which are meant only while they are of these generations."""

    space: Space
    rows: IntArray
    generations: IntArray

    @classmethod
    def of(cls, space: Space, rows: IntArray) -> "Batch":
        """These blocks, which are in memory, as they are now."""
        return cls(space, rows, space.index.generations(rows))

    def __getitem__(self, chosen: slice | IntArray | BoolArray) -> "Batch":
        return Batch(self.space, self.rows[chosen], self.generations[chosen])

    @property
    def size_bytes(self) -> int:
        return len(self.rows) * self.space.spec.block_bytes

    def to_copy(self, level: Level) -> "Batch":
        """Those of these blocks, each once, that are still in memory as they were, and not in that tier."""
        once = self[np.unique(self.rows, return_index=True)[1]]
        return once[once.unchanged() & ~level.has(once.rows)]

    def unchanged(self) -> BoolArray:
        """`[n]`: which of these blocks are still in memory, as they were."""
        index = self.space.index
        unchanged: BoolArray = (index.states(self.rows) == State.COMMITTED) & (
            index.generations(self.rows) == self.generations
        )
        return unchanged


class Backlog:
    """A queue of batches. `size_bytes` is what waits."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._waiting: deque[Batch] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, batch: Batch) -> None:
        """The blocks wait behind all others."""
        self._waiting.append(batch)
        self.size_bytes += batch.size_bytes

    def next(self) -> Batch:
        """The blocks at the front, of one namespace, about BATCH_BYTES of them, wait no more. There are some."""
        space = self._waiting[0].space
        most = max(1, BATCH_BYTES // space.spec.block_bytes)
        taken, count = [], 0
        while count < most and self._waiting and self._waiting[0].space is space:
            taken.append(self._waiting.popleft())
            count += len(taken[-1].rows)
        batch = Batch(
            space,
            np.concatenate([one.rows for one in taken]),
            np.concatenate([one.generations for one in taken]),
        )
        if count > most:
            self._waiting.appendleft(batch[most:])
            batch = batch[:most]
        self.size_bytes -= batch.size_bytes
        return batch

    def clear(self) -> int:
        """Nothing waits; returns how many blocks did."""
        count = sum(len(one.rows) for one in self._waiting)
        self._waiting.clear()
        self.size_bytes = 0
        return count
