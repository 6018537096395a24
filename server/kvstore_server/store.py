"""The store: match, load, reserve, take in, commit, give up, evict. The only writer of the indexes.

Everything here is synchronous and runs on the daemon's loop. Where bytes must move, a method returns what to
copy, and another takes note when that is done; nothing is awaited in between here.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from kvstore.errors import BlockMissing, InvalidRequest, KVStoreError, StoreFull, Unsupported, WriterFailed
from kvstore.spec import KVSpec
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
from kvstore_server.eviction import Ticks
from kvstore_server.grid import ranges_of, set_of, within
from kvstore_server.index import Index
from kvstore_server.level import State
from kvstore_server.lower import Lower
from kvstore_server.room import Room
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import CpuTier, slabs_and_places
from kvstore_server.values import (
    Change,
    Copies,
    Counters,
    Intake,
    Loaded,
    RemoteRegion,
    Space,
    Write,
    change_of,
)
from kvstore_server.writes import Follow, Pending, parts_of


class Store:
    """All namespaces over one cpu tier; `lower` is what lies beside it."""

    def __init__(
        self,
        tier: CpuTier,
        *,
        on_change: Callable[[Change], None] = lambda change: None,
        on_slab_closed: Callable[[SlabId, frozenset[SessionId]], None] = lambda slab, sessions: None,
        policy: str = "lru",
        placed: bool = False,
    ) -> None:
        """Empty. `placed`: there are other daemons, and whoever watches is told by what blocks are placed."""
        self.tier = tier
        self.placed = placed
        self.counters = Counters()
        self.spaces: dict[Namespace, Space] = {}
        self._ticks = Ticks()
        self._policy = policy
        self._room = Room(
            tier,
            self.spaces,
            self._ticks,
            self.counters,
            on_change=on_change,
            on_slab_closed=on_slab_closed,
            on_forgotten=lambda *forgotten: self.lower.below.forgotten(*forgotten),
        )
        self.lower = Lower(self._room, self.spaces, on_change=on_change)
        self._on_change = on_change
        self._on_slab_closed = on_slab_closed
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
        """A namespace without blocks, which no session uses, is forgotten, and its slabs are given up.

        But not while it has slabs beside memory: others find them there, and take them over.
        """
        if self.spaces.get(space.namespace) is not space:
            return  # the last two sessions ended at once, and the other was first
        slabs = self.tier.arena.slabs_of(space.namespace)
        if len(space.index) or any(self.tier.arena.num_used(slab) for slab in slabs):
            return
        for slab in slabs:
            self._on_slab_closed(slab, self.tier.close_slab(slab))
        if not self.lower.below.has_slabs(space):
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
        self.lower.seek(space, hashes, len(rows), num_writing)
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
                self.lower.raise_up(space, rows[states == State.COLD])
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
        self.lower.below.loaded(space, leased)
        return Loaded(leased, Location(slabs, places, generations), errors, writing)

    # Writing.

    def reserve(
        self,
        space: Space,
        *,
        parent: BlockHash | None,
        hashes: HashArray,
        parts: Sequence[int],
        heads: Sequence[int] = (),
    ) -> Write:
        """Every block that is new and has room is in writing; the outcomes say what became of each.

        `parts` are those that the writer delivers; none: all. `heads` are the positions at which another run begins,
        each of which begins a chain. Raises: InvalidRequest, if a part or a head is out of bounds, or hashes repeat.
        """
        claimed = set_of(parts, space) if parts else space.all_parts
        if len(set(hashes.tolist())) != len(hashes):
            raise InvalidRequest("hashes: expected each block once, got one twice; store each block once")
        bounds = [0, *heads, len(hashes)]
        if heads and not all(one < other for one, other in pairwise(bounds)):
            raise InvalidRequest(f"heads: expected ascending ones from 1 to {len(hashes) - 1}, got {heads[:8]}")
        self._last_write += 1
        write = Write(WriteId(self._last_write), space, hashes, [Outcome.STORED] * len(hashes))
        before = NONE if parent is None else space.index.row(parent)
        if parent is not None and space.index.state(before) == State.HOLE:
            write.outcomes[: bounds[1]] = [Outcome.ORPHAN] * bounds[1]
            before, bounds = NONE, bounds[1:]
        begin, end = bounds[0], len(hashes)
        known = space.index.find(hashes[begin:])
        with self._room.held(space, np.append(known, before)):
            missing = np.flatnonzero(space.index.states(known) == State.HOLE)
            slots = self._room.make(space, len(missing))
            if len(slots) < len(missing):
                end = begin + int(missing[len(slots)])
                num_refused = len(hashes) - end
                write.outcomes[end:] = [Outcome.FULL] * num_refused
                self.counters.blocks_refused += num_refused
            runs = [slice(one, min(other, end)) for one, other in pairwise(bounds) if one < end]
            self._begin(write, runs, before, claimed, slots)
        return write

    def _begin(self, write: Write, runs: Sequence[slice], before: int, claimed: int, slots: IntArray) -> None:
        """These runs of blocks, one behind the other, with just enough slots for them, are in writing or stored."""
        if not runs:
            return
        first = runs[0].start
        space, hashes = write.space, write.hashes[first : runs[-1].stop]
        generations = self._room.next_generations(len(slots))
        heads = [run.start - first for run in runs[1:]]
        rows, begun = space.index.insert(hashes, parent=before, heads=heads, slots=slots, generations=generations)
        self.tier.publish(slots, generations=generations, hashes=hashes[begun], used_bytes=space.spec.block_bytes)
        in_writing = np.flatnonzero(space.index.states(rows) == State.WRITING).tolist()
        slot_of = dict(zip(begun.tolist(), slots.tolist(), strict=True))
        all_parts = space.all_parts
        for position, row in zip(in_writing, rows[in_writing].tolist(), strict=True):
            slot = slot_of.get(position)
            block = first + position
            if slot is not None:
                pending = space.writes.begin(row=row, slot=slot, all_parts=all_parts, writer=write.id, parts=claimed)
            else:
                pending = space.writes.of(row)
                if not space.writes.join(pending, writer=write.id, parts=claimed):
                    write.outcomes[block] = Outcome.WRITING
                    continue
            write.pending[block] = pending
            write.outcomes[block] = Outcome.NEW
        for run in reversed(runs):  # so that the first block is the last to go
            space.index.touch(rows[run.start - first : run.stop - first])

    def plan_intake(
        self,
        write: Write,
        *,
        blocks: IntArray,
        parts: IntArray,
        region: ByteArray | RemoteRegion,
        offsets: IntArray,
    ) -> Intake:
        """The copies that bring the grid blocks x parts in. They must have `parts_arrived`, or be lost, afterwards.

        Raises: InvalidRequest, if anything is out of range, not reserved by this write, or was sent before;
        nothing is changed then. Blocks that were given up meanwhile are left out.
        """
        numbers: list[int] = parts.tolist()
        wanted = set_of(numbers, write.space)
        begins, sizes = ranges_of(numbers, write.space)
        remote = within(region, offsets, num_blocks=len(blocks), sizes=sizes)
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
        copies = Copies(
            targets=(self.tier.addresses(slots)[:, None] + begins).ravel(),
            sources=remote[kept].ravel(),
            sizes=np.tile(sizes, len(pendings)),
            region=region,
        )
        self.counters.bytes_stored += int(sizes.sum()) * len(pendings)
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

    def parts_lost(self, intake: Intake) -> None:
        """The copies have failed half way, and none is under way: the blocks are given up."""
        space = intake.write.space
        for pending in intake.blocks:
            space.writes.drop(pending, intake.mask)
            if pending.given_up:
                self._free_if_idle(pending)
            else:
                self._give_up(space, pending)

    def _commit(self, space: Space, complete: list[Pending]) -> None:
        if not complete:
            return
        for pending in complete:
            space.writes.finish(pending)
        rows = np.array([pending.row for pending in complete], np.int64)
        space.index.commit(rows)
        self.counters.blocks_stored += len(rows)
        self._on_change(change_of(space, rows, placed=self.placed))
        self.lower.below.stored(space, rows)

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
        stored = rows[space.index.states(rows) >= State.COMMITTED]
        if pinned:
            space.index.pin(stored)
        else:  # those too that were lost while they were pinned, or their holes would stay for ever
            space.index.unpin(rows[rows != NONE])
        return len(stored)

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

    def validate(self) -> None:
        """Every invariant over indexes, writes and slots holds, else AssertionError. For tests."""
        self.tier.arena.validate()
        for space in self.spaces.values():
            space.index.validate()
            assert space.index.count(State.WRITING) + space.index.count(State.RISING) == len(space.writes)
