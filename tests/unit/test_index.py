"""The index alone: prefixes, holes, leases."""

import numpy as np
from builders import chain

from kvstore_server.eviction import LRU, Ticks
from kvstore_server.index import NONE, Index, State

HASHES = chain(5)


def index_with(committed: int, writing: int = 0) -> tuple[Index, list[int]]:
    index = Index(LRU(Ticks()))
    rows: list[int] = []
    for place, block_hash in enumerate(HASHES[: committed + writing]):
        parent = rows[-1] if rows else NONE
        rows.append(index.insert(block_hash, parent=parent, slot=place, generation=place + 1))
    if rows:
        index.touch(np.array(rows))
    index.commit(np.array(rows[:committed], np.int64))
    return index, rows


def test_a_prefix_ends_at_the_first_block_that_is_not_committed() -> None:
    index, rows = index_with(2, 2)
    found, num_writing = index.prefix(HASHES)
    assert found.tolist() == rows[:2]
    assert num_writing == 2
    assert index.prefix([])[0].tolist() == []
    assert index.prefix(HASHES[4:])[1] == 0


def test_a_chain_is_evicted_leaf_first() -> None:
    """Covers: E6."""
    index, _ = index_with(5)
    assert index.evict(2)[0] == [HASHES[4], HASHES[3]]
    assert index.evict(9)[0] == [HASHES[2], HASHES[1], HASHES[0]]
    index.validate()


def test_a_block_before_one_in_writing_is_not_evicted() -> None:
    index, _ = index_with(2, 1)
    assert index.evict(5) == ([], [])


def test_a_hole_is_kept_while_what_follows_is_stored_and_forgotten_with_it() -> None:
    index, rows = index_with(3)
    index.drop(rows[1])
    assert index.state(rows[1]) is State.HOLE
    assert index.prefix(HASHES)[0].tolist() == rows[:1]
    assert index.find([HASHES[1]]).tolist() == [rows[1]]
    index.validate()
    index.drop(rows[2])
    assert index.find(HASHES[:3]).tolist() == [rows[0], NONE, NONE]
    index.validate()


def test_a_hole_is_kept_while_it_is_leased() -> None:
    index, rows = index_with(1)
    held = np.array(rows)
    index.lease(held)
    index.drop(rows[0])
    assert index.find(HASHES[:1]).tolist() == rows
    index.unlease(held)
    assert index.find(HASHES[:1]).tolist() == [NONE]
    index.validate()


def test_a_hole_that_is_written_again_is_found_by_what_follows() -> None:
    index, rows = index_with(3)
    index.drop(rows[1])
    assert index.insert(HASHES[1], parent=rows[0], slot=9, generation=9) == rows[1]
    index.commit(np.array([rows[1]]))
    assert len(index.prefix(HASHES)[0]) == 3
    index.validate()


def test_leases_are_counted() -> None:
    """Covers: C2."""
    index, rows = index_with(2)
    twice = np.array([rows[1], rows[1]])
    index.lease(twice)
    assert index.evict(2) == ([], [])
    assert index.num_leased == 1
    index.unlease(twice[:1])
    assert index.evict(2) == ([], [])
    index.unlease(twice[:1])
    assert index.evict(1)[0] == [HASHES[1]]


def test_a_parent_can_go_in_the_same_round_as_the_child_that_held_it() -> None:
    """The parent was looked at while only its child was leased; it must not be overlooked later."""
    index, rows = index_with(2)
    child = np.array([rows[1]])
    index.lease(child)
    assert index.evict(2) == ([], [])
    index.unlease(child)
    assert index.evict(2)[0] == [HASHES[1], HASHES[0]]
