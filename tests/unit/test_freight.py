"""What a courier copies, to whom, and in which order."""

from collections.abc import Iterable

import numpy as np
from builders import chain, records, spec

from kvstore.hashing import pack
from kvstore.placement import Placement
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.placing import View
from kvstore_server.commands.freight import Blocks, chains, runs, snapshot, targets

KV = spec()
SEGMENTS = np.random.default_rng(1).integers(1, 1 << 62, 500).astype(np.uint64)
NONE = bytes(32)


def view(names: str, *, replicas: int, draining: str = "") -> View:
    members = [
        pb.Member(node_id=name, capacity_bytes=1, state=pb.Member.DRAINING if name in draining else pb.Member.UP)
        for name in names
    ]
    return View.of(pb.MembersReply(members=members, epoch=1, replicas=replicas))


def wanted(node: str, seen: View) -> dict[str, set[int]]:
    return {to: set(places.tolist()) for to, places in targets(SEGMENTS, seen, node)}


def owned(names: str, rank: int) -> list[str]:
    placement = Placement(dict.fromkeys(names, 1.0))
    return [placement.nodes[index] for index in placement.owners(SEGMENTS, count=len(names))[:, rank].tolist()]


def test_blocks_go_to_all_other_owners_also_to_those_before_this_one() -> None:
    first, second = owned("abc", 0), owned("abc", 1)
    copied = wanted("a", view("abc", replicas=2))
    assert copied == {name: {at for at in range(500) if name in (first[at], second[at])} for name in "bc"}


def test_of_one_that_drains_everything_goes_to_those_that_stay() -> None:
    first = owned("bc", 0)
    copied = wanted("a", view("abc", replicas=1, draining="a"))
    assert copied == {name: {at for at in range(500) if first[at] == name} for name in "bc"}


def test_what_is_not_placed_stays_and_so_does_all_where_there_is_nobody_else() -> None:
    assert not list(targets(np.zeros(3, np.uint64), view("ab", replicas=2), "a"))
    assert not list(targets(SEGMENTS, view("a", replicas=2), "a"))
    assert not list(targets(SEGMENTS, view("ab", replicas=1, draining="b"), "a"))


def test_runs_follow_each_other_and_are_bounded() -> None:
    hashes = chain(100, of=KV)
    parents = [NONE, *hashes[:-1]]
    parents[70] = NONE
    found = list(runs(records(hashes), records(parents), 1))
    assert [(run.start, run.stop) for run in found] == [(0, 64), (64, 70), (70, 100)]
    assert len(list(runs(records(hashes), records(parents), 64 << 20))) == 100
    assert not list(runs(records([]), records([]), 1))


def event(hashes: list[bytes], parents: list[bytes], segment: int) -> pb.Event:
    segments = np.full(len(hashes), segment, "<u8").tobytes()
    return pb.Event(kind=pb.Event.STORED, hashes=pack(hashes), parents=b"".join(parents), segments=segments)


def test_a_snapshot_has_each_block_once_and_behind_the_one_before_it() -> None:
    one, other = chain(6, of=KV), chain(3, of=KV, seed=1)
    above = dict(zip(one, [NONE, *one[:-1]], strict=True)) | dict(zip(other, [NONE, *other[:-1]], strict=True))
    events: Iterable[pb.Event] = [
        event([one[4], one[2], one[3]], [above[one[4]], above[one[2]], above[one[3]]], 7),
        event(other[::-1], [above[hash_] for hash_ in other[::-1]], 5),
        event(one[::-1], [above[hash_] for hash_ in one[::-1]], 7),  # in another tier, too
        pb.Event(kind=pb.Event.SNAPSHOT_END),
        event(one, list(above.values())[:6], 7),
    ]
    pieces = snapshot(iter(events))
    assert pieces is not None
    (blocks,) = pieces
    assert [hash_.tobytes() for hash_ in blocks.hashes] == [*other, *one]
    assert [parent.tobytes() for parent in blocks.parents] == [above[hash_] for hash_ in [*other, *one]]
    assert blocks.segments.tolist() == [5] * 3 + [7] * 6


def test_a_watch_that_breaks_off_is_no_snapshot() -> None:
    assert snapshot(iter([event(chain(1, of=KV), [NONE], 1)])) is None


def test_parents_in_a_circle_which_only_a_liar_has_do_not_hold_it_up() -> None:
    a, b = chain(2, of=KV)
    blocks = Blocks.of(event([a, b], [b, a], 1))
    assert sorted(chains(blocks).tolist()) == [0, 1]
