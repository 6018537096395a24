"""Which blocks to write down before memory is full: the oldest that are nowhere else, while it fills up."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvstore.types import IntArray
from kvstore_server.backlog import Batch
from kvstore_server.level import State
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.values import Space


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of memory. Filled above `high`, it may hold no more than `low` of what is nowhere else."""

    high: float
    low: float

    def to_write(self, tier: CpuTier, spaces: Iterable[Space]) -> list[Batch]:
        """The blocks to write now, those that will go first in front. Reads every row."""
        if filled_share(tier, spaces := list(spaces)) <= self.high:
            return []
        found = unwritten(spaces)
        only_here = sum(batch.size_bytes for batch in found)
        return oldest(found, only_here - int(self.low * tier.arena.capacity_bytes))


def filled_share(tier: CpuTier, spaces: Iterable[Space]) -> float:
    """How much of memory no store can use without an eviction."""
    arena = tier.arena
    free_bytes = sum(arena.num_free(space.namespace) * space.spec.block_bytes for space in spaces)
    return 1 - (arena.capacity_bytes - arena.used_bytes + free_bytes) / arena.capacity_bytes


def unwritten(spaces: Iterable[Space]) -> list[Batch]:
    """All committed blocks that are in memory and not on disk."""
    found = []
    for space in spaces:
        index = space.index
        rows = index.memory.rows()
        rows = rows[(index.states(rows) == State.COMMITTED) & ~index.disk.has(rows)]
        if len(rows):
            found.append(Batch.of(space, rows))
    return found


def oldest(batches: list[Batch], size_bytes: int) -> list[Batch]:
    """Of these blocks the least recently used, as many bytes as that, in runs of one namespace."""
    return _in_order(batches, size_bytes, newest_first=False)


def newest_first(batches: list[Batch]) -> list[Batch]:
    """All of these blocks, the most recently used in front, in runs of one namespace."""
    return _in_order(batches, sum(batch.size_bytes for batch in batches), newest_first=True)


def _in_order(batches: list[Batch], size_bytes: int, *, newest_first: bool) -> list[Batch]:
    if not batches or size_bytes <= 0:
        return []
    stamps = np.concatenate([batch.space.index.stamps.of(batch.rows) for batch in batches])
    counts = [len(batch.rows) for batch in batches]
    owners = np.repeat(np.arange(len(batches)), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(-stamps if newest_first else stamps)
    sizes = np.array([batch.space.spec.block_bytes for batch in batches])[owners[order]]
    order = order[: int(np.searchsorted(np.cumsum(sizes), size_bytes)) + 1]
    return [batches[int(owners[run[0]])][places[run]] for run in _runs(owners[order], order)]


def _runs(owners: IntArray, order: IntArray) -> list[IntArray]:
    return np.split(order, np.flatnonzero(np.diff(owners)) + 1)
