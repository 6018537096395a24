"""What a daemon exports to Prometheus, while it works and when it fails."""

import asyncio
import ctypes
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from itertools import count, islice
from pathlib import Path

import grpc
import numpy as np
import pytest
from builders import chain, records, spec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from service.disk import SMALL, Connect, MakeDaemon, moved_away, offer_chain
from service.harness import DEADLINE_S, DaemonProcess, eventually, store

from kvstore.hashing import pack
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore_client import BlockRows, KVClient
from kvstore_server.config import Settings
from kvstore_server.daemon import Daemon
from kvstore_server.embedded import EmbeddedDaemon
from kvstore_server.metrics import Snapshot, series
from kvstore_server.values import Counters

KV = spec(layers=2, bytes_per_part=8192)
OTHER = spec(layers=2, bytes_per_part=5000)
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
ROUNDS = 20
SCRAPES = 20

Scrape = dict[str, float]


@pytest.fixture
def port() -> int:
    """One that is free, or was a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def families(port: int) -> list[Metric]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as reply:
        return list(text_string_to_metric_families(reply.read().decode()))


def scrape(port: int) -> Scrape:
    """Every sample, by its name, and by its tier where it has one."""
    return {
        sample.name + (f":{sample.labels['tier']}" if "tier" in sample.labels else ""): sample.value
        for family in families(port)
        for sample in family.samples
    }


@contextmanager
def scraping(port: int) -> Iterator[list[Scrape]]:
    """Meanwhile one scrape follows the other; all of them, in order."""
    scrapes: list[Scrape] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            scrapes.append(scrape(port))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield scrapes
    finally:
        stop.set()
        thread.join()


def mixed_load(daemon: DaemonProcess, client: KVClient, seed: int) -> None:
    """Blocks are stored, found, missed, loaded, given up, verified, cleared, and evicted by others."""
    kv = client.spec
    known, given_up = chain(20, of=kv, seed=2 * seed), chain(5, of=kv, seed=2 * seed + 1)
    store(client, known)
    with client.match([*known[:12], *given_up], lease="held"):
        target = np.zeros((12, kv.block_bytes), np.uint8)
        client.load(known[:12], into=BlockRows(target)).wait()
        client.store(given_up).abort()
        client.match(given_up, lease="")
        client.verify(known[:3])
    if seed % 10 == 2:
        daemon.admin.Clear(pb.ClearRequest(namespace=kv.namespace))


def check_sums(one: Scrape, tiers: list[str]) -> None:
    """What docs/metrics.md says of every scrape."""
    assert one["kvstore_blocks_asked_total"] == one["kvstore_blocks_hit_total"] + one["kvstore_blocks_missed_total"]
    for tier in tiers:
        used, slabs, capacity = (one[f"kvstore_tier_{name}_bytes:{tier}"] for name in ("used", "slab", "capacity"))
        assert used <= slabs <= capacity
    if tiers == ["cpu"]:
        gone = sum(one[f"kvstore_blocks_{how}_total"] for how in ("evicted", "removed", "lost"))
        assert one["kvstore_blocks_committed"] == one["kvstore_blocks_stored_total"] - gone


@pytest.mark.parametrize("tiers", [["cpu"], ["cpu", "disk"]])
def test_the_sums_hold_in_every_scrape_under_mixed_load(
    make_daemon: MakeDaemon, connect: Connect, port: int, tmp_path: Path, tiers: list[str]
) -> None:
    below = {"disk_path": tmp_path / "disk"} if "disk" in tiers else {}
    daemon = make_daemon(metrics_port=port, **SMALL, **below)
    client, seeds = connect(daemon, KV), count()
    with scraping(port) as scrapes:
        for seed in islice(seeds, ROUNDS):
            mixed_load(daemon, client, seed)
        client = connect(daemon, OTHER)  # memory is full, so it gets slabs of the first
        for seed in seeds:
            mixed_load(daemon, client, seed)
            if seed > 2 * ROUNDS and len(scrapes) >= SCRAPES:
                break
    for one in scrapes:
        check_sums(one, tiers)
    for name in [name for name in scrapes[0] if name.endswith("_total")]:
        counts = [one[name] for one in scrapes]
        assert counts == sorted(counts), name
    last = scrape(port)
    for what in ("asked", "hit", "missed", "stored", "loaded", "evicted", "removed", "aborted"):
        assert last[f"kvstore_blocks_{what}_total"] > 0, "the load was not mixed"


def test_a_block_that_was_lost_is_in_the_sum() -> None:
    with (
        closing(EmbeddedDaemon(capacity_bytes=1 << 20, slab_bytes=1 << 20)) as embedded,
        KVClient(embedded.address, KV) as client,
    ):
        hashes = chain(6, of=KV)
        store(client, hashes)
        tier, index = embedded.daemon.store.tier, embedded.daemon.store.spaces[KV.namespace].index
        (address,) = tier.addresses(index.memory.slots(index.find(records(hashes[2:3]))))
        ctypes.c_uint8.from_address(int(address)).value ^= 1
        assert list(client.verify(hashes)) == [2]
        with grpc.insecure_channel(embedded.address) as channel:
            stats = AdminStub(channel).Stats(pb.StatsRequest(), timeout=DEADLINE_S)
    found = {s.name: s.value for metric in series(Snapshot(stats, None, None)) for s in metric.samples if not s.labels}
    assert (found["kvstore_blocks_stored_total"], found["kvstore_blocks_lost_total"]) == (6, 1)
    assert found["kvstore_blocks_committed"] == 5


def test_a_scrape_says_what_the_daemon_says(make_daemon: MakeDaemon, connect: Connect, port: int) -> None:
    daemon = make_daemon(metrics_port=port)
    client = connect(daemon, KV)
    hashes = chain(6, of=KV)
    store(client, hashes)
    client.match([*hashes, *chain(2, of=KV, seed=1)], lease="held")
    daemon.admin.Pin(pb.PinRequest(namespace=KV.namespace, hashes=pack(hashes[:4])))
    daemon.admin.Drain(pb.DrainRequest())
    stats, found = daemon.stats(), scrape(port)
    assert {f"kvstore_{field.name}_total" for field in fields(Counters)} == {
        name for name in found if name.endswith("_total")
    }
    for field in fields(Counters):
        assert found[f"kvstore_{field.name}_total"] == getattr(stats.counters, field.name)
    assert found["kvstore_blocks_committed"] == 6
    assert found["kvstore_blocks_leased"] == 6
    assert found["kvstore_blocks_pinned"] == 4
    assert found["kvstore_sessions"] == found["kvstore_leases"] == found["kvstore_draining"] == 1
    assert found["kvstore_tier_used_bytes:cpu"] == 6 * KV.block_bytes


def test_the_page_lists_exactly_the_series_of_a_daemon(make_daemon: MakeDaemon, port: int, tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvstore[remote]'")
    nowhere, remote = f"unix://{tmp_path}/redis.sock", f"file://{tmp_path}/remote"
    both = {"cluster_url": nowhere, "node_id": "a", "remote_url": remote}
    make_daemon(metrics_port=port, disk_path=tmp_path / "disk", **both, **SMALL)
    exported = {
        (sample.name, ", ".join(sorted(sample.labels)), family.type, family.documentation)
        for family in families(port)
        for sample in family.samples
    }
    page = DOCS.read_text()
    row = re.compile(r"^\| `(kvstore_\w+)(?:\{([\w, ]+)\})?` \| (\w+) \| (.+) \|$", re.MULTILINE)
    assert {found.groups("") for found in row.finditer(page)} == exported
    assert set(re.findall(r"kvstore_\w+", page)) == {name for name, *_ in exported}


def test_a_disk_that_fails_shows(make_daemon: MakeDaemon, connect: Connect, port: int, tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    daemon = make_daemon(metrics_port=port, disk_path=directory, **SMALL)
    client = connect(daemon, KV)
    offer_chain(daemon, client, chain(12, of=KV))
    assert scrape(port)["kvstore_disks_failed"] == 0
    with moved_away(directory):
        offer_chain(daemon, client, chain(40, of=KV, seed=1))
        eventually(lambda: scrape(port)["kvstore_disks_failed"] == 1, "the disk tier is off")
    found = scrape(port)
    assert found["kvstore_blocks_unwritten_total"] > 0
    assert found["kvstore_spill_backlog_bytes"] == 0


def test_without_a_port_there_is_no_listener(daemon: DaemonProcess) -> None:
    assert "/metrics" not in daemon.new_log()


def test_the_log_says_where_it_listens_and_a_stop_is_clean(make_daemon: MakeDaemon, port: int) -> None:
    daemon = make_daemon(metrics_port=port)
    scrape(port)
    assert daemon.terminate() == 0
    log = daemon.new_log()
    assert f"http://127.0.0.1:{port}/metrics" in log
    assert "Traceback" not in log


def test_a_daemon_that_has_stopped_does_not_listen(port: int, tmp_path: Path) -> None:
    settings = Settings(unix_socket=str(tmp_path / "kv.sock"), tcp_port=0, metrics_port=port, prefault=False)

    async def run() -> None:
        daemon = Daemon(settings)
        await daemon.start()
        assert (await asyncio.to_thread(scrape, port))["kvstore_sessions"] == 0
        await daemon.stop()

    asyncio.run(run())
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))


def test_a_port_that_is_taken_is_refused_by_its_name(make_daemon: MakeDaemon, port: int) -> None:
    make_daemon(metrics_port=port)
    second = subprocess.run(
        [
            *(sys.executable, "-m", "kvstore_server.cli", "serve", "--unix-socket", ""),
            *("--tcp-port", str(port - 1), "--no-prefault", "--metrics-port", str(port)),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert second.returncode == 2
    assert f"metrics_port: expected 127.0.0.1:{port} to be free" in second.stderr
