"""Which blocks are cold: those that will leave the lowest tier of the host first, once it fills up. Decides only."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvstore.types import IntArray
from kvstore_server.level import Level, State
from kvstore_server.tiers.slab import SlabArena
from kvstore_server.values import Space
from kvstore_server.watermarks import Watermarks

Lowest = Literal["cpu", "disk"]


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """The blocks of one namespace in the lowest tier, and when each was last used, as they were at one moment."""

    space: Space
    rows: IntArray
    stamps: IntArray

    @classmethod
    def of(cls, space: Space, lowest: Lowest) -> "Uses":
        index = space.index
        rows = level_of(space, lowest).rows()
        rows = rows[index.states(rows) >= State.COMMITTED]
        return cls(space, rows, index.stamps.of(rows))

    def unchanged(self, chosen: IntArray) -> IntArray:
        """Rows of those of these blocks, by position, that were neither used since nor forgotten, in order."""
        index = self.space.index
        rows = self.rows[chosen]
        # A tick is one use of one block, so a row with the same one holds the same block.
        unchanged: IntArray = rows[
            (index.states(rows) >= State.COMMITTED) & (index.stamps.of(rows) == self.stamps[chosen])
        ]
        return unchanged


def level_of(space: Space, lowest: Lowest) -> Level:
    return space.index.disk if lowest == "disk" else space.index.memory


def filled_share(arenas: Iterable[SlabArena]) -> float:
    """How much of a tier is slots in use."""
    arenas = list(arenas)
    return sum(arena.filled_bytes for arena in arenas) / sum(arena.capacity_bytes for arena in arenas)


def coldest(
    spaces: Sequence[Uses], *, filled: float, watermarks: Watermarks, after: int, most_bytes: int
) -> tuple[list[tuple[Uses, IntArray]], int]:
    """Positions of cold blocks last used after that tick, the oldest first in runs of one namespace, and a tick.

    A tier filled above `high` has cold blocks: all but the most recently used that fit into `low` of it. Up to
    `most_bytes` of them are told; the tick is the one to go on after. May run in a thread.
    """
    if not spaces or filled <= watermarks.high:
        return [], after
    stamps = np.concatenate([one.stamps for one in spaces])
    counts = [len(one.rows) for one in spaces]
    sizes = np.repeat([one.space.spec.block_bytes for one in spaces], counts)
    owners = np.repeat(np.arange(len(spaces)), counts)
    places = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort(stamps)
    younger_bytes = sizes.sum() - np.cumsum(sizes[order])
    order = order[(younger_bytes >= sizes.sum() * watermarks.low / filled) & (stamps[order] > after)]
    order = order[: int(np.searchsorted(np.cumsum(sizes[order]), most_bytes)) + 1]
    if not len(order):
        return [], after
    runs = np.split(order, np.flatnonzero(np.diff(owners[order])) + 1)
    return [(spaces[int(owners[run[0]])], places[run]) for run in runs], int(stamps[order[-1]])
