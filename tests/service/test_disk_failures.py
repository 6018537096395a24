"""A directory that cannot be used is refused at the start; one that fails later costs the disk tier, not the store."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import lmdb
import pytest
from builders import chain, spec
from service.disk import SMALL, Connect, MakeDaemon, load, moved_away, offer_chain, store_chain, tmpfs
from service.harness import DEADLINE_S, DaemonProcess, eventually

from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockCorrupt, BlockMissing

KV = spec(layers=2, bytes_per_part=8192)
HASHES = chain(40, of=KV)


def refusal(folder: Path, **flags: object) -> str:
    """What a daemon says that does not start."""
    folder.mkdir(exist_ok=True)
    with closing(DaemonProcess(folder, **SMALL | flags)) as refused:
        assert refused.launch().wait(DEADLINE_S) == 2
        said = refused.log.read_text()
    assert "Traceback" not in said
    return said


def test_a_second_daemon_on_the_directory_is_refused_and_the_first_unharmed(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect
) -> None:
    directory = tmp_path / "disk"
    daemon = make_daemon(disk_path=directory, **SMALL)
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES)

    said = refusal(tmp_path / "second", disk_path=directory)

    assert f"{directory}: another daemon has it" in said
    store_chain(daemon, client, chain(40, of=KV, seed=1))
    daemon.kill()
    daemon.start()
    client.wait_ready()
    assert load(client, HASHES) == {}
    assert load(client, chain(40, of=KV, seed=1)) == {}


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    assert f"disk tier: {path}: cannot open" in refusal(tmp_path, disk_path=path)
    assert path.read_text() == "precious"


def test_a_directory_that_is_read_only_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    with tmpfs(directory, "size=1m,ro"):
        said = refusal(tmp_path, disk_path=directory)
    assert "Read-only file system" in said
    assert str(directory) in said


def test_a_directory_of_another_format_is_refused_and_left_as_it_is(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    """Covers: A25."""
    directory = tmp_path / "disk"
    make_daemon(disk_path=directory, **SMALL).terminate()
    with lmdb.open(str(directory / "catalog"), max_dbs=4) as catalog, catalog.begin(write=True) as transaction:
        transaction.put(b"format", (99).to_bytes(8, "little"), db=catalog.open_db(b"meta", transaction))
    before = sorted((path, path.stat().st_size) for path in directory.rglob("*"))
    said = refusal(tmp_path, disk_path=directory)
    assert "expected format 2, got 99" in said
    assert sorted((path, path.stat().st_size) for path in directory.rglob("*")) == before


def test_a_disk_tier_without_checksums_is_refused(tmp_path: Path) -> None:
    """Covers: A25."""
    (tmp_path / "kvstore.toml").write_text("checksums = false\n")
    said = refusal(tmp_path, disk_path=tmp_path / "disk", config=tmp_path / "kvstore.toml")
    assert "checksums: expected on, because the disk tier needs them" in said
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("what", ["moved", "deleted", "replaced by a file"])
def test_a_directory_that_vanishes_costs_the_disk_tier_and_nothing_in_memory(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect, what: str
) -> None:
    """Covers: A1, D12, F2."""
    directory = tmp_path / "disk"
    daemon = make_daemon(disk_path=directory, **SMALL)
    client = connect(daemon, KV)
    store_chain(daemon, client, HASHES)
    daemon.kill()
    daemon.start()
    client.wait_ready()
    warm, cold, new = HASHES[:12], HASHES[12:24], chain(12, of=KV, seed=1)
    assert load(client, warm) == {}
    with moved_away(directory):
        if what == "replaced by a file":
            directory.write_text("")
        elif what == "deleted":
            shutil.rmtree(directory.with_name("disk-away"))

        offer_chain(daemon, client, new)

        assert load(client, new) == {}
        assert load(client, warm) == {}
        assert {type(error) for error in load(client, cold).values()} == {BlockCorrupt}
        assert {type(error) for error in load(client, cold).values()} == {BlockMissing}
        assert client.match(HASHES, lease="").num_blocks == 12
        eventually(lambda: daemon.stats().blocks_leased == 0)
        assert daemon.admin.Clear(pb.ClearRequest()).blocks_removed == 40 - 12 + 12
        others = [chain(12, of=KV, seed=seed) for seed in range(2, 12)]
        for hashes in others:
            offer_chain(daemon, client, hashes)
        assert load(client, others[-1]) == {}
        counters = daemon.stats().counters
        assert (counters.blocks_written, counters.blocks_unwritten) == (0, 11 * 12)
        assert daemon.terminate() == 0
        log = daemon.log.read_text()
        assert log.count("disk tier disabled") == 1
        assert str(directory) in log
        assert "Traceback" not in log
        if what == "replaced by a file":
            directory.unlink()
        elif what == "deleted":
            directory.with_name("disk-away").mkdir()
    daemon.start()
    client.wait_ready()
    load(client, HASHES)
    store_chain(daemon, client, new)
    assert load(client, new) == {}
    assert os.path.isdir(directory)
