"""What is stored, in one namespace: block hash -> row, and a column for each fact about a row.

A row is linked to its parent's, so that no block is evicted before the blocks that follow it. A block that is
lost in mid-chain leaves its row behind as a hole: what follows cannot be matched, until someone writes it again.

    hole ──insert──> writing ──commit──> committed ──drop──> hole      a hole that nothing holds is forgotten
                        └───────────────drop────────────────> hole

Whole prefixes are handled by vectorised operations, because a match has 0.15 us a block (docs/adr/0004).
"""

from typing import Final

import numpy as np

from kvstore.hashing import unpack
from kvstore.types import AnyArray, BlockHash, HashArray, IntArray
from kvstore_server.eviction import BoolArray, EvictionPolicy
from kvstore_server.table import NONE, HashTable

_FIRST_ROWS: Final = 1024
_ONE: Final = np.int32(1)  # of the columns' type: another would be cast element by element, at 50 times the cost


class State:
    """What a row stands for. Plain integers: they are compared a block at a time, and an Enum costs five times more."""

    HOLE: Final = 0  # no bytes; kept because something holds the row
    WRITING: Final = 1
    COMMITTED: Final = 2


class Index:
    """Blocks of one namespace. All methods take and give rows; a row is valid while something holds it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._table = HashTable()
        self._unused: list[int] = []
        self._known: AnyArray = np.zeros(0, np.bool_)  # has a hash, so is in use
        self._state: AnyArray = np.zeros(0, np.int8)
        self._pinned: AnyArray = np.zeros(0, np.bool_)
        self._leases: AnyArray = np.zeros(0, np.int32)
        self._children: AnyArray = np.zeros(0, np.int32)
        self._parent: AnyArray = np.zeros(0, np.int32)
        self._slot: AnyArray = np.zeros(0, np.int64)
        self._generation: AnyArray = np.zeros(0, np.int64)
        self._grow(_FIRST_ROWS)

    def __repr__(self) -> str:
        committed, writing = self.count(State.COMMITTED), self.count(State.WRITING)
        return f"<Index [{committed} committed, {writing} writing, {self.num_leased} leased]>"

    def __len__(self) -> int:
        """Rows in use."""
        return len(self._table)

    # Questions.

    def find(self, hashes: HashArray) -> IntArray:
        """`[n]` rows, NONE where the hash is not known."""
        return self._table.find(hashes)

    def prefix(self, hashes: HashArray) -> tuple[IntArray, int]:
        """Rows of the longest committed prefix, and how many blocks right after it are being written."""
        rows = self.find(hashes)
        states = self.states(rows)
        num_committed = _leading(states == State.COMMITTED)
        if num_committed == len(rows):
            return rows, 0
        return rows[:num_committed], _leading(states[num_committed:] == State.WRITING)

    def row(self, block_hash: BlockHash) -> int:
        """The row of one block, NONE if it is not known."""
        return int(self._table.find(unpack(block_hash))[0])

    def state(self, row: int) -> int:
        """The state of one row; HOLE for NONE."""
        return State.HOLE if row == NONE else int(self._state_at[row])

    def states(self, rows: IntArray) -> AnyArray:
        """`[n]` states; HOLE for NONE."""
        states: AnyArray = self._state.take(rows)
        states[rows == NONE] = State.HOLE
        return states

    def slots(self, rows: IntArray) -> IntArray:
        slots: IntArray = self._slot[rows]
        return slots

    def generations(self, rows: IntArray) -> IntArray:
        generations: IntArray = self._generation[rows]
        return generations

    def hashes_of(self, rows: IntArray) -> HashArray:
        assert self._known[rows].all(), "a row that is not in use has no hash"
        return self._table.hashes_of(rows)

    def parent_hashes(self, rows: IntArray) -> HashArray:
        """The hash of the block before each of these; zeros for one that starts a chain."""
        parents = self._parent[rows]
        hashes = self._table.hashes_of(parents)
        hashes[parents == NONE] = b""
        return hashes

    def committed(self) -> IntArray:
        """Rows of all committed blocks."""
        return np.flatnonzero(self._state == State.COMMITTED)

    def held(self, rows: IntArray) -> BoolArray:
        """`[n]`: leased or pinned."""
        return (self._leases[rows] > 0) | self._pinned[rows]

    @property
    def num_leased(self) -> int:
        return int(np.count_nonzero(self._leases))

    @property
    def num_pinned(self) -> int:
        return int(np.count_nonzero(self._pinned))

    def count(self, state: int) -> int:
        return int(np.count_nonzero(self._state == state))

    # What a policy may ask (eviction.Candidates).

    def unheld(self, rows: slice = slice(None)) -> BoolArray:
        unheld: BoolArray = (self._state[rows] == State.COMMITTED) & (self._leases[rows] == 0) & ~self._pinned[rows]
        return unheld

    def take(self, row: int) -> bool:
        if (
            self._state_at[row] != State.COMMITTED
            or self._leases_at[row]
            or self._pinned_at[row]
            or self._children_at[row]
        ):
            return False
        self._state_at[row] = State.HOLE
        parent = self._parent_at[row]
        if parent != NONE:
            self._children_at[parent] -= 1
            self._tell_if_childless(parent)
        return True

    def take_all(self, rows: IntArray) -> bool:
        parents = self._parent[rows]
        parents = parents[parents != NONE]
        np.subtract.at(self._children, parents, _ONE)
        free = (self._state[rows] == State.COMMITTED) & (self._leases[rows] == 0) & ~self._pinned[rows]
        if not (free & (self._children[rows] == 0)).all():
            np.add.at(self._children, parents, _ONE)
            return False
        self._state[rows] = State.HOLE
        for parent in np.setdiff1d(parents, rows).tolist():
            self._tell_if_childless(parent)
        return True

    # Changes.

    def insert(
        self, hashes: HashArray, *, parent: int, slots: IntArray, generations: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Those of a run of a chain that have no bytes are being written, each into its slot, in order.

        `parent` is the row before the run, or NONE; no hash comes twice. Returns the rows of all, and the
        positions of those that are being written from now on, as many as there are slots.
        """
        rows = self.find(hashes)
        unknown = np.flatnonzero(rows == NONE)
        if len(unknown):
            new = self._new_rows(len(unknown))
            rows[unknown] = new
            self._known[new] = True
            self._table.add(hashes[unknown], new)
            parents = np.concatenate([[parent], rows[:-1]])[unknown]
            self._parent[new] = parents
            np.add.at(self._children, parents[parents != NONE], _ONE)
        begun = np.flatnonzero(self._state[rows] == State.HOLE)
        filled = rows[begun]
        self._state[filled] = State.WRITING
        self._slot[filled] = slots
        self._generation[filled] = generations
        return rows, begun

    def commit(self, rows: IntArray) -> None:
        """The blocks are immutable, and a match counts them."""
        assert (self._state[rows] == State.WRITING).all()
        self._state[rows] = State.COMMITTED
        self._policy.became_unheld(rows)

    def drop(self, row: int) -> None:
        """The block has no bytes any more, whoever holds it."""
        assert self._state_at[row] != State.HOLE
        self._state_at[row] = State.HOLE
        self._forget_if_unused(row)

    def lease(self, rows: IntArray) -> None:
        """The blocks stay where they are until `unlease`; a row may come twice."""
        np.add.at(self._leases, rows, _ONE)

    def unlease(self, rows: IntArray) -> None:
        """Undoes one `lease` of the same rows."""
        np.subtract.at(self._leases, rows, _ONE)
        assert self._leases.take(rows).min(initial=0) >= 0, "more leases given back than taken"
        self._let_go(rows)

    def pin(self, rows: IntArray) -> None:
        """The blocks are not evicted until `unpin`."""
        self._pinned[rows] = True

    def unpin(self, rows: IntArray) -> None:
        self._pinned[rows] = False
        self._let_go(rows)

    def touch(self, rows: IntArray) -> None:
        """These blocks, a run of a chain, and all that come before them were just used."""
        before = []
        row = self._parent_at[int(rows[0])]
        while row != NONE:
            before.append(row)
            row = self._parent_at[row]
        self._policy.touch(np.concatenate([np.array(before[::-1], np.int64), rows]) if before else rows)

    def evict(self, count: int) -> tuple[HashArray, IntArray]:
        """Up to `count` blocks that nothing holds are gone, as the policy orders; their hashes and slots."""
        gone = np.array(self._policy.victims(count, self), np.int64)
        hashes = self.hashes_of(gone)
        self._forget(gone)
        left = np.setdiff1d(self._parent[gone], gone)
        for parent in left[self.states(left) == State.HOLE].tolist():
            if parent != NONE:
                self._forget_if_unused(parent)
        return hashes, self.slots(gone)

    # Inside.

    def _let_go(self, rows: IntArray) -> None:
        """A lease or a pin of these rows is gone: the policy knows, and holes that nothing else holds are gone."""
        self._policy.became_unheld(rows)
        for row in rows[self._state.take(rows) == State.HOLE].tolist():
            self._forget_if_unused(row)

    def _forget_if_unused(self, row: int) -> None:
        """A hole that nothing holds is gone, and so are the holes before it that it alone held."""
        while (
            self._state_at[row] == State.HOLE
            and not self._leases_at[row]
            and not self._children_at[row]
            and not self._pinned_at[row]
            and self._known[row]
        ):
            self._forget(np.array([row]))
            parent = self._parent_at[row]
            if parent == NONE:
                return
            self._children_at[parent] -= 1
            if self._state_at[parent] != State.HOLE:
                self._tell_if_childless(parent)
            row = parent

    def _forget(self, rows: IntArray) -> None:
        """The rows, which nothing holds, can be used for others."""
        self._table.remove(rows)
        self._known[rows] = False
        self._unused.extend(rows.tolist())
        if self._table.needs_rebuild():
            self._table.rebuild(np.flatnonzero(self._known))

    def _tell_if_childless(self, row: int) -> None:
        """The policy knows of a stored row that has lost its last child."""
        if not self._children_at[row]:
            self._policy.became_childless(row)

    def _new_rows(self, count: int) -> IntArray:
        while len(self._unused) < count:
            self._grow(2 * len(self._known))
        rows = np.array(self._unused[: -count - 1 : -1], np.int64)
        del self._unused[-count:]
        return rows

    def _grow(self, num_rows: int) -> None:
        old = len(self._known)
        more = num_rows - old
        for name in ("_known", "_state", "_pinned", "_leases", "_children", "_parent", "_slot", "_generation"):
            column: AnyArray = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))
        # One value through a memoryview costs half of one through the array.
        self._state_at = self._state.data
        self._pinned_at = self._pinned.data
        self._leases_at = self._leases.data
        self._children_at = self._children.data
        self._parent_at = self._parent.data
        self._table.resize(num_rows, np.flatnonzero(self._known))
        self._unused.extend(range(num_rows - 1, old - 1, -1))
        self._policy.resize(num_rows)

    def validate(self) -> None:
        """Every invariant of this class holds, else AssertionError. O(n): for tests."""
        used = np.flatnonzero(self._known)
        self._table.validate(used)
        assert sorted([*self._unused, *used.tolist()]) == list(range(len(self._known)))
        assert (self._leases >= 0).all()
        unused = np.array(self._unused, np.int64)
        for column in (self._state, self._leases, self._children, self._pinned):
            assert not column[unused].any(), "an unused row holds something"
        children = np.zeros_like(self._children)
        parents = self._parent[used]
        np.add.at(children, parents[parents != NONE], 1)
        assert (children == self._children).all(), "children are miscounted"
        assert self._known[parents[parents != NONE]].all(), "a parent was forgotten before its child"
        with_bytes = used[self._state[used] != State.HOLE]
        assert len(np.unique(self._slot[with_bytes])) == len(with_bytes), "two blocks in one slot"
        holes = used[self._state[used] == State.HOLE]
        held = (self._leases[holes] > 0) | (self._children[holes] > 0) | self._pinned[holes]
        assert held.all(), "a hole that nothing holds was kept"


def _leading(flags: AnyArray) -> int:
    """How many of the flags are set before the first that is not."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
