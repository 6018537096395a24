"""Two hosts, in network namespaces with a link between them: it carries, is slow, loses packets, is cut and comes back.

Needs root, `ip` and TUN devices. The daemon is in one namespace, clients in the other; what is asked over the daemon's
unix socket comes from the test.
"""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, NO_UCX, Child, DaemonProcess, RawStream, eventually, store
from service.link import Quality
from service.puppet import Puppet

from kvstore.types import ByteArray
from kvstore_client import BlockRows, KVClient, Outcome

HAS_HOSTS = os.geteuid() == 0 and shutil.which("ip") and os.path.exists("/dev/net/tun")
pytestmark = [
    pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX),
    pytest.mark.skipif(not HAS_HOSTS, reason="needs root, ip and /dev/net/tun"),
    pytest.mark.slow,
]

FIELDS: dict[str, Any] = {"layers": 2, "bytes_per_part": 256 << 10}
KV = spec(**FIELDS)
LENGTH = 8
LINK = Path(__file__).with_name("link.py")
_numbers = itertools.count()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Hosts:
    """Namespaces `server` and `engine`, with the devices s0 (10.77.0.1) and e0 (10.77.0.2) at the ends of a link."""

    def __init__(self) -> None:
        number = f"{os.getpid()}-{next(_numbers)}"
        self.server, self.engine = f"kv-s-{number}", f"kv-e-{number}"

    def __enter__(self) -> "Hosts":
        for name in (self.server, self.engine):
            self._boot(name)
        command = [sys.executable, str(LINK), self.server, self.engine]
        self._link = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._hear("ready")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._link.communicate(timeout=DEADLINE_S)
        for name in (self.server, self.engine):
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)

    def restart_engine(self) -> None:
        """Another host has its name and address; nobody heard a word of the old one's end."""
        run("ip", "netns", "del", self.engine)
        self._boot(self.engine)
        self._tell("renew")

    def _boot(self, name: str) -> None:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")

    def shape(self, quality: Quality) -> None:
        """The link is so from now on, in both directions."""
        self._tell(json.dumps(dataclasses.asdict(quality)))

    def cut(self) -> None:
        self.shape(Quality(loss=1.0))

    def mend(self) -> None:
        self.shape(Quality())

    def _tell(self, line: str) -> None:
        assert self._link.stdin is not None
        self._link.stdin.write(line + "\n")
        self._link.stdin.flush()
        self._hear("told")

    def _hear(self, word: str) -> None:
        assert self._link.stdout is not None
        assert self._link.stdout.readline().strip() == word, "the link has ended"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as hosts:
        yield hosts


@pytest.fixture
def transport() -> str:
    return "ucx"


@pytest.fixture
def make_remote(hosts: Hosts, make_daemon: Callable[..., DaemonProcess]) -> Callable[..., DaemonProcess]:
    """Starts a daemon on the host `server`."""
    listening = {"tcp_host": "10.77.0.1", "tcp_port": 7311, "ucx_device": "s0"}
    return lambda **flags: make_daemon(prefix=("ip", "netns", "exec", hosts.server), **listening, **flags)


@pytest.fixture
def remote(make_remote: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_remote(heartbeat_s=1.0)


@pytest.fixture
def engine(hosts: Hosts, child: Callable[..., Child]) -> Callable[..., Child]:
    """A client on the host `engine`."""
    prefix = ("ip", "netns", "exec", hosts.engine)
    return lambda scenario, **more: child(
        scenario, prefix=prefix, address="10.77.0.1:7311", fields=FIELDS, length=LENGTH, **more
    )


def test_what_one_host_stores_another_loads(remote: DaemonProcess, engine: Callable[..., Child]) -> None:
    """Covers: G3."""
    assert engine("round_trip", seed=1).step() == "stored 8 loaded 8 wrong 0"
    assert engine("round_trip", seed=1).step() == "stored 8 loaded 8 wrong 0"
    assert remote.stats().counters.blocks_stored == LENGTH


def loaded(client: KVClient, hashes: list) -> ByteArray:
    target = np.zeros((len(hashes), KV.block_bytes), np.uint8)
    assert not client.load(hashes, into=BlockRows(target)).wait().errors
    return target


BAD = {
    "200 Mbit/s": Quality(bytes_per_s=25e6),
    "50 ms": Quality(delay_s=0.05),
    "1 % loss": Quality(loss=0.01),
}


@pytest.mark.parametrize("quality", BAD.values(), ids=BAD)
def test_over_a_bad_link_the_bytes_are_right_and_others_are_served_meanwhile(
    hosts: Hosts,
    remote: DaemonProcess,
    engine: Callable[..., Child],
    connect: Callable[..., KVClient],
    quality: Quality,
) -> None:
    """Covers: A22, D10."""
    hosts.shape(quality)
    busy = engine("round_trips")
    assert busy.step() == "ready"
    busy.go_on()
    local = connect(remote, KV, transport="shm")
    moved = eventually(lambda: remote.stats().counters.blocks_stored)

    for seed in range(100, 104):
        hashes = chain(LENGTH, of=KV, seed=seed)
        assert store(local, hashes) == [Outcome.STORED] * LENGTH
        assert (loaded(local, hashes) == rows(KV, hashes)).all()

    eventually(lambda: remote.stats().counters.blocks_stored >= moved + 6 * LENGTH, "the other still moves bytes")
    busy.go_on()
    num_rounds, wrong = busy.step().split()
    assert int(num_rounds) > 0
    assert wrong == "0"


def test_over_a_long_link_a_deadline_is_kept_and_the_next_call_is_served(
    hosts: Hosts, remote: DaemonProcess, engine: Callable[..., Child]
) -> None:
    """Covers: B1. A request takes 100 ms there and back: it cannot be answered in 50."""
    assert engine("round_trip", seed=1).step() == "stored 8 loaded 8 wrong 0"
    hosts.shape(Quality(delay_s=0.05))
    assert engine("hurried", timeout_s=0.05).step() == "load StoreTimeout store StoreTimeout then 8 wrong 0"


def test_a_link_that_is_cut_fails_what_is_under_way_and_is_used_again_when_it_is_back(
    hosts: Hosts, remote: DaemonProcess, engine: Callable[..., Child], connect: Callable[..., KVClient]
) -> None:
    """Covers: A22, D10."""
    local = connect(remote, KV, transport="shm")
    store(local, chain(LENGTH, of=KV))
    hosts.shape(Quality(bytes_per_s=50e6))
    reader = engine("load_until_cut")
    assert reader.step() == "ready"
    reader.go_on()
    eventually(lambda: remote.stats().counters.blocks_loaded > 2 * LENGTH)

    hosts.cut()

    assert reader.step() == "cut wrong 0"
    eventually(lambda: len(remote.stats().sessions) == 1, "the daemon has ended its session")
    hosts.mend()
    reader.go_on()
    assert reader.step() == "again 8 wrong 0"
    reader.kill()


def test_a_process_that_takes_over_port_and_address_of_a_dead_one_is_neither_written_to_nor_stored_from(
    hosts: Hosts,
    make_remote: Callable[..., DaemonProcess],
    connect: Callable[..., KVClient],
    raw: Callable[..., RawStream],
    child: Callable[..., Child],
) -> None:
    """Covers: A3, A19. The daemon still knows the dead one, whose session is as it was."""
    remote = make_remote(heartbeat_s=10.0)
    in_engine = ("ip", "netns", "exec", hosts.engine)
    local = connect(remote, KV, transport="shm")
    known, new = chain(LENGTH, of=KV), chain(LENGTH, of=KV, seed=1)
    store(local, known)
    size_bytes = LENGTH * KV.block_bytes
    same = {"number": 1, "size_bytes": size_bytes, "at": 0x6000_0000_0000, "device": "e0", "ports": "7400-7400"}

    def puppet(filled: int) -> Puppet:
        peer = child("agent", prefix=in_engine, filled=filled, **same)
        peer.step()
        return Puppet(raw(remote, KV), peer, KV, length=LENGTH)

    dead = puppet(filled=7)
    hosts.restart_engine()
    dead.peer.kill()
    heir = puppet(filled=5)
    dead.load(known)
    dead.store(new)

    assert dead.stream.end().code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: remote.stats().blocks_writing == remote.stats().blocks_leased == 0)
    heir.peer.go_on()
    assert heir.peer.step() == str(size_bytes), "it still holds what it wrote"
    assert local.match(new, lease="").num_blocks == 0


def test_a_client_that_finds_the_link_cut_is_served_within_two_heartbeats_of_its_return(
    hosts: Hosts,
    make_remote: Callable[..., DaemonProcess],
    connect: Callable[..., KVClient],
    engine: Callable[..., Child],
) -> None:
    """Covers: D10. Nothing answers, not even with a refusal: each attempt must end by itself."""
    remote = make_remote(heartbeat_s=10.0)
    store(connect(remote, KV, transport="shm"), chain(LENGTH, of=KV, seed=1))
    hosts.cut()
    client = engine("late", timeout_s=20.0)
    said = client.step()
    assert said.startswith("StoreUnavailable"), said
    assert "no welcome within 3 s" in said, said
    hosts.mend()
    client.go_on()
    assert client.step() == "loaded 8 wrong 0"


def test_a_client_that_cannot_be_reached_by_ucx_is_told_so_when_it_stores(
    hosts: Hosts, remote: DaemonProcess, engine: Callable[..., Child]
) -> None:
    """Covers: D10, G3. Its device is one that the daemon has no way to."""
    run("ip", "-n", hosts.engine, "link", "add", "d0", "type", "veth", "peer", "name", "d1")
    run("ip", "-n", hosts.engine, "link", "set", "d1", "up")
    run("ip", "-n", hosts.engine, "address", "add", "10.99.0.1/24", "dev", "d0")
    run("ip", "-n", hosts.engine, "link", "set", "d0", "up")
    said = engine("round_trip", seed=1, ucx_device="d0").step()
    assert said.startswith("StoreUnavailable"), said
    assert "ucx" in said
    assert engine("round_trip", seed=1).step() == "stored 8 loaded 8 wrong 0"
