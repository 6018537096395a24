"""Which blocks are written down while memory fills up: the oldest first, down to the low mark, and never more."""

import numpy as np
import pytest
from builders import chain, records, spec
from houses import House

from kvstore.spec import KVSpec
from kvstore.types import BlockHash, IntArray
from kvstore_server.values import Space
from kvstore_server.watermarks import Watermarks, filled_share, newest_first, unwritten

KV = spec(layers=1, bytes_per_part=16384)
OTHER = spec(model="other", layers=1, bytes_per_part=16384)


@pytest.fixture
def at() -> House:
    """Room for 60 blocks, in four slabs of 15."""
    return House(memory_slabs=4)


def put(at: House, kv: KVSpec, hashes: list[BlockHash]) -> tuple[Space, IntArray]:
    space = at.put(kv, hashes)
    return space, space.index.find(records(hashes))


def rows_of(at: House, marks: Watermarks) -> list[tuple[str, list[int]]]:
    found = marks.to_write(at.tier, at.store.spaces.values())
    return [(batch.space.spec.model, batch.rows.tolist()) for batch in found]


def test_nothing_is_written_below_the_high_mark(at: House) -> None:
    put(at, KV, chain(40, of=KV))
    assert 0.6 < filled_share(at.tier, at.store.spaces.values()) < 0.7
    assert rows_of(at, Watermarks(high=0.7, low=0.1)) == []
    assert len(rows_of(at, Watermarks(high=0.6, low=0.1))) == 1


def test_the_oldest_go_until_no_more_than_the_low_mark_is_nowhere_else(at: House) -> None:
    """Covers: E6, E11."""
    _, old = put(at, KV, chain(20, of=KV))
    _, between = put(at, OTHER, chain(10, of=OTHER))
    space, new = put(at, KV, chain(20, of=KV, seed=1))
    marks = Watermarks(high=0.5, low=0.3)
    kept = int(0.3 * (1 << 20)) // KV.block_bytes
    oldest_first = [*old[::-1].tolist(), *between[::-1].tolist(), *new[::-1].tolist()]
    wanted = oldest_first[: 50 - kept]
    found = marks.to_write(at.tier, at.store.spaces.values())
    assert [row for batch in found for row in batch.rows.tolist()] == wanted
    assert [batch.space.spec.model for batch in found] == ["model", "other", "model"]
    space.index.put(space.index.disk, old, np.arange(20))  # once they are on disk, they do not count
    left = marks.to_write(at.tier, at.store.spaces.values())
    assert [row for batch in left for row in batch.rows.tolist()] == wanted[20:]


def test_what_was_used_since_is_not_the_oldest_any_more(at: House) -> None:
    _, first = put(at, KV, chain(20, of=KV))
    space, _ = put(at, KV, chain(20, of=KV, seed=1))
    at.store.match(space, records(chain(20, of=KV)))
    ((_, rows),) = rows_of(at, Watermarks(high=0.5, low=0.4))
    assert rows
    assert not set(rows) & set(first.tolist())


def test_a_flush_begins_with_what_was_used_last_and_parents_before_children(at: House) -> None:
    """Covers: F6."""
    put(at, KV, chain(5, of=KV))
    _, new = put(at, OTHER, chain(5, of=OTHER))
    ordered = newest_first(unwritten(at.store.spaces.values()))
    assert [batch.space.spec.model for batch in ordered] == ["other", "model"]
    assert ordered[0].rows.tolist() == new.tolist()


def test_an_empty_store_has_nothing_to_write(at: House) -> None:
    assert filled_share(at.tier, []) == 0
    assert rows_of(at, Watermarks(high=0, low=0)) == []
    assert newest_first(unwritten([])) == []
