"""Requests that are answered at once and so may come over the shm socket, beside the stream."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, DaemonProcess, RawStream, eventually

from kvstore.errors import BlockMissing, InvalidRequest, StoreTimeout
from kvstore.hashing import pack
from kvstore.transport.shm import MAX_CALL_COPY_BYTES, Op, Request
from kvstore.types import BlockHash, Outcome
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockRows, ClientOptions, KVClient

KV = spec()
HASHES = chain(4, of=KV)
INVALID = InvalidRequest.code


def call(**body: Any) -> Request:
    return Request(Op.CALL, body=pb.ClientMessage(request_id=7, **body).SerializeToString())


def told(**body: Any) -> Request:
    return Request(Op.TELL, body=pb.ClientMessage(**body).SerializeToString())


def match(lease: str) -> Request:
    return call(match=pb.Match(hashes=pack(HASHES), lease=lease))


@pytest.fixture
def stream(shared: DaemonProcess, raw: Any) -> Any:
    return raw(shared, KV)


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[KVClient]:
    with KVClient(daemon.address, KV, options=ClientOptions(timeout_s=DEADLINE_S)) as client:
        client.wait_ready(DEADLINE_S)
        with client.store(HASHES) as write:
            write.put_blocks(rows(KV, HASHES))
        yield client


def test_a_match_leases_until_its_release_and_neither_takes_the_stream(
    daemon: DaemonProcess, client: KVClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client._link.channel.current
    assert session is not None
    sent_before = session.sent_at
    found = client.match(HASHES, lease="mine")
    assert found.num_blocks == 4
    assert daemon.stats().blocks_leased == 4
    found.release()
    eventually(lambda: daemon.stats().blocks_leased == 0)
    assert session.sent_at == sent_before, "the stream was used"


def test_a_load_of_blocks_that_are_all_there_does_not_take_the_stream(client: KVClient) -> None:
    session = client._link.channel.current
    assert session is not None
    sent_before = session.sent_at
    out = np.zeros((4, KV.block_bytes), np.uint8)
    load = client.load(HASHES, into=BlockRows(out), lease="mine")
    assert load.wait().num_loaded == 4
    assert np.array_equal(out, rows(KV, HASHES))
    assert session.sent_at == sent_before, "the stream was used"
    load.release()


def test_a_load_with_a_block_that_is_missing_takes_the_stream_and_nothing_is_leased_twice(
    daemon: DaemonProcess, client: KVClient
) -> None:
    load = client.load([*HASHES, BlockHash(bytes(32))], view=True)
    assert list(load.errors) == [4]
    assert daemon.stats().sessions[0].blocks_leased == 4
    load.release()
    eventually(lambda: daemon.stats().blocks_leased == 0)


def test_a_small_store_from_a_region_does_not_take_the_stream(client: KVClient) -> None:
    session = client._link.channel.current
    assert session is not None
    more = chain(3, of=KV, seed=1)
    region = client.region(3 * KV.block_bytes)
    region.array[:] = rows(KV, more).ravel()
    sent_before = session.sent_at
    with client.store(more) as write:
        write.put_blocks(region.array.reshape(3, -1))
    assert write.outcomes == [Outcome.STORED] * 3
    assert session.sent_at == sent_before, "the stream was used"
    assert client.statistics().bytes_stored == 7 * KV.block_bytes
    with client.load(more, view=True) as load:
        assert [bytes(load.view(block, 1)) for block in range(3)] == [bytes(row[64:]) for row in rows(KV, more)]


def test_a_part_that_would_keep_others_waiting_is_referred_to_the_stream_and_not_taken_in(
    daemon: DaemonProcess, client: KVClient
) -> None:
    session = client._link.channel.current
    assert session is not None
    num_blocks = MAX_CALL_COPY_BYTES // KV.block_bytes + 1
    more = [BlockHash((1 + number).to_bytes(32, "big")) for number in range(num_blocks)]
    region = client.region(num_blocks * KV.block_bytes)
    region.array[:] = np.arange(len(region.array)) % 251
    with client.store(more) as write:
        part = write._part(np.arange(num_blocks), write.parts[:], region.number, np.zeros((num_blocks, 2), np.int64))
        assert session.exchange.begin(part.SerializeToString())
        assert session.exchange.finish(undo=bytes, deadline=time.monotonic() + DEADLINE_S) is None
        assert daemon.stats().counters.bytes_stored == 4 * KV.block_bytes
        write.put_blocks(region.array.reshape(num_blocks, -1))
    assert write.outcomes == [Outcome.STORED] * num_blocks


def test_a_store_that_a_stopped_daemon_answers_too_late_reserves_nothing(
    daemon: DaemonProcess, client: KVClient
) -> None:
    """Covers: C1, C5."""
    more = chain(3, of=KV, seed=1)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreTimeout):
            client.store(more, timeout_s=0.1)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: not daemon.stats().blocks_writing)
    with client.store(more) as write:
        assert write.outcomes == [Outcome.NEW] * 3, "they are reserved for nobody"
        write.put_blocks(rows(KV, more))


def test_a_part_that_a_stopped_daemon_takes_too_late_gives_the_write_up(
    daemon: DaemonProcess, client: KVClient
) -> None:
    """Covers: C1, C5."""
    more = chain(3, of=KV, seed=1)
    region = client.region(3 * KV.block_bytes)
    write = client.store(more)
    assert daemon.stats().blocks_writing == 3
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreTimeout):
            write.put(0, region.array.reshape(3, -1)[:, :64], timeout_s=0.1)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: not daemon.stats().blocks_writing)
    assert client.match(more).num_blocks == 0


def test_a_write_is_aborted_by_the_request_that_began_it_only_while_it_is_open(
    shared: DaemonProcess, stream: RawStream, shm: Any
) -> None:
    peer = shm(shared, stream.welcome.shm.ticket)
    begun = call(store=pb.Store_(hashes=pack(chain(2, of=KV, seed=5))))
    peer.ask(begun)
    assert stream.code(abort=pb.Abort(store_request_id=8)) == BlockMissing.code
    assert stream.ask(abort=pb.Abort(store_request_id=7)).aborted.num_blocks == 2
    assert stream.code(abort=pb.Abort(store_request_id=7)) == BlockMissing.code


def test_calls_of_two_threads_at_once_are_both_answered(client: KVClient) -> None:
    found: list[int] = []

    def ask() -> None:
        for number in range(200):
            with client.match(HASHES[: 1 + number % 4]) as match:
                found.append(match.num_blocks - number % 4)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == [1] * 800


def test_more_hashes_than_a_datagram_holds_take_the_stream(client: KVClient) -> None:
    many = [*HASHES, *(BlockHash(number.to_bytes(32, "big")) for number in range(60_000))]
    with client.match(many) as match:
        assert match.num_blocks == 4


def test_a_match_that_a_stopped_daemon_answers_too_late_leases_nothing(daemon: DaemonProcess, client: KVClient) -> None:
    """Covers: C1, C3."""
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreTimeout):
            client.match(HASHES, timeout_s=0.1)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    with client.match(HASHES) as match:
        assert match.num_blocks == 4
        eventually(lambda: daemon.stats().blocks_leased == 4)
    eventually(lambda: daemon.stats().blocks_leased == 0)


def test_a_client_that_leaves_without_reading_its_answer_has_its_last_word_heard(
    daemon: DaemonProcess, client: KVClient, raw: Any, shm: Any
) -> None:
    stream = raw(daemon, KV)
    peer = shm(daemon, stream.welcome.shm.ticket)
    os.kill(daemon.pid, signal.SIGSTOP)
    peer.socket.send(match("a").encode())
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: daemon.stats().blocks_leased == 4)
    os.kill(daemon.pid, signal.SIGSTOP)
    peer.socket.send(told(release=pb.Release(lease="a")).encode())
    peer.close()  # its answer is unread, which the daemon sees as a reset
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: daemon.stats().blocks_leased == 0)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (call(verify=pb.Verify(hashes=pack(HASHES))), "expected one of match, prefetch, load, release, store, store_"),
        (call(load=pb.Load(hashes=pack(HASHES), lease="x", follow=True)), "got load; use the stream"),
        (call(load=pb.Load(hashes=pack(HASHES))), "expected a name"),
        (call(), "got none"),
        (Request(Op.CALL), "got none"),
        (Request(Op.CALL, body=b"\xff" * 20), "expected a ClientMessage"),
        (call(match=pb.Match(hashes=b"x" * 33)), "multiple of 32"),
        (call(release=pb.Release(lease="x" * 300)), "at most 256 bytes"),
        (Request(Op.SLAB, 1, body=b"x"), "expected 32 bytes"),
        (Request(Op.CALL, body=bytes(Request.MAX_BYTES)), "expected 32"),
    ],
)
def test_what_cannot_be_called_is_refused_and_the_connection_goes_on(
    shared: DaemonProcess, stream: RawStream, shm: Any, request_: Request, says: str
) -> None:
    peer = shm(shared, stream.welcome.shm.ticket)
    if len(request_.encode()) > 1 << 18:
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    reply, _ = peer.ask(request_)
    assert reply.code == INVALID
    assert says in reply.message
    assert pb.ServerMessage.FromString(peer.ask(match(""))[0].body).matched.num_blocks == 0


def test_a_tell_is_never_answered_not_even_one_that_is_refused(
    shared: DaemonProcess, stream: RawStream, shm: Any
) -> None:
    peer = shm(shared, stream.welcome.shm.ticket)
    for request in (Request(Op.TELL), Request(Op.TELL, body=b"\xff"), told(release=pb.Release(lease="none"))):
        peer.socket.send(request.encode())
    answer = pb.ServerMessage.FromString(peer.ask(match(""))[0].body)
    assert answer.request_id == 7, "the next reply is that of the next call"


def test_a_call_before_attach_is_refused(shared: DaemonProcess, shm: Any) -> None:
    assert shm(shared).ask(match("x"))[0].code == 16


def test_views_of_what_a_call_found(client: KVClient) -> None:
    with client.match(HASHES) as match, client.load(match, view=True) as load:
        assert np.array_equal(load.view(2, 1), rows(KV, HASHES)[2][64:])
        load.check()
