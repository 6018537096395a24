"""The daemon is killed, stopped and started again: clients see a miss or StoreUnavailable, and come back."""

import subprocess
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, DaemonProcess, RawStream, eventually, over_all_transports

from kvstore_client import BlockRows, ClientOptions, KVClient, Outcome, StoreUnavailable

KV = spec(layers=3, bytes_per_part=8192)
HASHES = chain(4, of=KV)
DATA = rows(KV, HASHES)

Connect = Callable[..., KVClient]
MakeDaemon = Callable[..., DaemonProcess]


@over_all_transports
def test_a_killed_daemon_fails_loads_and_stores_at_once_and_clients_come_back_by_themselves(
    daemon: DaemonProcess, connect: Connect
) -> None:
    """Covers: A3, A15, B1, D3, D13."""
    writer = connect(daemon, KV)
    reader = connect(daemon, KV)
    region = writer.region(4 * KV.block_bytes)
    from_region = region.array.reshape(4, KV.block_bytes)
    from_region[:] = DATA
    boot_id = reader.boot_id
    assert boot_id is not None
    write = writer.store(HASHES)
    write.put(0, from_region[:, :8192])
    target = np.zeros((4, KV.block_bytes), np.uint8)
    load = reader.load(HASHES, into=BlockRows(target), follow=True)
    load.wait_part(0)

    daemon.kill()

    with pytest.raises(StoreUnavailable):
        load.wait_part(1)
    with pytest.raises(StoreUnavailable):
        load.wait()
    assert not target[:, 8192:].any()
    with pytest.raises(StoreUnavailable):
        write.put(1, from_region[:, 8192:16384])
    with pytest.raises(StoreUnavailable):
        reader.match(HASHES)
    assert reader.boot_id is None

    daemon.start()

    for client in (writer, reader):
        client.wait_ready(DEADLINE_S)
        assert client.boot_id not in (None, boot_id)
        assert client.boot_id == daemon.stats().boot_id
    assert reader.match(HASHES).num_blocks == 0
    with writer.store(HASHES) as again:
        again.put_blocks(from_region)
    assert again.outcomes == [Outcome.STORED] * 4
    result = reader.load(HASHES, into=BlockRows(target)).wait()
    assert result.num_loaded == 4
    assert (target == DATA).all()
    assert reader.statistics().reconnects == 1
    region.close()


@over_all_transports
def test_views_of_a_dead_daemon_are_not_those_of_the_next(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: A3, A17. The next daemon's first slab has the same number; its blocks are read from it, not from
    the mapping of the old."""
    client = connect(daemon, KV)
    with client.store(HASHES) as write:
        write.put_blocks(DATA)
    load = client.load(HASHES, view=True)
    load.wait()
    old = load.view(0, 0)
    daemon.kill()
    daemon.start()
    client.wait_ready(DEADLINE_S)
    others = chain(4, of=KV, seed=1)
    with client.store(others) as write:
        write.put_blocks(rows(KV, others))

    with client.load(others, view=True) as again:
        again.wait()
        assert (again.view(0, 0) == rows(KV, others)[0][:8192]).all()

    assert (old == DATA[0][:8192]).all(), "the memory of a view stays as long as the view"


@over_all_transports
def test_a_client_made_before_its_daemon_connects_when_it_starts(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: D12."""
    daemon.kill()
    client = connect(daemon, KV, ready=False)
    with pytest.raises(StoreUnavailable):
        client.match(HASHES)

    daemon.start()

    client.wait_ready(DEADLINE_S)
    assert client.match(HASHES).num_blocks == 0


@over_all_transports
def test_sigterm_ends_the_daemon_with_code_zero_and_no_files_left(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon, KV)
    with client.store(HASHES) as write:
        write.put_blocks(DATA)
    open_write = client.store(chain(2, of=KV, seed=1))
    load = client.load(chain(2, of=KV, seed=1), into=BlockRows(np.zeros((2, KV.block_bytes), np.uint8)), follow=True)

    assert daemon.terminate() == 0

    assert not daemon.socket_path.exists()
    assert not daemon.shm_path.exists()
    with pytest.raises(StoreUnavailable):
        load.wait()
    with pytest.raises(StoreUnavailable):
        client.match(HASHES)
    open_write.abort()
    assert "stopped" in daemon.log.read_text()
    assert "Traceback" not in daemon.log.read_text()


def test_a_raw_stream_is_told_that_the_daemon_stops(daemon: DaemonProcess) -> None:
    with closing(RawStream(daemon.address)) as stream:
        stream.hello(KV)
        assert daemon.terminate() == 0
        error = stream.end()
    assert error.code().name == "UNAVAILABLE"
    assert "stopping" in error.details()


def test_a_second_daemon_on_the_same_socket_is_refused_and_the_first_goes_on(
    daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect(daemon, KV)
    second = DaemonProcess(daemon.folder)
    with closing(second):
        second.log = daemon.folder / "second.log"
        assert second.launch().wait(DEADLINE_S) == 2
    assert f"{daemon.socket_path}: a daemon listens there already" in second.log.read_text()
    assert "Traceback" not in second.log.read_text()
    assert client.match(HASHES).num_blocks == 0
    assert daemon.shm_path.exists()
    with client.store(HASHES) as write:
        write.put_blocks(DATA)
    assert write.outcomes == [Outcome.STORED] * 4


def test_sockets_of_a_killed_daemon_are_replaced(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: D13."""
    daemon.kill()
    assert daemon.socket_path.exists()
    assert daemon.shm_path.exists()

    daemon.start()

    client = connect(daemon, KV)
    with client.store(HASHES) as write:
        write.put_blocks(DATA)
    assert client.match(HASHES).num_blocks == 4


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: pytest.TempPathFactory) -> None:
    daemon = DaemonProcess(tmp_path)  # type: ignore[arg-type]
    daemon.socket_path.write_text("precious")
    with closing(daemon):
        assert daemon.launch().wait(DEADLINE_S) == 2
    assert daemon.socket_path.read_text() == "precious"
    assert "expected a socket or nothing" in daemon.log.read_text()


@over_all_transports
def test_a_daemon_that_stops_answering_is_noticed(make_daemon: MakeDaemon, connect: Connect) -> None:
    """Covers: A15, B1, B3. The process is there and its socket accepts, but nothing comes."""
    daemon = make_daemon(heartbeat_s=0.3)
    client = connect(daemon, KV)
    process = daemon._process
    assert isinstance(process, subprocess.Popen)
    process.send_signal(19)
    try:
        with pytest.raises((StoreUnavailable, TimeoutError)):
            client.match(HASHES, timeout_s=0.2)
        eventually(lambda: not client.connected, "the client gives the session up")
        with pytest.raises(StoreUnavailable):
            client.match(HASHES)
    finally:
        process.send_signal(18)
    client.wait_ready(DEADLINE_S)
    assert client.match(HASHES).num_blocks == 0


def test_a_breaker_that_opens_on_the_first_failure_is_closed_by_the_next_session(
    make_daemon: MakeDaemon, stack
) -> None:
    """Covers: B1."""
    daemon = make_daemon(heartbeat_s=0.3)
    options = ClientOptions(timeout_s=DEADLINE_S, breaker_failures=1, breaker_cooldown_s=30)
    client = stack.enter_context(closing(KVClient(daemon.address, KV, options=options)))
    client.wait_ready(DEADLINE_S)
    daemon.kill()
    eventually(lambda: not client.connected)
    daemon.start()
    client.wait_ready(DEADLINE_S)
    assert client.match(HASHES).num_blocks == 0
