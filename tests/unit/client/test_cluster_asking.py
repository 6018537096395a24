"""What members are asked, round by round, until nobody has the next block; and which leases are held then."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from builders import chain
from hypothesis import example, given
from hypothesis import strategies as st
from tellers import member

from kvstore.errors import InvalidRequest, KVStoreError, StoreFull, StoreTimeout, StoreUnavailable
from kvstore.hashing import pack
from kvstore.types import HASH_BYTES, BlockHash, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import unpack_hashes
from kvstore_client.cluster_load import begin_legs
from kvstore_client.joining import Prefix, Told
from kvstore_client.link import match_request, release_request
from kvstore_client.links import Ring
from kvstore_client.load import Load
from kvstore_client.owners import ask_readers, holders
from kvstore_client.placing import NOBODY, Cost, Runs, View

NODES = ("a", "b", "c", "d")
SIZES = (2, 3, 1, 2, 3)
HASHES = chain(sum(SIZES))
BEGINS = [sum(SIZES[:run]) for run in range(len(SIZES) + 1)]
LEASE = "mine"


@dataclass(eq=False)
class Fake:
    """A member: as a link, its channel, its session and the calls there."""

    has: set[BlockHash] = field(default_factory=set)
    writes: set[BlockHash] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)  # by number of the call
    live: bool = True
    cost: Cost = (False, 0)
    leased: set[BlockHash] = field(default_factory=set)
    num_asked: int = 0
    alive: bool = True
    failed: bool = False

    @property
    def channel(self) -> "Fake":
        return self

    @property
    def current(self) -> "Fake":
        return self

    def session(self, timeout_s: float) -> "Fake":
        return self

    def tell(self, message: pb.ClientMessage) -> None:
        assert message.release.lease == LEASE
        self.leased = set()

    def begin(self, message: pb.ClientMessage, *, deadline: float, undo: Any) -> "Answer":
        hashes = [BlockHash(one.tobytes()) for one in unpack_hashes(message.match.hashes)]
        assert not self.failed, "who fails is left alone"
        failure = self.failures.get(self.num_asked)
        self.failed = failure is not None
        self.num_asked += 1
        if failure == "open":
            raise StoreUnavailable("circuit breaker: open")
        if failure == "refuses":
            return Answer(StoreFull("leases"))
        found = leading(hashes, self.has)
        self.leased = set(hashes[:found])
        if failure == "late":
            self.tell(undo(0))
            return Answer(StoreTimeout("late"))
        writing = leading(hashes[found:], self.writes)
        return Answer(pb.ServerMessage(matched=pb.Matched(num_blocks=found, num_writing=writing)))


@dataclass
class Answer:
    said: pb.ServerMessage | KVStoreError

    def answer(self) -> pb.ServerMessage:
        if isinstance(self.said, KVStoreError):
            raise self.said
        return self.said

    def abandon(self) -> None:
        pass


class House(Ring):
    links: Any  # each a `Fake`

    def costs(self) -> list[Cost]:
        return [link.cost for link in self.links]


def leading(hashes: Sequence[BlockHash], among: set[BlockHash]) -> int:
    return next((place for place, one in enumerate(hashes) if one not in among), len(hashes))


def ask(fakes: Sequence[Fake], segments: list[int], *, replicas: int, draining: str = "") -> tuple[House, Runs, Prefix]:
    view = View([member(node, b"", "", draining=node == draining) for node in NODES[: len(fakes)]], 1, replicas)
    ways: Any = tuple(fakes)
    house = House(view, ways)
    runs = Runs(BEGINS[: len(segments) + 1], segments)
    prefix, sessions = ask_readers(
        house,
        pack(HASHES)[: runs.begins[-1] * HASH_BYTES],
        runs,
        lambda part: match_request(part, LEASE),
        lambda answer: Told(answer.matched.num_blocks, answer.matched.num_blocks, answer.matched.num_writing),
        undo=lambda _: release_request(LEASE),
        deadline=time.monotonic() + 10,
    )
    assert not any(fake.leased for node, fake in enumerate(fakes) if node not in sessions), "leases nobody gives back"
    for run in range(len(runs)):
        counted = set(HASHES[runs.begins[run] : min(runs.begins[run + 1], prefix.num_found)])
        assert not counted or counted <= fakes[prefix.holders[run]].leased
    return house, runs, prefix


def may_have(house: House, segment: int) -> set[int]:
    tried: set[int] = set()
    while (node := house.view.next_reader(segment, house.live(), house.costs(), tried)) != NOBODY:
        tried.add(node)
    return tried or set(house.view.readers(Runs([0, 1], [segment]), house.live(), house.costs()))


def houses(seed: int, *, failing: bool) -> tuple[list[Fake], list[int], int, str]:
    """Members, the segments of a chain, how many replicas there are, and who is draining. Odd: some have writes."""
    pick = Random(seed)
    fakes = []
    for _ in range(pick.randint(1, len(NODES))):
        fake = Fake(live=pick.random() < 0.9, cost=(pick.random() < 0.5, pick.randint(0, 2)))
        for begin, end in pairwise(BEGINS):
            count = pick.choice([0, 1, end, end])
            fake.has.update(HASHES[begin:end][:count])
            fake.writes.update(HASHES[begin:end][count:][: pick.choice([0, 0, 1, end])] if seed % 2 else ())
        if failing:
            fake.failures = {pick.randint(0, 3): pick.choice(["open", "refuses", "late"])}
        fakes.append(fake)
    segments = [pick.randint(0, 1 << 60) for _ in range(pick.randint(0, len(SIZES)))]
    return fakes, segments, pick.randint(1, 4), pick.choice(["", "a"])


@given(st.integers(0, 1 << 32))
@example(2468)
def test_the_prefix_ends_with_the_first_block_that_none_of_the_owners_has(seed: int) -> None:
    members, segments, replicas, draining = houses(seed, failing=False)
    house, runs, prefix = ask(members, segments, replicas=replicas, draining=draining)
    owners = [may_have(house, segment) for segment in segments]
    expected = 0
    for nodes, begin, end in zip(owners, runs.begins, runs.begins[1:], strict=False):
        most = max(leading(HASHES[begin:end], members[node].has) for node in nodes)
        expected += most
        if most < end - begin:
            break
    assert prefix.num_found <= expected
    # Of three, the one that has a part of a run may have given it up before the chain got there.
    if not any(fake.writes for fake in members) and all(len(nodes) <= 2 for nodes in owners):
        assert prefix.num_found == expected


@given(st.integers(0, 1 << 32))
@example(155763)
def test_what_counts_is_leased_and_nothing_is_with_those_that_failed(seed: int) -> None:
    members, segments, replicas, draining = houses(seed, failing=True)
    try:
        ask(members, segments, replicas=replicas, draining=draining)
    except KVStoreError:
        assert not any(fake.leased for fake in members)


def test_a_tail_that_is_with_its_first_owner_alone_is_found_whatever_follows() -> None:
    """The next owner of it has nothing; of the run behind it, which nobody has, it is the first to be asked."""
    placed = View([member(node, b"", "") for node in "ab"], 1, 2)
    by_first = {placed.writers(Runs([0, 1], [segment]), [True, True])[0]: segment for segment in range(50)}
    members = [Fake(has=set(HASHES[:4])), Fake()]
    _, _, prefix = ask(members, [by_first[0], by_first[0], by_first[1]], replicas=2)
    assert prefix.num_found == 4
    assert prefix.holders[1] == 0


def test_a_member_that_tells_of_blocks_it_was_not_asked_for_does_no_harm_before_the_load_finds_out() -> None:
    class Wrong(Fake):
        def begin(self, message: pb.ClientMessage, *, deadline: float, undo: Any) -> Answer:
            return Answer(pb.ServerMessage(located=pb.Located(errors=[pb.BlockError(index=7)])))

        def tell(self, message: pb.ClientMessage) -> None:
            pass

    view = View([member(node, b"", "") for node in "ab"], 1, 2)
    runs = Runs([0, 2], [1])
    ways: Any = (Wrong(), Wrong())
    until = time.monotonic() + 10
    nodes = holders(House(view, ways), pack(HASHES[:2]), runs, {}, follow=False, lease=LEASE, deadline=until)
    assert nodes.tolist() == view.writers(runs, [True, True]) * 2


def test_a_call_that_one_member_finds_wrong_leaves_no_load_with_another() -> None:
    """What has raised must not go on writing to the caller's memory."""
    begun: list[Mock] = []

    def begin(node: int, blocks: IntArray, until: float) -> Any:
        if node:
            raise InvalidRequest("wrong")
        begun.append(Mock(Load))
        return begun[-1]

    view = View([member(node, b"", "") for node in "ab"], 1, 1)
    ways: Any = (Fake(), Fake())
    until = time.monotonic() + 10
    with ThreadPoolExecutor(1) as pool, pytest.raises(InvalidRequest):
        begin_legs(House(view, ways), Runs([0, 1, 2], [1, 2]), np.array([0, 1]), begin, pool=pool, deadline=until)
    assert [call[0] for load in begun for call in load.method_calls] == ["cancel", "release"]
