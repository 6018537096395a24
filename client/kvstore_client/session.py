"""One stream to the daemon: requests go out by a queue, answers come back by their request id.

A call costs one queue put and one wait on a lock that the reader thread releases; there are no other hops.
What ends the stream ends every call that waits on it, at once, with `StoreUnavailable`.
"""

import itertools
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

from kvstore.errors import KVStoreError, StoreBug, StoreTimeout, StoreUnavailable, error_of
from kvstore.transport.ucx import Agent
from kvstore.types import BootId, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import error_from_status
from kvstore_client.breaker import Breaker
from kvstore_client.exchange import Exchange
from kvstore_client.options import Counters

if TYPE_CHECKING:
    import grpc

Answer: TypeAlias = pb.ServerMessage | KVStoreError
OnAnswer: TypeAlias = Callable[[Answer], None]  # runs on the reader thread: must neither block nor raise
Undo: TypeAlias = Callable[[int], pb.ClientMessage]  # what undoes the request of this id

_CANCELLED: Final = 1


class Pending:
    """A request without an answer: somebody waits on `latch`, or `then` is called, or one after the other."""

    __slots__ = ("answer", "lasting", "latch", "then")

    def __init__(self, latch: "threading.Lock | None", then: OnAnswer | None, lasting: bool) -> None:
        self.latch = latch
        self.then = then
        self.lasting = lasting  # several answers: stays until `forget`
        self.answer: Answer | None = None


class Session:
    """A stream that was welcomed. Made by `open_session`; all methods are thread-safe."""

    boot_id: BootId
    session_id: int
    namespace: Namespace
    heartbeat_s: float
    exchange: Exchange
    max_region_bytes: int

    def __init__(
        self,
        channel: "grpc.Channel",
        *,
        breaker: Breaker,
        counters: Counters,
        on_retired: Callable[["Session", list[int]], None],
    ) -> None:
        from kvstore.v1.kvstore_pb2_grpc import StoreStub

        self._breaker = breaker
        self._counters = counters
        self._on_retired = on_retired
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._ids = itertools.count(1)
        self._ended: KVStoreError | None = None
        self._beside = False  # whether requests may be sent over the shm socket
        self._agent: Agent | None = None
        self.ended = threading.Event()
        self.sent_at = self.heard_at = time.monotonic()
        self._outgoing: SimpleQueue[pb.ClientMessage | None] = SimpleQueue()
        self._stream = StoreStub(channel).Session(iter(self._outgoing.get, None))
        self._reader = threading.Thread(target=self._read, name="kvstore-reader", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        return self._ended is None

    @property
    def num_waiting(self) -> int:
        """Requests without their last answer."""
        return len(self._pending)

    def greet(self, hello: pb.Hello, *, timeout_s: float) -> None:
        """The daemon has welcomed this session.

        Raises: what the daemon refused it with, StoreTimeout, StoreUnavailable.
        """
        entry = self.send(pb.ClientMessage(hello=hello), threading.Lock(), None, lasting=False)
        welcome = self.wait(entry, time.monotonic() + timeout_s, "hello").welcome
        if welcome.heartbeat_ms < 1:
            raise StoreBug("welcome: expected a heartbeat of at least 1 ms, got 0; report it")
        self.boot_id = BootId(welcome.boot_id)
        self.session_id = welcome.session_id
        self.capabilities = frozenset(welcome.capabilities)
        self.namespace = Namespace(welcome.namespace)
        self.heartbeat_s = welcome.heartbeat_ms / 1000
        self.max_region_bytes = welcome.limits.max_region_bytes
        self.agent_name = welcome.ucx.agent_name  # empty: the daemon offers no ucx
        self.exchange = Exchange(welcome.shm.socket_path, welcome.shm.ticket)
        self._beside = "call" in self.capabilities
        if not self.alive:
            self.exchange.close()

    @property
    def agent(self) -> Agent | None:
        """With which the daemon moves bytes, if this session's transport is ucx."""
        return self._agent

    def use(self, agent: Agent) -> None:
        """The transport of this session is ucx, and the agent is closed when it ends.

        The daemon is on another host, so that nothing takes the shm socket.
        """
        with self._lock:
            self._agent = agent
            self._beside = False
            ended = self._ended is not None
        if ended:
            agent.close()

    def call(
        self,
        message: pb.ClientMessage,
        *,
        deadline: float,
        then: OnAnswer | None = None,
        lasting: bool = False,
        undo: Undo | None = None,
    ) -> tuple[pb.ServerMessage, int]:
        """The answer, and the id of the request.

        `then` gets an answer that comes after the deadline; with `lasting`, every later one, and the
        error that ends the stream, until `forget`. `undo` is for requests that are answered at once: it is sent
        behind the request if there was no answer in time. Where they can be, they are sent over the shm socket.

        Raises: the error that the daemon answers with; StoreTimeout; StoreUnavailable, if the stream
        ends or the breaker is open.
        """
        call = self.begin(message, deadline=deadline, then=then, lasting=lasting, undo=undo)
        return call.answer(), message.request_id

    def begin(
        self,
        message: pb.ClientMessage,
        *,
        deadline: float,
        then: OnAnswer | None = None,
        lasting: bool = False,
        undo: Undo | None = None,
    ) -> "Call":
        """As `call`, but the answer is not waited for: the caller asks the Call for it, in any case.

        Never waits. Raises: StoreUnavailable, if the stream has ended or the breaker is open.
        """
        self._counters.add("calls")
        wait_s = self._breaker.admit()
        if wait_s:
            self._counters.add("failures")
            raise StoreUnavailable(
                f"circuit breaker: open, as the store did not answer; next try in {wait_s:.1f} s; recompute"
            )
        call = Call(self, message, deadline=deadline, then=then, lasting=lasting, undo=undo)
        try:
            if not (undo is not None and self._beside and self.alive and self._begin_beside(message)):
                call.send()
        except KVStoreError as error:
            self.report(error)
            raise
        return call

    def answered(self) -> None:
        """A call was answered, whatever the answer."""
        self._breaker.succeeded()

    def _begin_beside(self, message: pb.ClientMessage) -> bool:
        message.request_id = next(self._ids)
        return self.exchange.begin(message.SerializeToString())

    def finish_beside(self, message: pb.ClientMessage, undo: Undo, deadline: float) -> pb.ServerMessage | None:
        """The answer over the shm socket; None if the request must take the stream."""

        def undoing() -> bytes:
            undone = undo(message.request_id)
            undone.request_id = next(self._ids)
            return undone.SerializeToString()

        data = self.exchange.finish(undo=undoing, deadline=deadline)
        if data is None:
            return None
        answer = pb.ServerMessage.FromString(data)
        if answer.HasField("status"):
            raise error_from_status(answer.status)
        return answer

    def revive(self, deadline: float) -> None:
        """The shm socket is used again, if it was lost: the daemon answers."""
        if self._beside:
            self.exchange.revive(deadline=deadline)

    def start(self, message: pb.ClientMessage, then: OnAnswer) -> None:
        """The request is on its way; `then` gets the answer, or what ended the stream, exactly once."""
        try:
            self.send(message, None, then, lasting=False)
        except KVStoreError as error:
            then(error)

    def tell(self, message: pb.ClientMessage) -> None:
        """The request is on its way, and nobody waits for an answer.

        Waits for no lock, so that finalizers may call it.
        """
        message.request_id = next(self._ids)
        self.sent_at = time.monotonic()
        self._outgoing.put(message)

    def release(self, lease: str) -> None:
        """The lease, of requests that were all answered, will be given back; as `tell`, but it may overtake."""
        message = pb.ClientMessage(request_id=next(self._ids), release=pb.Release(lease=lease))
        if not (self._beside and self.exchange.tell(message.SerializeToString())):
            self.tell(message)

    def forget(self, request_id: int) -> None:
        """Nothing more is told about this request."""
        with self._lock:
            self._pending.pop(request_id, None)

    def report(self, error: KVStoreError) -> None:
        """Count a call that failed; one that had no answer counts against the store."""
        self._counters.add("failures")
        if isinstance(error, StoreTimeout):
            self._counters.add("timeouts")
        if isinstance(error, StoreTimeout | StoreUnavailable):
            self._breaker.failed()
        else:
            self._breaker.succeeded()

    def end(self, error: KVStoreError) -> None:
        """The stream is over: whoever waits gets `StoreUnavailable`. Idempotent."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            pending = list(self._pending.values())
            self._pending.clear()
            agent = self._agent
        if agent is not None:
            agent.close()  # first: whoever hears that the session is over may use its memory for other things
        for entry in pending:
            reason = self._gone()
            if entry.latch is not None:
                entry.answer = reason
                entry.latch.release()
            elif entry.then is not None:
                entry.then(reason)
        self._stream.cancel()
        self._outgoing.put(None)
        self.ended.set()
        if hasattr(self, "exchange"):
            self.exchange.close()

    def join(self, timeout_s: float) -> None:
        """The reader thread of an ended session is gone, or the time is over."""
        if self._reader is not threading.current_thread():
            self._reader.join(timeout_s)

    def why_ended(self) -> KVStoreError:
        assert self._ended is not None, "the session has ended"
        return self._ended

    def _gone(self) -> StoreUnavailable:
        return StoreUnavailable(f"session: it has ended ({self._ended}); recompute, the client reconnects")

    def send(
        self,
        message: pb.ClientMessage,
        latch: "threading.Lock | None",
        then: OnAnswer | None,
        *,
        lasting: bool,
        deadline: float | None = None,
    ) -> Pending:
        """The request is on its way over the stream. Raises: StoreUnavailable, if that has ended."""
        now = time.monotonic()
        if deadline is not None:
            message.timeout_ms = max(1, int((deadline - now) * 1000))
        message.request_id = next(self._ids)
        entry = Pending(latch, then, lasting)
        if latch is not None:
            latch.acquire()
        with self._lock:
            if self._ended is not None:
                raise self._gone()
            self._pending[message.request_id] = entry
        self.sent_at = now
        self._outgoing.put(message)
        return entry

    def wait(self, entry: Pending, deadline: float, what: str) -> pb.ServerMessage:
        """The answer to what was sent. Raises: as `call` does."""
        latch = entry.latch
        # None: answered before we looked.
        if latch is not None and not latch.acquire(timeout=max(0.0, deadline - time.monotonic())):
            with self._lock:
                if entry.answer is None:
                    entry.latch = None  # from now on an answer goes to `then`
        answer = entry.answer
        if answer is None:
            raise StoreTimeout(f"{what}: no answer from the store within the deadline; recompute")
        if isinstance(answer, KVStoreError):
            raise answer
        if answer.HasField("status"):
            raise error_from_status(answer.status)
        return answer

    # The reader thread.

    def _read(self) -> None:
        import grpc

        try:
            for message in self._stream:
                self.heard_at = time.monotonic()
                if message.request_id:
                    self._dispatch(message)
                elif message.HasField("slabs_retired"):
                    self._on_retired(self, list(message.slabs_retired.slabs))
            error: KVStoreError = StoreUnavailable("the daemon closed the stream")
        except grpc.RpcError as failure:
            code = failure.code().value[0]
            details = failure.details() or failure.code().name
            error = StoreUnavailable(details) if code == _CANCELLED else error_of(code, details)
        except Exception as failure:
            error = StoreUnavailable(f"the reader failed: {failure!r}")
        self.end(error)

    def _dispatch(self, message: pb.ServerMessage) -> None:
        with self._lock:
            entry = self._pending.get(message.request_id)
            if entry is None:
                return
            if not entry.lasting:
                del self._pending[message.request_id]
            latch = entry.latch
            if latch is not None:
                entry.answer = message
                entry.latch = None
                latch.release()
                return
        if entry.then is not None:
            entry.then(message)


class Call:
    """A request on its way. Made by `Session.begin`; whoever did asks for its `answer`, once, or abandons it.

    Until then, it may keep others off the shm socket.
    """

    __slots__ = ("_deadline", "_entry", "_lasting", "_message", "_over", "_session", "_then", "_undo")

    def __init__(
        self,
        session: Session,
        message: pb.ClientMessage,
        *,
        deadline: float,
        then: OnAnswer | None,
        lasting: bool,
        undo: Undo | None,
    ) -> None:
        self._session = session
        self._message = message
        self._deadline = deadline
        self._then, self._lasting = then, lasting
        self._undo = undo
        self._entry: Pending | None = None  # on the stream; None: it went over the shm socket
        self._over = False

    def send(self) -> Pending:
        """It goes over the stream. Raises: StoreUnavailable, if that has ended."""
        self._entry = self._session.send(
            self._message, threading.Lock(), self._then, lasting=self._lasting, deadline=self._deadline
        )
        return self._entry

    def answer(self) -> pb.ServerMessage:
        """Raises: the error that the daemon answers with; StoreTimeout; StoreUnavailable, if the stream ends."""
        session, undo = self._session, self._undo
        self._over = True
        try:
            answer = None
            if self._entry is None:
                assert undo is not None, "only what can be undone goes over the shm socket"
                answer = session.finish_beside(self._message, undo, self._deadline)
            if answer is None:
                answer = self._take_stream()
        except KVStoreError as error:
            session.report(error)
            raise
        session.answered()
        return answer

    def abandon(self) -> None:
        """Nobody waits for the answer, and what was asked for is undone. Nothing to do once it was waited for."""
        if self._over:
            return
        self._over = True
        if self._entry is None:
            self._session.exchange.abandon()
        if self._undo is not None and self._session.alive:
            self._session.tell(self._undo(self._message.request_id))

    def _take_stream(self) -> pb.ServerMessage:
        session, undo = self._session, self._undo
        entry = self._entry or self.send()
        try:
            answer = session.wait(entry, self._deadline, self._message.WhichOneof("body") or "")
        except StoreTimeout:
            if undo is not None and session.alive:
                session.tell(undo(self._message.request_id))
            raise
        if undo is not None:
            session.revive(self._deadline)
        return answer
