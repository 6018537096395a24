"""Parts that go to a client on another host: from where, to where, and whether they were the right ones."""

import numpy as np

from kvstore.errors import BlockMissing, InvalidRequest, KVStoreError, WriterFailed
from kvstore.types import AnyArray, HashArray, IntArray
from kvstore_server.grid import ranges_of, set_of, within
from kvstore_server.level import State
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.values import Delivery, Pieces, RemoteRegion, Space


def plan_delivery(
    space: Space,
    tier: CpuTier,
    hashes: HashArray,
    *,
    generations: IntArray,
    parts: IntArray,
    region: RemoteRegion,
    offsets: IntArray,
) -> Delivery:
    """What brings the grid blocks x parts into the region. The blocks are leased until it is `delivered`.

    Raises: InvalidRequest, if anything is out of range; nothing is changed then.
    """
    numbers: list[int] = parts.tolist()
    wanted = set_of(numbers, space)
    begins, sizes = ranges_of(numbers, space)
    if len(generations) != len(hashes):
        raise InvalidRequest(f"generations: expected {len(hashes)}, one for each hash, got {len(generations)}")
    remote = within(region, offsets, num_blocks=len(hashes), sizes=sizes)
    index = space.index
    rows = index.find(hashes)
    states = index.states(rows)
    here: AnyArray = np.isin(states, (State.COMMITTED, State.WRITING, State.RISING))
    here[here] = index.generations(rows[here]) == generations[here]
    errors: dict[int, KVStoreError] = {place: _missing(hashes, place) for place in np.flatnonzero(~here).tolist()}
    for place in np.flatnonzero(here & (states != State.COMMITTED)).tolist():
        if space.writes.of(int(rows[place])).arrived & wanted != wanted:
            here[place] = False
            errors[place] = WriterFailed(f"block {_name(hashes, place)}: a part has not arrived; wait for Arrived")
    rows = rows[here]
    slots = index.memory.slots(rows)
    checksums = np.zeros((len(hashes), len(numbers)), np.uint64)
    checksums[here] = tier.checksums(slots, num_parts=space.spec.num_parts)[:, numbers]
    index.lease(rows)
    pieces = Pieces(
        local=(tier.addresses(slots)[:, None] + begins).ravel(),
        remote=remote[here].ravel(),
        sizes=np.tile(sizes, len(rows)),
    )
    return Delivery(space, hashes, np.flatnonzero(here), rows, slots, generations[here], pieces, checksums, errors)


def delivered(delivery: Delivery) -> dict[int, KVStoreError]:
    """Nothing of the plan is under way any more; the errors of blocks whose bytes must not be used.

    A block can lose its slot in spite of its lease, if its checksum failed or its writer did.
    """
    index, rows = delivery.space.index, delivery.rows
    same = index.memory.slots(rows) == delivery.slots
    same &= index.generations(rows) == delivery.generations
    index.unlease(rows)
    gone = delivery.positions[~same].tolist()
    return delivery.errors | {place: _missing(delivery.hashes, place) for place in gone}


def _missing(hashes: HashArray, place: int) -> BlockMissing:
    return BlockMissing(f"block {_name(hashes, place)}: not where it was located (any more); recompute")


def _name(hashes: HashArray, place: int) -> str:
    return f"{hashes[place].tobytes().hex()[:12]}…"
