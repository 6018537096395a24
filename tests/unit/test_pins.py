"""Pins of blocks that are gone: they can be taken back, and leave nothing behind."""

import numpy as np
from builders import chain, records, spec

from kvstore.types import BlockHash
from kvstore_server.store import Store
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.values import Space

KV = spec(layers=1, bytes_per_part=16384)


def put(store: Store, hashes: list[BlockHash]) -> Space:
    """The blocks are committed; their bytes do not matter."""
    space = store.open_space(KV)
    write = store.reserve(space, parent=None, hashes=records(hashes), parts=[])
    for pending in write.pending.values():
        space.writes.take(pending, writer=write.id, parts=pending.all_parts)
        space.writes.arrive(pending, pending.all_parts)
        space.writes.finish(pending)
    space.index.commit(np.array([pending.row for pending in write.pending.values()], np.int64))
    return space


def test_a_block_that_was_lost_while_it_was_pinned_can_be_unpinned() -> None:
    store = Store(CpuTier(capacity_bytes=1 << 20, slab_bytes=1 << 18, page_lock=PageLock(wanted=False)))
    hashes = chain(5, of=KV)
    space = put(store, hashes)
    assert store.set_pinned(space, records(hashes), True) == 5
    store.lose(space, hashes[2])
    assert space.index.num_pinned == 5
    assert store.set_pinned(space, records(hashes), False) == 4
    assert space.index.num_pinned == 0
    assert store.clear(space) == (4, 0)
    assert len(space.index) == 0, "its row stayed"
    store.validate()
