"""Peers of another host that stop or die in mid-transfer: no byte is wrong, and nothing is kept for ever."""

import contextlib
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import NO_UCX, Child, DaemonProcess, RawStream, eventually, store
from service.puppet import Puppet

from kvstore.types import ByteArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockRows, KVClient, Outcome, StoreTimeout, StoreUnavailable

pytestmark = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)

FIELDS: dict[str, Any] = {"layers": 2, "bytes_per_part": 512 << 10}
KV = spec(**FIELDS)
HASHES = chain(4, of=KV)
DATA = rows(KV, HASHES)
ADDRESS = 0x6000_0000_0000  # where no process has anything

Connect = Callable[..., KVClient]
MakeDaemon = Callable[..., DaemonProcess]
MakeChild = Callable[..., Child]
Raw = Callable[..., RawStream]


@pytest.fixture
def transport() -> str:
    return "ucx"


def puppet(daemon: DaemonProcess, raw: Raw, child: MakeChild, **agent: Any) -> Puppet:
    """A session with a region of 4 blocks, full of 7s."""
    peer = child("agent", **{"size_bytes": DATA.size, "number": 1} | agent)
    peer.step()  # it has started, which can take longer than a session may be silent
    return Puppet(raw(daemon, KV), peer, KV, length=4)


def stopped(daemon: DaemonProcess, raw: Raw, child: MakeChild) -> Puppet:
    """One whose agent's process is stopped: what is asked for does not come, or is not taken."""
    session = puppet(daemon, raw, child)
    session.peer.send(signal.SIGSTOP)
    return session


def loaded(client: KVClient, hashes: list) -> ByteArray:
    target = np.zeros((len(hashes), KV.block_bytes), np.uint8)
    assert not client.load(hashes, into=BlockRows(target)).wait().errors
    return target


def fill(client: KVClient) -> list[int]:
    """As many chains of one block as there is room for are stored; their seeds."""
    seeds = []
    for seed in range(100, 140):
        if store(client, chain(1, of=KV, seed=seed)) == [Outcome.FULL]:
            break
        client.match(chain(1, of=KV, seed=seed), lease=f"kept {seed}")
        seeds.append(seed)
    return seeds


def test_slots_that_a_stopped_client_may_still_fill_are_not_used_for_others_until_it_goes_on_or_dies(
    make_daemon: MakeDaemon, connect: Connect, raw: Raw, child: MakeChild
) -> None:
    """Covers: A19, A22. What was asked of a peer cannot be taken back: the answer comes whenever the peer goes on."""
    daemon = make_daemon(heartbeat_s=1.0, cpu_capacity="12MiB", slab_bytes="3MiB")
    client = connect(daemon, KV, transport="shm")
    session = stopped(daemon, raw, child)
    session.store(chain(4, of=KV, seed=1))

    assert session.stream.end().code() is grpc.StatusCode.UNAVAILABLE  # silent, and stuck: whichever comes first
    eventually(lambda: daemon.stats().blocks_writing == 0, "the session is over, and its blocks are given up")
    eventually(lambda: len(daemon.stats().sessions) == 1)

    seeds = fill(client)
    assert 0 < len(seeds) <= 4, "slots that may be written to were given to others"
    session.peer.send(signal.SIGCONT)
    eventually(lambda: store(client, chain(1, of=KV, seed=99)) != [Outcome.FULL], "the slots came back")
    for seed in seeds:
        hashes = chain(1, of=KV, seed=seed)
        assert (loaded(client, hashes) == rows(KV, hashes)).all()
    assert len(fill(client)) <= 8


def test_blocks_on_their_way_to_a_stopped_client_are_not_evicted_before_it_dies(
    make_daemon: MakeDaemon, connect: Connect, raw: Raw, child: MakeChild
) -> None:
    """Covers: A19. What a peer did not take in is sent when it goes on, from wherever it lay."""
    daemon = make_daemon(heartbeat_s=1.0, cpu_capacity="12MiB", slab_bytes="3MiB")
    client = connect(daemon, KV, transport="shm")
    store(client, HASHES)
    session = stopped(daemon, raw, child)
    session.load(HASHES)
    assert session.stream.end().code() is grpc.StatusCode.UNAVAILABLE  # silent, and stuck: whichever comes first
    eventually(lambda: len(daemon.stats().sessions) == 1)
    assert daemon.stats().blocks_leased == 4, "they are still being sent"
    fill(client)
    assert client.match(HASHES, lease="").num_blocks == 4

    session.peer.kill()

    eventually(lambda: store(client, chain(1, of=KV, seed=99)) != [Outcome.FULL], "their room can be used")


def test_what_is_under_way_with_a_stopped_client_is_bounded_whatever_it_asked_for(
    make_daemon: MakeDaemon, connect: Connect, raw: Raw, child: MakeChild
) -> None:
    """Covers: C7. Of 48 MiB that it asked to have read, 16 are."""
    daemon = make_daemon(heartbeat_s=1.0, slab_bytes="16MiB")
    client = connect(daemon, KV, transport="shm")
    session = stopped(daemon, raw, child)
    for seed in range(1, 13):
        session.store(chain(4, of=KV, seed=seed))
    assert daemon.stats().blocks_writing == 48
    assert session.stream.end().code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: (len(daemon.stats().sessions), daemon.stats().blocks_writing) == (1, 0))
    assert len(fill(client)) == 40, "as many as it tries, of 64 MiB"


@pytest.mark.parametrize("scenario", ["load_large", "store_large"])
def test_a_client_killed_in_mid_transfer_holds_nothing_any_more(
    make_daemon: MakeDaemon, connect: Connect, child: MakeChild, scenario: str
) -> None:
    """Covers: A19, C9."""
    daemon = make_daemon(cpu_capacity="32MiB", slab_bytes="3MiB")
    client = connect(daemon, KV)
    store(client, HASHES)
    client.match(HASHES, lease="kept")  # what is stored now would evict it
    moved = daemon.stats().counters
    busy = child(scenario, address=daemon.address, fields=FIELDS, length=4)
    busy.step()
    busy.go_on()
    eventually(
        lambda: (
            daemon.stats().counters.blocks_loaded > moved.blocks_loaded + 8
            or daemon.stats().counters.blocks_stored > moved.blocks_stored + 8
        )
    )

    busy.kill()

    eventually(lambda: len(daemon.stats().sessions) == 1)
    eventually(lambda: (daemon.stats().blocks_leased, daemon.stats().blocks_writing) == (4, 0))
    assert (loaded(client, HASHES) == DATA).all()


@pytest.mark.parametrize("when", ["before any transfer", "in mid-transfer"])
@pytest.mark.parametrize("name", ["another name", "the same name"])
def test_a_process_that_takes_over_the_address_of_a_dead_one_is_neither_written_to_nor_stored_from(
    daemon: DaemonProcess, connect: Connect, raw: Raw, child: MakeChild, when: str, name: str
) -> None:
    """Covers: A3, A19. The daemon still knows the dead one, whose session is as it was."""
    client = connect(daemon, KV, transport="shm")
    store(client, HASHES)
    new = chain(4, of=KV, seed=1)
    dead = puppet(daemon, raw, child, at=ADDRESS)
    if when == "in mid-transfer":
        dead.peer.send(signal.SIGSTOP)
        dead.load(HASHES)
        dead.store(new)
    dead.peer.kill()
    if name == "the same name":
        heir = child("agent", size_bytes=DATA.size, number=1, filled=5, at=ADDRESS)
        heir.step()
        heir.go_on(dead.name)
        heir.step()
    else:
        heir = puppet(daemon, raw, child, filled=5, at=ADDRESS).peer

    if when == "before any transfer":
        dead.load(HASHES)
        dead.store(new)

    assert dead.stream.end().code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: daemon.stats().blocks_writing == daemon.stats().blocks_leased == 0)
    heir.go_on()
    assert heir.step() == str(DATA.size), "it still holds what it wrote"
    assert client.match(new, lease="").num_blocks == 0
    assert (loaded(client, HASHES) == DATA).all()


@pytest.mark.parametrize("target", ["staging", "region"])
def test_nothing_is_written_after_a_load_timed_out_because_the_daemon_stopped(
    daemon: DaemonProcess, connect: Connect, target: str
) -> None:
    """Covers: A3, A19."""
    client = connect(daemon, KV)
    store(client, HASHES)
    region = client.region(DATA.size)
    rows_of = region.array if target == "region" else np.zeros(DATA.size, np.uint8)
    into = BlockRows(rows_of.reshape(4, -1))
    assert client.load(HASHES, into=into).wait().num_loaded == 4
    loads = []
    for _ in range(3):
        loads.append(client.load(HASHES, into=into))
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        for load in loads:
            with contextlib.suppress(StoreTimeout, StoreUnavailable):
                load.wait(timeout_s=0.2)
        rows_of[:] = 99
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    client.wait_ready(20)
    eventually(lambda: client.connected and client.match(HASHES, lease="").num_blocks == 4)
    assert (rows_of == 99).all()
    assert (loaded(client, HASHES) == DATA).all()


def test_a_daemon_killed_in_mid_load_fails_it_and_the_next_session_has_another_name(
    make_daemon: MakeDaemon, connect: Connect
) -> None:
    """Covers: A3, D10. It is there within two heartbeats."""
    daemon = make_daemon(heartbeat_s=5.0)
    client = connect(daemon, KV)
    store(client, HASHES)
    before = client._link.channel.current
    assert before is not None
    target = np.zeros_like(DATA)
    loads = [client.load(HASHES, into=BlockRows(target)) for _ in range(4)]

    daemon.kill()

    for load in loads:
        try:
            assert load.wait().num_loaded == 4
            assert (target == DATA).all()
        except StoreUnavailable:
            pass
    daemon.start()
    client.wait_ready(10)
    after = client._link.channel.current
    assert after is not None
    assert after.agent_name != before.agent_name
    assert store(client, HASHES) == [Outcome.STORED] * 4
    assert (loaded(client, HASHES) == DATA).all()


def test_a_client_that_waits_for_its_regions_to_be_registered_is_not_taken_for_dead(
    make_daemon: MakeDaemon, connect: Connect, raw: Raw, child: MakeChild
) -> None:
    """Covers: D11. One that is out of reach is tried first, which takes longer than a session may be silent."""
    daemon = make_daemon(heartbeat_s=0.7)
    client = connect(daemon, KV)
    region = client.region(DATA.size)
    peer = child("agent", size_bytes=4096, number=1)
    peer.step()
    stream = raw(daemon, KV)
    peer.go_on(stream.welcome.ucx.agent_name)  # type: ignore[attr-defined]
    address, metadata = json.loads(peer.step())
    peer.send(signal.SIGSTOP)
    told = {"region": 1, "size_bytes": 4096, "address": address, "metadata": bytes.fromhex(metadata)}
    stream.start(register_region=pb.RegisterRegion(**told))
    session = client._link.channel.current
    assert session is not None

    session.end(StoreUnavailable("its link was cut"))

    eventually(lambda: client.statistics().reconnects)
    assert store(client, HASHES) == [Outcome.STORED] * 4
    into = region.array.reshape(4, -1)
    assert client.load(HASHES, into=BlockRows(into)).wait().num_loaded == 4
    assert (into == DATA).all()
    assert (client.statistics().reconnects, daemon.stats().counters.sessions_opened) == (1, 3)
