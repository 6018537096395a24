"""A daemon with several disks, and one that writes only when memory fills up or when it stops."""

from pathlib import Path

import numpy as np
import pytest
from builders import chain, spec
from service.disk import (
    SMALL,
    Connect,
    MakeDaemon,
    disk_stats,
    load,
    moved_away,
    slab_files,
    store_chain,
    wait_written,
)
from service.harness import DaemonProcess, eventually, store

from kvstore_client import BlockRows, KVClient

KV = spec(layers=2, bytes_per_part=8192)
HASHES = chain(100, of=KV)


@pytest.fixture
def two_disks(make_daemon: MakeDaemon, tmp_path: Path) -> DaemonProcess:
    config = tmp_path / "kvstore.toml"
    config.write_text(
        "".join(
            f'[[disks]]\npath = "{tmp_path / name}"\ncapacity = "{size}"\nreserve = 0\n'
            for name, size in (("a", "12MiB"), ("b", "4MiB"))
        )
    )
    sizes = ("disk_capacity", "disk_reserve")
    return make_daemon(config=config, **{key: value for key, value in SMALL.items() if key not in sizes})


def used(daemon: DaemonProcess) -> dict[str, int]:
    """Bytes of blocks, by the name of each disk's directory."""
    return {Path(tier.place).name: tier.used_bytes for tier in daemon.stats().tiers if tier.tier == "disk"}


def test_blocks_lie_on_all_disks_and_survive_kill_9(two_disks: DaemonProcess, tmp_path: Path, connect: Connect) -> None:
    """Covers: D2, D4."""
    client = connect(two_disks, KV)
    store_chain(two_disks, client, HASHES)
    before = used(two_disks)
    assert sum(before.values()) == 100 * KV.block_bytes
    assert abs(before["a"] / KV.block_bytes - 75) <= 3
    assert slab_files(tmp_path / "a")
    assert slab_files(tmp_path / "b")
    two_disks.kill()
    two_disks.start()
    client.wait_ready()
    assert used(two_disks) == before
    assert client.match(HASHES, lease="").num_blocks == 100
    assert load(client, HASHES) == {}


def test_a_disk_that_vanishes_costs_what_is_on_it_and_the_other_goes_on(
    two_disks: DaemonProcess, tmp_path: Path, connect: Connect
) -> None:
    """Covers: A1, D12, F2."""
    client = connect(two_disks, KV)
    store_chain(two_disks, client, HASHES)
    with moved_away(tmp_path / "b"):
        others = chain(24, of=KV, seed=1)
        store_chain(two_disks, client, others)
        assert two_disks.stats().counters.blocks_unwritten == 0, "its share went to the other disk"
        lost = load(client, HASHES)
        assert 0 < len(lost) < 40
        assert load(client, others) == {}
        log = two_disks.log.read_text()
        assert log.count("disk disabled") == 1
        assert "disk tier disabled" not in log


def warm(client: KVClient, daemon: DaemonProcess) -> int:
    """How many of the blocks a new daemon finds."""
    client.wait_ready()
    return client.match(HASHES, lease="").num_blocks


def test_with_the_policy_evict_blocks_are_written_when_memory_fills_up_and_when_the_daemon_stops(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect
) -> None:
    """Covers: E6, F6."""
    config = tmp_path / "kvstore.toml"
    config.write_text('write_policy = "evict"\n')
    daemon = make_daemon(config=config, disk_path=tmp_path / "disk", **SMALL)
    client = connect(daemon, KV)
    store(client, HASHES[:12])
    assert daemon.stats().counters.blocks_written == 0
    daemon.kill()
    daemon.start()
    assert warm(client, daemon) == 0
    store(client, HASHES[:12])
    assert daemon.stats().counters.blocks_written == 0
    assert daemon.terminate() == 0
    daemon.start()
    assert warm(client, daemon) == 12
    assert load(client, HASHES[:12]) == {}


def test_blocks_are_compressed_by_the_codec_of_their_model_and_read_whatever_comes_next(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect
) -> None:
    """Covers: A25, D2."""
    config = tmp_path / "kvstore.toml"
    config.write_text('disk_codecs = { "*" = "none", "packed" = "zstd" }\n')
    daemon = make_daemon(config=config, disk_path=tmp_path / "disk", **SMALL | {"cpu_capacity": "4MiB"})
    plain, packed = (spec(layers=2, bytes_per_part=16384, model=model) for model in ("plain", "packed"))
    array = np.tile(np.arange(plain.block_bytes, dtype=np.uint8) // 16, (40, 1))
    taken = []
    for kv in (plain, packed):
        client = connect(daemon, kv)
        for piece in range(0, 40, 10):
            written = daemon.stats().counters.blocks_written
            parent = chain(40, of=kv)[piece - 1] if piece else None
            with client.store(chain(40, of=kv)[piece : piece + 10], parent=parent) as write:
                write.put_blocks(array[:10])
            wait_written(daemon, written + 10)
        taken.append(disk_stats(daemon).slab_bytes)
    assert taken[1] - taken[0] < taken[0] / 2, "no room was saved"
    config.write_text("")
    daemon.kill()
    daemon.start()
    for kv in (plain, packed):
        client = connect(daemon, kv)
        for piece in range(0, 40, 10):
            target = np.zeros((10, kv.block_bytes), np.uint8)
            assert client.load(chain(40, of=kv)[piece : piece + 10], into=BlockRows(target)).wait().num_loaded == 10
            assert (target == array[:10]).all()


def test_blocks_of_a_tenant_with_a_time_to_live_go_and_those_of_others_stay(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect
) -> None:
    config = tmp_path / "kvstore.toml"
    config.write_text("ttl_s = { brief = 0.2 }\n")
    daemon = make_daemon(config=config, disk_path=tmp_path / "disk", **SMALL)
    brief, kept = (spec(layers=2, bytes_per_part=8192, tenant=tenant) for tenant in ("brief", "kept"))
    clients = [connect(daemon, kv) for kv in (brief, kept)]
    for client in clients:
        store(client, chain(6, of=client.spec))
    eventually(lambda: daemon.stats().counters.blocks_removed == 6, "they have expired")
    assert [client.match(chain(6, of=client.spec), lease="").num_blocks for client in clients] == [0, 6]
    daemon.kill()
    daemon.start()
    for client in clients:
        client.wait_ready()
    assert clients[0].match(chain(6, of=brief), lease="").num_blocks == 0
