"""The index alone: prefixes, holes, leases."""

import numpy as np
from builders import chain, records

from kvstore_server.eviction import Ticks
from kvstore_server.index import Index
from kvstore_server.level import State
from kvstore_server.table import NONE

CHAIN = chain(5)
HASHES = records(CHAIN)


def index_with(committed: int, writing: int = 0) -> tuple[Index, list[int]]:
    index = Index(Ticks())
    count = committed + writing
    rows, begun = index.insert(HASHES[:count], parent=NONE, slots=np.arange(count), generations=np.arange(count) + 1)
    assert begun.tolist() == list(range(count))
    if count:
        index.touch(rows)
    index.commit(rows[:committed])
    return index, rows.tolist()


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
    hashes, slots = index.evict(2)
    assert hashes.tolist() == [CHAIN[4], CHAIN[3]]
    assert slots.tolist() == [4, 3]
    assert index.evict(9)[0].tolist() == [CHAIN[2], CHAIN[1], CHAIN[0]]
    index.validate()


def test_a_block_before_one_in_writing_is_not_evicted() -> None:
    index, _ = index_with(2, 1)
    assert index.evict(5)[0].tolist() == []


def test_a_hole_is_kept_while_what_follows_is_stored_and_forgotten_with_it() -> None:
    index, rows = index_with(3)
    index.leave_memory(np.array(rows[1 : 1 + 1]))
    assert index.state(rows[1]) is State.HOLE
    assert index.prefix(HASHES)[0].tolist() == rows[:1]
    assert index.find(HASHES[1 : 1 + 1]).tolist() == [rows[1]]
    index.validate()
    index.leave_memory(np.array(rows[2 : 2 + 1]))
    assert index.find(HASHES[:3]).tolist() == [rows[0], NONE, NONE]
    index.validate()


def test_a_hole_is_kept_while_it_is_leased() -> None:
    index, rows = index_with(1)
    held = np.array(rows)
    index.lease(held)
    index.leave_memory(np.array(rows[0 : 0 + 1]))
    assert index.find(HASHES[:1]).tolist() == rows
    index.unlease(held)
    assert index.find(HASHES[:1]).tolist() == [NONE]
    index.validate()


def test_a_hole_that_is_written_again_is_found_by_what_follows() -> None:
    index, rows = index_with(3)
    index.leave_memory(np.array(rows[1 : 1 + 1]))
    again, begun = index.insert(HASHES[:3], parent=NONE, slots=np.array([9]), generations=np.array([9]))
    assert again.tolist() == rows
    assert begun.tolist() == [1]
    assert index.memory.slots(again).tolist() == [0, 9, 2]
    index.commit(again[begun])
    assert len(index.prefix(HASHES)[0]) == 3
    index.validate()


def test_leases_are_counted() -> None:
    """Covers: C2."""
    index, rows = index_with(2)
    twice = np.array([rows[1], rows[1]])
    index.lease(twice)
    assert index.evict(2)[0].tolist() == []
    assert index.num_leased == 1
    index.unlease(twice[:1])
    assert index.evict(2)[0].tolist() == []
    index.unlease(twice[:1])
    assert index.evict(1)[0].tolist() == [CHAIN[1]]


def test_a_parent_can_go_in_the_same_round_as_the_child_that_held_it() -> None:
    """The parent was looked at while only its child was leased; it must not be overlooked later."""
    index, rows = index_with(2)
    child = np.array([rows[1]])
    index.lease(child)
    assert index.evict(2)[0].tolist() == []
    index.unlease(child)
    assert index.evict(2)[0].tolist() == [CHAIN[1], CHAIN[0]]


def test_a_head_begins_a_chain_though_others_come_before_it() -> None:
    index = Index(Ticks())
    rows, begun = index.insert(HASHES[:4], parent=NONE, slots=np.arange(4), generations=np.arange(4) + 1, heads=[1, 3])
    assert begun.tolist() == [0, 1, 2, 3]
    none = bytes(32)
    assert index.parent_hashes(rows).tolist() == [none, none, CHAIN[1], none]
    assert index.segments(rows, length=2).tolist() == [int.from_bytes(CHAIN[n][:8], "little") for n in (0, 1, 1, 3)]
    index.validate()


def test_a_segment_is_told_by_the_block_that_begins_its_chain_here() -> None:
    index = Index(Ticks())
    hashes = records(chain(70))
    rows, _ = index.insert(hashes, parent=NONE, slots=np.arange(70), generations=np.arange(70) + 1)
    first = int.from_bytes(hashes[0].tobytes()[:8], "little")
    assert index.segments(rows, length=64).tolist() == [first] * 64 + [0] * 6
    assert index.segments(rows, length=1).tolist() == [first] + [0] * 69
    assert index.segments(rows[:0], length=64).tolist() == []
