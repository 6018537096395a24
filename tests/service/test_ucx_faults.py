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

from kvstore.hashing import pack
from kvstore.types import ByteArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import pack_u32, pack_u64
from kvstore_client import BlockRows, KVClient, Outcome, StoreTimeout, StoreUnavailable

pytestmark = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)

FIELDS: dict[str, Any] = {"layers": 2, "bytes_per_part": 512 << 10}
KV = spec(**FIELDS)
HASHES = chain(4, of=KV)
DATA = rows(KV, HASHES)

Connect = Callable[..., KVClient]
MakeDaemon = Callable[..., DaemonProcess]
MakeChild = Callable[..., Child]
Raw = Callable[..., RawStream]


@pytest.fixture
def transport() -> str:
    return "ucx"


class Stopped:
    """A session whose agent, in a process of its own, is stopped; its region of 4 blocks is full of 7s."""

    def __init__(self, daemon: DaemonProcess, raw: Raw, child: MakeChild) -> None:
        self.stream = raw(daemon, KV)
        name = self.stream.welcome.ucx.agent_name  # type: ignore[attr-defined]
        self.peer = child("agent", name=name, size_bytes=DATA.size, number=1)
        address, metadata = json.loads(self.peer.step())
        region = pb.RegisterRegion(region=1, size_bytes=DATA.size, address=address, metadata=bytes.fromhex(metadata))
        assert self.stream.ask(register_region=region).status.code == 0
        self.peer.send(signal.SIGSTOP)

    def store(self, seed: int) -> None:
        """Four blocks are being read from the region, and do not come."""
        reserved = self.stream.ask(store=pb.Store_(hashes=pack(chain(4, of=KV, seed=seed)))).reserved
        offsets = np.arange(8, dtype=np.int64) * (512 << 10)
        grid = {"blocks": pack_u32(range(4)), "parts": pack_u32([0, 1]), "offsets": pack_u64(offsets)}
        self.stream.start(store_part=pb.StorePart(write_id=reserved.write_id, region=1, **grid))

    def load(self) -> None:
        """Blocks are being written to the region, and are not taken."""
        located = self.stream.ask(load=pb.Load(hashes=pack(HASHES), lease="a")).located
        offsets = pack_u64(np.arange(8, dtype=np.int64) * (512 << 10))
        fetch = pb.Fetch(hashes=pack(HASHES), generations=located.generations, region=1, offsets=offsets)
        fetch.parts = pack_u32([0, 1])
        self.stream.start(fetch=fetch)
        self.stream.ask(release=pb.Release(lease="a"))  # so that they are leased for their transfer only

    def go_on(self) -> None:
        self.peer.send(signal.SIGCONT)


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
    daemon = make_daemon(heartbeat_s=0.5, cpu_capacity="12MiB", slab_bytes="3MiB")
    client = connect(daemon, KV, transport="shm")
    stopped = Stopped(daemon, raw, child)
    stopped.store(seed=1)

    assert stopped.stream.end().code() is grpc.StatusCode.UNAVAILABLE  # silent, and stuck: whichever comes first
    eventually(lambda: daemon.stats().blocks_writing == 0, "the session is over, and its blocks are given up")
    eventually(lambda: len(daemon.stats().sessions) == 1)

    seeds = fill(client)
    assert 0 < len(seeds) <= 4, "slots that may be written to were given to others"
    stopped.go_on()
    eventually(lambda: store(client, chain(1, of=KV, seed=99)) != [Outcome.FULL], "the slots came back")
    for seed in seeds:
        hashes = chain(1, of=KV, seed=seed)
        assert (loaded(client, hashes) == rows(KV, hashes)).all()
    assert len(fill(client)) <= 8


def test_blocks_on_their_way_to_a_stopped_client_are_not_evicted_before_it_dies(
    make_daemon: MakeDaemon, connect: Connect, raw: Raw, child: MakeChild
) -> None:
    """Covers: A19. What a peer did not take in is sent when it goes on, from wherever it lay."""
    daemon = make_daemon(heartbeat_s=0.5, cpu_capacity="12MiB", slab_bytes="3MiB")
    client = connect(daemon, KV, transport="shm")
    store(client, HASHES)
    stopped = Stopped(daemon, raw, child)
    stopped.load()
    assert stopped.stream.end().code() is grpc.StatusCode.UNAVAILABLE  # silent, and stuck: whichever comes first
    eventually(lambda: len(daemon.stats().sessions) == 1)
    assert daemon.stats().blocks_leased == 4, "they are still being sent"
    fill(client)
    assert client.match(HASHES, lease="").num_blocks == 4

    stopped.peer.kill()

    eventually(lambda: store(client, chain(1, of=KV, seed=99)) != [Outcome.FULL], "their room can be used")


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
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Covers: A3, D10."""
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
    client.wait_ready(20)
    after = client._link.channel.current
    assert after is not None
    assert after.agent_name != before.agent_name
    assert store(client, HASHES) == [Outcome.STORED] * 4
    assert (loaded(client, HASHES) == DATA).all()
