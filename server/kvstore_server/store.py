"""The store: match, load, reserve, take in, commit, give up, evict. The only writer of the indexes.

Everything here is synchronous and runs on the daemon's loop. Where bytes must move, a method returns what to
copy, and another takes note when that is done; nothing is awaited in between here.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from kvstore.errors import BlockMissing, InvalidRequest, KVStoreError, StoreFull, Unsupported, WriterFailed
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of
from kvstore.types import (
    AnyArray,
    BlockHash,
    ByteArray,
    HashArray,
    IntArray,
    Location,
    Namespace,
    Outcome,
    SessionId,
    SlabId,
    WriteId,
)
from kvstore_server.coldest import coldest_slab, oldest_use
from kvstore_server.eviction import BoolArray, Ticks
from kvstore_server.index import Index
from kvstore_server.level import State
from kvstore_server.room import Room
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import CpuTier, TierStatistics, slabs_and_places
from kvstore_server.tiers.slab import SlabArena
from kvstore_server.values import Change, Copies, Counters, Intake, Loaded, Rise, Space, Write
from kvstore_server.writes import Follow, Pending, mask_of, parts_of


class Below(Protocol):
    """What the store tells the tier below memory. Nothing here waits."""

    def stored(self, space: Space, rows: IntArray) -> None:
        """These blocks were committed, and may be written down."""
        ...

    def rise(self, rise: Rise) -> None:
        """This plan is to be carried out, and `Store.risen` told."""
        ...

    def forgotten(self, space: Space, hashes: HashArray, slots: IntArray) -> None:
        """The index knows these blocks, in these slots there, no more; the slots are the tier's to free."""
        ...

    def statistics(self) -> list[TierStatistics]:
        """Of each tier there is."""
        ...


class NothingBelow:
    """Memory is the only tier."""

    def stored(self, space: Space, rows: IntArray) -> None:
        pass

    def rise(self, rise: Rise) -> None:
        raise AssertionError("no block can be below memory")

    def forgotten(self, space: Space, hashes: HashArray, slots: IntArray) -> None:
        raise AssertionError("no block can be below memory")

    def statistics(self) -> list[TierStatistics]:
        return []


class Store:
    """All namespaces over one cpu tier, and what lies below it."""

    def __init__(
        self,
        tier: CpuTier,
        *,
        on_change: Callable[[Change], None] = lambda change: None,
        on_slab_closed: Callable[[SlabId, frozenset[SessionId]], None] = lambda slab, sessions: None,
        below: "Below | None" = None,
        policy: str = "lru",
    ) -> None:
        self.tier = tier
        self.counters = Counters()
        self.spaces: dict[Namespace, Space] = {}
        self._ticks = Ticks()
        self._policy = policy
        self.below: Below = below or NothingBelow()
        self._room = Room(
            tier,
            self.spaces,
            self._ticks,
            self.counters,
            on_change=on_change,
            on_slab_closed=on_slab_closed,
            on_forgotten=lambda space, hashes, slots: self.below.forgotten(space, hashes, slots),
        )
        self._on_change = on_change
        self._on_slab_closed = on_slab_closed
        self._last_generation = 0
        self._last_write = 0

    @property
    def tick(self) -> int:
        """The last tick that was used."""
        return self._ticks.now

    def open_space(self, spec: KVSpec, *, with_slab: bool = True) -> Space:
        """The namespace of this spec; made if it is new, and, unless it need not be, with a slab in memory."""
        space = self.spaces.get(spec.namespace)
        if space is None:
            layout = self.tier.layout(spec)
            if layout.size_bytes > self.tier.arena.capacity_bytes:
                raise InvalidRequest(
                    f"spec: expected blocks that fit into the cpu tier of {self.tier.arena.capacity_bytes} bytes, "
                    f"got blocks of {spec.block_bytes}; enlarge the tier or use fewer tokens per block"
                )
            ranges = [spec.part_range(part) for part in range(spec.num_parts)]
            space = Space(spec, layout, Index(self._ticks, policy=self._policy), part_ranges=ranges)
            self.spaces[spec.namespace] = space
        # Its first slab now, so that readers of the slab it may have to take over unmap it before the first store.
        if with_slab and not self.tier.arena.slabs_of(spec.namespace) and not self.tier.open_slab(spec, space.layout):
            self._room.take_over_slab(space)
        return space

    def close_space_if_empty(self, space: Space) -> None:
        """A namespace without blocks, which no session uses, is forgotten, and its slabs are given up."""
        slabs = self.tier.arena.slabs_of(space.namespace)
        if len(space.index) or any(self.tier.arena.num_used(slab) for slab in slabs):
            return
        for slab in slabs:
            self._on_slab_closed(slab, self.tier.close_slab(slab))
        del self.spaces[space.namespace]

    # Reading.

    def match(self, space: Space, hashes: HashArray) -> tuple[IntArray, int]:
        """Rows of the longest stored prefix, just used; and how many blocks after it are being written."""
        rows, num_writing = space.index.prefix(hashes)
        if len(rows):
            space.index.touch(rows)
        self.counters.matches += 1
        self.counters.blocks_asked += len(hashes)
        self.counters.blocks_hit += len(rows)
        self.counters.blocks_missed += len(hashes) - len(rows)
        return rows, num_writing

    def load(self, space: Space, hashes: HashArray, follower: Follow, *, follow: bool, whole: bool = False) -> Loaded:
        """The blocks that can be served are leased and located; with `follow`, those being written too.

        Blocks that are only on disk are brought up, and `follower` is told of them as of those being written.
        Raises: Unsupported, and nothing is leased, if the `whole` is wanted and one is not in memory.
        """
        index = space.index
        rows = index.find(hashes)
        states = index.states(rows)
        served = states == State.COMMITTED
        if whole and not served.all():
            raise Unsupported("load: expected only blocks that can be served at once; send it on the stream")
        if (states == State.COLD).any():
            with self._room.held(space, rows):
                self.raise_up(space, rows[states == State.COLD])
            states = index.states(rows)
        errors: dict[int, KVStoreError] = {}
        writing: list[int] = []
        for position in np.flatnonzero(~served).tolist():
            name = hashes[position].tobytes().hex()[:12]
            if states[position] == State.COLD:
                errors[position] = StoreFull(f"block {name}…: on disk, and no room in memory to bring it up; recompute")
            elif states[position] == State.HOLE:
                errors[position] = BlockMissing(f"block {name}…: not stored (any more); recompute")
            elif states[position] == State.WRITING and not follow:
                errors[position] = WriterFailed(f"block {name}…: still being written; match again, or follow")
            else:
                space.writes.follow(space.writes.of(int(rows[position])), follower, position)
                writing.append(position)
                served[position] = True
        leased = rows[served]
        index.lease(leased)
        slabs, places, generations = np.zeros((3, len(rows)), np.int64)
        slabs[served], places[served] = slabs_and_places(index.memory.slots(leased))
        generations[served] = index.generations(leased)
        self.counters.blocks_loaded += len(leased)
        return Loaded(leased, Location(slabs, places, generations), errors, writing)

    def raise_up(self, space: Space, rows: IntArray) -> None:
        """As many of these cold blocks as there is room for are rising, and leased until they have `risen`.

        The caller holds them, so that making room does not drop them.
        """
        index = space.index
        rows = rows[np.sort(np.unique(rows, return_index=True)[1])]  # each once; the first ones matter most
        slots = self._room.make(space, len(rows))
        rows = rows[: len(slots)]
        if not len(rows):
            return
        index.lease(rows)
        hashes, generations = index.hashes_of(rows), self._next_generations(len(rows))
        index.rise(rows, slots=slots, generations=generations)
        self.tier.publish(slots, generations=generations, hashes=hashes, used_bytes=space.spec.block_bytes)
        all_parts = space.all_parts
        pendings = [
            space.writes.rise(row=row, slot=slot, all_parts=all_parts)
            for row, slot in zip(rows.tolist(), slots.tolist(), strict=True)
        ]
        self.below.rise(Rise(space, rows, pendings, hashes, index.disk.slots(rows), self.tier.addresses(slots)))

    def prefetch(self, space: Space, rows: IntArray) -> int:
        """Of these blocks, a stored prefix, as many as there is room for are in memory or rising; how many lead."""
        with self._room.held(space, rows):
            self.raise_up(space, rows[space.index.states(rows) == State.COLD])
        cold = np.flatnonzero(space.index.states(rows) == State.COLD)
        return int(cold[0]) if len(cold) else len(rows)

    def risen(self, rise: Rise, good: BoolArray, checksums: AnyArray) -> None:
        """The bytes of the `good` ones are in their slots, with `[n, num_parts]` checksums; those are committed.

        The others are lost: they leave the disk too, and their readers take a miss.
        """
        space, index = rise.space, rise.space.index
        parts = list(range(space.spec.num_parts))
        slots = index.memory.slots(rise.rows)
        self.tier.set_checksums(slots[good], parts, checksums[good])
        for pending, is_good in zip(rise.pendings, good.tolist(), strict=True):
            if not is_good:
                space.writes.give_up(pending)
            space.writes.arrive(pending, pending.all_parts)
            if is_good:
                space.writes.finish(pending)
        index.commit(rise.rows[good])
        self.counters.blocks_risen += int(good.sum())
        bad = rise.rows[~good]
        if len(bad):
            self._room.drop_all(space, bad)
            self.counters.blocks_lost += len(bad)
        index.unlease(rise.rows)

    # Writing.

    def reserve(self, space: Space, *, parent: BlockHash | None, hashes: HashArray, parts: Sequence[int]) -> Write:
        """Every block that is new and has room is in writing; the outcomes say what became of each.

        `parts` are those that the writer delivers; none: all. Raises: InvalidRequest, if one does not exist.
        """
        claimed = _set_of(parts, space) if parts else space.all_parts
        if len(set(hashes.tolist())) != len(hashes):
            raise InvalidRequest("hashes: expected each block once, got one twice; store each block once")
        self._last_write += 1
        write = Write(WriteId(self._last_write), space, hashes, [Outcome.STORED] * len(hashes))
        before = NONE if parent is None else space.index.row(parent)
        if parent is not None and space.index.state(before) == State.HOLE:
            write.outcomes = [Outcome.ORPHAN] * len(hashes)
            return write
        known = space.index.find(hashes)
        with self._room.held(space, np.append(known, before)):
            missing = np.flatnonzero(space.index.states(known) == State.HOLE)
            slots = self._room.make(space, len(missing))
            num_refused = 0
            if len(slots) < len(missing):
                num_refused = len(hashes) - int(missing[len(slots)])
                write.outcomes[-num_refused:] = [Outcome.FULL] * num_refused
                self.counters.blocks_refused += num_refused
            self._begin(write, len(hashes) - num_refused, before, claimed, slots)
        return write

    def _begin(self, write: Write, count: int, before: int, claimed: int, slots: IntArray) -> None:
        """The first `count` blocks of the write, for which there are just enough slots, are in writing or stored."""
        if not count:
            return
        space, hashes = write.space, write.hashes[:count]
        generations = self._next_generations(len(slots))
        rows, begun = space.index.insert(hashes, parent=before, slots=slots, generations=generations)
        self.tier.publish(slots, generations=generations, hashes=hashes[begun], used_bytes=space.spec.block_bytes)
        in_writing = np.flatnonzero(space.index.states(rows) == State.WRITING).tolist()
        slot_of = dict(zip(begun.tolist(), slots.tolist(), strict=True))
        all_parts = space.all_parts
        for position, row in zip(in_writing, rows[in_writing].tolist(), strict=True):
            slot = slot_of.get(position)
            if slot is not None:
                pending = space.writes.begin(row=row, slot=slot, all_parts=all_parts, writer=write.id, parts=claimed)
            else:
                pending = space.writes.of(row)
                if not space.writes.join(pending, writer=write.id, parts=claimed):
                    write.outcomes[position] = Outcome.WRITING
                    continue
            write.pending[position] = pending
            write.outcomes[position] = Outcome.NEW
        space.index.touch(rows)

    def _next_generations(self, count: int) -> IntArray:
        first = self._last_generation + 1
        self._last_generation += count
        return np.arange(first, first + count)

    def plan_intake(
        self, write: Write, *, blocks: IntArray, parts: IntArray, region: ByteArray, offsets: IntArray
    ) -> Intake:
        """The copies that bring the grid blocks x parts in. Each block must be `parts_arrived` afterwards.

        Raises: InvalidRequest, if anything is out of range, not reserved by this write, or was sent before;
        nothing is changed then. Blocks that were given up meanwhile are left out.
        """
        if len(offsets) != len(blocks) * len(parts) or not len(offsets):
            raise InvalidRequest(
                f"offsets: expected {len(blocks)} blocks x {len(parts)} parts, at least one, got {len(offsets)}"
            )
        numbers: list[int] = parts.tolist()
        wanted = _set_of(numbers, write.space)
        ranges = [write.space.part_ranges[part] for part in numbers]
        sizes = [size for _, size in ranges]
        # Compared so that no sum can overflow: an offset may be anything below 2**63.
        if (offsets.reshape(len(blocks), len(parts)) > region.size - np.array(sizes, np.int64)).any():
            raise InvalidRequest(
                f"offsets: expected parts within the region of {region.size} bytes, got offsets up to {offsets.max()}"
            )
        taken: list[Pending | None] = []
        for block in blocks.tolist():
            pending = write.pending.get(block)
            if pending is None:
                raise InvalidRequest(f"blocks: expected blocks reserved by write {write.id}, got {block}")
            if not pending.given_up and pending.owed.get(write.id, 0) & wanted != wanted:
                again = parts_of(wanted & ~pending.owed.get(write.id, 0))
                raise InvalidRequest(f"block {block}: expected parts that this write owes, got parts {again}")
            taken.append(None if pending.given_up else pending)
        if len(set(blocks.tolist())) != len(blocks):
            raise InvalidRequest("blocks: expected each block once, got one twice")
        pendings = [taking for taking in taken if taking is not None]
        for pending in pendings:
            write.space.writes.take(pending, writer=write.id, parts=wanted)
        kept = np.array([taking is not None for taking in taken])
        slots = np.array([pending.slot for pending in pendings], np.int64)
        begins = np.array([begin for begin, _ in ranges], np.int64)
        copies = Copies(
            targets=(self.tier.addresses(slots)[:, None] + begins).ravel(),
            sources=(offsets.reshape(len(blocks), len(parts))[kept] + address_of(region)).ravel(),
            sizes=np.tile(np.array(sizes, np.int64), len(pendings)),
            region=region,
        )
        self.counters.bytes_stored += sum(sizes) * len(pendings)
        return Intake(write, copies, pendings, slots, numbers, wanted, taken.count(None))

    def parts_arrived(self, intake: Intake, checksums: AnyArray) -> int:
        """The copies are done, `[n]` checksums taken; complete blocks are committed. Returns how many are."""
        space = intake.write.space
        complete: list[Pending] = []
        self.tier.set_checksums(intake.slots, intake.parts, checksums.reshape(-1, len(intake.parts)))
        for pending in intake.blocks:
            space.writes.arrive(pending, intake.mask)
            if pending.given_up:
                self._free_if_idle(pending)
            elif space.writes.is_complete(pending):
                complete.append(pending)
        self._commit(space, complete)
        return len(complete)

    def _commit(self, space: Space, complete: list[Pending]) -> None:
        if not complete:
            return
        for pending in complete:
            space.writes.finish(pending)
        rows = np.array([pending.row for pending in complete], np.int64)
        space.index.commit(rows)
        self.counters.blocks_stored += len(rows)
        self._on_change(self.change_of(space, rows))
        self.below.stored(space, rows)

    def written(self, space: Space, rows: IntArray, slots: IntArray) -> None:
        """These committed blocks are in these slots on disk too, and will be found there after a restart."""
        space.index.is_on_disk(rows, slots)
        self.counters.blocks_written += len(rows)
        self._on_change(self.change_of(space, rows, tier="disk"))

    def make_room_below(self, space: Space, count: int) -> tuple[HashArray, IntArray]:
        """Up to `count` blocks that nothing holds have left the disk; their hashes, and the slots they were in."""
        hashes, gone, slots = space.index.evict_from_disk(count)
        self.counters.blocks_dropped += len(hashes)
        self._room.tell_removed(space, gone)
        return hashes, slots

    def empty_slab_below(self, space: Space, arena: SlabArena) -> tuple[Space, SlabId, HashArray, IntArray] | None:
        """The blocks of the coldest slab on disk of another namespace, colder than all of this one's, have left it.

        Returns its owner, its id, their hashes and slots; None, if there is none.
        """
        oldest = oldest_use(space, space.index.disk)
        found = coldest_slab(space, self.spaces.values(), level_of=lambda index: index.disk, arena=arena, oldest=oldest)
        if found is None:
            return None
        owner, slab, rows = found
        hashes, slots = self._leave_disk(owner, rows)
        self.counters.blocks_dropped += len(hashes)
        return owner, slab, hashes, slots

    def lose_below(self, space: Space, rows: IntArray) -> tuple[HashArray, IntArray]:
        """The copies on disk of these blocks are wrong and have left it, whoever holds them; their hashes and slots."""
        self.counters.blocks_lost += len(rows)
        return self._leave_disk(space, rows)

    def _leave_disk(self, space: Space, rows: IntArray) -> tuple[HashArray, IntArray]:
        """These blocks are not on disk any more; those that are not in memory are gone. Their hashes and slots."""
        index = space.index
        hashes, gone = index.hashes_of(rows), index.hashes_of(rows[~index.memory.has(rows)])
        slots = index.leave_disk(rows)
        self._room.tell_removed(space, gone)
        return hashes, slots

    def finish_write(self, write: Write, *, abort: bool = False) -> int:
        """The writer sends no more; blocks that wait for it (with `abort`: all not committed) are given up.

        Returns how many were given up. Idempotent.
        """
        given_up = 0
        for pending in write.pending.values():
            if not write.space.writes.has(pending):
                continue
            if abort or pending.owed.get(write.id, 0):
                self._give_up(write.space, pending)
                given_up += 1
            else:
                pending.owed.pop(write.id, None)
        return given_up

    def outcomes(self, write: Write) -> list[Outcome]:
        """What has become of each block by now."""
        outcomes = list(write.outcomes)
        for position, pending in write.pending.items():
            if pending.given_up:
                outcomes[position] = Outcome.FAILED
            elif pending.arrived == pending.all_parts:
                outcomes[position] = Outcome.STORED
            else:
                outcomes[position] = Outcome.WRITING
        return outcomes

    def _give_up(self, space: Space, pending: Pending) -> None:
        space.writes.give_up(pending)
        space.index.leave_memory(np.array([pending.row]))
        self.tier.retract(np.array([pending.slot]), used_bytes=space.spec.block_bytes)
        self._free_if_idle(pending)
        self.counters.blocks_aborted += 1

    def _free_if_idle(self, pending: Pending) -> None:
        """The slot of a block that was given up is free, once no copy into it is under way."""
        if not pending.copying:
            self.tier.arena.free(np.array([pending.slot]))

    # Removing.

    def set_pinned(self, space: Space, hashes: HashArray, pinned: bool) -> int:
        """Those of the blocks that are committed are pinned, or not; returns how many. Idempotent."""
        rows = space.index.find(hashes)
        rows = rows[space.index.states(rows) >= State.COMMITTED]
        (space.index.pin if pinned else space.index.unpin)(rows)
        return len(rows)

    def clear(self, space: Space) -> tuple[int, int]:
        """Stored blocks that nothing holds are gone; returns how many, and how many were kept."""
        rows = space.index.stored()
        held = space.index.held(rows)
        removed = self._room.drop_all(space, rows[~held])
        self.counters.blocks_removed += removed
        return removed, int(held.sum())

    def expire(self, space: Space, tick: int) -> int:
        """Stored blocks last used at this tick or before, which nothing holds, are gone; returns how many."""
        removed = self._room.drop_all(space, space.index.expired(tick))
        self.counters.blocks_removed += removed
        return removed

    def lose(self, space: Space, block_hash: BlockHash) -> None:
        """A block whose bytes in memory are wrong leaves memory, whoever holds it: its readers take a miss."""
        row = space.index.row(block_hash)
        if space.index.state(row) == State.COMMITTED:
            self._room.push_out(space, np.array([row]))
            self.counters.blocks_lost += 1

    def change_of(self, space: Space, rows: IntArray, *, tier: str = "cpu") -> Change:
        """What a watcher is told of these blocks, which are stored."""
        hashes, parents = space.index.hashes_of(rows), space.index.parent_hashes(rows)
        return Change(space.namespace, True, hashes, parents, space.spec.block_tokens, tier)

    def validate(self) -> None:
        """Every invariant over indexes, writes and slots holds, else AssertionError. For tests."""
        self.tier.arena.validate()
        for space in self.spaces.values():
            space.index.validate()
            assert space.index.count(State.WRITING) + space.index.count(State.RISING) == len(space.writes)


def _set_of(parts: Sequence[int], space: Space) -> int:
    """The parts as a set. Raises: InvalidRequest, if one does not exist or comes twice."""
    num_parts = space.spec.num_parts
    if len(set(parts)) != len(parts) or not all(part < num_parts for part in parts):
        raise InvalidRequest(f"parts: expected different ones from 0 to {num_parts - 1}, got {parts[:8]}")
    return mask_of(parts)
