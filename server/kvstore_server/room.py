"""Makes room in memory: free slots, a new slab, a slab of a colder namespace, the oldest blocks; drops blocks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np

from kvstore.types import HashArray, IntArray, Namespace, SessionId, SlabId
from kvstore_server.coldest import coldest_slab, oldest_use
from kvstore_server.eviction import Ticks
from kvstore_server.index import BESIDE, Beside
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.values import Change, Counters, Space

# A look for a colder namespace reads every row; it is not worth one until this many blocks were used.
LOOK_EVERY: Final = 1024


class Room:
    """The slots of one tier, shared by all namespaces. Whoever gets a slot evicts, if it must, the coldest first."""

    def __init__(
        self,
        tier: CpuTier,
        spaces: Mapping[Namespace, Space],
        ticks: Ticks,
        counters: Counters,
        *,
        on_change: Callable[[Change], None],
        on_slab_closed: Callable[[SlabId, frozenset[SessionId]], None],
        on_forgotten: Callable[[Space, Beside, HashArray, IntArray], None],
    ) -> None:
        self.tier = tier
        self.counters = counters
        self._spaces = spaces
        self._ticks = ticks
        self._on_change = on_change
        self._on_slab_closed = on_slab_closed
        self._on_forgotten = on_forgotten
        self._next_look = 0
        self._last_generation = 0

    @contextmanager
    def held(self, space: Space, rows: IntArray) -> Iterator[None]:
        """None of these blocks, where NONE stands for no block, is evicted in the meantime."""
        rows = rows[rows != NONE]
        space.index.lease(rows)
        try:
            yield
        finally:
            space.index.unlease(rows)

    def next_generations(self, count: int) -> IntArray:
        """`[count]` generations that no slot has had, for slots that get blocks."""
        first = self._last_generation + 1
        self._last_generation += count
        return np.arange(first, first + count)

    def make(self, space: Space, count: int) -> IntArray:
        """Up to `count` slots: free ones, then a new slab, a slab of a colder namespace, the oldest blocks."""
        arena = self.tier.arena
        found = [arena.allocate(space.namespace, count)]
        missing = count - len(found[0])
        while missing and (self.tier.open_slab(space.spec, space.layout) or self.take_over_slab(space)):
            found.append(arena.allocate(space.namespace, missing))
            missing -= len(found[-1])
        if missing:
            evicted, freed = space.index.evict(missing)
            self.free(space, freed)
            found.append(arena.allocate(space.namespace, len(freed)))
            self.counters.blocks_evicted += len(freed)
            self.tell_removed(space, evicted)
        return np.concatenate(found)

    def take_over_slab(self, space: Space) -> bool:
        """The namespace has one more slab, in place of others whose every block is older than all of ours.

        False also while a slab taken over before waits for its readers to unmap it.
        """
        if self.tier.arena.num_lingering or len(self._spaces) < 2:
            return False
        oldest = oldest_use(space, space.index.memory)
        if oldest is not None:
            if self._ticks.now < self._next_look:
                return False
            self._next_look = self._ticks.now + LOOK_EVERY
        while not self.tier.open_slab(space.spec, space.layout):  # one of large blocks takes the room of several
            found = coldest_slab(
                space,
                self._spaces.values(),
                level_of=lambda index: index.memory,
                arena=self.tier.arena,
                oldest=oldest,
            )
            if found is None or self.tier.arena.num_lingering:
                return False
            owner, slab, rows = found
            self.push_out(owner, rows)
            self.counters.blocks_evicted += len(rows)
            self._on_slab_closed(slab, self.tier.close_slab(slab))
        return True

    def push_out(self, space: Space, rows: IntArray) -> None:
        """These committed blocks leave memory, whoever holds them; those that are nowhere else are gone."""
        hashes = space.index.hashes_of(rows[~space.index.is_below(rows)])
        self.free(space, space.index.leave_memory(rows))
        self.tell_removed(space, hashes)

    def drop_all(self, space: Space, rows: IntArray) -> int:
        """These stored blocks, which are not rising, are gone from all tiers, whoever holds them; returns how many."""
        index = space.index
        hashes = index.hashes_of(rows)
        levels = {tier: index.beside(tier) for tier in BESIDE}
        below = {tier: rows[level.has(rows)] for tier, level in levels.items()}
        forgotten = {tier: index.hashes_of(some) for tier, some in below.items()}
        self.free(space, index.leave_memory(rows[index.memory.has(rows)]))
        for tier, level in levels.items():
            if len(below[tier]):
                self._on_forgotten(space, tier, forgotten[tier], index.leave(level, below[tier]))
        self.tell_removed(space, hashes)
        return len(hashes)

    def free(self, space: Space, slots: IntArray) -> None:
        """Readers of these slots take a miss, and the slots can be allocated again."""
        self.tier.retract(slots, used_bytes=space.spec.block_bytes)
        self.tier.arena.free(slots)

    def tell_removed(self, space: Space, hashes: HashArray) -> None:
        """Whoever watches is told that these blocks are gone."""
        if len(hashes):
            self._on_change(Change(space.namespace, False, hashes, hashes[:0], space.spec.block_tokens))
