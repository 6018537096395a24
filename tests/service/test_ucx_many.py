"""Many clients of another host, at once and one after the other: all bytes are right, and nothing of them is left."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders import chain, spec
from service.harness import NO_UCX, Child, DaemonProcess, eventually, store

from kvstore_client import KVClient, Outcome

pytestmark = [pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX), pytest.mark.slow, pytest.mark.timeout(600)]

FIELDS: dict[str, Any] = {"layers": 2, "bytes_per_part": 64 << 10}
KV = spec(**FIELDS)
LENGTH = 4
HASHES = chain(LENGTH, of=KV)

Connect = Callable[..., KVClient]


@pytest.fixture
def transport() -> str:
    return "ucx"


def rss_bytes(daemon: DaemonProcess) -> int:
    """What the daemon has of memory for itself: its slabs are shared, and do not count."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def test_daemons_that_start_at_once_all_serve(make_daemon: Callable[..., DaemonProcess], connect: Connect) -> None:
    """Covers: B8. Each makes two agents, in two processes."""
    with ThreadPoolExecutor(4) as pool:
        daemons = list(pool.map(lambda _: make_daemon(), range(4)))
    for daemon in daemons:
        assert store(connect(daemon, KV), HASHES) == [Outcome.STORED] * LENGTH


def test_64_processes_that_start_at_once_all_move_their_own_bytes(
    make_daemon: Callable[..., DaemonProcess], connect: Connect, child: Callable[..., Child]
) -> None:
    """Covers: B8, F8."""
    daemon = make_daemon(heartbeat_s=10.0)
    assert store(connect(daemon, KV), HASHES) == [Outcome.STORED] * LENGTH
    clients = child("many", address=daemon.address, fields=FIELDS, length=LENGTH, count=64)
    assert clients.step() == "connected"
    assert len(daemon.stats().sessions) == 65
    clients.go_on()
    assert clients.step() == "64 right"
    assert daemon.stats().blocks_committed == 65 * LENGTH


def test_over_200_clients_killed_in_mid_transfer_memory_and_descriptors_are_flat(
    make_daemon: Callable[..., DaemonProcess], connect: Connect, child: Callable[..., Child]
) -> None:
    """Covers: A19, C7, C9."""
    daemon = make_daemon(heartbeat_s=10.0)
    client = connect(daemon, KV)
    store(client, HASHES)
    killed = child("killed_in_turn", address=daemon.address, fields=FIELDS, length=LENGTH)
    killed.step()

    def kill(times: int) -> None:
        killed.go_on(str(times))
        killed.step()
        eventually(lambda: len(daemon.stats().sessions) == 1)
        eventually(lambda: daemon.stats().blocks_writing == daemon.stats().blocks_leased == 0)

    kill(50)  # what is made once is made
    fds, rss = daemon.num_fds(), rss_bytes(daemon)
    kill(200)
    eventually(lambda: daemon.num_fds() <= fds, "descriptors are flat")
    grown = rss_bytes(daemon) - rss
    # Where peers are never removed it grows by 30 KiB for each.
    assert grown < 200 * 20 << 10, f"memory has grown by {grown} bytes"
