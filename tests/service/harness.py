"""A daemon in its own process, clients that can be killed, and raw peers that say what no client would."""

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from builders import rows

from kvstore.errors import Unsupported
from kvstore.hashing import unpack
from kvstore.spec import KVSpec
from kvstore.transport import ucx
from kvstore.transport.shm import Op, Reply, Request, create_memfd, seal_region
from kvstore.types import BlockHash, ByteArray, Outcome
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminStub, StoreStub
from kvstore.wire import MAX_MESSAGE_BYTES, PROTOCOL_VERSION, spec_to_proto
from kvstore_client import KVClient
from kvstore_server.commands.hosts import DEVICE, Hosts

NO_UCX = ucx.why_unavailable()
TRANSPORTS = ["shm", pytest.param("ucx", marks=pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX))]
over_all_transports = pytest.mark.parametrize("transport", TRANSPORTS)
DEADLINE_S = 20.0  # of everything that must happen some time: generous, because machines are slow
CHILD = Path(__file__).with_name("child.py")
NOBODY = "02:00:00:00:00:01"  # no device has this address
_numbers = itertools.count()


def store(client: KVClient, hashes: list[BlockHash]) -> list[Outcome]:
    """The blocks, with the bytes that they hold in tests, were offered to the store; what became of each."""
    with client.store(hashes) as write:
        write.put_blocks(rows(client.spec, hashes))
    return write.outcomes


@contextlib.contextmanager
def made_hosts(*names: str) -> Iterator[Hosts]:
    """Network namespaces on a switch; skips the test, with the reason, where they cannot be made."""
    hosts = Hosts(f"kv-{os.getpid()}-{next(_numbers)}", *names)
    try:
        hosts.make()
    except Unsupported as error:
        pytest.skip(str(error))
    try:
        yield hosts
    finally:
        hosts.remove()


@contextlib.contextmanager
def cut(hosts: Hosts, one: str, *others: str) -> Iterator[None]:
    """No packet passes between `one` and the others, either way, and no host is told so: they go to nobody."""
    ends = [end for other in others for end in ((one, other), (other, one))]

    def neighbour(what: str, here: str, there: str, *more: str) -> None:
        command = ["ip", "-n", hosts.namespace(here), "neigh", what, hosts.address(there), "dev", DEVICE, *more]
        subprocess.run(command, check=True, capture_output=True, text=True)

    for end in ends:
        neighbour("replace", *end, "lladdr", NOBODY, "nud", "permanent")
    try:
        yield
    finally:
        for end in ends:
            neighbour("del", *end)


_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)


def eventually(condition: Callable[[], Any], what: str = "", *, timeout_s: float = DEADLINE_S) -> Any:
    """What `condition` gives as soon as that is true; fails at the deadline, with what it gave last."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what or condition}; last seen: {value!r}")
        pause.wait(0.01)


class DaemonProcess:
    """`kvstore serve` as its own process; started, killed and started again on the same socket."""

    def __init__(self, folder: Path, *, prefix: tuple[str, ...] = (), **flags: object) -> None:
        self._prefix = prefix  # a command that runs the daemon elsewhere
        self.folder = folder
        self.socket_path = folder / "kvstore.sock"
        self.shm_path = folder / "kvstore.sock.shm"
        self.address = f"unix:{self.socket_path}"
        self.log = folder / "daemon.log"
        self._flags: dict[str, object] = {
            "unix_socket": self.socket_path,
            "tcp_port": 0,
            "cpu_capacity": "64MiB",
            "slab_bytes": "1MiB",
            "heartbeat_s": 2.0,
        }
        self._flags |= flags
        self._process: subprocess.Popen[bytes] | None = None
        self._log_read = 0
        self._channel = grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        self.admin = AdminStub(self._channel)
        self.channel = self._channel

    def launch(self) -> "subprocess.Popen[bytes]":
        """The process is started; it may not listen yet."""
        command = [*self._prefix, sys.executable, "-m", "kvstore_server.cli", "serve", "--no-prefault"]
        for name, value in self._flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        return self._process

    def start(self) -> "DaemonProcess":
        process = self.launch()
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                next(self.admin.Members(pb.MembersRequest(), wait_for_ready=True, timeout=1.0))
                return self
            except grpc.RpcError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"no daemon: {error.details()}\n{self.log.read_text()}") from None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stats(self) -> pb.StatsReply:
        return self.admin.Stats(pb.StatsRequest(), timeout=DEADLINE_S)

    def num_fds(self) -> int:
        """Descriptors that are open in the daemon, but for those of its slabs."""
        count = 0
        for entry in os.scandir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += not os.readlink(entry.path).startswith("/memfd:kvstore-slab")
        return count

    def kill(self) -> None:
        """SIGKILL: nothing is tidied up."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(DEADLINE_S)

    def new_log(self) -> str:
        """What was logged since this was asked last."""
        text = self.log.read_text()[self._log_read :]
        self._log_read += len(text)
        return text

    def is_idle(self) -> bool:
        """Nobody is there and nobody's things are left."""
        stats = self.stats()
        clients = [one for one in stats.sessions if not one.client_name.startswith("courier/")]  # of other daemons
        return not (clients or stats.blocks_leased or stats.blocks_writing)

    def close(self) -> None:
        if self.running:
            self.kill()
        self._channel.close()


def held_by(daemon: DaemonProcess) -> set[bytes]:
    """Hashes of the blocks that are stored with this daemon."""
    events = daemon.admin.Watch(pb.WatchRequest(snapshot=True))
    held: set[bytes] = set()
    for event in events:
        if event.kind == pb.Event.SNAPSHOT_END:
            events.cancel()
            break
        held.update(one.tobytes() for one in unpack(event.hashes))
    return held


class Child:
    """A client in a process of its own (child.py): it stops at each step until it is told to go on."""

    def __init__(
        self, scenario: str, *, transport: str = "auto", prefix: tuple[str, ...] = (), **arguments: object
    ) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(CHILD), scenario, json.dumps(arguments), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self) -> str:
        """What the child says at its next stop."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the child ended with {self._process.wait(DEADLINE_S)}"
        return line.strip()

    def go_on(self, word: str = "") -> None:
        """The child goes on, and is told this."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()


class RawStream:
    """The Session stream itself."""

    def __init__(self, address: str, *, serializer: Callable[[Any], bytes] | None = None) -> None:
        self.channel = grpc.insecure_channel(address, _CHANNEL_OPTIONS)
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._last_id = 0
        messages = iter(self._outgoing.get, None)
        if serializer is None:
            self._stream = StoreStub(self.channel).Session(messages, timeout=60, wait_for_ready=True)
        else:
            method = self.channel.stream_stream(
                "/kvstore.v1.Store/Session",
                request_serializer=serializer,
                response_deserializer=pb.ServerMessage.FromString,
            )
            self._stream = method(messages, timeout=60, wait_for_ready=True)

    def send(self, message: Any) -> None:
        self._outgoing.put(message)

    def start(self, **body: Any) -> int:
        """The request is on its way; returns its id."""
        self._last_id += 1
        self.send(pb.ClientMessage(request_id=self._last_id, **body))
        return self._last_id

    def next(self) -> pb.ServerMessage:
        message: pb.ServerMessage = next(self._stream)
        return message

    def answer(self, request_id: int) -> pb.ServerMessage:
        """The next message with this id; others are passed over."""
        while True:
            message = self.next()
            if message.request_id == request_id:
                return message

    def ask(self, **body: Any) -> pb.ServerMessage:
        return self.answer(self.start(**body))

    def code(self, **body: Any) -> int:
        """The status code of the answer."""
        return self.ask(**body).status.code

    def hello(self, kv: KVSpec, **fields: Any) -> pb.Welcome:
        hello = {"protocol_version": PROTOCOL_VERSION, "spec": spec_to_proto(kv), "client_name": "raw"}
        return self.ask(hello=pb.Hello(**(hello | fields))).welcome

    def end(self) -> grpc.RpcError:
        """How the stream ends, which it must."""
        try:
            while True:
                self.next()
        except StopIteration:
            raise AssertionError("the stream ended without an error") from None
        except grpc.RpcError as error:
            return error

    def finish_sending(self) -> None:
        self._outgoing.put(None)

    def close(self) -> None:
        self._outgoing.put(None)
        self._stream.cancel()
        self.channel.close()


class ShmPeer:
    """The shm socket itself."""

    def __init__(self, path: str | Path, ticket: bytes | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(path))
        if ticket is not None:
            assert self.ask(Request(Op.ATTACH, ticket=ticket))[0].code == 0

    def ask(self, request: Request | bytes, fds: list[int] | None = None) -> tuple[Reply, list[int]]:
        data = request if isinstance(request, bytes) else request.encode()
        socket.send_fds(self.socket, [data], fds or [])
        answer, received, _, _ = socket.recv_fds(self.socket, Reply.MAX_BYTES, 4)
        return Reply.decode(answer), received

    def register(self, number: int, fd: int, size_bytes: int) -> Reply:
        return self.ask(Request(Op.REGION, number, size_bytes), [fd])[0]

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def memfd(size_bytes: int, *, sealed: bool = True) -> Iterator[tuple[int, ByteArray]]:
    """A region's memory."""
    fd, memory = create_memfd("test", size_bytes)
    try:
        if sealed:
            seal_region(fd)
        yield fd, memory
    finally:
        os.close(fd)
