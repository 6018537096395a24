"""Blocks beside memory, on the GPU or on disk: what the store tells those tiers, and what they tell it.

Everything here is synchronous and runs on the daemon's loop, as in `store`, of which this is a part.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from kvstore.types import AnyArray, HashArray, IntArray, Namespace, SlabId
from kvstore_server.coldest import Slabs, coldest_slab, oldest_use
from kvstore_server.eviction import BoolArray
from kvstore_server.index import BESIDE, Beside, Index
from kvstore_server.level import Level, State
from kvstore_server.room import Room
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.values import Change, Rise, Space, change_of
from kvstore_server.writes import Pending


class Below(Protocol):
    """What the store tells the tiers beside memory. Nothing here waits."""

    def stored(self, space: Space, rows: IntArray) -> None:
        """These blocks were committed, and may be written down."""
        ...

    def loaded(self, space: Space, rows: IntArray) -> None:
        """These blocks were asked for, and are leased."""
        ...

    def sought(self, space: Space, hashes: HashArray, num_found: int) -> None:
        """Of this chain so many leading blocks are stored, and nobody is writing the next one."""
        ...

    def rise(self, rise: Rise) -> None:
        """This plan is to be carried out, and `Lower.risen` told."""
        ...

    def forgotten(self, space: Space, tier: Beside, hashes: HashArray, slots: IntArray) -> None:
        """The index knows these blocks, in these slots of that tier, no more; the slots are the tier's to free."""
        ...

    def has_slabs(self, space: Space) -> bool:
        """Whether room in a tier is cut for blocks of this namespace, even if none is there."""
        ...

    def statistics(self) -> list[TierStatistics]:
        """Of each tier there is."""
        ...

    def rise_bytes_per_s(self) -> int:
        """How fast blocks came up lately, from the slowest tier that was asked; 0: none did yet."""
        ...


class NothingBelow:
    """Memory is the only tier."""

    def stored(self, space: Space, rows: IntArray) -> None:
        pass

    def loaded(self, space: Space, rows: IntArray) -> None:
        pass

    def sought(self, space: Space, hashes: HashArray, num_found: int) -> None:
        pass

    def rise(self, rise: Rise) -> None:
        raise AssertionError("no block can be beside memory")

    def forgotten(self, space: Space, tier: Beside, hashes: HashArray, slots: IntArray) -> None:
        raise AssertionError("no block can be beside memory")

    def has_slabs(self, space: Space) -> bool:
        return False

    def statistics(self) -> list[TierStatistics]:
        return []

    def rise_bytes_per_s(self) -> int:
        return 0


class Lower:
    """What lies beside memory, of all namespaces of one store. `below` carries out what is decided here."""

    def __init__(self, room: Room, spaces: Mapping[Namespace, Space], *, on_change: Callable[[Change], None]) -> None:
        self.below: Below = NothingBelow()
        self.seeks = True  # what a match missed may be brought here
        self._room = room
        self._spaces = spaces
        self._on_change = on_change

    # Up.

    def seek(self, space: Space, hashes: HashArray, num_found: int, num_writing: int) -> None:
        """Those below know what a match of this chain missed, unless somebody is writing it."""
        if self.seeks and num_found < len(hashes) and not num_writing:
            self.below.sought(space, hashes, num_found)

    def raise_up(self, space: Space, rows: IntArray) -> None:
        """As many of these cold blocks as there is room for are rising, and leased until they have `risen`.

        The caller holds them, so that making room does not drop them.
        """
        index, tier = space.index, self._room.tier
        rows = rows[np.sort(np.unique(rows, return_index=True)[1])]  # each once; the first ones matter most
        slots = self._room.make(space, len(rows))
        rows = rows[: len(slots)]
        if not len(rows):
            return
        index.lease(rows)
        hashes, generations = index.hashes_of(rows), self._room.next_generations(len(rows))
        index.rise(rows, slots=slots, generations=generations)
        tier.publish(slots, generations=generations, hashes=hashes, used_bytes=space.spec.block_bytes)
        all_parts = space.all_parts
        pendings = [
            space.writes.rise(row=row, slot=slot, all_parts=all_parts)
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True)
        ]
        self._bring(space, rows, pendings)

    def prefetch(self, space: Space, hashes: HashArray) -> int:
        """Of the stored prefix, as many blocks as there is room for are in memory or rising; how many lead."""
        rows, num_writing = space.index.prefix(hashes)
        self.seek(space, hashes, len(rows), num_writing)
        with self._room.held(space, rows):
            self.raise_up(space, rows[space.index.states(rows) == State.COLD])
        cold = np.flatnonzero(space.index.states(rows) == State.COLD)
        return int(cold[0]) if len(cold) else len(rows)

    def risen(self, rise: Rise, good: BoolArray, checksums: AnyArray) -> None:
        """The bytes of the `good` ones are in their slots, with `[n, num_parts]` checksums; those are committed.

        The others leave the tier that they came from. Another that has them is asked; else they are lost, and their
        readers take a miss.
        """
        space, index = rise.space, rise.space.index
        slots = index.memory.slots(rise.rows)
        self._room.tier.set_checksums(slots[good], list(range(space.spec.num_parts)), checksums[good])
        bad = np.flatnonzero(~good)
        self._forget(space, rise.tier, rise.rows[bad])
        again = bad[index.is_below(rise.rows[bad])]
        lost = np.setdiff1d(bad, again)
        for place in lost.tolist():
            space.writes.give_up(rise.pendings[place])
        for place in [*lost.tolist(), *np.flatnonzero(good).tolist()]:
            space.writes.arrive(rise.pendings[place], rise.pendings[place].all_parts)
        for place in np.flatnonzero(good).tolist():
            space.writes.finish(rise.pendings[place])
        index.commit(rise.rows[good])
        self._room.counters.blocks_risen += int(good.sum())
        if len(lost):
            self._room.drop_all(space, rise.rows[lost])
            self._room.counters.blocks_lost += len(lost)
        if len(again):
            self._bring(space, rise.rows[again], [rise.pendings[place] for place in again.tolist()])
        index.unlease(rise.rows[np.setdiff1d(np.arange(len(rise.rows)), again)])

    # Down.

    def written(self, space: Space, tier: Beside, rows: IntArray, slots: IntArray) -> None:
        """These committed blocks are in these slots of the tier too; on disk, a restart will find them there."""
        if not len(rows):
            return
        space.index.put(space.index.beside(tier), rows, slots)
        if tier == "disk":
            self._room.counters.blocks_written += len(rows)
        else:
            self._room.counters.blocks_lifted += len(rows)
        self._on_change(change_of(space, rows, tier=tier))

    def make_room(self, space: Space, tier: Beside, count: int) -> tuple[HashArray, IntArray]:
        """Up to `count` blocks that nothing holds have left the tier; their hashes, and the slots they were in."""
        hashes, gone, slots = space.index.evict_from(space.index.beside(tier), count)
        self._dropped(tier, len(hashes))
        self._room.tell_removed(space, gone)
        return hashes, slots

    def empty_slab(
        self, space: Space, tier: Beside, slabs: Slabs, *, own: bool = False
    ) -> tuple[Space, SlabId, HashArray, IntArray] | None:
        """The blocks of the coldest slab of another namespace, colder than all of this one's there, have left it.

        With `own`, of the coldest of this one. Returns its owner, its id, their hashes and slots; None, if there is
        none.
        """

        def level_of(index: Index) -> Level:
            return index.beside(tier)

        if own:
            found = coldest_slab(None, [space], level_of=level_of, arena=slabs, oldest=None)
        else:
            oldest = oldest_use(space, level_of(space.index))
            found = coldest_slab(space, self._spaces.values(), level_of=level_of, arena=slabs, oldest=oldest)
        if found is None:
            return None
        owner, slab, rows = found
        hashes, slots, _ = self._leave(owner, tier, rows)
        self._dropped(tier, len(hashes))
        return owner, slab, hashes, slots

    def lose(self, space: Space, tier: Beside, rows: IntArray) -> None:
        """The copies in that tier of these blocks are wrong and have left it, whoever holds them."""
        self._room.counters.blocks_lost += len(rows)
        self._forget(space, tier, rows)

    def abandon(self, tier: Beside) -> None:
        """No block is in that tier any more, but for those that are on their way from it."""
        for space in self._spaces.values():
            rows = space.index.beside(tier).rows()
            self._room.counters.blocks_lost += self._forget(space, tier, rows[space.index.states(rows) != State.RISING])

    # Within.

    def _bring(self, space: Space, rows: IntArray, pendings: list[Pending]) -> None:
        """These rising blocks are brought into their slots, each from the fastest tier that has it."""
        index = space.index
        addresses = self._room.tier.addresses(index.memory.slots(rows))
        hashes = index.hashes_of(rows)
        left = np.ones(len(rows), np.bool_)
        for tier in BESIDE:
            slots = index.beside(tier).slots(rows)
            chosen = np.flatnonzero(left & (slots != NONE))
            left[chosen] = False
            if len(chosen):
                moved = [pendings[place] for place in chosen.tolist()]
                columns = hashes[chosen], slots[chosen], addresses[chosen]
                self.below.rise(Rise(space, tier, rows[chosen], moved, *columns))

    def _forget(self, space: Space, tier: Beside, rows: IntArray) -> int:
        """These blocks are not in that tier any more, and it knows; returns how many of them are gone."""
        if not len(rows):
            return 0
        hashes, slots, num_gone = self._leave(space, tier, rows)
        self.below.forgotten(space, tier, hashes, slots)
        return num_gone

    def _leave(self, space: Space, tier: Beside, rows: IntArray) -> tuple[HashArray, IntArray, int]:
        """These blocks are not in that tier any more. Their hashes, their slots, and how many were nowhere else."""
        index = space.index
        hashes = index.hashes_of(rows)
        slots = index.leave(index.beside(tier), rows)
        gone = hashes[~(index.memory.has(rows) | index.is_below(rows))]
        self._room.tell_removed(space, gone)
        return hashes, slots, len(gone)

    def _dropped(self, tier: Beside, count: int) -> None:
        if tier == "disk":
            self._room.counters.blocks_dropped += count
        else:
            self._room.counters.blocks_lowered += count
