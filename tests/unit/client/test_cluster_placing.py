"""Who is asked for which blocks, and how answers are joined; and what is done with answers that do not come."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import chain
from tellers import member

from kvstore.errors import InvalidRequest, StoreTimeout
from kvstore.hashing import pack
from kvstore.placement import Placement, segments, segments_from
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.breaker import Breaker
from kvstore_client.buffers import as_rows
from kvstore_client.fanout import each
from kvstore_client.joining import Told, join
from kvstore_client.placing import NOBODY, Runs, View, runs_of, shares

TOKENS = 8  # a block, so that 64 are a segment
HASHES = chain(300)
DATA = pack(HASHES)
RUNS = runs_of(DATA, None, block_tokens=TOKENS)
NODES = ("a", "b", "c")
ALL = [True, True, True]
SAME = [(False, 0)] * 3
CHAIN = Runs([0, 2, 4, 6], [7, 8, 9])


def view(*, draining: str = "", replicas: int = 1) -> View:
    return View([member(node, b"", "", draining=node == draining) for node in NODES], 7, replicas)


def ranked(count: int) -> list[list[int]]:
    """Of each run, its owners as the placement says."""
    heads = np.array(RUNS.segments, np.uint64)
    owners: list[list[int]] = Placement(dict.fromkeys(NODES, 1.0)).owners(heads, count=count).tolist()
    return owners


def joined(*told: tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, int]) -> tuple[int, int, int]:
    """Blocks worth loading, in writing, and found, of `CHAIN`, whose runs have two each.

    Of each answer: the runs asked for, blocks found, in writing, and worth loading.
    """
    answers = []
    for node, (letters, found, *rest) in enumerate(told):
        writing, worth = (*rest, *(0, found)[len(rest) :])
        answers.append((node, ["abc".index(letter) for letter in letters], Told(found, worth, writing)))
    prefix = join(CHAIN, answers)
    assert prefix.gap == (prefix.num_found + prefix.num_writing) // 2 or prefix.num_blocks < prefix.num_found
    return prefix.num_blocks, prefix.num_writing, prefix.num_found


def test_a_request_is_cut_where_segments_end() -> None:
    where = segments(HASHES, block_tokens=TOKENS)
    assert Runs([0, 64, 128, 192, 256, 300], where[::64].tolist()) == RUNS
    assert runs_of(DATA, where, block_tokens=TOKENS) == RUNS
    within = runs_of(pack(HASHES[70:200]), where[70:200], block_tokens=TOKENS)
    assert within == Runs([0, 58, 122, 130], RUNS.segments[1:4])
    assert within.sizes() == [58, 64, 8]
    assert within.by_block([5, 6, 7]).tolist() == [5] * 58 + [6] * 64 + [7] * 8
    assert within.cut(pack(HASHES[70:200]), [2, 0]) == pack([*HASHES[192:200], *HASHES[70:128]])
    assert runs_of(b"", None, block_tokens=TOKENS) == runs_of(b"", where[:0], block_tokens=TOKENS) == Runs([0], [])
    assert len(Runs([0], []).by_block([])) == 0


def test_blocks_go_to_the_first_owner_of_their_segment() -> None:
    owners = [row[0] for row in ranked(1)]
    within = Runs(RUNS.begins[:3], RUNS.segments[2:4])
    seen = view()
    for _ in range(2):  # the second time from memory
        assert seen.readers(RUNS, ALL, SAME) == seen.writers(RUNS, ALL) == owners
        assert seen.writers(within, ALL) == owners[2:4]
    assert seen.next_reader(RUNS.segments[0], ALL, SAME, {owners[0]}) == NOBODY


def test_where_the_first_replica_does_not_answer_the_next_is_asked_and_the_first_if_none_does() -> None:
    for down in range(3):
        live = [node != down for node in range(3)]
        expected = [second if first == down else first for first, second in ranked(2)]
        assert view(replicas=2).readers(RUNS, live, SAME) == expected
        assert view(replicas=2).writers(RUNS, live) == expected
    first = [row[0] for row in ranked(1)]
    assert view(replicas=2).readers(RUNS, [False] * 3, SAME) == view().writers(RUNS, [False] * 3) == first


def test_of_replicas_the_one_on_this_host_is_asked_and_of_others_the_one_with_least_to_do() -> None:
    for near in range(3):
        costs = [(node != near, 7 if node == near else 0) for node in range(3)]
        expected = [near if near in owners else owners[0] for owners in ranked(2)]
        assert view(replicas=2).readers(RUNS, ALL, costs) == expected
        assert view(replicas=2).writers(RUNS, ALL) == [row[0] for row in ranked(1)]
        busy = [(True, int(node == near)) for node in range(3)]
        expected = [owners[1] if owners[0] == near else owners[0] for owners in ranked(2)]
        assert view(replicas=2).readers(RUNS, ALL, busy) == expected


def test_what_one_replica_does_not_have_each_other_is_asked_for_once() -> None:
    seen = view(replicas=2)
    for segment, (first, second) in zip(RUNS.segments, ranked(2), strict=True):
        assert seen.next_reader(segment, ALL, SAME, {first}) == second
        assert seen.next_reader(segment, ALL, SAME, {second}) == first
        assert seen.next_reader(segment, ALL, SAME, {first, second}) == NOBODY
        assert seen.next_reader(segment, [node != second for node in range(3)], SAME, {first}) == NOBODY


def test_a_draining_member_is_asked_before_the_one_that_takes_its_place_and_gets_nothing() -> None:
    before = view().writers(RUNS, ALL)
    leaving = before[0]
    draining = view(draining=NODES[leaving])
    writers = draining.writers(RUNS, ALL)
    assert draining.readers(RUNS, ALL, SAME) == before
    assert leaving not in writers
    for segment, old, new in zip(RUNS.segments, before, writers, strict=True):
        assert draining.next_reader(segment, ALL, SAME, {old}) == (new if old == leaving else NOBODY)
    only = View([member("a", b"", "", draining=True)], 0, 1)
    assert only.writers(RUNS, [True]) == [NOBODY] * len(RUNS)
    assert only.readers(RUNS, [True], SAME) == [0] * len(RUNS)
    assert only.next_reader(RUNS.segments[0], [True], SAME, {0}) == NOBODY
    assert shares([NOBODY] * len(RUNS)) == {}


def test_members_are_known_by_their_node_ids_and_weigh_what_they_hold() -> None:
    big = View([member("a", b"", ""), member("b", b"", "", capacity_bytes=3 << 30)], 0, 1)
    many = Runs([*range(20_001)], [number * 0x9E3779B97F4A7C15 % (1 << 64) for number in range(20_000)])
    assert sum(big.writers(many, [True, True])) == pytest.approx(15_000, rel=0.03)
    alone = View([member("", b"", "", capacity_bytes=0)], 0, 1)
    assert alone.writers(RUNS, [True]) == [0] * len(RUNS)
    told = pb.MembersReply(members=[member("b", b"", ""), member("a", b"1", ""), member("a", b"2", "")], epoch=3)
    assert [(each.node_id, each.boot_id) for each in View.of(told).members] == [("a", b"2"), ("b", b"")]
    assert View.of(told).replicas == 1


def test_shares_are_the_runs_of_each_in_order() -> None:
    assert shares([2, 0, NOBODY, 2, 0]) == {2: [0, 3], 0: [1, 4]}


def test_segments_can_be_had_from_their_first_blocks() -> None:
    whole = segments_from(HASHES[::64], block_tokens=TOKENS)
    assert (whole[: len(HASHES)] == segments(HASHES, block_tokens=TOKENS)).all()


def test_a_prefix_ends_with_the_first_block_that_nobody_has() -> None:
    assert joined(("ac", 4), ("b", 2)) == (6, 0, 6)
    assert joined(("ac", 4), ("b", 1)) == (3, 0, 3)
    assert joined(("ac", 4)) == (2, 0, 2)
    assert joined(("b", 2)) == (0, 0, 0)
    assert joined() == (0, 0, 0)
    assert join(Runs([0], []), []).num_found == 0


def test_what_either_of_two_has_counts() -> None:
    assert joined(("ab", 3), ("b", 1), ("cb", 3)) == (3, 0, 3)
    assert joined(("a", 2), ("b", 1), ("cb", 4)) == (6, 0, 6)
    assert joined(("b", 2), ("ab", 3)) == (4, 0, 4)
    holders = join(CHAIN, [(2, [0, 1], Told(3, 3, 0)), (1, [1], Told(1, 1, 0))]).holders
    assert list(holders) == [2, 2, NOBODY]


def test_blocks_in_writing_count_where_they_follow() -> None:
    assert joined(("a", 1, 1), ("b", 2)) == (1, 3, 1)
    assert joined(("a", 1), ("b", 0, 2)) == (1, 0, 1)
    assert joined(("a", 2), ("b", 0, 1)) == (2, 1, 2)


def test_what_one_member_would_bring_too_slowly_cuts_the_chain_there() -> None:
    assert joined(("ac", 3, 1, 3), ("b", 2, 0, 1)) == (3, 0, 5)
    assert joined(("ab", 3, 0, 1), ("c", 2)) == (1, 0, 3)


def test_steps_run_side_by_side_and_each_has_its_own_end() -> None:
    def fails() -> int:
        raise StoreTimeout("slow")

    with ThreadPoolExecutor(2) as pool:
        first, second, third = each(pool, [lambda: 1, fails, lambda: 3])
        assert (first, third) == (1, 3)
        assert isinstance(second, StoreTimeout)
        assert each(pool, []) == []
        closed = ThreadPoolExecutor(1)
        closed.shutdown()
        assert each(closed, [lambda: 1, lambda: 2]) == [1, 2]

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
