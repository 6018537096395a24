"""A daemon with a disk tier: more is stored than memory holds, and found again after a restart.

Nothing here depends on the time of day: the daemon orders blocks by counters, and waits by a monotonic clock.
"""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from builders import chain, rows, spec
from service.disk import (
    PIECE,
    SMALL,
    Connect,
    MakeDaemon,
    disk_stats,
    file_bytes,
    flip,
    hanging,
    load,
    moved_away,
    offer_chain,
    record_of,
    slab_files,
    store_chain,
    tmpfs,
    used_bytes,
    wait_written,
)
from service.harness import Child, DaemonProcess, eventually, store

from kvstore.hashing import pack
from kvstore.types import BlockHash
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockCorrupt, BlockMissing, BlockRows, KVClient, Outcome, StoreTimeout

KV = spec(layers=2, bytes_per_part=8192)
RECORD_BYTES = 4096 + KV.block_bytes
HASHES = chain(150, of=KV)  # longer than memory
SHORT = HASHES[:PIECE]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def daemon(make_daemon: MakeDaemon, directory: Path) -> DaemonProcess:
    return make_daemon(disk_path=directory, **SMALL)


def restart(daemon: DaemonProcess, *clients: KVClient, kill: bool = True, **flags: object) -> None:
    """The daemon ended and runs again, with other flags if given, and the clients are connected again."""
    if daemon.running:
        if kill:
            daemon.kill()
        else:
            assert daemon.terminate() == 0
    daemon._flags |= flags
    daemon.start()
    for client in clients:
        client.wait_ready()


# More than memory.


def test_more_is_stored_than_memory_holds_and_every_block_of_it_is_served(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Covers: D4, F6."""
    client = connect(daemon, KV)
    chains = [chain(40, of=KV, seed=seed) for seed in range(5)]
    for hashes in chains:
        store_chain(daemon, client, hashes)
    stats = daemon.stats()
    assert stats.tiers[0].used_bytes <= stats.tiers[0].capacity_bytes < 200 * KV.block_bytes
    assert stats.blocks_committed == 200
    assert disk_stats(daemon).used_bytes == 200 * KV.block_bytes
    for hashes in chains:
        assert client.match(hashes, lease="").num_blocks == 40
        assert load(client, hashes) == {}
    counters = daemon.stats().counters
    assert counters.blocks_risen >= 200 - 64
    assert (counters.blocks_lost, counters.blocks_dropped, counters.blocks_unwritten) == (0, 0, 0)


def test_a_chain_longer_than_memory_is_read_by_two_clients_at_once(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: F6."""
    clients = [connect(daemon, KV) for _ in range(2)]
    store_chain(daemon, clients[0], HASHES)
    with ThreadPoolExecutor(2) as pool:
        assert [found.num_blocks for found in pool.map(lambda one: one.match(HASHES, lease=""), clients)] == [150] * 2
        for _ in range(3):
            assert list(pool.map(load, clients, [HASHES, HASHES[::-1]])) == [{}, {}]
    assert daemon.stats().counters.blocks_risen > 150


def test_a_load_of_more_than_memory_holds_gets_its_beginning(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: E11. What does not fit is refused block by block, and those are the last of the chain."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES)
    eventually(lambda: daemon.admin.Clear(pb.ClearRequest()).blocks_kept == 0)
    others = chain(60, of=KV, seed=1)
    for hashes in (HASHES, others):  # into places left by others, so in another order than before
        store_chain(daemon, client, hashes)

    found = client.load(HASHES, view=True)
    result = found.wait()

    assert 40 <= result.num_loaded < 64
    assert {type(error).__name__ for error in result.errors.values()} == {"StoreFull"}
    assert sorted(result.errors) == list(range(result.num_loaded, 150))
    found.release()


# Restarts.


def test_blocks_that_are_on_disk_survive_kill_9_for_old_clients_and_new(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Covers: A16, A17, D2, D3, D4, D5."""
    client = connect(daemon, KV)
    chains = [chain(40, of=KV, seed=seed) for seed in range(3)]
    for hashes in chains:
        store_chain(daemon, client, hashes)

    restart(daemon, client)

    assert disk_stats(daemon).used_bytes == 120 * KV.block_bytes == used_bytes(daemon)
    for reader in (client, connect(daemon, KV)):
        for hashes in chains:
            assert reader.match(hashes, lease="").num_blocks == 40
            assert load(reader, hashes) == {}
    store_chain(daemon, client, chain(40, of=KV, seed=3))  # what is new does not take the place of what was there
    for hashes in chains:
        assert load(client, hashes) == {}
    assert disk_stats(daemon).used_bytes == 160 * KV.block_bytes


def test_sigterm_writes_down_what_is_only_in_memory(make_daemon: MakeDaemon, directory: Path, connect: Connect) -> None:
    """Covers: D4, D7."""
    daemon = make_daemon(disk_path=directory, **SMALL | {"cpu_capacity": "16MiB", "disk_capacity": "64MiB"})
    client = connect(daemon, KV)
    whole = chain(800, of=KV)
    assert store(client, whole) == [Outcome.STORED] * 800  # faster than the disk takes it
    assert daemon.terminate() == 0
    assert "Traceback" not in daemon.new_log()

    restart(daemon, client)

    assert daemon.stats().blocks_committed == 800
    assert load(client, whole) == {}


def test_namespaces_do_not_see_each_other_after_a_restart(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: A2, A12. The same hashes, so that only the namespace tells them apart."""
    kinds = [KV, spec(layers=2, bytes_per_part=8192, salt="s"), spec(layers=4, bytes_per_part=4096)]
    kinds.append(spec(layers=2, bytes_per_part=8192, tenant="t"))
    clients = [connect(daemon, kv) for kv in kinds]
    for number, client in enumerate(clients[:3]):
        store_chain(daemon, client, SHORT[: 4 * (number + 1)])

    restart(daemon, *clients)

    for number, client in enumerate(clients):
        expected = 4 * (number + 1) if number < 3 else 0
        assert client.match(SHORT, lease="").num_blocks == expected
        errors = load(client, SHORT)
        assert sorted(errors) == list(range(expected, PIECE))
        assert all(isinstance(error, BlockMissing) for error in errors.values())


def test_what_was_cleared_is_gone_after_a_restart(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: D5."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES)
    eventually(lambda: daemon.stats().blocks_leased == 0)
    assert daemon.admin.Clear(pb.ClearRequest()).blocks_removed == 150
    eventually(lambda: disk_stats(daemon).used_bytes == 0)
    kept = chain(20, of=KV, seed=1)
    store_chain(daemon, client, kept)

    restart(daemon, client)

    assert client.match(HASHES, lease="").num_blocks == 0
    assert client.match(kept, lease="").num_blocks == 20
    assert disk_stats(daemon).used_bytes == 20 * KV.block_bytes


# Bytes that changed on the disk.


@pytest.mark.parametrize("running", [True, False], ids=["running", "down"])
def test_a_flipped_bit_on_disk_is_noticed_and_only_that_block_is_lost(
    daemon: DaemonProcess, directory: Path, connect: Connect, running: bool
) -> None:
    """Covers: A1, A2, A25. In the hash, in a checksum, in the first byte of a block and in the last of one."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES[:60])
    restart(daemon, client)  # nothing is in memory
    records = {block: record_of(directory, KV, HASHES[block]) for block in (5, 20, 35, 59)}
    if not running:
        daemon.kill()
    for (path, begin), offset in zip(records.values(), (60, 128, 4096, RECORD_BYTES - 1), strict=True):
        flip(path, begin + offset)
    if not running:
        restart(daemon, client)

    errors = load(client, HASHES[:60])

    assert {index: type(error) for index, error in errors.items()} == dict.fromkeys(records, BlockCorrupt)
    assert client.match(HASHES, lease="").num_blocks == 5
    assert daemon.stats().counters.blocks_lost == 4
    eventually(lambda: disk_stats(daemon).used_bytes == 56 * KV.block_bytes)
    with client.store(HASHES[:60]) as write:
        assert [block for block, outcome in enumerate(write.outcomes) if outcome is Outcome.NEW] == list(records)
        write.put_blocks(rows(KV, HASHES[:60]))
    wait_written(daemon, 4)
    restart(daemon, client)
    assert client.match(HASHES, lease="").num_blocks == 60
    assert load(client, HASHES[:60]) == {}


def test_a_slab_file_that_is_short_or_gone_takes_only_its_blocks_along(
    daemon: DaemonProcess, directory: Path, connect: Connect
) -> None:
    """Covers: A2, A25, D6."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES)
    daemon.kill()
    files = slab_files(directory)
    num_slots = files[0].stat().st_size // RECORD_BYTES
    with files[0].open("r+b") as file:
        file.truncate(files[0].stat().st_size - 1)
    files[1].unlink()
    restart(daemon, client)

    left = 150 - 2 * num_slots

    assert disk_stats(daemon).used_bytes == left * KV.block_bytes == used_bytes(daemon)
    errors = load(client, HASHES)
    assert len(errors) == 2 * num_slots
    assert all(isinstance(error, BlockMissing) for error in errors.values())
    assert "slab files missing or too short" in daemon.log.read_text()
    store_chain(daemon, client, HASHES)
    assert load(client, HASHES) == {}


@pytest.mark.parametrize("running", [True, False], ids=["running", "down"])
def test_a_slab_file_cut_short_gives_no_wrong_bytes(
    daemon: DaemonProcess, directory: Path, connect: Connect, running: bool
) -> None:
    """Covers: A25. It is cut, and while the daemon is down filled up with zeros."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES[:24])
    restart(daemon, client)
    path, record = record_of(directory, KV, SHORT[2])
    size_bytes = path.stat().st_size
    if not running:
        daemon.kill()
    with path.open("r+b") as file:
        file.truncate(record + RECORD_BYTES // 2)
        if not running:
            file.truncate(size_bytes)
    if not running:
        restart(daemon, client)

    errors = load(client, HASHES[:24])

    assert errors
    assert 2 in errors
    assert {type(error) for error in errors.values()} == {BlockCorrupt}
    again = load(client, HASHES[:24])
    assert again.keys() == errors.keys()
    assert {type(error) for error in again.values()} == {BlockMissing}


def test_without_its_catalog_the_directory_counts_as_empty(
    daemon: DaemonProcess, directory: Path, connect: Connect
) -> None:
    """Covers: D6."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES)
    daemon.kill()
    shutil.rmtree(directory / "catalog")
    restart(daemon, client)
    assert (disk_stats(daemon).used_bytes, file_bytes(directory)) == (0, 0)
    assert client.match(HASHES, lease="").num_blocks == 0
    assert len(load(client, SHORT)) == PIECE
    store_chain(daemon, client, HASHES)
    assert load(client, HASHES) == {}
    restart(daemon, client)
    assert load(client, HASHES) == {}


def test_a_pinned_block_stays_pinned_to_the_disk_while_others_leave_it(
    make_daemon: MakeDaemon, directory: Path, connect: Connect
) -> None:
    """Covers: E1."""
    daemon = make_daemon(disk_path=directory, **SMALL | {"disk_capacity": "1536KiB"})
    client = connect(daemon, KV)
    store_chain(daemon, client, SHORT)
    restart(daemon, client)
    assert daemon.admin.Pin(pb.PinRequest(namespace=KV.namespace, hashes=pack(SHORT))).num_blocks == PIECE
    for seed in range(1, 11):
        store_chain(daemon, client, chain(20, of=KV, seed=seed))
    assert daemon.stats().counters.blocks_dropped > 100
    assert client.match(SHORT, lease="").num_blocks == PIECE
    assert load(client, SHORT) == {}
    restart(daemon, client)
    assert load(client, SHORT) == {}


# Limits.


def is_prefix_loaded(client: KVClient, hashes: list[BlockHash]) -> int:
    """How many blocks of the chain are stored; those are its beginning, and all of them are right."""
    errors = load(client, hashes)
    num_loaded = len(hashes) - len(errors)
    assert all(isinstance(error, BlockMissing) for error in errors.values()), errors
    assert sorted(errors) == list(range(num_loaded, len(hashes))), "a chain is evicted from its end"
    assert client.match(hashes, lease="").num_blocks == num_loaded
    return num_loaded


def test_a_disk_smaller_than_what_is_stored_keeps_what_was_used_last_and_its_limit(
    make_daemon: MakeDaemon, directory: Path, connect: Connect
) -> None:
    """Covers: E1, E2, E6."""
    limit_bytes = 3 << 20
    daemon = make_daemon(disk_path=directory, **SMALL | {"disk_capacity": limit_bytes})
    client = connect(daemon, KV)
    chains = [chain(40, of=KV, seed=seed) for seed in range(8)]
    for hashes in chains:
        store_chain(daemon, client, hashes)
        assert file_bytes(directory) <= limit_bytes
    counters = daemon.stats().counters
    assert counters.blocks_written == 320
    assert counters.blocks_dropped >= 320 - limit_bytes // RECORD_BYTES

    for again in range(2):
        left = [is_prefix_loaded(client, hashes) for hashes in chains]
        assert left[0] == 0, f"the oldest has left, in round {again}"
        assert left[-1] == 40
        assert left == sorted(left)
        assert disk_stats(daemon).slab_bytes == file_bytes(directory) <= limit_bytes
        restart(daemon, client)
        assert disk_stats(daemon).used_bytes == used_bytes(daemon)


def test_a_restart_with_less_capacity_keeps_within_it_and_serves_what_it_kept(
    daemon: DaemonProcess, directory: Path, connect: Connect
) -> None:
    """Covers: E1, D5."""
    client = connect(daemon, KV)
    chains = [chain(40, of=KV, seed=seed) for seed in range(6)]
    for hashes in chains:
        store_chain(daemon, client, hashes)
    assert file_bytes(directory) > 2 << 20

    restart(daemon, client, disk_capacity=2 << 20)

    shown = disk_stats(daemon)
    assert shown.slab_bytes == file_bytes(directory) <= shown.capacity_bytes == 2 << 20
    assert 80 <= shown.used_bytes // KV.block_bytes < 120
    new = chain(40, of=KV, seed=6)
    store_chain(daemon, client, new)
    assert file_bytes(directory) <= 2 << 20
    kept = sum(40 - len(load(client, hashes)) for hashes in [*chains, new])
    assert kept == disk_stats(daemon).used_bytes // KV.block_bytes
    assert load(client, chains[-1]) == {}, "the oldest made room, not the youngest"
    restart(daemon, client)
    assert load(client, new) == {}


def test_a_file_system_smaller_than_the_disk_tier_may_be_keeps_the_latest_blocks(
    make_daemon: MakeDaemon, directory: Path, connect: Connect
) -> None:
    """Covers: A1, E2. Others are evicted for what has no room, and no chain has a gap."""
    with tmpfs(directory, "size=4m"):
        daemon = make_daemon(disk_path=directory, **SMALL | {"disk_capacity": "64MiB"})
        client = connect(daemon, KV)
        chains = [chain(40, of=KV, seed=seed) for seed in range(8)]
        for hashes in chains:
            offer_chain(daemon, client, hashes)
            assert load(client, hashes[-PIECE:]) == {}
        assert "disk tier disabled" not in daemon.log.read_text()
        counters = daemon.stats().counters
        assert counters.blocks_written + counters.blocks_unwritten == 320
        assert counters.blocks_dropped > 0
        restart(daemon, client)
        assert disk_stats(daemon).used_bytes == used_bytes(daemon)
        for hashes in chains:
            is_prefix_loaded(client, hashes)
        assert load(client, chains[-1]) == {}
        daemon.close()


def test_a_file_system_that_others_filled_is_used_again_when_there_is_room(
    make_daemon: MakeDaemon, directory: Path, connect: Connect
) -> None:
    """Covers: A1, E2. Not even the catalog can take note of what should leave, until then."""
    with tmpfs(directory, "size=4m"):
        daemon = make_daemon(disk_path=directory, **SMALL | {"disk_capacity": "2MiB"})
        client = connect(daemon, KV)
        chains = [chain(40, of=KV, seed=seed) for seed in range(6)]
        for hashes in chains[:3]:
            offer_chain(daemon, client, hashes)
        with pytest.raises(OSError, match="No space"):
            (directory / "filler").write_bytes(bytes(4 << 20))
        for hashes in chains[3:5]:
            offer_chain(daemon, client, hashes)
            assert load(client, hashes[-PIECE:]) == {}
        assert daemon.stats().counters.blocks_unwritten > 0
        assert "disk tier disabled" not in daemon.log.read_text()

        (directory / "filler").unlink()

        store_chain(daemon, client, chains[-1])
        restart(daemon, client)
        assert disk_stats(daemon).used_bytes == used_bytes(daemon)
        assert load(client, chains[-1]) == {}
        for hashes in chains[:-1]:
            load(client, hashes)
        daemon.close()


# What is on its way up.


def test_a_match_is_cut_where_loading_from_disk_takes_longer_than_computing(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Covers: F2."""
    client = connect(daemon, KV)
    hashes = chain(30, of=KV)
    store_chain(daemon, client, hashes)
    restart(daemon, client)
    assert load(client, hashes[:PIECE]) == {}  # the daemon knows now how fast its disk is
    quick, slow = (connect(daemon, KV, prefill_tokens_per_s=speed) for speed in (1e12, 1e-3))
    cut, whole = quick.match(hashes), slow.match(hashes)
    assert (cut.num_blocks, cut.num_found) == (PIECE, 30)
    assert (whole.num_blocks, whole.num_found) == (30, 30)
    assert quick.load(cut, view=True).wait().num_loaded == PIECE
    assert client.prefetch(hashes) == 30
    eventually(lambda: daemon.stats().counters.blocks_risen == 30)
    assert quick.match(hashes).num_blocks == 30


def test_a_prefetched_block_is_served_from_memory(daemon: DaemonProcess, directory: Path, connect: Connect) -> None:
    """Covers: F2, F6."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES[:40])
    restart(daemon, client)
    assert client.prefetch(HASHES[:40]) == 40
    eventually(lambda: daemon.stats().counters.blocks_risen == 40)
    with moved_away(directory):
        assert load(client, HASHES[:40]) == {}
    assert client.prefetch(HASHES[:40]) == 40
    assert daemon.stats().counters.blocks_risen == 40


def test_a_prefetch_of_more_than_memory_holds_says_how_much_it_is(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: F2."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES)
    restart(daemon, client)
    num_blocks = client.prefetch(HASHES)
    eventually(lambda: daemon.stats().blocks_leased == 0)
    assert num_blocks == daemon.stats().counters.blocks_risen < 64


def test_a_block_on_disk_passes_a_verify_and_stays_there(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon, KV)
    store_chain(daemon, client, SHORT)
    restart(daemon, client)
    errors = client.verify([*SHORT, *chain(1, of=KV, seed=1)])
    assert {index: type(error) for index, error in errors.items()} == {PIECE: BlockMissing}
    assert load(client, SHORT) == {}


def test_a_load_from_a_disk_that_hangs_ends_at_its_deadline_and_holds_up_nobody(
    daemon: DaemonProcess, directory: Path, connect: Connect, child: Callable[..., Child]
) -> None:
    """Covers: A16, D12, F2. Nothing is left of the one that timed out, of a client that is closed, of one killed."""
    client, other = connect(daemon, KV), connect(daemon, KV)
    cold, warm = HASHES[:3], chain(PIECE, of=KV, seed=1)
    store_chain(daemon, client, cold)
    restart(daemon, client, other)
    store_chain(daemon, client, warm)
    with hanging(record_of(directory, KV, cold[0])[0]):
        with pytest.raises(StoreTimeout):
            client.load(cold, into=BlockRows(np.zeros((3, KV.block_bytes), np.uint8)), timeout_s=0.001).wait(0.001)
        killed = child("rise", address=daemon.address, fields={"layers": 2, "bytes_per_part": 8192}, length=3)
        assert killed.step() == "loading"
        killed.kill()
        other.load(cold, view=True)
        other.close()
        assert load(client, warm) == {}
        assert store(client, chain(PIECE, of=KV, seed=2)) == [Outcome.STORED] * PIECE
        assert client.match(cold, lease="").num_blocks == 3
        eventually(lambda: len(daemon.stats().sessions) == 1)
    eventually(lambda: daemon.stats().blocks_leased == 0)
    assert load(client, cold) == {}
    assert daemon.stats().counters.blocks_lost == 0


def test_a_reader_killed_while_blocks_rise_for_it_leaves_nothing_behind(
    daemon: DaemonProcess, connect: Connect, child: Callable[..., Child]
) -> None:
    """Covers: A16."""
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES[:40])
    restart(daemon, client)
    killed = child("rise", address=daemon.address, fields={"layers": 2, "bytes_per_part": 8192}, length=40)
    assert killed.step() == "loading"
    killed.kill()
    eventually(lambda: len(daemon.stats().sessions) == 1)
    eventually(lambda: daemon.stats().blocks_leased == 0)
    assert load(client, HASHES[:40]) == {}
    assert daemon.stats().counters.blocks_lost == 0
