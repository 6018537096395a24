"""Two hosts, in network namespaces with a link between them: it carries, is slow, loses packets, is cut and comes back.

Needs root and `ip`, and `tc` for bad links. The daemon is in one namespace, clients in the other; what is asked over
the daemon's unix socket comes from the test.
"""

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from builders import chain, spec
from service.harness import NO_UCX, Child, DaemonProcess, eventually, made_hosts, store

from kvstore_client import KVClient
from kvstore_server.commands.hosts import DEVICE, Hosts

pytestmark = [
    pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX),
    pytest.mark.slow,
]

FIELDS: dict[str, Any] = {"layers": 2, "bytes_per_part": 256 << 10}
KV = spec(**FIELDS)
LENGTH = 8
PORT = 7311
NAMES = ("server", "engine")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def shape(hosts: Hosts, *how: str) -> None:
    """Both hosts send so; skips the test where `tc` or the kernel cannot."""
    for name in NAMES:
        try:
            run("tc", "-n", hosts.namespace(name), "qdisc", "replace", "dev", DEVICE, "root", *how)
        except FileNotFoundError:
            pytest.skip("needs tc")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"tc {how[0]}: {error.stderr.strip()}")


def set_link(hosts: Hosts, state: str) -> None:
    """The device of the host `engine` is "up" or "down"."""
    run("ip", "-n", hosts.namespace("engine"), "link", "set", "dev", DEVICE, state)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with made_hosts(*NAMES) as hosts:
        yield hosts


@pytest.fixture
def transport() -> str:
    return "ucx"


@pytest.fixture
def remote(hosts: Hosts, make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """The daemon on the host `server`."""
    listening = {"tcp_host": hosts.address("server"), "tcp_port": PORT, "ucx_device": DEVICE}
    return make_daemon(prefix=hosts.command("server"), heartbeat_s=1.0, **listening)


@pytest.fixture
def engine(hosts: Hosts, remote: DaemonProcess, child: Callable[..., Child]) -> Callable[..., Child]:
    """A client on the host `engine`."""
    prefix, address = hosts.command("engine"), f"{hosts.address('server')}:{PORT}"
    return lambda scenario, **more: child(
        scenario, prefix=prefix, address=address, fields=FIELDS, length=LENGTH, **more
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
    shape(hosts, *how)
    assert engine("round_trip", seed=1).step() == "stored 8 loaded 8 wrong 0"


def test_a_link_that_is_cut_fails_what_is_under_way_and_is_used_again_when_it_is_back(
    hosts: Hosts, remote: DaemonProcess, engine: Callable[..., Child], connect: Callable[..., KVClient]
) -> None:
    """Covers: A22, D10."""
    local = connect(remote, KV, transport="shm")
    store(local, chain(LENGTH, of=KV))
    shape(hosts, "tbf", "rate", "400mbit", "burst", "256k", "latency", "50ms")
    reader = engine("load_until_cut")
    assert reader.step() == "ready"
    reader.go_on()
    eventually(lambda: remote.stats().counters.blocks_loaded > 2 * LENGTH)

    set_link(hosts, "down")

    assert reader.step() == "cut wrong 0"
    eventually(lambda: len(remote.stats().sessions) == 1, "the daemon has ended its session")
    set_link(hosts, "up")
    reader.go_on()
    assert reader.step() == "again 8 wrong 0"
    reader.kill()


def test_a_client_that_cannot_be_reached_by_ucx_is_told_so_when_it_stores(
    hosts: Hosts, remote: DaemonProcess, engine: Callable[..., Child]
) -> None:
    """Covers: D10, G3. Its device is one that the daemon has no way to."""
    run("ip", "-n", hosts.namespace("engine"), "link", "add", "d0", "type", "veth", "peer", "name", "d1")
    run("ip", "-n", hosts.namespace("engine"), "link", "set", "d1", "up")
    run("ip", "-n", hosts.namespace("engine"), "address", "add", "10.99.0.1/24", "dev", "d0")
    run("ip", "-n", hosts.namespace("engine"), "link", "set", "d0", "up")
    said = engine("round_trip", seed=1, ucx_device="d0").step()
    assert said.startswith("StoreUnavailable"), said
    assert "ucx" in said
    assert engine("round_trip", seed=1).step() == "stored 8 loaded 8 wrong 0"
