"""What is stored, in one namespace: block hash -> row, and columns of facts about each row.

A row is linked to its parent's, so that no block is evicted before the blocks that follow it. A block that is
lost in mid-chain leaves its row behind as a hole: what follows cannot be matched, until someone writes it again.

    hole ──insert──> writing ──commit──> committed ──leave_memory, evict──> cold ──rise──> rising ──commit──> committed
      ^                 │                    │  (nowhere else)               │               │
      └─────────────────┴────────────────────┴────────leave, evict_from──────┘      cold <───┘ leave_memory

A hole that nothing holds is forgotten. Whole prefixes are handled by vectorised operations, because a match has
0.15 us a block (docs/adr/0004).
"""

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from kvstore.hashing import unpack
from kvstore.types import AnyArray, BlockHash, HashArray, IntArray
from kvstore_server.eviction import LRU, BoolArray, EvictionPolicy, Stamps, Ticks
from kvstore_server.level import ONE, Columns, Level, State, grown
from kvstore_server.lfu import LFU
from kvstore_server.table import NONE, HashTable
from kvstore_server.uses import Uses

Beside = Literal["gpu", "disk"]  # a tier that a block may be in beside memory, or without it
BESIDE: Final[tuple[Beside, ...]] = ("gpu", "disk")  # the faster one first
_FIRST_ROWS: Final = 1024


class Index:
    """Blocks of one namespace. All methods take and give rows; a row is valid while something holds it."""

    def __init__(self, ticks: Ticks, *, policy: str = "lru") -> None:
        """Empty. `policy`: the order of eviction from each tier, by its name in the settings."""
        self.stamps = Stamps(ticks)
        self._uses = Uses(self.stamps) if policy == "lfu" else None
        self._columns = Columns()
        self.disk = Level(self._columns, self._new_policy())
        self.gpu = Level(self._columns, self._new_policy())
        self.memory = Level(self._columns, self._new_policy(), below=(self.gpu, self.disk))
        self._table = HashTable()
        self._unused: list[int] = []
        self._known: AnyArray = np.zeros(0, np.bool_)  # has a hash, so is in use
        self._generation: AnyArray = np.zeros(0, np.int64)  # of the slot in memory
        self._grow(_FIRST_ROWS)

    def __repr__(self) -> str:
        counts = [self.count(state) for state in (State.COMMITTED, State.COLD, State.WRITING)]
        return "<Index [{} committed, {} cold, {} writing, {} leased]>".format(*counts, self.num_leased)

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._table)

    # Questions.

    def find(self, hashes: HashArray) -> IntArray:
        """`[n]` rows, NONE where the hash is not known."""
        return self._table.find(hashes)

    def prefix(self, hashes: HashArray) -> tuple[IntArray, int]:
        """Rows of the longest stored prefix, and how many blocks right after it are being written."""
        rows = self.find(hashes)
        states = self.states(rows)
        num_stored = leading(states >= State.COMMITTED)
        if num_stored == len(rows):
            return rows, 0
        return rows[:num_stored], leading(states[num_stored:] == State.WRITING)

    def row(self, block_hash: BlockHash) -> int:
        """The row of one block, NONE if it is not known."""
        return int(self._table.find(unpack(block_hash))[0])

    def state(self, row: int) -> int:
        """The state of one row; HOLE for NONE."""
        return State.HOLE if row == NONE else int(self._columns.state_at[row])

    def states(self, rows: IntArray) -> AnyArray:
        """`[n]` states; HOLE for NONE."""
        states: AnyArray = self._columns.state.take(rows)
        states[rows == NONE] = State.HOLE
        return states

    def generations(self, rows: IntArray) -> IntArray:
        generations: IntArray = self._generation[rows]
        return generations

    def hashes_of(self, rows: IntArray) -> HashArray:
        assert self._known[rows].all(), "a row that is not in use has no hash"
        return self._table.hashes_of(rows)

    def parent_hashes(self, rows: IntArray) -> HashArray:
        """The hash of the block before each of these; zeros for one that starts a chain."""
        parents = self._columns.parent[rows]
        hashes = self._table.hashes_of(parents)
        hashes[parents == NONE] = b""
        return hashes

    def segments(self, rows: IntArray, *, length: int) -> AnyArray:
        """`[n]` u64: the segment of each of these, by the block that begins its chain here.

        0 if that is `length` blocks away, as many as are in a segment, or more.
        Source: docs/spec/placement.md; writers that place blocks begin a chain with each segment.
        """
        heads = rows.copy()
        for _ in range(length - 1):
            parents = self._columns.parent[heads]
            if (parents == NONE).all():
                break
            heads = np.where(parents == NONE, heads, parents)
        names = self._table.hashes_of(heads).view("<u8")[::4].copy()
        names[self._columns.parent[heads] != NONE] = 0
        return names

    def before(self, row: int) -> IntArray:
        """The rows that come before this one, from the start of its chain."""
        before = []
        parent_at = self._columns.parent_at
        row = parent_at[row]
        while row != NONE:
            before.append(row)
            row = parent_at[row]
        return np.array(before[::-1], np.int64)

    def stored(self) -> IntArray:
        """Rows of all blocks that a match counts."""
        return np.flatnonzero(self._columns.state >= State.COMMITTED)

    def num_warm(self, rows: IntArray) -> int:
        """How many of these stored blocks lead that are in memory or on their way there."""
        return leading(self._columns.state.take(rows) != State.COLD)

    def beside(self, tier: Beside) -> Level:
        return self.gpu if tier == "gpu" else self.disk

    def is_below(self, rows: IntArray) -> BoolArray:
        """`[n]`: in a tier beside memory, so that it need not be in memory to be served."""
        return self.disk.has(rows) | self.gpu.has(rows)

    def expired(self, tick: int) -> IntArray:
        """Rows of all stored blocks that were last used at this tick or before and may go: whole ends of chains.

        What is held or moves stays, and so does all that comes before it.
        """
        columns = self._columns
        old = self._known & (self.stamps.column <= tick)
        everything = slice(None)
        may_go: BoolArray = old & columns.settled(everything) & columns.unheld(everything)
        # A parent is younger than its children, so that what follows an old row is old too.
        staying = np.flatnonzero(old & ~may_go)
        while len(staying):
            parents = columns.parent[staying]
            parents = np.unique(parents[parents != NONE])
            staying = parents[may_go[parents]]
            may_go[staying] = False
        return np.flatnonzero(may_go)

    def held(self, rows: IntArray) -> BoolArray:
        """`[n]`: leased or pinned."""
        return ~self._columns.unheld(rows)

    @property
    def num_stored(self) -> int:
        return int(np.count_nonzero(self._columns.state >= State.COMMITTED))

    @property
    def num_leased(self) -> int:
        return int(np.count_nonzero(self._columns.leases))

    @property
    def num_pinned(self) -> int:
        return int(np.count_nonzero(self._columns.pinned))

    def count(self, state: int) -> int:
        return int(np.count_nonzero(self._columns.state == state))

    # Bytes come.

    def insert(
        self,
        hashes: HashArray,
        *,
        parent: int,
        slots: IntArray,
        generations: IntArray,
        heads: Sequence[int] = (),
    ) -> tuple[IntArray, IntArray]:
        """Those of a run of a chain that have no bytes are being written, each into its slot in memory, in order.

        `parent` is the row before the run, or NONE; `heads` are positions at which another run begins, which nothing
        comes before; no hash comes twice. Returns the rows of all, and the positions of those that are being written
        from now on, as many as there are slots.
        """
        rows = self.find(hashes)
        unknown = np.flatnonzero(rows == NONE)
        if len(unknown):
            rows[unknown] = self._new_rows(hashes[unknown])
            parents = np.concatenate([[parent], rows[:-1]])
            parents[np.asarray(heads, np.int64)] = NONE
            self._link(rows[unknown], parents[unknown])
        begun = np.flatnonzero(self._columns.state[rows] == State.HOLE)
        self._fill(rows[begun], slots, generations, State.WRITING)
        return rows, begun

    def rise(self, rows: IntArray, *, slots: IntArray, generations: IntArray) -> None:
        """These cold blocks are being brought into these slots in memory."""
        assert (self._columns.state[rows] == State.COLD).all()
        self._fill(rows, slots, generations, State.RISING)

    def commit(self, rows: IntArray) -> None:
        """The blocks, which were being written or rising, are immutable and in memory."""
        states = self._columns.state[rows]
        assert ((states == State.WRITING) | (states == State.RISING)).all()
        self._columns.state[rows] = State.COMMITTED
        self._settled(rows)

    def put(self, level: Level, rows: IntArray, slots: IntArray) -> None:
        """These committed blocks are in these slots of a tier beside memory too."""
        assert (self._columns.state[rows] == State.COMMITTED).all()
        level.put(rows, slots)
        self._settled(rows)

    def restore(self, hashes: HashArray, *, parents: HashArray, slots: IntArray, written: IntArray) -> None:
        """These blocks, none of them known, are on disk: what was there before a restart.

        A parent, zeros for none, that is neither known nor among them counts as none. `written` is larger for
        blocks that were written later; a block counts as used when the last of those that follow it was written.
        """
        rows = self._new_rows(hashes)
        self._link(rows, self._without_circles(rows, self.find(parents)))
        self._columns.state[rows] = State.COLD
        self.disk.put(rows, slots)
        position_of = np.full(len(self._known), NONE)
        position_of[rows] = np.arange(len(rows))
        parent_rows = self._columns.parent[rows]
        parent_positions = np.where(parent_rows == NONE, NONE, position_of[parent_rows]).tolist()
        used = written.tolist()
        for position in np.argsort(-written).tolist():
            parent = parent_positions[position]
            if parent != NONE:
                used[parent] = max(used[parent], used[position])
        oldest_first = rows[np.lexsort((-written, used))]
        self.stamps.touch(oldest_first[::-1])

    # Bytes go.

    def leave_memory(self, rows: IntArray) -> IntArray:
        """These different rows have no bytes in memory, whoever holds them: cold, or holes; returns their slots."""
        slots = self.memory.leave(rows)
        self._rest(rows)
        return slots

    def leave(self, level: Level, rows: IntArray) -> IntArray:
        """These different rows have no bytes in this tier beside memory, whoever holds them; returns their slots."""
        slots = level.leave(rows)
        self._rest(rows[~self.memory.has(rows)])
        return slots

    def evict(self, count: int) -> tuple[HashArray, IntArray]:
        """Up to `count` blocks that nothing holds have left memory; hashes of those that are gone, and all slots."""
        rows, slots = self.memory.evict(count)
        gone = rows[~self.is_below(rows)]
        hashes = self.hashes_of(gone)
        self._rest(rows)
        return hashes, slots

    def evict_from(self, level: Level, count: int) -> tuple[HashArray, HashArray, IntArray]:
        """Up to `count` blocks that nothing holds have left this tier; their hashes, those that are gone, all slots."""
        rows, slots = level.evict(count)
        hashes = self.hashes_of(rows)
        below = rows[~self.memory.has(rows)]
        gone = self.hashes_of(below[~self.is_below(below)])
        self._rest(below)
        return hashes, gone, slots

    # Who holds what.

    def lease(self, rows: IntArray) -> None:
        """The blocks stay where they are until `unlease`; a row may come twice."""
        np.add.at(self._columns.leases, rows, ONE)

    def unlease(self, rows: IntArray) -> None:
        """Undoes one `lease` of the same rows."""
        np.subtract.at(self._columns.leases, rows, ONE)
        assert self._columns.leases.take(rows).min(initial=0) >= 0, "more leases given back than taken"
        self._let_go(rows)

    def pin(self, rows: IntArray) -> None:
        """The blocks are not evicted until `unpin`."""
        self._columns.pinned[rows] = True

    def unpin(self, rows: IntArray) -> None:
        self._columns.pinned[rows] = False
        self._let_go(rows)

    def touch(self, rows: IntArray) -> None:
        """These blocks, a run of a chain, and all that come before them were just used."""
        rows = np.concatenate([self.before(int(rows[0])), rows])
        if self._uses is None:
            self.stamps.touch(rows)
            return
        self._uses.touch(rows)
        self.stamps.touch(rows)
        self._settled(rows)  # the new key may be among those that a policy has found already

    # Inside.

    def _new_policy(self) -> EvictionPolicy:
        return LRU(self.stamps) if self._uses is None else LFU(self._uses)

    def _fill(self, rows: IntArray, slots: IntArray, generations: IntArray, state: int) -> None:
        self._columns.state[rows] = state
        self._generation[rows] = generations
        self.memory.put(rows, slots)

    def _rest(self, rows: IntArray) -> None:
        """These rows, which are not in memory, are cold if another tier has them, and else holes or forgotten."""
        below = self.is_below(rows)
        self._columns.state[rows] = np.where(below, State.COLD, State.HOLE)
        self._settled(rows[below])
        gone = rows[~below]
        if not len(gone):
            return
        parents = self._columns.parent.take(gone)
        parents = parents[parents != NONE]
        np.subtract.at(self._columns.children, parents, ONE)
        if (self._columns.unheld(gone) & (self._columns.children.take(gone) == 0)).all():
            self._forget(gone)
            holes = set(parents[self._columns.state.take(parents) == State.HOLE].tolist())
            for parent in holes.difference(gone.tolist()):
                self._forget_if_unused(parent)
            return
        np.add.at(self._columns.children, parents, ONE)
        for row in gone[np.argsort(self.stamps.of(gone))].tolist():  # leaves first, so that no holes stay
            self._forget_if_unused(row)

    def _settled(self, rows: IntArray) -> None:
        for level in (self.memory, self.disk, self.gpu):
            level.policy.became_unheld(rows)

    def _let_go(self, rows: IntArray) -> None:
        """A lease or a pin of these rows is gone: the policies know, and holes that nothing else holds are gone."""
        self._settled(rows)
        for row in rows[self._columns.state.take(rows) == State.HOLE].tolist():
            self._forget_if_unused(row)

    def _forget_if_unused(self, row: int) -> None:
        """A hole that nothing holds is gone, and so are the holes before it that it alone held."""
        columns = self._columns
        while (
            columns.state_at[row] == State.HOLE
            and not columns.leases_at[row]
            and not columns.children_at[row]
            and not columns.pinned_at[row]
            and self._known[row]
        ):
            self._forget(np.array([row]))
            parent = columns.parent_at[row]
            if parent == NONE:
                return
            columns.children_at[parent] -= 1
            row = parent

    def _forget(self, rows: IntArray) -> None:
        """The rows, which nothing holds, can be used for others."""
        if self._uses is not None:
            self._uses.end(rows, self.hashes_of(rows))
        self._table.remove(rows)
        self._known[rows] = False
        self._unused.extend(rows.tolist())
        if self._table.needs_rebuild():
            self._table.rebuild(np.flatnonzero(self._known))

    def _new_rows(self, hashes: HashArray) -> IntArray:
        """Rows for these hashes, none of which is known."""
        while len(self._unused) < len(hashes):
            self._grow(2 * len(self._known))
        rows = np.array(self._unused[len(self._unused) - len(hashes) :][::-1], np.int64)
        del self._unused[len(self._unused) - len(hashes) :]
        self._known[rows] = True
        self._table.add(hashes, rows)
        if self._uses is not None:
            self._uses.begin(rows, hashes)
        return rows

    def _link(self, rows: IntArray, parents: IntArray) -> None:
        self._columns.parent[rows] = parents
        np.add.at(self._columns.children, parents[parents != NONE], ONE)

    def _without_circles(self, rows: IntArray, parents: IntArray) -> IntArray:
        """The parents of these new rows; NONE for those of a circle, which only a liar writes, and all that follow."""
        above = np.full(len(self._known) + 1, NONE)  # the last is for NONE
        above[rows] = parents
        for _ in range(len(rows).bit_length()):  # twice as far up each time
            above = above[above]
        return np.where(above[rows] == NONE, parents, NONE)

    def _grow(self, num_rows: int) -> None:
        old = len(self._known)
        self._known = grown(self._known, num_rows)
        self._generation = grown(self._generation, num_rows)
        for part in (self._columns, self.memory, self.disk, self.gpu, self.stamps):
            part.resize(num_rows)
        if self._uses is not None:
            self._uses.resize(num_rows)
        self._table.resize(num_rows, np.flatnonzero(self._known))
        self._unused.extend(range(num_rows - 1, old - 1, -1))

    def validate(self) -> None:
        """Every invariant of this class holds, else AssertionError. O(n): for tests."""
        columns, used = self._columns, np.flatnonzero(self._known)
        self._table.validate(used)
        self.memory.validate()
        self.disk.validate()
        self.gpu.validate()
        assert sorted([*self._unused, *used.tolist()]) == list(range(len(self._known)))
        assert (columns.leases >= 0).all()
        unused = np.array(self._unused, np.int64)
        for column in (columns.state, columns.leases, columns.children, columns.pinned):
            assert not column[unused].any(), "an unused row holds something"
        children = np.zeros_like(columns.children)
        parents = columns.parent[used]
        np.add.at(children, parents[parents != NONE], 1)
        assert (children == columns.children).all(), "children are miscounted"
        assert self._known[parents[parents != NONE]].all(), "a parent was forgotten before its child"
        state = columns.state[used]
        assert (self.memory.has(used) == np.isin(state, (State.WRITING, State.COMMITTED, State.RISING))).all()
        assert self.is_below(used)[np.isin(state, (State.COLD, State.RISING))].all(), "a cold block is nowhere"
        assert not self.is_below(used)[state < State.COMMITTED].any()
        assert not self.memory.has(unused).any()
        assert not self.is_below(unused).any()
        holes = used[state == State.HOLE]
        assert (self.held(holes) | (columns.children[holes] > 0)).all(), "a hole that nothing holds was kept"


def leading(flags: AnyArray) -> int:
    """How many of the flags are set before the first that is not."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
