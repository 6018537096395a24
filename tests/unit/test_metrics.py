"""What a scrape reads, and where it reads it."""

import asyncio
import dataclasses
import socket
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest

from kvstore.errors import InvalidRequest, StoreUnavailable
from kvstore.types import BootId
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_server import metrics
from kvstore_server.config import load
from kvstore_server.metrics import (
    COUNTERS,
    REMOTE_COUNTERS,
    DiskState,
    MetricsListener,
    RemoteState,
    Snapshot,
    series,
)
from kvstore_server.roster import Member, View
from kvstore_server.tiers.remote import RemoteCounters
from kvstore_server.values import Counters

# A different number in each counter, so that two that are mixed up show.
COUNTED = Counters(*range(1, len(dataclasses.fields(Counters)) + 1))
STATS = pb.StatsReply(
    boot_id=b"\x3f" * 16,
    server_version="1.2.3",
    uptime_s=1.5,
    counters=pb.Counters(**dataclasses.asdict(COUNTED)),
    tiers=[
        pb.TierStats(tier="cpu", capacity_bytes=100, slab_bytes=80, used_bytes=60, num_slabs=4),
        pb.TierStats(tier="disk", place="/a", capacity_bytes=1000, slab_bytes=800, used_bytes=600, num_slabs=40),
        pb.TierStats(tier="disk", place="/b", capacity_bytes=2000, slab_bytes=1800, used_bytes=1600, num_slabs=50),
    ],
    blocks_committed=21,
    blocks_writing=22,
    blocks_leased=23,
    blocks_pinned=24,
    sessions=[
        pb.SessionStats(num_leases=1, num_writes=2, region_bytes=3),
        pb.SessionStats(num_leases=10, num_writes=20, region_bytes=30),
    ],
    draining=True,
    loop_gaps=pb.LoopGaps(bounds_s=[0.001, 0.02], counts=[5, 3, 1], total_s=0.25),
)
ME = Member("a", BootId(b"1" * 16), ("unix:/a",), 100, draining=False)
VIEW = View((ME, replace(ME, node_id="b")), epoch=7, replicas=2, stale=True)

# A different number in each again.
REMOTE = RemoteCounters(*range(101, 101 + len(dataclasses.fields(RemoteCounters))))


def exported(snapshot: Snapshot) -> dict[str, float]:
    """Every sample as it is scraped, but for the information of the build."""
    return {
        ":".join((sample.name, "".join(sample.labels.values()))).rstrip(":"): sample.value
        for metric in series(snapshot)
        for sample in metric.samples
        if metric.name != "kvstore_build"
    }


def test_every_counter_has_a_help() -> None:
    assert list(COUNTERS) == [field.name for field in dataclasses.fields(Counters)]
    assert list(REMOTE_COUNTERS) == [field.name for field in dataclasses.fields(RemoteCounters)]


def test_every_figure_of_the_daemon_is_exported_under_its_name() -> None:
    counters = {f"kvstore_{name}_total": count for name, count in dataclasses.asdict(COUNTED).items()}
    assert exported(Snapshot(STATS, DiskState(backlog_bytes=31, num_failed=1), VIEW)) == counters | {
        "kvstore_uptime_seconds": 1.5,
        "kvstore_draining": 1,
        "kvstore_loop_gap_seconds_bucket:0.001": 5,
        "kvstore_loop_gap_seconds_bucket:0.02": 8,
        "kvstore_loop_gap_seconds_bucket:+Inf": 9,
        "kvstore_loop_gap_seconds_count": 9,
        "kvstore_loop_gap_seconds_sum": 0.25,
        "kvstore_blocks_committed": 21,
        "kvstore_blocks_writing": 22,
        "kvstore_blocks_leased": 23,
        "kvstore_blocks_pinned": 24,
        "kvstore_sessions": 2,
        "kvstore_leases": 11,
        "kvstore_writes": 22,
        "kvstore_region_bytes": 33,
        "kvstore_tier_capacity_bytes:cpu": 100,
        "kvstore_tier_capacity_bytes:disk/a": 1000,
        "kvstore_tier_capacity_bytes:disk/b": 2000,
        "kvstore_tier_slab_bytes:cpu": 80,
        "kvstore_tier_slab_bytes:disk/a": 800,
        "kvstore_tier_slab_bytes:disk/b": 1800,
        "kvstore_tier_used_bytes:cpu": 60,
        "kvstore_tier_used_bytes:disk/a": 600,
        "kvstore_tier_used_bytes:disk/b": 1600,
        "kvstore_tier_slabs:cpu": 4,
        "kvstore_tier_slabs:disk/a": 40,
        "kvstore_tier_slabs:disk/b": 50,
        "kvstore_spill_backlog_bytes": 31,
        "kvstore_disks_failed": 1,
        "kvstore_cluster_members": 2,
        "kvstore_cluster_epoch": 7,
        "kvstore_cluster_stale": 1,
    }


def test_a_remote_tier_is_told_of_where_there_is_one() -> None:
    without = exported(Snapshot(STATS, None))
    found = exported(Snapshot(STATS, None, remote=RemoteState(REMOTE, num_objects=51, is_down=True)))
    counters = {f"kvstore_remote_{name}_total": count for name, count in dataclasses.asdict(REMOTE).items()}
    assert found == without | counters | {"kvstore_remote_objects": 51, "kvstore_remote_down": 1}


def test_the_build_is_told_by_version_and_boot_id() -> None:
    (build,) = (metric for metric in series(Snapshot(STATS, None, None)) if metric.name == "kvstore_build")
    (sample,) = build.samples
    assert (sample.name, sample.value) == ("kvstore_build_info", 1)
    assert sample.labels == {"version": "1.2.3", "boot_id": "3f" * 16}


def test_without_a_disk_tier_or_other_daemons_nothing_is_said_of_them() -> None:
    names = exported(Snapshot(STATS, None, None)).keys()
    assert "kvstore_disks_failed" not in names
    assert "kvstore_spill_backlog_bytes" not in names
    assert "kvstore_cluster_members" not in names


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.run_until_complete(asyncio.sleep(0))  # what was left for it
    loop.close()


@pytest.fixture
def running(loop: asyncio.AbstractEventLoop) -> Iterator[threading.Thread]:
    """The thread in which the loop runs."""
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield thread
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_out_of_bounds_is_refused_by_name(port: int) -> None:
    with pytest.raises(InvalidRequest, match=f"metrics_port: expected 0 to 65535, got {port}"):
        load(None, {}, {"metrics_port": port})


def test_the_daemon_is_read_on_its_loop_and_nowhere_else(
    loop: asyncio.AbstractEventLoop, running: threading.Thread
) -> None:
    read_in = []

    def gather() -> Snapshot:
        read_in.append(threading.current_thread())
        return Snapshot(STATS, None, None)

    listener = MetricsListener(gather, host="127.0.0.1", port=0, loop=loop)
    try:
        for _ in range(3):
            assert b"kvstore_blocks_asked_total 2.0" in urllib.request.urlopen(listener.url).read()
    finally:
        listener.close()
    assert read_in == [running] * 3


def test_a_daemon_that_is_stuck_costs_the_scrape_and_nothing_else(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "GATHER_TIMEOUT_S", 0)  # the loop does not run
    listener = MetricsListener(lambda: Snapshot(STATS, None, None), host="127.0.0.1", port=0, loop=loop)
    try:
        with pytest.raises(HTTPError, match="500") as caught:
            urllib.request.urlopen(listener.url)
        caught.value.close()
    finally:
        listener.close()


def test_an_address_that_is_taken_is_refused_and_a_closed_one_is_free_again(loop: asyncio.AbstractEventLoop) -> None:
    def listen(port: int) -> MetricsListener:
        return MetricsListener(lambda: Snapshot(STATS, None, None), host="127.0.0.1", port=port, loop=loop)

    first = listen(0)
    port = urlsplit(first.url).port
    assert port is not None
    with pytest.raises(StoreUnavailable, match=f"metrics_port: expected 127.0.0.1:{port} to be free"):
        listen(port)
    first.close()
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))
    listen(port).close()
