"""Which slab of another namespace should change hands: the one whose every block is older than all of ours."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from kvstore.types import IntArray, Namespace, SlabId
from kvstore_server.index import Index
from kvstore_server.level import Level, State
from kvstore_server.tiers.cpu import slabs_and_places
from kvstore_server.values import Space


class Slabs(Protocol):
    """What is asked of the slabs of a tier."""

    def slabs_of(self, namespace: Namespace) -> list[SlabId]: ...

    def num_used(self, slab: SlabId) -> int:
        """Slots of the slab that are in use."""
        ...


def coldest_slab(
    space: Space | None,
    others: Iterable[Space],
    *,
    level_of: Callable[[Index], Level],
    arena: Slabs,
    oldest: int | None,
) -> tuple[Space, SlabId, IntArray] | None:
    """The owner, the slab, and the rows in it; None, if no slab of others than `space` was last used before `oldest`.

    `oldest` is a tick; None: whenever it was used. Reads every row of every namespace. Nothing in the slab is held or
    moving, so all of it may go.
    """
    best: tuple[int, Space, SlabId] | None = None
    for other in others:
        if other is not space:
            for newest, slab in _coldness(other, level_of(other.index), arena):
                if (oldest is None or newest < oldest) and (best is None or newest < best[0]):
                    best = (newest, other, slab)
    if best is None:
        return None
    _, owner, slab = best
    level = level_of(owner.index)
    rows = level.rows()
    return owner, slab, rows[slabs_and_places(level.slots(rows))[0] == slab]


def oldest_use(space: Space, level: Level) -> int | None:
    """The tick at which the oldest block that could go from this tier was last used; None, if there is none."""
    mine = np.flatnonzero(level.unheld(slice(None)))
    return int(space.index.stamps.of(mine).min()) if len(mine) else None


def _coldness(space: Space, level: Level, arena: Slabs) -> Iterator[tuple[int, SlabId]]:
    """For each slab that could be emptied now: the tick at which it was last used, and its id."""
    index = space.index
    rows = level.rows()
    slabs, _ = slabs_and_places(level.slots(rows))
    kept = index.held(rows) | ~np.isin(index.states(rows), (State.COMMITTED, State.COLD))
    held = set(slabs[kept].tolist())
    stamps = index.stamps.of(rows)
    for slab in arena.slabs_of(space.namespace):
        inside = stamps[slabs == slab]
        # A slot in use that is of no block is being written into.
        if slab not in held and arena.num_used(slab) == len(inside):
            yield int(inside.max()) if len(inside) else 0, slab
