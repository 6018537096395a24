"""Who is asked for which blocks, and how answers are joined; and what is done with answers that do not come."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from builders import chain
from tellers import member

from kvstore.errors import InvalidRequest, StoreTimeout
from kvstore.placement import Placement, segments, segments_from
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.breaker import Breaker
from kvstore_client.buffers import as_rows
from kvstore_client.fanout import each
from kvstore_client.joining import Found, Prefix, join
from kvstore_client.placing import NOBODY, Run, View, indices_of, runs_of, shares

TOKENS = 8  # a block, so that 64 are a segment
HASHES = chain(300)
RUNS = runs_of(HASHES, None, block_tokens=TOKENS)
NODES = ("a", "b", "c")
ALL = [True, True, True]
CHAIN = [Run(0, 2, 7), Run(2, 4, 8), Run(4, 6, 9)]


def view(*, draining: str = "", replicas: int = 1) -> View:
    return View([member(node, b"", "", draining=node == draining) for node in NODES], 7, replicas)


def ranked(count: int) -> list[list[int]]:
    """Of each run, its owners as the placement says."""
    heads = np.array([run.segment for run in RUNS], np.uint64)
    owners: list[list[int]] = Placement(dict.fromkeys(NODES, 1.0)).owners(heads, count=count).tolist()
    return owners


def found(letters: str, num_found: int, num_writing: int = 0, *, num_worth: int | None = None) -> Found:
    """What one has of these runs of `CHAIN`, each of two blocks."""
    runs = [CHAIN["abc".index(letter)] for letter in letters]
    return Found(runs, num_found, num_found if num_worth is None else num_worth, num_writing)


def test_a_request_is_cut_where_segments_end() -> None:
    where = segments(HASHES, block_tokens=TOKENS)
    assert [(run.begin, run.end) for run in RUNS] == [(0, 64), (64, 128), (128, 192), (192, 256), (256, 300)]
    assert [run.segment for run in RUNS] == where[::64].tolist()
    assert runs_of(HASHES, where, block_tokens=TOKENS) == RUNS
    within = runs_of(HASHES[70:200], where[70:200], block_tokens=TOKENS)
    assert within == [Run(0, 58, RUNS[1].segment), Run(58, 122, RUNS[2].segment), Run(122, 130, RUNS[3].segment)]
    assert indices_of(within[::2]).tolist() == [*range(58), *range(122, 130)]
    assert runs_of([], None, block_tokens=TOKENS) == runs_of([], where[:0], block_tokens=TOKENS) == []
    assert len(indices_of([])) == 0


def test_blocks_go_to_the_first_owner_of_their_segment() -> None:
    owners = [row[0] for row in ranked(1)]
    assert view().readers(RUNS, ALL) == (owners, [NOBODY] * len(RUNS))
    seen = view()
    for _ in range(2):  # the second time from memory
        assert seen.writers(RUNS, ALL) == owners
        assert seen.writers(RUNS[2:4], ALL) == owners[2:4]


def test_where_the_first_replica_does_not_answer_the_next_is_asked_and_the_first_if_none_does() -> None:
    for down in range(3):
        live = [node != down for node in range(3)]
        expected = [second if first == down else first for first, second in ranked(2)]
        assert view(replicas=2).readers(RUNS, live)[0] == expected
        assert view(replicas=2).writers(RUNS, live) == expected
    assert view(replicas=2).readers(RUNS, [False] * 3)[0] == [row[0] for row in ranked(1)]


def test_a_draining_member_is_asked_beside_the_one_that_takes_its_place_and_gets_nothing() -> None:
    before = view().writers(RUNS, ALL)
    leaving = before[0]
    draining = view(draining=NODES[leaving])
    first, other = draining.readers(RUNS, ALL)
    writers = draining.writers(RUNS, ALL)
    assert first == before
    assert leaving not in writers
    assert other == [new if old == leaving else NOBODY for old, new in zip(before, writers, strict=True)]
    only = View([member("a", b"", "", draining=True)], 0, 1)
    assert only.writers(RUNS, [True]) == [NOBODY] * len(RUNS)
    assert only.readers(RUNS, [True])[0] == [0] * len(RUNS)
    assert shares(RUNS, [NOBODY] * len(RUNS)) == {}


def test_members_are_known_by_their_node_ids_and_weigh_what_they_hold() -> None:
    big = View([member("a", b"", ""), member("b", b"", "", capacity_bytes=3 << 30)], 0, 1)
    many = [Run(number, number + 1, number * 0x9E3779B97F4A7C15 % (1 << 64)) for number in range(20_000)]
    assert sum(big.writers(many, [True, True])) == pytest.approx(15_000, rel=0.03)
    alone = View([member("", b"", "", capacity_bytes=0)], 0, 1)
    assert alone.writers(RUNS, [True]) == [0] * len(RUNS)
    told = pb.MembersReply(members=[member("b", b"", ""), member("a", b"1", ""), member("a", b"2", "")], epoch=3)
    assert [(each.node_id, each.boot_id) for each in View.of(told).members] == [("a", b"2"), ("b", b"")]
    assert View.of(told).replicas == 1


def test_shares_are_the_runs_of_each_in_order() -> None:
    assert shares(RUNS, [2, 0, NOBODY, 2, 0]) == {2: [RUNS[0], RUNS[3]], 0: [RUNS[1], RUNS[4]]}


def test_segments_can_be_had_from_their_first_blocks() -> None:
    whole = segments_from(HASHES[::64], block_tokens=TOKENS)
    assert (whole[: len(HASHES)] == segments(HASHES, block_tokens=TOKENS)).all()


def test_a_prefix_ends_with_the_first_block_that_nobody_has() -> None:
    assert join(CHAIN, [found("ac", 4), found("b", 2)]) == Prefix(6, 0, 6)
    assert join(CHAIN, [found("ac", 4), found("b", 1)]) == Prefix(3, 0, 3)
    assert join(CHAIN, [found("ac", 4)]) == Prefix(2, 0, 2)
    assert join(CHAIN, [found("b", 2)]) == Prefix(0, 0, 0)
    assert join(CHAIN, []) == Prefix(0, 0, 0)
    assert join([], []) == Prefix(0, 0, 0)


def test_what_either_of_two_has_counts() -> None:
    assert join(CHAIN, [found("ab", 3), found("b", 1), found("cb", 3)]) == Prefix(3, 0, 3)
    assert join(CHAIN, [found("a", 2), found("b", 1), found("cb", 4)]) == Prefix(6, 0, 6)
    assert join(CHAIN, [found("b", 2), found("ab", 3)]) == Prefix(4, 0, 4)


def test_blocks_in_writing_count_where_they_follow() -> None:
    assert join(CHAIN, [found("a", 1, 1), found("b", 2)]) == Prefix(1, 3, 1)
    assert join(CHAIN, [found("a", 1), found("b", 0, 2)]) == Prefix(1, 0, 1)
    assert join(CHAIN, [found("a", 2), found("b", 0, 1)]) == Prefix(2, 1, 2)


def test_what_one_member_would_bring_too_slowly_cuts_the_chain_there() -> None:
    assert join(CHAIN, [found("ac", 3, 1, num_worth=3), found("b", 2, num_worth=1)]) == Prefix(3, 0, 5)


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
