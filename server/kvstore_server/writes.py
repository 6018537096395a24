"""Blocks that are being written: which parts have arrived, who owes the others, and who follows along.

A block may have several writers, the ranks of one engine, each with parts of its own. It is complete when every
part has arrived; it is given up when a writer leaves that still owes a part.

Sets of parts are bit masks: bit p stands for part p.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvstore.types import WriteId


class Follow:
    """One Load that waits for blocks in writing.

    What it is told is kept here until its session takes it; `wake` is called when there is something.
    """

    __slots__ = ("arrived", "failed", "open_indices", "request_id", "wake")

    def __init__(self, request_id: int, wake: Callable[[], None]) -> None:
        self.request_id = request_id
        self.wake = wake
        self.open_indices: set[int] = set()  # blocks that are neither complete nor given up
        self.arrived: list[tuple[int, int]] = []  # (index of the block, part), not told yet
        self.failed: list[tuple[int, bool]] = []  # (index of a block given up, whether it was rising), not told yet

    def __repr__(self) -> str:
        return f"<Follow {self.request_id} [{len(self.open_indices)} open, {len(self.arrived)} to tell]>"


@dataclass(slots=True, eq=False)
class Pending:
    """One block in writing. While it is `copying`, its slot must not be used for another."""

    row: int
    slot: int
    all_parts: int
    arrived: int = 0
    taking: int = 0  # parts being copied in
    given_up: bool = False
    rising: bool = False  # its bytes come from disk, not from a writer
    owed: dict[WriteId, int] = field(default_factory=dict)  # per writer: parts it claimed, not taken in yet
    followers: list[tuple[Follow, int]] = field(default_factory=list)  # and the index of this block there

    @property
    def copying(self) -> bool:
        """Whether copies into its slot are under way."""
        return self.taking != 0

    @property
    def claimed(self) -> int:
        """Parts that have arrived, are being copied or are owed by someone."""
        claimed = self.arrived | self.taking
        for parts in self.owed.values():
            claimed |= parts
        return claimed


class Writes:
    """All blocks in writing, by row."""

    def __init__(self) -> None:
        self._pending: dict[int, Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def of(self, row: int) -> Pending:
        """The block of this row, which is in writing."""
        return self._pending[row]

    def has(self, pending: Pending) -> bool:
        """Whether the block is still in writing: neither committed nor given up."""
        return self._pending.get(pending.row) is pending

    def begin(self, *, row: int, slot: int, all_parts: int, writer: WriteId, parts: int) -> Pending:
        """The block waits for `all_parts`, of which this writer owes `parts`."""
        pending = Pending(row, slot, all_parts, owed={writer: parts})
        self._pending[row] = pending
        return pending

    def rise(self, *, row: int, slot: int, all_parts: int) -> Pending:
        """The block waits for all parts, which come from disk at once."""
        pending = Pending(row, slot, all_parts, taking=all_parts, rising=True)
        self._pending[row] = pending
        return pending

    def join(self, pending: Pending, *, writer: WriteId, parts: int) -> bool:
        """The writer owes these parts too; False, and nothing changed, if someone has one of them already."""
        if pending.claimed & parts:
            return False
        pending.owed[writer] = parts
        return True

    def take(self, pending: Pending, *, writer: WriteId, parts: int) -> None:
        """Copies of these parts, which the writer owes, are under way."""
        assert pending.owed[writer] & parts == parts
        pending.owed[writer] &= ~parts
        pending.taking |= parts

    def arrive(self, pending: Pending, parts: int) -> None:
        """The parts, of one `take`, are in the block's slot."""
        pending.taking &= ~parts
        if pending.given_up:
            return
        pending.arrived |= parts
        for follow, index in pending.followers:
            follow.arrived.extend((index, part) for part in parts_of(parts))
            follow.wake()

    def drop(self, pending: Pending, parts: int) -> None:
        """The copies of these parts, of one `take`, have failed: none is under way."""
        pending.taking &= ~parts

    def is_complete(self, pending: Pending) -> bool:
        return pending.arrived == pending.all_parts and not pending.given_up

    def finish(self, pending: Pending) -> None:
        """The complete block is no longer in writing."""
        del self._pending[pending.row]
        for follow, index in pending.followers:
            follow.open_indices.discard(index)
            follow.wake()

    def give_up(self, pending: Pending) -> None:
        """The block will not be completed."""
        del self._pending[pending.row]
        pending.given_up = True
        for follow, index in pending.followers:
            follow.open_indices.discard(index)
            follow.failed.append((index, pending.rising))
            follow.wake()

    def follow(self, pending: Pending, follow: Follow, index: int) -> None:
        """The follower is told of each part of this block; of those that have arrived, at once."""
        pending.followers.append((follow, index))
        follow.open_indices.add(index)
        follow.arrived.extend((index, part) for part in parts_of(pending.arrived))

    def unfollow(self, follow: Follow) -> None:
        """The follower is told nothing more."""
        for pending in self._pending.values():
            pending.followers = [(other, index) for other, index in pending.followers if other is not follow]
        follow.open_indices.clear()


def mask_of(parts: Iterable[int]) -> int:
    """The set of these parts."""
    mask = 0
    for part in parts:
        mask |= 1 << part
    return mask


def parts_of(mask: int) -> list[int]:
    """The parts of a set, in order."""
    return [part for part in range(mask.bit_length()) if mask >> part & 1]
