"""Which blocks are written down while memory fills up: the oldest first, down to the low mark, and never more."""

import numpy as np
import pytest
from builders import chain, records, spec

from kvstore.spec import KVSpec
from kvstore.types import BlockHash, IntArray
from kvstore_server.store import Store
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.values import Space
from kvstore_server.watermarks import Watermarks, filled_share, newest_first, unwritten

KV = spec(layers=1, bytes_per_part=16384)
OTHER = spec(model="other", layers=1, bytes_per_part=16384)


@pytest.fixture
def store() -> Store:
    """Room for 60 blocks, in four slabs of 15."""
    return Store(CpuTier(capacity_bytes=1 << 20, slab_bytes=1 << 18, page_lock=PageLock(wanted=False)))


def put(store: Store, kv: KVSpec, hashes: list[BlockHash]) -> tuple[Space, IntArray]:
    """The blocks are committed; their bytes do not matter."""
    space = store.open_space(kv)
    write = store.reserve(space, parent=None, hashes=records(hashes), parts=[])
    rows = np.array([pending.row for pending in write.pending.values()], np.int64)
    for pending in list(write.pending.values()):
        space.writes.take(pending, writer=write.id, parts=pending.all_parts)
        space.writes.arrive(pending, pending.all_parts)
        space.writes.finish(pending)
    space.index.commit(rows)
    return space, rows


def rows_of(store: Store, marks: Watermarks) -> list[tuple[str, list[int]]]:
    found = marks.to_write(store.tier, store.spaces.values())
    return [(batch.space.spec.model, batch.rows.tolist()) for batch in found]


def test_nothing_is_written_below_the_high_mark(store: Store) -> None:
    put(store, KV, chain(40, of=KV))
    assert 0.6 < filled_share(store.tier, store.spaces.values()) < 0.7
    assert rows_of(store, Watermarks(high=0.7, low=0.1)) == []
    assert len(rows_of(store, Watermarks(high=0.6, low=0.1))) == 1


def test_the_oldest_go_until_no_more_than_the_low_mark_is_nowhere_else(store: Store) -> None:
    """Covers: E6, E11."""
    _, old = put(store, KV, chain(20, of=KV))
    _, between = put(store, OTHER, chain(10, of=OTHER))
    space, new = put(store, KV, chain(20, of=KV, seed=1))
    marks = Watermarks(high=0.5, low=0.3)
    kept = int(0.3 * (1 << 20)) // KV.block_bytes
    oldest_first = [*old[::-1].tolist(), *between[::-1].tolist(), *new[::-1].tolist()]
    wanted = oldest_first[: 50 - kept]
    found = marks.to_write(store.tier, store.spaces.values())
    assert [row for batch in found for row in batch.rows.tolist()] == wanted
    assert [batch.space.spec.model for batch in found] == ["model", "other", "model"]
    space.index.put(space.index.disk, old, np.arange(20))  # once they are on disk, they do not count
    left = marks.to_write(store.tier, store.spaces.values())
    assert [row for batch in left for row in batch.rows.tolist()] == wanted[20:]


def test_what_was_used_since_is_not_the_oldest_any_more(store: Store) -> None:
    _, first = put(store, KV, chain(20, of=KV))
    space, _ = put(store, KV, chain(20, of=KV, seed=1))
    store.match(space, records(chain(20, of=KV)))
    ((_, rows),) = rows_of(store, Watermarks(high=0.5, low=0.4))
    assert rows
    assert not set(rows) & set(first.tolist())


def test_a_flush_begins_with_what_was_used_last_and_parents_before_children(store: Store) -> None:
    """Covers: F6."""
    put(store, KV, chain(5, of=KV))
    _, new = put(store, OTHER, chain(5, of=OTHER))
    ordered = newest_first(unwritten(store.spaces.values()))
    assert [batch.space.spec.model for batch in ordered] == ["other", "model"]
    assert ordered[0].rows.tolist() == new.tolist()


def test_an_empty_store_has_nothing_to_write(store: Store) -> None:
    assert filled_share(store.tier, []) == 0
    assert rows_of(store, Watermarks(high=0, low=0)) == []
    assert newest_first(unwritten([])) == []
