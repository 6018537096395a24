"""A store of several daemons: who gets which blocks, and what becomes of them when a daemon goes, comes or hangs."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, DaemonProcess, eventually
from tellers import Teller, member

from kvstore.errors import BlockMissing, InvalidRequest, MembersChanged, StoreTimeout, StoreUnavailable
from kvstore.placement import Placement, segment_blocks, segments
from kvstore.types import BlockHash, ByteArray, IntArray, Outcome
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import unpack_hashes, unpack_u32
from kvstore_client import BlockRows, ClientOptions, ClusterClient, ClusterLoad, Match, connect
from kvstore_client import owners as owners_module
from kvstore_client.members import Members

KV = spec(block_tokens=8)
NUM_BLOCKS = 1000
SEGMENT_BLOCKS = segment_blocks(KV.block_tokens)
HASHES = chain(NUM_BLOCKS, of=KV)
DATA = rows(KV, HASHES)
AWAY = (StoreUnavailable, StoreTimeout)


class House:
    """Three daemons, which a teller calls the members n0 to n2."""

    def __init__(self, make_daemon: Callable[..., DaemonProcess], teller: Teller) -> None:
        self.daemons = [make_daemon() for _ in range(3)]
        self.teller = teller
        self.address = f"kvstore://{teller.address}"
        self.tell()

    def tell(self, *, draining: int | None = None, replicas: int = 1) -> None:
        """All daemons are members."""
        members = [
            member(f"n{number}", daemon.stats().boot_id, daemon.address, draining=number == draining)
            for number, daemon in enumerate(self.daemons)
            if daemon.running
        ]
        self.teller.tell(members, replicas=replicas)

    def owners(self, hashes: list[BlockHash] = HASHES, *, num_nodes: int = 3) -> IntArray:
        """Who keeps each block."""
        placement = Placement(dict.fromkeys([f"n{number}" for number in range(num_nodes)], 1.0))
        return placement.owners(segments(hashes, block_tokens=KV.block_tokens))[:, 0]

    def counts(self, name: str) -> list[int]:
        return [getattr(daemon.stats(), name) for daemon in self.daemons if daemon.running]


@pytest.fixture
def house(make_daemon: Callable[..., DaemonProcess], stack: ExitStack) -> House:
    return House(make_daemon, stack.enter_context(closing(Teller())))


@pytest.fixture
def client(house: House, stack: ExitStack) -> ClusterClient:
    return open_client(house, stack)


def open_client(house: House, stack: ExitStack, **options: Any) -> ClusterClient:
    defaults = {"timeout_s": DEADLINE_S, "breaker_cooldown_s": 2.0}
    client = connect(house.address, KV, options=ClientOptions(**(defaults | options)))
    assert isinstance(client, ClusterClient)
    stack.enter_context(closing(client))
    client.wait_ready(DEADLINE_S)
    return client


def store(client: ClusterClient, hashes: list[BlockHash] = HASHES) -> list[Outcome]:
    with client.store(hashes) as write:
        write.put_blocks(rows(KV, hashes))
    return write.outcomes


def load(
    client: ClusterClient, hashes: Match | list[BlockHash] = HASHES, **arguments: Any
) -> tuple[ByteArray, ClusterLoad]:
    """What is in place, in the end, of memory that was all zeros."""
    target = np.zeros_like(DATA)
    load = client.load(hashes, into=BlockRows(target), **arguments)
    load.wait()
    return target, load


def all_live(client: ClusterClient, count: int = 3) -> bool:
    links = client._links.current().links
    return len(links) == count and all(link.live for link in links)


@contextmanager
def stopped(daemon: DaemonProcess) -> Iterator[None]:
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def test_a_chain_is_split_over_its_owners_and_comes_back_bit_by_bit(house: House, client: ClusterClient) -> None:
    assert store(client) == [Outcome.STORED] * NUM_BLOCKS
    counts = house.counts("blocks_committed")
    assert counts == np.bincount(house.owners()).tolist()
    assert min(counts) > 0
    assert client.prefetch(HASHES) == NUM_BLOCKS
    with client.match(HASHES) as match:
        assert (match.num_blocks, match.num_found, match.num_writing) == (NUM_BLOCKS, NUM_BLOCKS, 0)
        target = np.zeros_like(DATA)
        with client.load(match, into=BlockRows(target)) as load:
            assert load.wait().num_loaded == NUM_BLOCKS
        assert (target == DATA).all()
    assert store(client) == [Outcome.STORED] * NUM_BLOCKS
    assert house.counts("blocks_committed") == counts


def test_a_store_is_one_request_to_each_owner(
    house: House, client: ClusterClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all its runs, each of which begins a chain there."""
    ask = owners_module.ask
    asked: list[pb.Store_] = []

    def heard(questions: Any, *, deadline: float) -> Any:
        asked.extend(question.message.store for question in questions)
        return ask(questions, deadline=deadline)

    monkeypatch.setattr(owners_module, "ask", heard)
    assert store(client) == [Outcome.STORED] * NUM_BLOCKS
    assert len(asked) == 3
    owners, begins = house.owners(), set(HASHES[::SEGMENT_BLOCKS])
    for request in asked:
        hashes = [BlockHash(one.tobytes()) for one in unpack_hashes(request.hashes)]
        assert hashes == [HASHES[block] for block in np.flatnonzero(owners == owners[HASHES.index(hashes[0])])]
        heads = [place for place, block_hash in enumerate(hashes) if block_hash in begins]
        assert [0, *unpack_u32(request.heads, name="heads")] == heads
    for daemon in house.daemons:
        watch = daemon.admin.Watch(pb.WatchRequest(snapshot=True), timeout=DEADLINE_S)
        event = next(watch)
        watch.cancel()
        there = unpack_hashes(event.hashes).tolist()
        told = zip(there, unpack_hashes(event.parents).tolist(), strict=True)
        assert {block_hash for block_hash, before in told if before == bytes(32)} == begins.intersection(there)


def test_a_run_within_a_chain_goes_where_its_chain_does(house: House, client: ClusterClient) -> None:
    """Covers: E6."""
    where, begin = segments(HASHES, block_tokens=KV.block_tokens), SEGMENT_BLOCKS + 7
    with client.store(HASHES[:begin]) as write:
        write.put_blocks(DATA[:begin])
    with client.store(HASHES[begin:], parent=HASHES[begin - 1], segments=where[begin:]) as write:
        assert write.num_new == NUM_BLOCKS - begin
        for part in range(KV.num_parts):
            first, size = KV.part_range(part)
            write.put(part, DATA[begin:, first : first + size])
    assert house.counts("blocks_committed") == np.bincount(house.owners()).tolist()
    chosen = [3, 70, 71, 500, 999]
    target = np.zeros((len(chosen), KV.block_bytes), np.uint8)
    picked = client.load([HASHES[i] for i in chosen], into=BlockRows(target), segments=where[chosen])
    assert picked.wait().num_loaded == len(chosen)
    assert (target == DATA[chosen]).all()
    assert client.match(HASHES[begin:], segments=where[begin:], lease="").num_found == NUM_BLOCKS - begin
    orphans = chain(200, of=KV, seed=2)
    theirs = segments(orphans, block_tokens=KV.block_tokens)[begin:]
    with client.store(orphans[begin:], parent=orphans[begin - 1], segments=theirs) as write:
        head = write.outcomes[: 2 * SEGMENT_BLOCKS - begin]
    assert head == [Outcome.ORPHAN] * len(head)
    with pytest.raises(InvalidRequest, match="segments"):
        client.store(HASHES[begin:], parent=HASHES[begin - 1])


def test_a_daemon_that_is_killed_costs_its_blocks_and_comes_back_without_a_new_client(
    house: House, client: ClusterClient
) -> None:
    """Covers: A15, D14."""
    store(client)
    lost = house.owners() == 1
    house.daemons[1].kill()
    match = client.match(HASHES)
    assert match.num_found == int(lost.argmax())
    match.release()
    target, part_load = load(client)
    assert sorted(part_load.errors) == np.flatnonzero(lost).tolist()
    assert all(isinstance(error, (BlockMissing, *AWAY)) for error in part_load.errors.values())
    assert (target[~lost] == DATA[~lost]).all()
    assert not target[lost].any()
    more = chain(NUM_BLOCKS, of=KV, seed=1)
    assert set(store(client, more)) == {Outcome.STORED}, "who is next takes its place"
    assert client.match(more, lease="").num_found == NUM_BLOCKS
    house.daemons[1].start()
    eventually(lambda: all_live(client))
    assert store(client) == [Outcome.STORED] * NUM_BLOCKS
    target, part_load = load(client)
    assert not part_load.errors
    assert (target == DATA).all()


def test_a_daemon_that_dies_during_a_load_or_a_write_costs_its_blocks(house: House, client: ClusterClient) -> None:
    """Covers: A15, D14."""
    lost = house.owners() == 2
    with client.store(HASHES) as write:
        write.put(0, DATA[:, :64])
        following = client.load(HASHES, into=[np.zeros((NUM_BLOCKS, 64), np.uint8) for _ in range(2)], follow=True)
        house.daemons[2].kill()
        write.put(1, DATA[:, 64:])
        outcomes = np.array(write.commit())
    assert (outcomes[lost] == Outcome.FAILED).all()
    assert (outcomes[~lost] == Outcome.STORED).all()
    result = following.wait()
    assert sorted(result.errors) == np.flatnonzero(lost).tolist()
    with pytest.raises(AWAY):
        following.wait_part(1)


def test_a_daemon_that_hangs_costs_its_blocks_and_no_call_waits_for_it_for_ever(house: House, stack: ExitStack) -> None:
    """Covers: A15, C1."""
    client = open_client(house, stack, breaker_failures=2)
    store(client)
    lost = house.owners() == 0
    more = chain(NUM_BLOCKS, of=KV, seed=1)
    with stopped(house.daemons[0]):
        assert client.match(HASHES, timeout_s=0.5).num_found == int(lost.argmax())
        target, part_load = load(client, timeout_s=0.5)
        assert {type(error) for error in part_load.errors.values()} == {StoreTimeout}
        assert sorted(part_load.errors) == np.flatnonzero(lost).tolist()
        assert (target[~lost] == DATA[~lost]).all()
        assert not client._links.current().links[0].live, "its breaker is open"
        with client.store(more, timeout_s=0.5) as write:
            write.put_blocks(rows(KV, more), timeout_s=0.5)
        assert set(write.outcomes) == {Outcome.STORED}, "who is next takes its place"
        client.release("client/1")
    eventually(lambda: client.match(HASHES, lease="", timeout_s=1.0).num_found == NUM_BLOCKS)


def test_a_daemon_that_hangs_during_a_write_costs_its_blocks(house: House, client: ClusterClient) -> None:
    lost = house.owners() == 0
    region = client.region(DATA.size)
    region.array[:] = DATA.ravel()
    write = client.store(HASHES)
    with stopped(house.daemons[0]):
        write.put_blocks(region.array.reshape(DATA.shape), timeout_s=1.0)
        outcomes = np.array(write.commit(timeout_s=1.0))
    assert (outcomes[lost] == Outcome.FAILED).all()
    assert (outcomes[~lost] == Outcome.STORED).all()


def test_a_member_that_joins_gets_its_share_and_one_that_leaves_is_left(
    house: House, client: ClusterClient, make_daemon: Callable[..., DaemonProcess]
) -> None:
    """Covers: D14."""
    house.daemons.append(make_daemon())
    house.tell()
    eventually(lambda: all_live(client, 4))
    store(client)
    shares = np.bincount(house.owners(num_nodes=4), minlength=4).tolist()
    assert house.counts("blocks_committed") == shares
    assert shares[3] > 0
    leaving = house.daemons[3]
    house.teller.tell([member(f"n{i}", each.stats().boot_id, each.address) for i, each in enumerate(house.daemons[:3])])
    eventually(lambda: not leaving.stats().sessions)
    assert client.match(HASHES, lease="").num_found == int((house.owners(num_nodes=4) == 3).argmax())


def test_a_member_that_is_draining_is_read_from_and_takes_nothing_in(house: House, client: ClusterClient) -> None:
    store(client)
    before = house.counts("blocks_committed")
    house.tell(draining=1)
    eventually(lambda: client._links.current().view.epoch == 2)
    more = chain(NUM_BLOCKS, of=KV, seed=1)
    assert store(client, more) == [Outcome.STORED] * NUM_BLOCKS
    assert house.counts("blocks_committed")[1] == before[1]
    assert client.match(HASHES, lease="").num_found == NUM_BLOCKS
    for _ in range(2):
        for hashes in (HASHES, more):  # those that it has, and those that it would have
            target, whole = load(client, hashes)
            assert not whole.errors
            assert (target == rows(KV, hashes)).all()
        assert client.match(more, lease="").num_found == NUM_BLOCKS
        store(client)  # what the one that is draining has goes to the others, too
    eventually(lambda: house.counts("blocks_leased") == [0, 0, 0])


def test_with_two_replicas_the_next_owner_stands_in_for_the_first(house: House, client: ClusterClient) -> None:
    house.tell(replicas=2)
    eventually(lambda: client._links.current().view.epoch == 2)
    house.daemons[0].kill()
    eventually(lambda: not client._links.current().links[0].live)
    assert store(client) == [Outcome.STORED] * NUM_BLOCKS
    assert client.match(HASHES, lease="").num_found == NUM_BLOCKS
    assert (load(client)[0] == DATA).all()


@pytest.fixture
def uneven(house: House, client: ClusterClient) -> IntArray:
    """`[NUM_BLOCKS]`: who keeps each block first, of two replicas. Of those, n0 has none of its, and is there."""
    house.tell(replicas=2)
    eventually(lambda: client._links.current().view.epoch == 2)
    house.daemons[0].kill()
    eventually(lambda: not client._links.current().links[0].live)
    store(client)
    house.daemons[0].start()
    house.tell(replicas=2)
    eventually(lambda: all_live(client))
    assert house.counts("blocks_committed")[0] == 0
    return house.owners()


def test_what_one_replica_lacks_is_found_with_the_other(
    house: House, client: ClusterClient, uneven: IntArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = owners_module.ask
    deadlines = []

    def noted(questions: Any, *, deadline: float) -> Any:
        deadlines.append(deadline)
        return ask(questions, deadline=deadline)

    with monkeypatch.context() as patch:
        patch.setattr(owners_module, "ask", noted)
        match = client.match(HASHES)
    assert len(set(deadlines)) == len(deadlines) >= 2, "each round leaves time for another"
    with match:
        assert match.num_found == NUM_BLOCKS
        assert sum(house.counts("blocks_leased")) == NUM_BLOCKS, "also those found in different rounds"
        with monkeypatch.context() as patch:
            patch.setattr(owners_module, "ask", None)  # where they are is known
            assert not load(client, match)[1].errors
        for blocks in (match, HASHES):
            target, whole = load(client, blocks)
            assert not whole.errors
            assert (target == DATA).all()
    eventually(lambda: house.counts("blocks_leased") == [0, 0, 0])
    assert client.prefetch(HASHES) == NUM_BLOCKS


def test_a_replica_that_hangs_costs_a_call_time_and_no_blocks(
    house: House, client: ClusterClient, uneven: IntArray
) -> None:
    """Covers: A15, D14."""
    store(client)  # now n0 has its blocks, too
    match = client.match(HASHES)
    assert house.counts("blocks_leased")[0] == int((uneven == 0).sum()), "it is asked first"
    with stopped(house.daemons[0]):
        assert client.match(HASHES, lease="", timeout_s=1.0).num_found == NUM_BLOCKS
        for blocks in (match, HASHES):
            target, whole = load(client, blocks, timeout_s=1.0)
            assert not whole.errors
            assert (target == DATA).all()


def test_what_a_member_brings_in_place_of_another_is_followed_beyond_the_end_of_what_it_brings_itself(
    house: House, client: ClusterClient
) -> None:
    """n1 is asked for `first`, and for `second` once n0, which is said to have it, hangs."""
    house.tell(replicas=2)
    eventually(lambda: client._links.current().view.epoch == 2)
    where = segments(HASHES, block_tokens=KV.block_tokens)
    ranked = Placement(dict.fromkeys(["n0", "n1", "n2"], 1.0)).owners(where, count=2)[::SEGMENT_BLOCKS].tolist()
    begins = [SEGMENT_BLOCKS * next(i for i, two in enumerate(ranked) if two[: len(of)] == of) for of in ([1], [0, 1])]
    first, second = (np.arange(begin, begin + SEGMENT_BLOCKS) for begin in begins)
    both = np.concatenate([first, second])
    house.daemons[0].kill()
    eventually(lambda: not client._links.current().links[0].live)
    writes = [client.store([HASHES[i] for i in blocks], segments=where[blocks]) for blocks in (first, second)]
    house.daemons[0].start()
    house.tell(replicas=2)
    eventually(lambda: all_live(client))
    n0, n1 = (link.channel.current for link in client._links.current().links[:2])
    assert n0 is not None
    assert n1 is not None
    match = Match(len(both), 0, 0, "", [HASHES[i] for i in both], [], {0: n1, SEGMENT_BLOCKS: n0})
    target = np.zeros_like(DATA[both])
    with stopped(house.daemons[0]):
        load = client.load(match, into=BlockRows(target), segments=where[both], follow=True, timeout_s=1.0)
    with writes[0] as write:
        write.put_blocks(DATA[first])
    eventually(lambda: (target[:SEGMENT_BLOCKS] == DATA[first]).all() and load._legs[0].load._released)
    with writes[1] as write:
        write.put_blocks(DATA[second])
    assert load.wait(2.0).num_loaded == len(both)
    assert (target == DATA[both]).all()


def test_views_are_in_place_and_leases_are_given_back_everywhere(house: House, client: ClusterClient) -> None:
    """Covers: C1."""
    store(client)
    with client.match(HASHES, lease="mine") as match:
        assert sum(house.counts("blocks_leased")) == NUM_BLOCKS
        with client.load(match, view=True) as load:
            assert load.wait().num_loaded == NUM_BLOCKS
            for block in range(0, NUM_BLOCKS, 37):
                assert bytes(load.view(block, 1)) == bytes(DATA[block, 64:])
            load.check()
            with pytest.raises(InvalidRequest):
                load.view(NUM_BLOCKS, 0)
    eventually(lambda: house.counts("blocks_leased") == [0, 0, 0])
    client.match(HASHES, lease="mine")
    client.release("mine")
    assert house.counts("blocks_leased") == [0, 0, 0]
    client.match(HASHES, lease="mine")
    with client.match(HASHES[:5], lease="mine"):
        eventually(lambda: sum(house.counts("blocks_leased")) == 5, "what it held is replaced with all members")
    eventually(lambda: house.counts("blocks_leased") == [0, 0, 0])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("known", [True, False], ids=["of a match", "of hashes"])
def test_a_follower_gets_each_part_as_it_arrives_with_any_owner(
    house: House, client: ClusterClient, known: bool, replicas: int
) -> None:
    house.tell(replicas=replicas)
    eventually(lambda: client._links.current().view.epoch == 2)
    target = [np.zeros((NUM_BLOCKS, 64), np.uint8) for _ in range(2)]
    with client.store(HASHES) as write:
        match = client.match(HASHES)
        assert (match.num_blocks, match.num_writing) == (0, NUM_BLOCKS)
        following = client.load(match if known else HASHES, into=target, follow=True)
        write.put(0, DATA[:, :64])
        following.wait_part(0)
        assert (target[0] == DATA[:, :64]).all()
        assert not target[1].any()
        write.put(1, DATA[:, 64:])
    assert following.wait().num_loaded == NUM_BLOCKS
    assert (target[1] == DATA[:, 64:]).all()


def test_a_write_that_is_aborted_is_given_up_everywhere(house: House, client: ClusterClient) -> None:
    with client.store(HASHES) as write:
        write.put(0, DATA[:, :64])
        with pytest.raises(InvalidRequest, match="once"):
            write.put(0, DATA[:, :64])
        write.abort()
    assert house.counts("blocks_writing") == [0, 0, 0]
    with pytest.raises(InvalidRequest, match="aborted"):
        write.commit()


def test_a_region_is_one_memory_for_all_members_also_after_a_restart(house: House, client: ClusterClient) -> None:
    with client.region(DATA.size) as region:
        region.array[:] = DATA.ravel()
        source = region.array.reshape(DATA.shape)
        for _ in range(2):
            with client.store(HASHES) as write:
                write.put_blocks(source)
            assert write.outcomes == [Outcome.STORED] * NUM_BLOCKS
            assert client._shared.regions._open == [region], "nothing went through staging"
            assert (load(client)[0] == DATA).all()
            house.daemons[0].kill()
            house.daemons[0].start()
            eventually(lambda: all_live(client))
    assert [len(each.stats().sessions) for each in house.daemons] == [1, 1, 1]
    eventually(lambda: not any(each.stats().sessions[0].region_bytes for each in house.daemons))


def test_verify_asks_every_member(client: ClusterClient) -> None:
    store(client)
    unknown = chain(2, of=KV, seed=5)
    wrong = client.verify([unknown[0], *HASHES[::100], unknown[1]])
    assert list(wrong) == [0, 11]
    assert all(isinstance(error, BlockMissing) for error in wrong.values())


def test_a_store_with_members_that_have_changed_is_tried_again_with_the_new(
    house: House,
    client: ClusterClient,
    make_daemon: Callable[..., DaemonProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The daemons here know nothing of epochs, so one is made to seem to refuse, and the teller asked in its place."""
    house.daemons.append(make_daemon())
    ask, ask_members = owners_module.ask, Members.ask
    asked: list[int] = []

    def refused(questions: Any, *, deadline: float) -> Any:
        answers = ask(questions, deadline=deadline)
        if not asked:
            abort = pb.Abort(write_id=answers[0].message.reserved.write_id)
            answers[0].session.call(pb.ClientMessage(abort=abort), deadline=deadline)
            answers[0] = MembersChanged("others")
            house.tell()
        asked.append(questions[0].message.store.epoch)
        return answers

    def from_teller(self: Members, address: str, *, deadline: float) -> None:
        ask_members(self, house.teller.address, deadline=deadline)

    monkeypatch.setattr(owners_module, "ask", refused)
    monkeypatch.setattr(Members, "ask", from_teller)
    assert store(client) == [Outcome.STORED] * NUM_BLOCKS
    assert asked == [1, 2]
    assert house.counts("blocks_committed") == np.bincount(house.owners(num_nodes=4)).tolist()


def test_without_any_daemon_calls_fail_at_once_and_it_connects_when_one_is_there(
    house: House, stack: ExitStack
) -> None:
    """Covers: D12."""
    seed = house.daemons[0]
    seed.kill()
    client = connect(f"kvstore://{seed.address}", KV, options=ClientOptions(timeout_s=DEADLINE_S))
    stack.enter_context(closing(client))
    with pytest.raises(StoreUnavailable, match="no member answers"):
        client.match(HASHES)
    seed.start()
    client.wait_ready(DEADLINE_S)  # a daemon by itself is a store of one member
    with client.store(HASHES[:10]) as write:
        write.put_blocks(DATA[:10])
    assert client.match(HASHES, lease="").num_found == 10
    client.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        client.match(HASHES)


def test_a_client_is_ready_once_any_of_the_members_is_there(house: House, stack: ExitStack) -> None:
    for daemon in house.daemons:
        daemon.kill()
    client = connect(house.address, KV, options=ClientOptions(timeout_s=DEADLINE_S))
    stack.enter_context(closing(client))
    with pytest.raises(StoreUnavailable):
        client.wait_ready(0.3)
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(client.wait_ready, DEADLINE_S)
        house.daemons[2].start()
        ready.result()
    assert client.connected


def test_a_member_with_the_path_of_another_one_is_not_taken_for_it(house: House, stack: ExitStack) -> None:
    first, second = house.daemons[:2]
    house.teller.tell(
        [
            member("n0", first.stats().boot_id, first.address),
            member("n1", second.stats().boot_id, "", addresses=[first.address, second.address]),
        ]
    )
    client = open_client(house, stack)
    assert [link.channel.address for link in client._links.current().links] == [first.address, second.address]


def test_addresses_that_are_none_are_refused() -> None:
    for address in ("kvstore://", "kvstore://a:1,,b:1", "kvstore://a"):
        with pytest.raises(InvalidRequest, match="kvstore://"):
            connect(address, KV)


def test_a_daemon_that_stands_alone_does_not_take_the_place_of_the_members(
    house: House, client: ClusterClient, caplog: pytest.LogCaptureFixture
) -> None:
    store(client)
    house.teller.close()
    eventually(lambda: all(each.address in caplog.text for each in house.daemons), "all are asked in its place")
    assert "stands alone" in caplog.text
    assert client.match(HASHES, lease="").num_found == NUM_BLOCKS


def test_a_daemon_that_hangs_while_a_client_starts_costs_its_blocks(house: House, stack: ExitStack) -> None:
    """Covers: D10."""
    store(open_client(house, stack))
    lost = house.owners() == 0
    with stopped(house.daemons[0]):
        late = connect(house.address, KV, options=ClientOptions(timeout_s=2.0))
        stack.enter_context(closing(late))
        assert isinstance(late, ClusterClient)
        target, whole = load(late)
        assert sorted(whole.errors) == np.flatnonzero(lost).tolist()
        assert (target[~lost] == DATA[~lost]).all()
