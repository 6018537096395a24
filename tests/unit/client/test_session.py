"""Sessions and the channel against a scripted daemon: deadlines, late answers, lost control."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from builders import chain, spec

from kvstore.errors import (
    InvalidRequest,
    NotAuthenticated,
    SpecMismatch,
    StoreTimeout,
    StoreUnavailable,
    Unsupported,
)
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import StoreServicer, add_StoreServicer_to_server
from kvstore.wire import pack_u32, pack_u64
from kvstore_client import BreakerState, ClientOptions, KVClient

KV = spec()
HASHES = chain(2, of=KV)
Script = Callable[[pb.ClientMessage], list[pb.ServerMessage]]


def answer_all(message: pb.ClientMessage) -> list[pb.ServerMessage]:
    return [pb.ServerMessage(matched=pb.Matched(num_blocks=1, num_writing=1))]


class ScriptedDaemon(StoreServicer):
    """Answers Hello, then whatever `script` says; keeps what it got. `cut` ends the streams."""

    def __init__(self, address: str) -> None:
        self.script: Script = answer_all
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.namespace = bytes(KV.namespace)
        self.heartbeat_ms = 60_000
        self.got: SimpleQueue[pb.ClientMessage] = SimpleQueue()
        self.streams: list[SimpleQueue[pb.ServerMessage | None]] = []
        self.server = grpc.server(ThreadPoolExecutor(8))
        add_StoreServicer_to_server(self, self.server)
        self.server.add_insecure_port(address)
        self.server.start()

    def Session(self, request_iterator: Iterator[pb.ClientMessage], context: Any) -> Iterator[pb.ServerMessage]:
        if self.refusal is not None:
            context.abort(*self.refusal)
        outgoing: SimpleQueue[pb.ServerMessage | None] = SimpleQueue()
        self.streams.append(outgoing)

        def read() -> None:
            try:
                for message in request_iterator:
                    self.got.put(message)
                    for reply in self.answers(message):
                        reply.request_id = message.request_id
                        outgoing.put(reply)
            except grpc.RpcError:
                pass
            finally:
                outgoing.put(None)

        threading.Thread(target=read, daemon=True).start()
        yield from iter(outgoing.get, None)

    def answers(self, message: pb.ClientMessage) -> list[pb.ServerMessage]:
        if message.HasField("hello"):
            welcome = pb.Welcome(
                boot_id=bytes([len(self.streams)]) * 16,
                session_id=len(self.streams),
                namespace=self.namespace,
                heartbeat_ms=self.heartbeat_ms,
            )
            return [pb.ServerMessage(welcome=welcome)]
        return self.script(message)

    def next(self, body: str) -> pb.ClientMessage:
        """The next message of that kind that the daemon got."""
        while True:
            message = self.got.get(timeout=5)
            if message.WhichOneof("body") == body:
                return message

    def cut(self) -> None:
        for stream in self.streams:
            stream.put(None)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/kv.sock"


@pytest.fixture
def daemon(address: str) -> Iterator[ScriptedDaemon]:
    daemon = ScriptedDaemon(address)
    yield daemon
    daemon.cut()
    daemon.server.stop(None).wait()


@pytest.fixture
def client(daemon: ScriptedDaemon, address: str) -> Iterator[KVClient]:
    with KVClient(address, KV, options=ClientOptions(timeout_s=5.0, breaker_failures=2)) as client:
        client.wait_ready(5)
        yield client


def silent(message: pb.ClientMessage) -> list[pb.ServerMessage]:
    return []


def test_a_call_is_answered_and_says_what_was_asked(daemon: ScriptedDaemon, client: KVClient) -> None:
    match = client.match(HASHES, lease="mine")
    assert (match.num_blocks, match.num_writing, match.lease) == (1, 1, "mine")
    asked = daemon.next("match")
    assert (asked.match.hashes, asked.match.lease) == (b"".join(HASHES), "mine")
    assert 4000 < asked.timeout_ms <= 5000


def test_a_status_becomes_the_error_of_its_code_and_the_session_goes_on(
    daemon: ScriptedDaemon, client: KVClient
) -> None:
    """Covers: G2."""
    daemon.script = lambda message: [pb.ServerMessage(status=pb.Status(code=3, message="too many"))]
    with pytest.raises(InvalidRequest, match="too many"):
        client.match(HASHES)
    daemon.script = answer_all
    assert client.match(HASHES).num_blocks == 1
    assert client.statistics().failures == 1


def test_a_call_without_an_answer_ends_at_its_deadline_and_gives_its_lease_back(
    daemon: ScriptedDaemon, client: KVClient
) -> None:
    """Covers: B1, B3, C1."""
    daemon.script = silent
    with pytest.raises(StoreTimeout, match="no answer from the store"):
        client.match(HASHES, lease="mine", timeout_s=0.05)
    assert daemon.next("release").release.lease == "mine"


def test_calls_without_answers_open_the_breaker_and_a_new_session_closes_it(
    daemon: ScriptedDaemon, client: KVClient
) -> None:
    """Covers: B1, D12."""
    daemon.script = silent
    for _ in range(2):
        with pytest.raises(StoreTimeout):
            client.match(HASHES, timeout_s=0.02)
    with pytest.raises(StoreUnavailable, match="circuit breaker"):
        client.match(HASHES)
    assert client.statistics().breaker is BreakerState.OPEN
    daemon.script = answer_all
    session = client._link.channel.current
    assert session is not None
    daemon.cut()
    assert session.ended.wait(5)
    client.wait_ready(5)
    assert client.match(HASHES).num_blocks == 1
    assert client.statistics().breaker is BreakerState.CLOSED


def test_a_reservation_that_comes_too_late_is_aborted(daemon: ScriptedDaemon, client: KVClient) -> None:
    """Covers: C5."""
    daemon.script = silent
    with pytest.raises(StoreTimeout):
        client.store(HASHES, timeout_s=0.05)
    asked = daemon.next("store")
    reserved = pb.Reserved(write_id=7, outcomes=b"\1\1")
    daemon.streams[-1].put(pb.ServerMessage(request_id=asked.request_id, reserved=reserved))
    assert daemon.next("abort").abort == pb.Abort(store_request_id=asked.request_id)


def test_a_stream_that_ends_fails_the_calls_that_wait_at_once(daemon: ScriptedDaemon, client: KVClient) -> None:
    """Covers: A15, B1."""
    daemon.script = silent
    threading.Timer(0.1, daemon.cut).start()
    before = time.monotonic()
    with pytest.raises(StoreUnavailable, match="the client reconnects"):
        client.match(HASHES, timeout_s=30)
    assert time.monotonic() - before < 10


def test_after_a_reconnect_the_boot_id_is_the_new_daemons(daemon: ScriptedDaemon, client: KVClient) -> None:
    """Covers: D10, D3."""
    assert client.boot_id == b"\1" * 16
    session = client._link.channel.current
    assert session is not None
    daemon.cut()
    assert session.ended.wait(5)
    client.wait_ready(5)
    assert client.boot_id == b"\2" * 16
    assert client.statistics().reconnects == 1


def test_an_absent_daemon_costs_nothing_but_a_typed_error(address: str) -> None:
    """Covers: D12."""
    with KVClient(address, KV) as client:
        with pytest.raises(StoreUnavailable, match="not connected"):
            client.match(HASHES)
        with pytest.raises(StoreUnavailable, match=r"No such file|failed to connect"):
            client.wait_ready(0.2)
        assert not client.connected
        assert client.boot_id is None


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, SpecMismatch),
        (grpc.StatusCode.UNAUTHENTICATED, NotAuthenticated),
    ],
)
def test_a_refusal_at_hello_is_told_at_once_by_its_reason(
    daemon: ScriptedDaemon, address: str, code: grpc.StatusCode, error: type[Exception]
) -> None:
    """Covers: A4, G2."""
    daemon.refusal = (code, "spec.layers: store has 2, client has 3")
    with KVClient(address, KV) as client:
        with pytest.raises(error, match=r"spec\.layers: store has 2"):
            client.wait_ready(5)
        with pytest.raises(error):
            client.match(HASHES)


def test_a_daemon_that_computes_another_namespace_is_not_used(daemon: ScriptedDaemon, address: str) -> None:
    """Covers: A4, A10."""
    daemon.namespace = bytes(32)
    with KVClient(address, KV) as client, pytest.raises(SpecMismatch, match="expected namespace"):
        client.wait_ready(5)


def test_an_idle_client_is_heard_of_within_each_heartbeat(daemon: ScriptedDaemon, address: str) -> None:
    """Covers: D11."""
    daemon.heartbeat_ms = 60
    daemon.script = lambda message: [pb.ServerMessage(pong=pb.Pong())]
    with KVClient(address, KV) as client:
        client.wait_ready(5)
        for _ in range(3):
            daemon.next("ping")


def test_a_daemon_that_is_silent_for_three_heartbeats_is_given_up(daemon: ScriptedDaemon, address: str) -> None:
    """Covers: A15, A22."""
    daemon.heartbeat_ms = 40
    daemon.script = silent
    with KVClient(address, KV) as client:
        client.wait_ready(5)
        session = client._link.channel.current
        assert session is not None
        assert session.ended.wait(5)
        assert "silent" in str(session.why_ended())


def test_slabs_without_shared_memory_are_refused_with_what_to_do(daemon: ScriptedDaemon, client: KVClient) -> None:
    """Covers: G3, C3."""
    located = pb.Located(slabs=pack_u32([1, 1]), slots=pack_u32([0, 1]), generations=pack_u64([5, 6]))
    daemon.script = lambda message: [pb.ServerMessage(located=located)]
    with pytest.raises(Unsupported, match="the daemon offers none"):
        client.load(HASHES, view=True, lease="mine")
    assert daemon.next("release").release.lease == "mine"


def test_an_shm_socket_that_is_not_here_is_named(daemon: ScriptedDaemon, client: KVClient) -> None:
    """Covers: G3."""
    session = client._link.channel.current
    assert session is not None
    session.exchange._path = "/nowhere/kv.shm"
    with pytest.raises(Unsupported, match=r"/nowhere/kv\.shm.*run the client on the daemon's host"):
        client.region(4096)


def test_close_ends_everything_and_may_be_called_again(daemon: ScriptedDaemon, client: KVClient) -> None:
    client.close()
    client.close()
    with pytest.raises(StoreUnavailable, match="it was closed"):
        client.match(HASHES)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvstore-")]
    assert names == []


@pytest.mark.parametrize("hashes", [[b"short"], [HASHES[0], b""]])
def test_hashes_of_another_length_never_leave_the_client(client: KVClient, hashes: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="expected 32 bytes"):
        client.match(hashes)


def test_options_out_of_bounds_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"options\.copy_threads: expected 1 to 256, got 0"):
        ClientOptions(copy_threads=0)
