"""The whole core, index, leases, eviction, writes and slabs, against an oracle that is a few dicts.

Two namespaces of different block sizes share a tier of three slabs, so that room runs out all the time and
slabs change hands. Bytes are really written to slots, and every match is read back and compared.
"""

from collections import Counter

import numpy as np
from builders import block_bytes, chain, records, spec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.transport.memory import copy_and_hash_pieces
from kvstore.types import BlockHash, Outcome, SessionId
from kvstore_server.level import State
from kvstore_server.session import Session
from kvstore_server.store import Store
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import CpuTier, slabs_and_places
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.values import Change, Space, Write

SPECS = [spec(model="a", layers=2, bytes_per_part=9000), spec(model="b", layers=1, bytes_per_part=5000)]
TREES = [[chain(6, of=kv, seed=seed) for seed in range(3)] for kv in SPECS]
# Chains that branch off others: the same first blocks, other ones after.
for trees in TREES:
    trees.append([*trees[0][:3], *[BlockHash(bytes([200 + n]) * 32) for n in range(3)]])

which = st.integers(0, 1)
tree = st.integers(0, 3)
length = st.integers(1, 6)
session_number = st.integers(0, 2)


class StoreMachine(RuleBasedStateMachine):
    """Sessions store, match, hold, release, abort, pin, clear and die at random."""

    @initialize()
    def start(self) -> None:
        self.evicted: list[BlockHash] = []
        self.tier = CpuTier(capacity_bytes=3 << 16, slab_bytes=1 << 16, page_lock=PageLock(wanted=False))
        self.store = Store(self.tier, on_change=self.note, on_slab_closed=lambda slab, readers: None)
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
            self.committed[space] |= set(change.hashes.tolist())
            return
        for block_hash in change.hashes.tolist():
            assert block_hash in self.committed[space], "a block was removed twice"
            assert not self.leases[space][block_hash], "a leased block was removed"
            assert block_hash not in self.pinned[space], "a pinned block was removed"
            self.committed[space].discard(block_hash)
        self.evicted = change.hashes.tolist()

    @rule(space=which, number=session_number, tree=tree, length=length)
    def reserve(self, space: int, number: int, tree: int, length: int) -> None:
        hashes = TREES[space][tree][:length]
        before = set(self.committed[space])
        write = self.sessions[space][number].reserve(parent=None, hashes=records(hashes), parts=[])
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
        num_blocks, num_writing = self.sessions[space][number].match(records(hashes), lease)
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
            self.pinned[space] -= there
        assert self.store.set_pinned(self.spaces[space], records(hashes), pinned) == len(there)

    @rule(space=which)
    def clear(self, space: int) -> None:
        held = {block for block in self.committed[space] if self.leases[space][block] or block in self.pinned[space]}
        self.store.clear(self.spaces[space])
        assert self.committed[space] == held

    @precondition(lambda self: any(self.committed))
    @rule(space=which, number=st.integers(0, 20))
    def lose(self, space: int, number: int) -> None:
        blocks = sorted(self.committed[space])
        if blocks:
            block = blocks[number % len(blocks)]
            # Losing is the one way in which a held block goes; its holders keep what they hold.
            held, self.leases[space][block] = self.leases[space][block], 0
            pinned = block in self.pinned[space]
            self.pinned[space].discard(block)
            self.store.lose(self.spaces[space], block)
            self.leases[space][block] = held
            if pinned:
                self.pinned[space].add(block)

    def forget_lease(self, space: int, number: int, lease: str) -> None:
        for block_hash in self.by_lease.pop((space, number, lease), []):
            self.leases[space][block_hash] -= 1

    def read_back(self, space: int, hashes: list[BlockHash]) -> None:
        """Each block lies where the index says, under its hash, with its bytes and no one else's."""
        index = self.spaces[space].index
        rows = index.find(records(hashes))
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
            held = sum(count > 0 for count in self.leases[number].values())
            assert space.index.num_leased == held
            for row in rows.tolist():
                # A parent is younger than its children, so that chains are evicted from their end.
                parent_row = space.index.find(space.index.parent_hashes(np.array([row])))
                if parent_row != NONE:
                    assert (space.index.stamps.of(parent_row) > space.index.stamps.of(np.array([row]))).all()
        used = sum(space.index.count(State.COMMITTED) + space.index.count(State.WRITING) for space in self.spaces)
        slots = sum(self.tier.arena.num_used(slab) for kv in SPECS for slab in self.tier.arena.slabs_of(kv.namespace))
        assert used == slots, "a slot is neither free nor a block's"

    @invariant()
    def headers_tell_the_truth(self) -> None:
        """A header shows a generation exactly while its slot holds a block, and no generation names two blocks."""
        shown = sum(int((slab.generations != 0).sum()) for slab in self.tier._slabs.values())
        rows = sum(space.index.count(State.COMMITTED) + space.index.count(State.WRITING) for space in self.spaces)
        assert shown == rows
        for slab in self.tier._slabs.values():
            for place in np.flatnonzero(slab.generations):
                shown_hash = slab.hashes[place].tobytes()
                assert self.seen_generations.setdefault(int(slab.generations[place]), shown_hash) == shown_hash


TestStoreMachine = StoreMachine.TestCase
