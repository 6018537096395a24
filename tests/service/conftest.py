"""Daemons, clients and children that are gone when a test is over, whatever became of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from service.harness import DEADLINE_S, Child, DaemonProcess, RawStream, ShmPeer, eventually

from kvstore.spec import KVSpec
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import ClientOptions, KVClient


def check_idle(daemon: DaemonProcess) -> None:
    """Its clients are gone, so nothing of theirs is left, and it has found no bug in itself."""
    eventually(daemon.is_idle, "sessions, leases and writes are gone with the clients")
    log = daemon.new_log()
    assert "this is a bug" not in log, log
    assert "Traceback" not in log, log


@pytest.fixture
def transport() -> str:
    """How clients of this test move bytes; a test can be run over all."""
    return "shm"


@pytest.fixture
def make_daemon(tmp_path_factory: pytest.TempPathFactory, transport: str) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts a daemon. After the test, nothing of its clients is left in it."""
    daemons: list[DaemonProcess] = []

    def make(**flags: object) -> DaemonProcess:
        if transport == "ucx":
            flags = {"ucx_device": "lo"} | flags
        daemons.append(DaemonProcess(tmp_path_factory.mktemp("d"), **flags))
        return daemons[-1].start()

    yield make
    try:
        for daemon in daemons:
            if daemon.running:
                check_idle(daemon)
    finally:
        for daemon in daemons:
            daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """A daemon of the test's own."""
    return make_daemon()


@pytest.fixture(scope="module")
def module_daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """With the `DAEMON_FLAGS` of the module, if it has some."""
    flags = {"heartbeat_s": 10} | getattr(request.module, "DAEMON_FLAGS", {})
    daemon = DaemonProcess(tmp_path_factory.mktemp("d"), **flags)
    try:
        yield daemon.start()
    finally:
        daemon.close()


@pytest.fixture
def shared(module_daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """A daemon shared by the tests of a module, which must outlive what each of them does to it."""
    yield module_daemon
    assert module_daemon.running, module_daemon.log.read_text()
    check_idle(module_daemon)
    module_daemon.admin.Clear(pb.ClearRequest())


@pytest.fixture
def stack(request: pytest.FixtureRequest) -> Iterator[ExitStack]:
    """Closed before the daemons are looked at and ended."""
    request.getfixturevalue("shared" if "shared" in request.fixturenames else "make_daemon")
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def connect(stack: ExitStack, transport: str) -> Callable[..., KVClient]:
    """A client that is connected."""

    def connect(daemon: DaemonProcess, kv: KVSpec, *, ready: bool = True, **options: Any) -> KVClient:
        defaults = {"timeout_s": DEADLINE_S, "transport": transport}
        client = KVClient(daemon.address, kv, options=ClientOptions(**defaults | options))
        stack.enter_context(closing(client))
        if ready:
            client.wait_ready(DEADLINE_S)
        return client

    return connect


@pytest.fixture
def make_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Makes a Redis (`service.redis_server.RedisServer`), which is not started."""
    from service.redis_server import RedisServer  # needs redis-py, as few tests do

    with ExitStack() as stack:

        def make(*options: str) -> RedisServer:
            return stack.enter_context(closing(RedisServer(tmp_path_factory.mktemp("r"), *options)))

        yield make


@pytest.fixture
def redis(make_redis: Callable[..., Any]) -> Any:
    """A Redis that answers."""
    return make_redis().start()


@pytest.fixture
def child(stack: ExitStack, transport: str) -> Callable[..., Child]:
    def child(scenario: str, **arguments: object) -> Child:
        return stack.enter_context(closing(Child(scenario, transport=transport, **arguments)))

    return child


@pytest.fixture
def raw(stack: ExitStack) -> Callable[..., RawStream]:
    """A raw stream; with a spec, one that was welcomed."""

    def raw(daemon: DaemonProcess, kv: KVSpec | None = None, **arguments: Any) -> RawStream:
        stream = stack.enter_context(closing(RawStream(daemon.address, **arguments)))
        if kv is not None:
            stream.welcome = stream.hello(kv)  # type: ignore[attr-defined]
        return stream

    return raw


@pytest.fixture
def shm(stack: ExitStack) -> Callable[..., ShmPeer]:
    """A raw connection to the shm socket; with a ticket, one that has shown it."""

    def shm(daemon: DaemonProcess, ticket: bytes | None = None) -> ShmPeer:
        return stack.enter_context(closing(ShmPeer(daemon.shm_path, ticket)))

    return shm
