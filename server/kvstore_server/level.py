"""One tier as an index sees it: which rows have bytes there, in which slot, and which of them may go.

A row may go when nothing holds it, its bytes do not move, and no block that follows it is in the tier, so that chains
go from their end. A row of memory that another tier has may go before those that follow it: its chain stays whole.
"""

from typing import Final

import numpy as np

from kvstore.types import AnyArray, IntArray
from kvstore_server.eviction import BoolArray, EvictionPolicy
from kvstore_server.table import NONE

ONE: Final = np.int32(1)  # of the columns' type: another would be cast element by element, at 50 times the cost


class State:
    """What a row stands for. Plain integers: they are compared a block at a time, and an Enum costs five times more.

    All from COMMITTED on are stored: a match counts them.
    """

    HOLE: Final = 0  # no bytes; kept because something holds the row
    WRITING: Final = 1  # parts are arriving
    COMMITTED: Final = 2  # in memory, maybe on the GPU and on disk too
    COLD: Final = 3  # on the GPU or on disk, and not in memory
    RISING: Final = 4  # the same, and being brought into memory


class Columns:
    """What all tiers need to know of a row. Columns are replaced when they grow, so they are never kept."""

    def __init__(self) -> None:
        self.state: AnyArray = np.zeros(0, np.int8)
        self.pinned: AnyArray = np.zeros(0, np.bool_)
        self.leases: AnyArray = np.zeros(0, np.int32)
        self.parent: AnyArray = np.zeros(0, np.int32)
        self.children: AnyArray = np.zeros(0, np.int32)  # known rows that follow this one
        self.resize(0)

    def resize(self, num_rows: int) -> None:
        for name in ("state", "pinned", "leases", "parent", "children"):
            setattr(self, name, grown(getattr(self, name), num_rows))
        # One value through a memoryview costs half of one through the array.
        self.state_at = self.state.data
        self.pinned_at = self.pinned.data
        self.leases_at = self.leases.data
        self.parent_at = self.parent.data
        self.children_at = self.children.data

    def unheld(self, rows: slice | IntArray) -> BoolArray:
        """`[n]`: neither leased nor pinned."""
        unheld: BoolArray = (self.leases[rows] == 0) & ~self.pinned[rows]
        return unheld

    def settled(self, rows: slice | IntArray) -> BoolArray:
        """`[n]`: stored, and not on the way from one tier to another."""
        state = self.state[rows]
        settled: BoolArray = (state == State.COMMITTED) | (state == State.COLD)
        return settled


class Level:
    """The rows that are in one tier. `slots` is NONE for the others."""

    def __init__(self, columns: Columns, policy: EvictionPolicy, *, below: "tuple[Level, ...]" = ()) -> None:
        self.policy = policy
        self._below = below
        self._columns = columns
        self._slots: IntArray = np.zeros(0, np.int64)
        self._children: AnyArray = np.zeros(0, np.int32)  # rows in this tier that follow this one
        self._freed: list[IntArray] = []  # slots of rows taken by `evict`
        self.resize(0)

    def resize(self, num_rows: int) -> None:
        self._slots = grown(self._slots, num_rows, NONE)
        self._children = grown(self._children, num_rows)
        self._slots_at = self._slots.data
        self._children_at = self._children.data

    def slots(self, rows: IntArray) -> IntArray:
        slots: IntArray = self._slots.take(rows)
        return slots

    def rows(self) -> IntArray:
        """All rows in this tier."""
        return np.flatnonzero(self._slots != NONE)

    def has(self, rows: IntArray) -> BoolArray:
        """`[n]`: in this tier."""
        has: BoolArray = self.slots(rows) != NONE
        return has

    def put(self, rows: IntArray, slots: IntArray) -> None:
        """These rows, which were not, are in the tier."""
        self._slots[rows] = slots
        np.add.at(self._children, self._parents_of(rows), ONE)

    def leave(self, rows: IntArray) -> IntArray:
        """These rows are not in the tier any more, whoever holds them; returns their slots."""
        slots = self.slots(rows)
        self._slots[rows] = NONE
        parents = self._parents_of(rows)
        np.subtract.at(self._children, parents, ONE)
        self._tell_childless(parents, gone=rows)
        return slots

    def evict(self, count: int) -> tuple[IntArray, IntArray]:
        """Up to `count` rows that may go are not in the tier any more, as the policy orders; their slots."""
        rows = np.array(self.policy.victims(count, self), np.int64)
        slots = np.concatenate([np.zeros(0, np.int64), *self._freed])
        self._freed.clear()
        return rows, slots

    # What a policy may ask (eviction.Candidates).

    def unheld(self, rows: slice) -> BoolArray:
        unheld: BoolArray = (self._slots[rows] != NONE) & self._columns.settled(rows) & self._columns.unheld(rows)
        return unheld

    def take(self, row: int) -> bool:
        columns = self._columns
        slot = self._slots_at[row]
        if (
            slot == NONE
            or columns.state_at[row] not in (State.COMMITTED, State.COLD)
            or columns.leases_at[row]
            or columns.pinned_at[row]
            or (self._children_at[row] and all(level._slots_at[row] == NONE for level in self._below))
        ):
            return False
        self._freed.append(np.array([slot]))
        self._slots_at[row] = NONE
        parent = columns.parent_at[row]
        if parent != NONE:
            self._children_at[parent] -= 1
            if not self._children_at[parent]:
                self.policy.became_childless(parent)
        return True

    def take_all(self, rows: IntArray) -> bool:
        parents = self._parents_of(rows)
        np.subtract.at(self._children, parents, ONE)
        slots = self.slots(rows)
        free = (slots != NONE) & self._columns.settled(rows) & self._columns.unheld(rows)
        whole = self._children.take(rows) == 0
        for level in self._below:
            whole |= level.has(rows)
        if not (free & whole).all():
            np.add.at(self._children, parents, ONE)
            return False
        self._freed.append(slots)
        self._slots[rows] = NONE
        self._tell_childless(parents, gone=rows)
        return True

    def _parents_of(self, rows: IntArray) -> IntArray:
        parents = self._columns.parent.take(rows)
        found: IntArray = parents[parents != NONE]
        return found

    def _tell_childless(self, parents: IntArray, *, gone: IntArray) -> None:
        childless = set(parents[self._children.take(parents) == 0].tolist())
        for parent in sorted(childless.difference(gone.tolist())):
            self.policy.became_childless(parent)

    def validate(self) -> None:
        """Every invariant of this class holds, else AssertionError. For tests."""
        rows = self.rows()
        assert len(np.unique(self._slots[rows])) == len(rows), "two blocks in one slot"
        children = np.zeros_like(self._children)
        np.add.at(children, self._parents_of(rows), ONE)
        assert (children == self._children).all(), "children in a tier are miscounted"


def grown(column: AnyArray, num_rows: int, fill: int = 0) -> AnyArray:
    """The column with `num_rows` rows; those that are new hold `fill`."""
    return np.concatenate([column, np.full(num_rows - len(column), fill, column.dtype)])
