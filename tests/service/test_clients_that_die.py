"""Clients that are killed or stopped: what they held is given back, and nobody reads what they half wrote."""

import signal
from collections.abc import Callable

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import Child, DaemonProcess, eventually, over_all_transports, store

from kvstore_client import BlockRows, KVClient, Outcome, WriterFailed

FIELDS = {"layers": 3, "bytes_per_part": 8192}
KV = spec(**FIELDS)  # type: ignore[arg-type]
HASHES = chain(4, of=KV)
DATA = rows(KV, HASHES)

Connect = Callable[..., KVClient]
MakeChild = Callable[..., Child]
MakeDaemon = Callable[..., DaemonProcess]


def loaded(client: KVClient, hashes: list) -> np.ndarray:
    target = np.zeros((len(hashes), client.spec.block_bytes), np.uint8)
    result = client.load(hashes, into=BlockRows(target)).wait()
    assert not result.errors
    return target


@pytest.mark.parametrize("num_parts_put", [0, 1, 2])
@over_all_transports
def test_blocks_of_a_writer_killed_between_parts_are_gone_and_can_be_stored_by_another(
    daemon: DaemonProcess, connect: Connect, child: MakeChild, num_parts_put: int
) -> None:
    """Covers: A1, C5."""
    client = connect(daemon, KV)
    writer = child("write", address=daemon.address, fields=FIELDS, length=4)
    assert writer.step() == "reserved"
    for part in range(num_parts_put):
        writer.go_on()
        assert writer.step() == f"put {part}"
    eventually(lambda: daemon.stats().blocks_writing == 4)
    half = client.match(HASHES)
    assert (half.num_blocks, half.num_writing) == (0, 4)

    writer.kill()

    eventually(lambda: daemon.stats().blocks_writing == 0)
    gone = client.match(HASHES)
    assert (gone.num_blocks, gone.num_writing) == (0, 0)
    stats = daemon.stats()
    assert stats.tiers[0].used_bytes == 0
    assert stats.counters.blocks_aborted == 4
    assert store(client, HASHES) == [Outcome.STORED] * 4
    assert (loaded(client, HASHES) == DATA).all()


@over_all_transports
def test_blocks_that_a_killed_writer_had_completed_stay(
    daemon: DaemonProcess, connect: Connect, child: MakeChild
) -> None:
    """Covers: C5. A block is committed by its last part, whether or not its writer lives to say Commit."""
    client = connect(daemon, KV)
    writer = child("write", address=daemon.address, fields=FIELDS, length=4)
    writer.step()
    for _ in range(KV.num_parts):
        writer.go_on()
        writer.step()
    eventually(lambda: daemon.stats().blocks_committed == 4)

    writer.kill()

    eventually(lambda: len(daemon.stats().sessions) == 1)
    assert client.match(HASHES).num_blocks == 4
    assert (loaded(client, HASHES) == DATA).all()


@over_all_transports
def test_leases_of_a_killed_reader_are_given_back(daemon: DaemonProcess, connect: Connect, child: MakeChild) -> None:
    """Covers: C1, C3, C9."""
    client = connect(daemon, KV)
    store(client, HASHES)
    reader = child("read", address=daemon.address, fields=FIELDS, length=4)
    assert reader.step() == "holding 4 4"
    assert daemon.stats().blocks_leased == 4

    reader.kill()

    eventually(lambda: daemon.stats().blocks_leased == 0)
    assert [session.client_name for session in daemon.stats().sessions] == ["client"]
    assert client.match(HASHES, lease="").num_blocks == 4


@over_all_transports
def test_a_follower_killed_during_its_load_does_not_disturb_the_writer(
    daemon: DaemonProcess, connect: Connect, child: MakeChild
) -> None:
    """Covers: C3, C9."""
    client = connect(daemon, KV)
    with client.store(HASHES) as write:
        write.put(0, DATA[:, :8192])
        follower = child("follow", address=daemon.address, fields=FIELDS, length=4)
        assert follower.step() == "part 0"
        assert daemon.stats().blocks_leased == 4

        follower.kill()

        eventually(lambda: daemon.stats().blocks_leased == 0)
        for part in (1, 2):
            write.put(part, DATA[:, part * 8192 : (part + 1) * 8192])
    assert write.outcomes == [Outcome.STORED] * 4
    assert (loaded(client, HASHES) == DATA).all()


@over_all_transports
def test_a_stopped_reader_is_reaped_and_sees_a_miss_when_it_goes_on(
    make_daemon: MakeDaemon, connect: Connect, child: MakeChild, transport: str
) -> None:
    """Covers: A13, C9. Its slots are used for other blocks meanwhile; it never takes those for its own."""
    daemon = make_daemon(heartbeat_s=0.3, cpu_capacity="1MiB")
    client = connect(daemon, KV)
    store(client, HASHES)
    reader = child("read", address=daemon.address, fields=FIELDS, length=4)
    assert reader.step() == "holding 4 4"

    reader.send(signal.SIGSTOP)

    eventually(lambda: daemon.stats().blocks_leased == 0)
    assert daemon.stats().counters.sessions_reaped >= 1
    others = chain(64, of=KV, seed=1)
    outcomes = store(client, others)
    assert outcomes[0] is Outcome.STORED
    assert client.match(HASHES, lease="").num_blocks == 0, "the room was needed"

    reader.send(signal.SIGCONT)
    reader.go_on()
    # Over ucx a view is a copy of the client's own, which nobody else writes to.
    assert reader.step() == ("BlockMissing True" if transport == "shm" else "unchanged True")
    reader.go_on()
    assert reader.step() == "matched 0 loaded 0 wrong 0"


@over_all_transports
def test_a_stopped_writer_is_reaped_and_its_blocks_are_free_for_others(
    make_daemon: MakeDaemon, connect: Connect, child: MakeChild
) -> None:
    """Covers: C5, C9."""
    daemon = make_daemon(heartbeat_s=0.3)
    client = connect(daemon, KV)
    writer = child("write", address=daemon.address, fields=FIELDS, length=4)
    writer.step()

    writer.send(signal.SIGSTOP)

    eventually(lambda: daemon.stats().blocks_writing == 0)
    assert store(client, HASHES) == [Outcome.STORED] * 4
    assert (loaded(client, HASHES) == DATA).all()


@pytest.mark.parametrize("num_parts_put", [1, 2])
@over_all_transports
def test_a_follow_gets_the_parts_that_came_and_an_error_for_the_others_when_its_writer_dies(
    daemon: DaemonProcess, connect: Connect, child: MakeChild, num_parts_put: int
) -> None:
    """Covers: A5, B7."""
    client = connect(daemon, KV)
    writer = child("write", address=daemon.address, fields=FIELDS, length=4)
    writer.step()
    target = np.zeros((4, KV.block_bytes), np.uint8)
    load = client.load(HASHES, into=BlockRows(target), follow=True)
    for part in range(num_parts_put):
        writer.go_on()
        writer.step()
        load.wait_part(part)
        assert (target[:, part * 8192 : (part + 1) * 8192] == DATA[:, part * 8192 : (part + 1) * 8192]).all()

    writer.kill()

    with pytest.raises(WriterFailed):
        load.wait_part(num_parts_put)
    result = load.wait()
    assert result.num_loaded == 0
    assert result.errors
    assert all(isinstance(error, WriterFailed) for error in result.errors.values())
    assert not target[:, num_parts_put * 8192 :].any(), "nothing was written for parts that did not come"


@over_all_transports
def test_when_one_rank_dies_the_block_fails_for_the_other(
    daemon: DaemonProcess, connect: Connect, child: MakeChild
) -> None:
    """Covers: A5, C5, E7."""
    fields = {"layers": 2, "ranks": 2, "bytes_per_part": 8192}
    kv = spec(**fields)  # type: ignore[arg-type]
    hashes = chain(3, of=kv)
    data = rows(kv, hashes)
    client = connect(daemon, kv)
    other = child("write", address=daemon.address, fields=fields, length=3, parts=list(kv.rank_parts(1)))
    assert other.step() == "reserved"
    mine = client.store(hashes, parts=list(kv.rank_parts(0)))
    assert mine.outcomes == [Outcome.NEW] * 3
    for part in mine.parts[:-1]:
        begin, size = kv.part_range(part)
        mine.put(part, data[:, begin : begin + size])

    other.kill()

    eventually(lambda: daemon.stats().blocks_writing == 0)
    begin, size = kv.part_range(mine.parts[-1])
    mine.put(mine.parts[-1], data[:, begin : begin + size])
    assert mine.commit() == [Outcome.FAILED] * 3
    assert client.match(hashes).num_blocks == 0
    assert daemon.stats().tiers[0].used_bytes == 0
