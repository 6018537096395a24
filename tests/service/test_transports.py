"""What every transport promises: the same bytes, parts and errors, wherever they come from; and the choice."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import chain, rows, spec
from service.disk import SMALL, store_chain
from service.harness import DEADLINE_S, NO_UCX, DaemonProcess, eventually, over_all_transports, store

from kvstore.spec import KVSpec
from kvstore.transport.ucx import REGISTER_BYTES
from kvstore.types import ByteArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import (
    BlockRows,
    ClientOptions,
    InvalidRequest,
    KVClient,
    Outcome,
    StoreFull,
    Unsupported,
    WriterFailed,
)

needs_ucx = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)

KV = spec(layers=3, bytes_per_part=8192)
HASHES = chain(6, of=KV)
DATA = rows(KV, HASHES)
PARTS = [DATA[:, 8192 * part : 8192 * (part + 1)] for part in range(3)]

BLANK = spec(layers=1, bytes_per_part=16 << 10, model="blank")
BLANKS = chain(64 * 63, of=BLANK)  # 64 slabs of a MiB
DAEMON_FLAGS = {} if NO_UCX else {"ucx_device": "lo"}

Connect = Callable[..., KVClient]
MakeDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def daemon(shared: DaemonProcess) -> DaemonProcess:
    """One for all, with all transports. Its memory holds zeros, and nothing that a test before has stored."""
    with closing(KVClient(shared.address, BLANK, options=ClientOptions(transport="shm"))) as client:
        client.wait_ready(DEADLINE_S)
        with client.store(BLANKS) as write:
            write.put_blocks(np.zeros((len(BLANKS), BLANK.block_bytes), np.uint8))
    assert shared.stats().blocks_committed == len(BLANKS), "they fill it"
    eventually(lambda: not shared.stats().sessions, "nobody has slabs mapped that are to be cut anew")
    shared.admin.Clear(pb.ClearRequest())
    return shared


def from_region(client: KVClient, data: ByteArray) -> ByteArray:
    array = client.region(data.size).array.reshape(data.shape)
    array[:] = data
    return array


@over_all_transports
@pytest.mark.parametrize("source", ["rows", "parts", "buffers", "region", "region parts"])
def test_bytes_arrive_wherever_they_are_stored_from(daemon: DaemonProcess, connect: Connect, source: str) -> None:
    client = connect(daemon, KV)
    data = from_region(client, DATA) if source.startswith("region") else DATA
    with client.store(HASHES) as write:
        if source in ("rows", "region"):
            write.put_blocks(data)
        elif source == "buffers":
            write.put_blocks([bytes(row) for row in data])
        else:
            for part in (2, 0, 1):
                write.put(part, data[:, 8192 * part : 8192 * (part + 1)])
    assert write.outcomes == [Outcome.STORED] * 6
    target = np.zeros_like(DATA)
    assert connect(daemon, KV).load(HASHES, into=BlockRows(target)).wait().num_loaded == 6
    assert (target == DATA).all()
    assert client.statistics().bytes_stored == DATA.size


@over_all_transports
@pytest.mark.parametrize("target", ["rows", "parts", "buffers", "region", "some parts", "views"])
def test_bytes_arrive_wherever_they_are_loaded_to(daemon: DaemonProcess, connect: Connect, target: str) -> None:
    client = connect(daemon, KV)
    store(client, HASHES)
    memory = from_region(client, np.zeros_like(DATA)) if target == "region" else np.zeros_like(DATA)
    if target == "views":
        with client.load(HASHES, view=True) as load:
            assert load.wait().num_loaded == 6
            for block in range(6):
                for part in range(3):
                    view = load.view(block, part)
                    assert (view == PARTS[part][block]).all()
                    assert not view.flags.writeable
            load.check()
        return
    if target in ("rows", "region"):
        result = client.load(HASHES, into=BlockRows(memory)).wait()
    elif target == "buffers":
        result = client.load(HASHES, into=BlockRows(list(memory))).wait()
    else:
        parts = [0, 2] if target == "some parts" else [0, 1, 2]
        into = {part: memory[:, 8192 * part : 8192 * (part + 1)] for part in parts}
        result = client.load(HASHES, into=into, parts=parts).wait()
    assert (result.num_loaded, result.errors) == (6, {})
    wanted = DATA.copy()
    if target == "some parts":
        wanted[:, 8192:16384] = 0
    assert (memory == wanted).all()


@over_all_transports
@pytest.mark.parametrize(
    ("kv", "length"),
    [
        (spec(layers=1, bytes_per_part=10 << 20), 2),
        (spec(layers=64, bytes_per_part=512), 40),
        (spec(layers=3, bytes_per_part=777), 300),
        (spec(layers=2, ranks=2, bytes_per_part=1 << 20), 7),
    ],
    ids=["parts larger than a piece", "many parts", "odd sizes", "two ranks"],
)
def test_blocks_of_any_shape(make_daemon: MakeDaemon, connect: Connect, kv: KVSpec, length: int) -> None:
    client = connect(make_daemon(), kv, staging_bytes=32 << 20)  # some are larger than a slab of 1 MiB
    hashes = chain(length, of=kv)
    assert store(client, hashes) == [Outcome.STORED] * length
    target = np.zeros((length, kv.block_bytes), np.uint8)
    assert client.load(hashes, into=BlockRows(target)).wait().num_loaded == length
    assert (target == rows(kv, hashes)).all()


@over_all_transports
def test_more_is_moved_than_staging_holds(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: C7. What is on its way is bounded by it."""
    kv = spec(layers=4, bytes_per_part=64 << 10)
    client = connect(daemon, kv, staging_bytes=1 << 20)
    hashes = chain(40, of=kv)
    assert store(client, hashes) == [Outcome.STORED] * 40
    target = np.zeros((40, kv.block_bytes), np.uint8)
    assert client.load(hashes, into=BlockRows(target)).wait().num_loaded == 40
    assert (target == rows(kv, hashes)).all()
    assert [session.region_bytes for session in daemon.stats().sessions] == [1 << 20]


@over_all_transports
def test_a_part_can_be_used_while_the_next_is_not_written_yet(daemon: DaemonProcess, connect: Connect) -> None:
    writer, reader = connect(daemon, KV), connect(daemon, KV)
    target = np.zeros_like(DATA)
    with writer.store(HASHES) as write:
        load = reader.load(HASHES, into=BlockRows(target), follow=True)
        for part in range(3):
            write.put(part, PARTS[part])
            load.wait_part(part)
            assert (target[:, : 8192 * (part + 1)] == DATA[:, : 8192 * (part + 1)]).all()
            assert not target[:, 8192 * (part + 1) :].any()
    assert load.wait().num_loaded == 6


@over_all_transports
def test_a_follow_whose_writer_gives_up_keeps_what_came_and_says_what_did_not(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Covers: A5, B7."""
    writer, reader = connect(daemon, KV), connect(daemon, KV)
    target = np.zeros_like(DATA)
    write = writer.store(HASHES)
    load = reader.load(HASHES, into=BlockRows(target), follow=True)
    write.put(0, PARTS[0])
    load.wait_part(0)
    write.abort()
    with pytest.raises(WriterFailed):
        load.wait_part(1)
    assert (target[:, :8192] == PARTS[0]).all()
    assert not target[:, 8192:].any()


@over_all_transports
def test_blocks_rise_from_disk_to_wherever_they_are_loaded(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect
) -> None:
    """Covers: D2."""
    daemon = make_daemon(disk_path=tmp_path / "disk", **SMALL)
    client = connect(daemon, KV)
    hashes = chain(100, of=KV)
    store_chain(daemon, client, hashes)
    daemon.kill()
    daemon.start()
    client.wait_ready()
    target = np.zeros((100, KV.block_bytes), np.uint8)
    failed = client.load(hashes, into=BlockRows(target)).wait().errors
    good = [block for block in range(100) if block not in failed]
    assert good, "some fit into memory"
    assert (target[good] == rows(KV, hashes)[good]).all()


@over_all_transports
def test_a_region_can_be_closed_while_others_are_used_and_its_room_be_used_again(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Covers: E13."""
    client = connect(daemon, KV)
    kept = from_region(client, DATA)
    for seed in range(1, 20):
        with client.region(DATA.size) as region:
            array = region.array.reshape(DATA.shape)
            hashes = chain(6, of=KV, seed=seed)
            array[:] = rows(KV, hashes)
            with client.store(hashes) as write:
                write.put_blocks(array)
            array[:] = 0
            assert client.load(hashes, into=BlockRows(array)).wait().num_loaded == 6
            assert (array == rows(KV, hashes)).all()
    eventually(lambda: daemon.stats().sessions[0].region_bytes == DATA.size)
    with client.store(HASHES) as write:
        write.put_blocks(kept)
    assert write.outcomes == [Outcome.STORED] * 6


@over_all_transports
def test_a_region_larger_than_the_daemon_allows_is_refused_and_smaller_ones_are_not(
    make_daemon: MakeDaemon, connect: Connect, tmp_path: Path
) -> None:
    """Covers: E12."""
    config = tmp_path / "kvstore.toml"
    config.write_text('max_region_bytes = "1MiB"\n')
    client = connect(make_daemon(config=config), KV)
    with pytest.raises(StoreFull, match="max_region_bytes"):
        client.region(2 << 20)
    with pytest.raises(InvalidRequest):
        client.region(0)
    client.region(1 << 19)


@over_all_transports
def test_a_region_of_more_than_a_gib_is_moved_to_and_from_wherever_in_it_the_bytes_are(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Covers: E12. Between hosts it takes two registrations, and a part lies on their border. Most of it is never
    touched, and takes no memory."""
    client = connect(daemon, KV)
    region = client.region(REGISTER_BYTES + (64 << 20))
    begin = REGISTER_BYTES - 3 * 8192 - 4096
    array = region.array[begin : begin + DATA.size].reshape(DATA.shape)
    array[:] = DATA
    with client.store(HASHES) as write:
        write.put_blocks(array)
    assert write.outcomes == [Outcome.STORED] * 6
    array[:] = 0
    assert client.load(HASHES, into=BlockRows(array)).wait().num_loaded == 6
    assert (array == DATA).all()


@over_all_transports
def test_clients_that_start_at_once_all_move_their_own_bytes(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: B8."""

    def work(number: int) -> bool:
        client = connect(daemon, KV)
        hashes = chain(6, of=KV, seed=number)
        done = store(client, hashes) == [Outcome.STORED] * 6
        target = np.zeros_like(DATA)
        for _ in range(3):
            done &= client.load(hashes, into=BlockRows(target)).wait().num_loaded == 6
            done &= bool((target == rows(KV, hashes)).all())
        return done

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(1, 17)))


# The choice.


@needs_ucx
def test_on_one_host_clients_take_shared_memory(make_daemon: MakeDaemon, connect: Connect) -> None:
    """Covers: G3."""
    client = connect(make_daemon(ucx_device="lo"), KV, transport="auto")
    session = client._link.channel.current
    assert session is not None
    assert session.agent is None


@needs_ucx
@pytest.mark.parametrize("why", ["is not there", "is that of another daemon"])
def test_where_the_socket_of_the_daemon_cannot_be_reached_clients_take_ucx_and_log_why(
    make_daemon: MakeDaemon, connect: Connect, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """Covers: G3. Two hosts may each have a daemon with a socket of the same path."""
    daemon = make_daemon(ucx_device="lo")
    daemon.shm_path.unlink()
    if why == "is that of another daemon":
        make_daemon().shm_path.rename(daemon.shm_path)
    with caplog.at_level(logging.INFO, "kvstore"):
        client = connect(daemon, KV, transport="auto")
    assert "transport: ucx on lo" in caplog.text
    assert ("another" in caplog.text) == (why == "is that of another daemon")
    assert store(client, HASHES) == [Outcome.STORED] * 6
    target = np.zeros_like(DATA)
    assert client.load(HASHES, into=BlockRows(target)).wait().num_loaded == 6
    assert (target == DATA).all()


def test_without_any_transport_the_error_says_why_for_each(make_daemon: MakeDaemon, connect: Connect) -> None:
    """Covers: G3. Nothing else is refused: a scheduler only asks."""
    daemon = make_daemon()
    daemon.shm_path.unlink()
    client = connect(daemon, KV, transport="auto")
    assert client.match(HASHES).num_blocks == 0
    with pytest.raises(Unsupported, match=r"shm socket.*ucx_device"):
        client.region(4096)


@pytest.mark.parametrize(("transport_asked", "says"), [("shm", "shm socket"), ("ucx", "ucx_device")])
def test_a_transport_that_was_asked_for_and_cannot_be_had_is_an_error(
    make_daemon: MakeDaemon, connect: Connect, transport_asked: Any, says: str
) -> None:
    daemon = make_daemon()
    daemon.shm_path.unlink()
    client = connect(daemon, KV, ready=False, transport=transport_asked)
    with pytest.raises(Unsupported, match=says):
        client.wait_ready(20)


@needs_ucx
def test_a_device_that_is_not_there_is_named(make_daemon: MakeDaemon, connect: Connect) -> None:
    client = connect(make_daemon(ucx_device="lo"), KV, ready=False, transport="ucx", ucx_device="nowhere0")
    with pytest.raises(Unsupported, match="nowhere0"):
        client.wait_ready(20)
