"""Which blocks are cold: those that will leave the lowest tier of the host first, once it fills up. Decides only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstore.types import IntArray, Namespace
from kvstore_server.eviction import BoolArray
from kvstore_server.level import State
from kvstore_server.tiers.slab import SlabArena
from kvstore_server.values import Space
from kvstore_server.watermarks import Watermarks

Lowest = Literal["cpu", "disk"]


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """The stored blocks of one namespace in the lowest tier, and when each was last used, as they are at one moment.

    `fresh` are those that were not told since their last use.
    """

    space: Space
    rows: IntArray
    stamps: IntArray
    fresh: BoolArray

    def unchanged(self, chosen: IntArray) -> IntArray:
        """Rows of those of these blocks, by position, that were neither used since nor forgotten, in order."""
        index = self.space.index
        rows = self.rows[chosen]
        # A tick is one use of one block, so a row with the same one holds the same block.
        unchanged: IntArray = rows[
            (index.states(rows) >= State.COMMITTED) & (index.stamps.of(rows) == self.stamps[chosen])
        ]
        return unchanged


class Told:
    """Which blocks were found cold before, by the tick of their last use: a row with the same one is the same block."""

    def __init__(self) -> None:
        self._stamps: dict[Namespace, IntArray] = {}  # by row

    def uses(self, space: Space, lowest: Lowest) -> Uses:
        """As things are now."""
        index = space.index
        rows = (index.disk if lowest == "disk" else index.memory).rows()
        rows = rows[index.states(rows) >= State.COMMITTED]
        stamps = index.stamps.of(rows)
        return Uses(space, rows, stamps, self._of(space, rows)[rows] != stamps)

    def note(self, uses: Uses, chosen: IntArray) -> None:
        """These of the blocks, by position, are not fresh until they are used again."""
        rows = uses.rows[chosen]
        self._of(uses.space, rows)[rows] = uses.stamps[chosen]

    def _of(self, space: Space, rows: IntArray) -> IntArray:
        stamps = self._stamps.get(space.namespace, np.zeros(0, np.int64))
        needed = int(rows.max(initial=-1)) + 1
        if len(stamps) < needed:
            stamps = np.concatenate([stamps, np.full(2 * needed - len(stamps), -1)])
            self._stamps[space.namespace] = stamps
        return stamps


def filled_share(arenas: Iterable[SlabArena]) -> float:
    """How much of a tier is slots in use."""
    arenas = list(arenas)
    return sum(arena.filled_bytes for arena in arenas) / sum(arena.capacity_bytes for arena in arenas)


def coldest(
    spaces: Sequence[Uses], *, filled: float, watermarks: Watermarks, most_bytes: int
) -> list[tuple[Uses, IntArray]]:
    """Positions of cold blocks that are fresh, the oldest first, about `most_bytes` of them, in runs of one namespace.

    A tier filled above `high` has cold blocks: all but the most recently used that fit into `low` of it. May run in a
    thread.
    """
    if not spaces or filled <= watermarks.high:
        return []
    stamps = np.concatenate([one.stamps for one in spaces])
    counts = [len(one.rows) for one in spaces]
    sizes = np.repeat([one.space.spec.block_bytes for one in spaces], counts)
    owners = np.repeat(np.arange(len(spaces)), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(stamps)
    younger_bytes = sizes.sum() - np.cumsum(sizes[order])
    fresh = np.concatenate([one.fresh for one in spaces])[order]
    order = order[fresh & (younger_bytes >= sizes.sum() * watermarks.low / filled)]
    order = order[: int(np.searchsorted(np.cumsum(sizes[order]), most_bytes)) + 1]
    if not len(order):
        return []
    runs = np.split(order, np.flatnonzero(np.diff(owners[order])) + 1)
    return [(spaces[int(owners[run[0]])], places[run]) for run in runs]
