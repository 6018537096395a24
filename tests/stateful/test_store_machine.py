"""The whole core, index, leases, eviction, writes, slabs and what lies beside memory, against an oracle of a few dicts.

Two namespaces of different block sizes share a tier of three slabs, so that room runs out all the time and
slabs change hands. Bytes are really written to slots, and every match is read back and compared. The GPU and the
disk are dicts that take copies, make room and are read, well or badly, whenever the machine likes.
"""

import ctypes
from collections import Counter

import numpy as np
from builders import block_bytes, chain, records, spec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.transport.memory import copy_and_hash_pieces
from kvstore.types import BlockHash, HashArray, IntArray, Outcome, SessionId
from kvstore_server.config import EVICTION_POLICIES
from kvstore_server.index import BESIDE, Beside
from kvstore_server.level import State
from kvstore_server.session import Session
from kvstore_server.store import Store
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import CpuTier, TierStatistics, slabs_and_places
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.values import Change, Rise, Space, Write

SPECS = [spec(model="a", layers=2, bytes_per_part=9000), spec(model="b", layers=1, bytes_per_part=5000)]
TREES = [[chain(6, of=kv, seed=seed) for seed in range(3)] for kv in SPECS]
# Chains that branch off others: the same first blocks, other ones after.
for trees in TREES:
    trees.append([*trees[0][:3], *[BlockHash(bytes([200 + n]) * 32) for n in range(3)]])

which = st.integers(0, 1)
tree = st.integers(0, 3)
length = st.integers(1, 6)
session_number = st.integers(0, 2)
beside = st.sampled_from(BESIDE)


class DictTiers:
    """What lies beside memory: it does what it is told when the machine says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Space, BlockHash]] = []  # committed, and not copied anywhere
        self.rising: list[Rise] = []
        self.bytes_in: dict[Beside, dict[int, bytes]] = {tier: {} for tier in BESIDE}  # by slot
        self.last_slot = 0

    def stored(self, space: Space, rows: IntArray) -> None:
        self.waiting += [(space, block_hash) for block_hash in space.index.hashes_of(rows).tolist()]

    def rise(self, rise: Rise) -> None:
        self.rising.append(rise)

    def sought(self, space: Space, hashes: HashArray, num_found: int) -> None:
        assert num_found < len(hashes)
        assert space.index.state(space.index.row(BlockHash(hashes[num_found].tobytes()))) < State.WRITING

    def loaded(self, space: Space, rows: IntArray) -> None:
        self.stored(space, rows)

    def forgotten(self, space: Space, tier: Beside, hashes: HashArray, slots: IntArray) -> None:
        for slot in slots.tolist():
            del self.bytes_in[tier][slot]

    def statistics(self) -> list[TierStatistics]:
        return []


class StoreMachine(RuleBasedStateMachine):
    """Sessions store, match, hold, release, abort, pin, clear and die at random."""

    @initialize(policy=st.sampled_from(EVICTION_POLICIES))
    def start(self, policy: str) -> None:
        self.evicted: list[BlockHash] = []
        self.tier = CpuTier(capacity_bytes=3 << 16, slab_bytes=1 << 16, page_lock=PageLock(wanted=False))
        self.beside = DictTiers()
        self.store = Store(self.tier, on_change=self.note, on_slab_closed=lambda slab, readers: None, policy=policy)
        self.store.lower.below = self.beside
        self.request_id = 0
        self.losing: set[BlockHash] = set()  # what is going to be lost, whoever holds it
        self.spaces = [self.store.open_space(kv) for kv in SPECS]
        self.sessions = [[self.new_session(number, space) for number in range(3)] for space in self.spaces]
        # The oracle: who holds what, and what has been pinned, committed and is being written.
        self.leases: list[Counter[BlockHash]] = [Counter(), Counter()]
        self.by_lease: dict[tuple[int, int, str], list[BlockHash]] = {}
        self.pinned: list[set[BlockHash]] = [set(), set()]
        self.committed: list[set[BlockHash]] = [set(), set()]
        self.writes: dict[tuple[int, int], list[Write]] = {}
        self.seen_generations: dict[int, bytes] = {}

    def new_session(self, number: int, space: Space) -> Session:
        return Session(
            number=SessionId(number + 1),
            name="test",
            space=space,
            store=self.store,
            wake=lambda: None,
            max_region_bytes=1 << 20,
        )

    def note(self, change: Change) -> None:
        space = next(n for n, kv in enumerate(SPECS) if kv.namespace == change.namespace)
        if change.stored:
            if change.tier != "cpu":
                assert set(change.hashes.tolist()) <= self.committed[space]
            self.committed[space] |= set(change.hashes.tolist())
            return
        for block_hash in change.hashes.tolist():
            assert block_hash in self.committed[space], "a block was removed twice"
            if block_hash in self.losing:
                self.committed[space].discard(block_hash)
                continue
            assert not self.leases[space][block_hash], "a leased block was removed"
            assert block_hash not in self.pinned[space], "a pinned block was removed"
            self.committed[space].discard(block_hash)
        self.evicted = change.hashes.tolist()

    @rule(space=which, number=session_number, tree=tree, length=length)
    def reserve(self, space: int, number: int, tree: int, length: int) -> None:
        hashes = TREES[space][tree][:length]
        self.reserve_runs(space, number, hashes, heads=[])

    @rule(space=which, number=session_number, tree=tree, end=st.integers(1, 3), begin=st.integers(3, 5))
    def reserve_two_runs(self, space: int, number: int, tree: int, end: int, begin: int) -> None:
        """What is between them, if anything, is with another daemon."""
        hashes = TREES[space][tree]
        self.reserve_runs(space, number, [*hashes[:end], *hashes[begin:]], heads=[end])

    def reserve_runs(self, space: int, number: int, hashes: list[BlockHash], *, heads: list[int]) -> None:
        before = set(self.committed[space])
        write = self.sessions[space][number].reserve(1, parent=None, hashes=records(hashes), parts=[], heads=heads)
        for block_hash, outcome in zip(hashes, write.outcomes, strict=True):
            if outcome is Outcome.STORED:
                assert block_hash in before & self.committed[space]
            if outcome is Outcome.NEW:
                assert block_hash not in before
        refused = [outcome is Outcome.FULL for outcome in write.outcomes]
        assert refused == sorted(refused), "blocks are accepted from the left"
        self.writes.setdefault((space, number), []).append(write)

    @rule(space=which, number=session_number, tree=tree, length=length)
    def store_whole(self, space: int, number: int, tree: int, length: int) -> None:
        self.reserve(space, number, tree, length)
        write = self.writes[space, number].pop()
        for part in range(SPECS[space].num_parts):
            self.deliver(space, write, part)
        outcomes = self.sessions[space][number].commit(write.id)
        for position in write.pending:
            assert outcomes[position] is Outcome.STORED
            assert write.hashes[position].tobytes() in self.committed[space]

    @rule(space=which, number=session_number, which_write=st.integers(0, 5), part=st.integers(0, 1))
    def part_arrives(self, space: int, number: int, which_write: int, part: int) -> None:
        writes = self.writes.get((space, number), [])
        if not writes:
            return
        self.deliver(space, writes[which_write % len(writes)], part % SPECS[space].num_parts)

    def deliver(self, space: int, write: Write, part: int) -> None:
        """The part of all blocks of the write that still wait for it is in its slot."""
        open_blocks = [
            position
            for position, pending in write.pending.items()
            if not pending.given_up and pending.owed.get(write.id, 0) >> part & 1
        ]
        if not open_blocks:
            return
        begin, size = SPECS[space].part_range(part)
        bytes_of = [
            block_bytes(SPECS[space], BlockHash(write.hashes[position].tobytes()))[begin : begin + size]
            for position in open_blocks
        ]
        intake = self.store.plan_intake(
            write,
            blocks=np.array(open_blocks),
            parts=np.array([part]),
            region=np.concatenate(bytes_of),
            offsets=np.arange(len(open_blocks)) * size,
        )
        copies = intake.copies
        self.store.parts_arrived(intake, copy_and_hash_pieces(copies.targets, copies.sources, copies.sizes))

    @rule(space=which, number=session_number, abort=st.booleans())
    def finish(self, space: int, number: int, abort: bool) -> None:
        writes = self.writes.pop((space, number), [])
        for write in writes:
            session = self.sessions[space][number]
            if abort:
                session.abort(write.id)
            else:
                assert Outcome.NEW not in session.commit(write.id)

    @rule(space=which, number=session_number, tree=tree, length=length, lease=st.sampled_from(["", "x", "y"]))
    def match(self, space: int, number: int, tree: int, length: int, lease: str) -> None:
        hashes = TREES[space][tree][:length]
        num_blocks, num_writing, _ = self.sessions[space][number].match(records(hashes), lease)
        expected = 0
        while expected < length and hashes[expected] in self.committed[space]:
            expected += 1
        assert num_blocks == expected
        assert num_blocks + num_writing <= length
        if lease:
            self.forget_lease(space, number, lease)
            if num_blocks:
                self.by_lease[space, number, lease] = hashes[:num_blocks]
                self.leases[space].update(hashes[:num_blocks])
        self.read_back(space, hashes[:num_blocks])

    @rule(space=which, number=session_number, tree=tree, length=length, lease=st.sampled_from(["x", "y"]))
    def load(self, space: int, number: int, tree: int, length: int, lease: str) -> None:
        hashes = TREES[space][tree][:length]
        self.request_id += 1
        loaded = self.sessions[space][number].load(self.request_id, records(hashes), lease=lease)
        index = self.spaces[space].index
        held = index.hashes_of(loaded.rows).tolist()
        assert set(held) == {block for position, block in enumerate(hashes) if position not in loaded.errors}
        assert set(held) <= self.committed[space]
        self.by_lease.setdefault((space, number, lease), []).extend(held)
        self.leases[space].update(held)
        ready = [block for position, block in enumerate(hashes) if position not in {*loaded.errors, *loaded.writing}]
        self.read_back(space, ready)

    # The GPU and the disk.

    @precondition(lambda self: self.beside.waiting)
    @rule(count=st.integers(1, 6), tier=beside)
    def a_tier_takes_copies(self, count: int, tier: Beside) -> None:
        for _ in range(min(count, len(self.beside.waiting))):
            space, block_hash = self.beside.waiting.pop(0)
            rows = space.index.find(records([block_hash]))
            if space.index.state(int(rows[0])) != State.COMMITTED or space.index.beside(tier).has(rows).any():
                continue
            self.beside.last_slot += 1
            slot = self.beside.last_slot
            self.beside.bytes_in[tier][slot] = self.memory_of(space, rows)
            self.store.lower.written(space, tier, rows, np.array([slot]))

    @rule(space=which, count=st.integers(1, 4), tier=beside)
    def a_tier_makes_room(self, space: int, count: int, tier: Beside) -> None:
        hashes, slots = self.store.lower.make_room(self.spaces[space], tier, count)
        for block_hash, slot in zip(hashes.tolist(), slots.tolist(), strict=True):
            assert self.beside.bytes_in[tier].pop(slot) == block_bytes(SPECS[space], block_hash).tobytes()
            assert not self.leases[space][block_hash], "a leased block left its tier"

    @precondition(lambda self: self.beside.rising)
    @rule(bad=st.sets(st.integers(0, 5), max_size=2))
    def a_tier_is_read(self, bad: set[int]) -> None:
        rise = self.beside.rising.pop(0)
        good = np.array([position not in bad for position in range(len(rise.rows))])
        for address, slot in zip(rise.addresses[good].tolist(), rise.slots[good].tolist(), strict=True):
            data = self.beside.bytes_in[rise.tier][slot]
            ctypes.memmove(address, data, len(data))
        others = [rise.space.index.beside(tier) for tier in BESIDE if tier != rise.tier]
        elsewhere = np.any([level.has(rise.rows) for level in others], axis=0)
        self.losing = set(rise.hashes[~good & ~elsewhere].tolist())
        self.store.lower.risen(rise, good, np.zeros((len(rise.rows), rise.space.spec.num_parts), np.uint64))
        assert set(rise.hashes[~good & elsewhere].tolist()) <= self.rising(rise.space), "the other tier was not asked"
        self.losing = set()

    def rising(self, space: Space) -> set[BlockHash]:
        return {block for rise in self.beside.rising if rise.space is space for block in rise.hashes.tolist()}

    def memory_of(self, space: Space, rows: IntArray) -> bytes:
        (address,) = self.tier.addresses(space.index.memory.slots(rows))
        return ctypes.string_at(int(address), space.spec.block_bytes)

    @rule(space=which, number=session_number, lease=st.sampled_from(["x", "y"]))
    def release(self, space: int, number: int, lease: str) -> None:
        self.forget_lease(space, number, lease)
        self.sessions[space][number].release(lease)

    @rule(space=which, number=session_number)
    def session_dies(self, space: int, number: int) -> None:
        for lease in ("x", "y"):
            self.forget_lease(space, number, lease)
        self.writes.pop((space, number), None)
        self.sessions[space][number].end()
        self.sessions[space][number].end()
        self.sessions[space][number] = self.new_session(number, self.spaces[space])

    @rule(space=which, tree=tree, length=length, pinned=st.booleans())
    def pin(self, space: int, tree: int, length: int, pinned: bool) -> None:
        hashes = TREES[space][tree][:length]
        there = {block_hash for block_hash in hashes if block_hash in self.committed[space]}
        if pinned:
            self.pinned[space] |= there
        else:
            self.pinned[space] -= set(hashes)  # those that were lost meanwhile too
        assert self.store.set_pinned(self.spaces[space], records(hashes), pinned) == len(there)

    @rule(space=which)
    def clear(self, space: int) -> None:
        rising = self.rising(self.spaces[space])
        held = {block for block in self.committed[space] if self.leases[space][block] or block in self.pinned[space]}
        held |= rising & self.committed[space]
        self.store.clear(self.spaces[space])
        assert self.committed[space] == held

    @rule(space=which, since=st.integers(0, 40))
    def expire(self, space: int, since: int) -> None:
        index = self.spaces[space].index
        tick = self.store.tick - since
        rows = index.stored()
        old = set(index.hashes_of(rows[index.stamps.of(rows) <= tick]).tolist())
        nothing_stays = not index.num_leased and not index.num_pinned and len(index) == len(rows)
        before = set(self.committed[space])
        num_expired = self.store.expire(self.spaces[space], tick)
        gone = before - self.committed[space]
        assert num_expired == len(gone)
        assert gone == old if nothing_stays else gone <= old

    @precondition(lambda self: any(self.committed))
    @rule(space=which, number=st.integers(0, 20))
    def lose(self, space: int, number: int) -> None:
        blocks = sorted(self.committed[space])
        if blocks:
            block = blocks[number % len(blocks)]
            # Losing is the one way in which a held block goes; its holders keep what they hold.
            self.losing = {block}
            self.store.lose(self.spaces[space], block)
            self.losing = set()

    def forget_lease(self, space: int, number: int, lease: str) -> None:
        for block_hash in self.by_lease.pop((space, number, lease), []):
            self.leases[space][block_hash] -= 1

    def read_back(self, space: int, hashes: list[BlockHash]) -> None:
        """Each block lies where the index says, under its hash, with its bytes and no one else's."""
        index = self.spaces[space].index
        rows = index.find(records(hashes))
        for tier in BESIDE:
            slots = index.beside(tier).slots(rows).tolist()
            for block_hash, slot in zip(hashes, slots, strict=True):
                if slot != NONE:
                    assert self.beside.bytes_in[tier][slot] == block_bytes(SPECS[space], block_hash).tobytes()
        in_memory = index.states(rows) == State.COMMITTED
        rows, hashes = rows[in_memory], [block for block, there in zip(hashes, in_memory, strict=True) if there]
        slabs, places = slabs_and_places(index.memory.slots(rows))
        for block_hash, row, slab, place in zip(hashes, rows, slabs, places, strict=True):
            opened = self.tier._slabs[int(slab)]  # the raw memory, past the code under test
            assert opened.hashes[place].tobytes() == block_hash
            assert opened.generations[place] == index.generations(np.array([row]))[0] != 0
            expected = block_bytes(SPECS[space], block_hash)
            assert (opened.slots[place][: len(expected)] == expected).all()

    @invariant()
    def everything_holds(self) -> None:
        self.store.validate()
        for number, space in enumerate(self.spaces):
            rows = space.index.stored()
            assert set(space.index.hashes_of(rows).tolist()) == self.committed[number]
            held = {block for block, count in self.leases[number].items() if count > 0}
            rising = self.rising(space)
            assert space.index.num_leased == len(held | rising)
            assert space.index.num_pinned == len(self.pinned[number])
            assert space.index.count(State.RISING) == len(rising)
            for row in rows.tolist():
                # A parent is younger than its children, so that chains are evicted from their end.
                parent_row = space.index.find(space.index.parent_hashes(np.array([row])))
                if parent_row != NONE:
                    assert (space.index.stamps.of(parent_row) > space.index.stamps.of(np.array([row]))).all()
        for tier in BESIDE:
            there = sum(len(space.index.beside(tier).rows()) for space in self.spaces)
            assert there == len(self.beside.bytes_in[tier])
        used = sum(len(space.index.memory.rows()) for space in self.spaces)
        slots = sum(self.tier.arena.num_used(slab) for kv in SPECS for slab in self.tier.arena.slabs_of(kv.namespace))
        assert used == slots, "a slot is neither free nor a block's"

    @invariant()
    def headers_tell_the_truth(self) -> None:
        """A header shows a generation exactly while its slot holds a block, and no generation names two blocks."""
        shown = sum(int((slab.generations != 0).sum()) for slab in self.tier._slabs.values())
        assert shown == sum(len(space.index.memory.rows()) for space in self.spaces)
        for slab in self.tier._slabs.values():
            for place in np.flatnonzero(slab.generations):
                shown_hash = slab.hashes[place].tobytes()
                assert self.seen_generations.setdefault(int(slab.generations[place]), shown_hash) == shown_hash


TestStoreMachine = StoreMachine.TestCase
