"""Who is asked for which blocks, and how answers are joined; and what is done with answers that do not come."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import chain
from tellers import member

from kvstore.errors import InvalidRequest, StoreTimeout
from kvstore.placement import SEGMENT_BLOCKS, Placement, segments, segments_from
from kvstore_client.breaker import Breaker
from kvstore_client.buffers import as_rows
from kvstore_client.fanout import each
from kvstore_client.joining import Found, Prefix, join
from kvstore_client.placing import NOBODY, View, shares

HASHES = chain(300)
SEGMENTS = segments(HASHES)
NODES = ("a", "b", "c")
ALL = np.ones(3, bool)


def view(*, draining: str = "", replicas: int = 1) -> View:
    return View([member(node, b"", "", draining=node == draining) for node in NODES], 7, replicas)


def found(blocks: list[int], num_found: int, num_writing: int = 0, *, num_worth: int | None = None) -> Found:
    return Found(np.array(blocks), num_found, num_found if num_worth is None else num_worth, num_writing)


def test_blocks_go_to_the_first_owner_of_their_segment() -> None:
    owners = Placement(dict.fromkeys(NODES, 1.0)).owners(SEGMENTS)[:, 0]
    first, other = view().readers(SEGMENTS, ALL)
    assert (first == owners).all()
    assert (other == NOBODY).all()
    assert (view().writers(SEGMENTS, ALL) == owners).all()
    begin = SEGMENT_BLOCKS + 5
    assert (view().writers(SEGMENTS[begin:], ALL) == owners[begin:]).all()


def test_where_the_first_replica_does_not_answer_the_next_is_asked_and_the_first_if_none_does() -> None:
    ranked = Placement(dict.fromkeys(NODES, 1.0)).owners(SEGMENTS, count=2)
    for down in range(3):
        live = np.arange(3) != down
        expected = np.where(ranked[:, 0] == down, ranked[:, 1], ranked[:, 0])
        assert (view(replicas=2).readers(SEGMENTS, live)[0] == expected).all()
        assert (view(replicas=2).writers(SEGMENTS, live) == expected).all()
    assert (view(replicas=2).readers(SEGMENTS, ~ALL)[0] == ranked[:, 0]).all()


def test_a_draining_member_is_asked_beside_the_one_that_takes_its_place_and_gets_nothing() -> None:
    before = view().writers(SEGMENTS, ALL)
    leaving = int(before[0])
    draining = view(draining=NODES[leaving])
    first, other = draining.readers(SEGMENTS, ALL)
    assert (first == before).all()
    assert ((other != NOBODY) == (before == leaving)).all()
    writers = draining.writers(SEGMENTS, ALL)
    assert (writers != leaving).all()
    assert (writers[other != NOBODY] == other[other != NOBODY]).all()
    only = View([member("a", b"", "", draining=True)], 0, 1)
    assert (only.writers(SEGMENTS, np.ones(1, bool)) == NOBODY).all()
    assert (only.readers(SEGMENTS, np.ones(1, bool))[0] == 0).all()


def test_members_are_known_by_their_node_ids_and_weigh_what_they_hold() -> None:
    big = View([member("a", b"", ""), member("b", b"", "", capacity_bytes=3 << 30)], 0, 1)
    many = np.arange(20_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert np.bincount(big.writers(many, np.ones(2, bool)))[1] == pytest.approx(15_000, rel=0.03)
    alone = View([member("", b"", "", capacity_bytes=0)], 0, 1)
    assert (alone.writers(SEGMENTS, np.ones(1, bool)) == 0).all()
    assert len(view().writers(SEGMENTS[:0], ALL)) == 0


def test_shares_are_the_blocks_of_each_in_order() -> None:
    cut = shares(np.array([2, 0, NOBODY, 2, 0]))
    assert [(share.node, share.blocks.tolist()) for share in cut] == [(0, [1, 4]), (2, [0, 3])]


def test_segments_can_be_had_from_their_first_blocks() -> None:
    assert (segments_from(HASHES[::SEGMENT_BLOCKS])[: len(HASHES)] == SEGMENTS).all()


def test_a_prefix_ends_with_the_first_block_that_nobody_has() -> None:
    whole = [found([0, 1, 4, 5], 4), found([2, 3], 2)]
    assert join(whole, num_blocks=6) == Prefix(6, 0, 6)
    assert join([found([0, 1, 4, 5], 4), found([2, 3], 1)], num_blocks=6) == Prefix(3, 0, 3)
    assert join([found([0, 1, 4, 5], 4)], num_blocks=6) == Prefix(2, 0, 2)
    assert join([found([2, 3], 2)], num_blocks=6) == Prefix(0, 0, 0)
    assert join([], num_blocks=6) == Prefix(0, 0, 0)
    assert join([], num_blocks=0) == Prefix(0, 0, 0)


def test_what_either_of_two_has_counts() -> None:
    assert join([found([0, 1, 2], 1), found([1, 2], 1)], num_blocks=3) == Prefix(2, 0, 2)


def test_blocks_in_writing_count_where_they_follow() -> None:
    assert join([found([0, 1], 1, 1), found([2, 3], 2)], num_blocks=4) == Prefix(1, 3, 1)
    assert join([found([0, 1], 1, 0), found([2, 3], 0, 2)], num_blocks=4) == Prefix(1, 0, 1)
    assert join([found([0, 1], 2, 0), found([2, 3], 0, 1)], num_blocks=4) == Prefix(2, 1, 2)


def test_what_one_member_would_bring_too_slowly_cuts_the_chain_there() -> None:
    answers = [found([0, 1, 4], 3, num_worth=2), found([2, 3], 2), found([5], 0, 1)]
    assert join(answers, num_blocks=6) == Prefix(4, 0, 5)


def test_steps_run_side_by_side_and_each_has_its_own_end() -> None:
    def fails() -> int:
        raise StoreTimeout("slow")

    with ThreadPoolExecutor(2) as pool:
        first, second, third = each(pool, [lambda: 1, fails, lambda: 3])
        assert (first, third) == (1, 3)
        assert isinstance(second, StoreTimeout)
        assert each(pool, []) == []

        def wrong() -> int:
            raise InvalidRequest("ours")

        with pytest.raises(InvalidRequest):
            each(pool, [fails, wrong])


def test_rows_that_were_picked_are_where_they_were() -> None:
    memory = np.arange(60, dtype=np.uint8).reshape(6, 10)
    chosen = np.array([5, 1, 2])
    for rows in (memory, list(memory)):
        picked = as_rows(rows, num_rows=6, row_bytes=10, where="rows").pick(chosen)
        assert len(picked) == 3
        assert (picked.addresses(np.arange(3)) == memory.ctypes.data + 10 * chosen).all()
        again = picked.pick(np.array([2, 0])).columns(4, 2)
        assert (again.addresses(np.arange(2)) == memory.ctypes.data + 10 * np.array([2, 5]) + 4).all()


def test_a_breaker_says_whether_it_admits_without_admitting() -> None:
    now = [0.0]
    breaker = Breaker(failures=1, cooldown_s=1.0, clock=lambda: now[0])
    assert breaker.admits
    breaker.failed()
    assert not breaker.admits
    now[0] = 1.0
    assert breaker.admits
    assert breaker.admits
    assert breaker.admit() == 0.0
    assert not breaker.admits, "its probe is under way"
