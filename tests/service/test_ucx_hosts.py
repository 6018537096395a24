"""Two hosts, in network namespaces with a link between them: it carries, is slow, loses packets, is cut and comes back.

Needs root and `ip`. The daemon is in one namespace, clients in the other; what is asked over the daemon's unix socket
comes from the test.
"""

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builders import chain, spec
from service.harness import NO_UCX, Child, DaemonProcess, eventually, store

from kvstore_client import KVClient

NO_HOSTS = "" if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc") else "needs root, ip and tc"
pytestmark = [
    pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX),
    pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS),
    pytest.mark.slow,
]

FIELDS: dict[str, Any] = {"layers": 2, "bytes_per_part": 256 << 10}
KV = spec(**FIELDS)
LENGTH = 8
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
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", self.server, "link", "add", "s0", "type", "veth", "peer", "name", "e0", "netns", self.engine)
        for name, device, address in ((self.server, "s0", "10.77.0.1/24"), (self.engine, "e0", "10.77.0.2/24")):
            run("ip", "-n", name, "address", "add", address, "dev", device)
            run("ip", "-n", name, "link", "set", device, "up")
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in (self.server, self.engine):
            subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)

    def shape(self, *how: str) -> None:
        """Both ends of the link send so; skips the test where the kernel cannot."""
        for name, device in ((self.server, "s0"), (self.engine, "e0")):
            try:
                run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", *how)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"tc {how[0]}: {error.stderr.strip()}")

    def cut(self) -> None:
        run("ip", "-n", self.engine, "link", "set", "e0", "down")

    def mend(self) -> None:
        run("ip", "-n", self.engine, "link", "set", "e0", "up")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts() as hosts:
        yield hosts


@pytest.fixture
def transport() -> str:
    return "ucx"


@pytest.fixture
def remote(hosts: Hosts, make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """The daemon on the host `server`."""
    listening = {"tcp_host": "10.77.0.1", "tcp_port": 7311, "ucx_device": "s0"}
    return make_daemon(prefix=("ip", "netns", "exec", hosts.server), heartbeat_s=1.0, **listening)


@pytest.fixture
def engine(hosts: Hosts, remote: DaemonProcess, child: Callable[..., Child]) -> Callable[..., Child]:
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


@pytest.mark.parametrize(
    "how",
    [
        ("tbf", "rate", "200mbit", "burst", "256k", "latency", "50ms"),
        ("netem", "delay", "50ms"),
        ("netem", "loss", "1%"),
    ],
    ids=["200 Mbit/s", "50 ms", "1 % loss"],
)
def test_over_a_bad_link_the_bytes_are_right(
    hosts: Hosts, remote: DaemonProcess, engine: Callable[..., Child], how: tuple[str, ...]
) -> None:
    hosts.shape(*how)
    assert engine("round_trip", seed=1).step() == "stored 8 loaded 8 wrong 0"


def test_a_link_that_is_cut_fails_what_is_under_way_and_is_used_again_when_it_is_back(
    hosts: Hosts, remote: DaemonProcess, engine: Callable[..., Child], connect: Callable[..., KVClient]
) -> None:
    """Covers: A22, D10."""
    local = connect(remote, KV, transport="shm")
    store(local, chain(LENGTH, of=KV))
    hosts.shape("tbf", "rate", "400mbit", "burst", "256k", "latency", "50ms")
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
