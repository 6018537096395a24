"""Keeps a session open: connects in the background, sends heartbeats, reconnects with backoff and jitter."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    NotAllowed,
    NotAuthenticated,
    SpecMismatch,
    StoreTimeout,
    StoreUnavailable,
    Unsupported,
    error_of,
)
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import MAX_MESSAGE_BYTES
from kvstore_client.breaker import Breaker
from kvstore_client.options import Counters
from kvstore_client.session import Session

if TYPE_CHECKING:
    import grpc  # imported when it is first needed, on the background thread: it takes a quarter of the client's import

CONNECT_TIMEOUT_S: Final = 3.0
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 2.0
PINGS_PER_HEARTBEAT: Final = 2
SILENT_HEARTBEATS: Final = 3

# No retry helps against these; someone has to change something first.
_REFUSALS: Final = (InvalidRequest, SpecMismatch, NotAuthenticated, NotAllowed, Unsupported)

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # or a new channel would inherit the backoff of the last
    ("grpc.default_authority", "localhost"),
)


class Channel:
    """The way to the daemon, by the first of its addresses at which it answers.

    Nothing here blocks the caller but `session` and `wait_ready`, and both have a deadline.

    `on_session` is called on the background thread for each new session, before anyone can use it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        hello: pb.Hello,
        *,
        breaker: Breaker,
        counters: Counters,
        on_session: Callable[[Session], None],
        on_retired: Callable[[Session, list[int]], None],
    ) -> None:
        self.addresses = tuple(addresses)  # may be replaced; of use from the next attempt to connect on
        self.address = addresses[0]  # where it is connected, or was tried last
        self._hello = hello
        self._breaker = breaker
        self._counters = counters
        self._on_session = on_session
        self._on_retired = on_retired
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._failure: KVStoreError | None = None  # of the last attempt to connect
        self._connected_before = False
        self._heartbeat: threading.Thread | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-channel", daemon=True)
        self._thread.start()

    @property
    def current(self) -> Session | None:
        """The open session, if there is one."""
        session = self._session
        return session if session is not None and session.alive else None

    def session(self, deadline: float) -> Session:
        """The open session; waits for it only while the very first attempt to connect is under way.

        Raises: StoreUnavailable, or the reason why the daemon refuses this client.
        """
        session = self._session
        if session is not None and session.alive:
            return session
        with self._changed:
            while self._session is None and self._failure is None and not self._closing.is_set():
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            session = self._session
        if session is not None and session.alive:
            return session
        self._counters.add("calls")
        self._counters.add("failures")
        raise self._reason()

    def wait_tried(self, deadline: float) -> bool:
        """Whether the first attempt to connect is over, at the latest at the deadline."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._session is not None or self._failure is not None or self._closing.is_set(),
                max(0.0, deadline - time.monotonic()),
            )

    def wait_ready(self, deadline: float) -> Session:
        """The open session.

        Raises: the reason why there is none at the deadline, or earlier if it is a refusal.
        """
        with self._changed:
            while self.current is None:
                refused = isinstance(self._failure, _REFUSALS)
                remaining_s = deadline - time.monotonic()
                if refused or self._closing.is_set() or remaining_s <= 0:
                    raise self._reason()
                self._changed.wait(remaining_s)
            assert self._session is not None
            return self._session

    def close(self) -> None:
        """The stream is closed and the threads are gone (waits up to 2 s for each). Idempotent."""
        self._closing.set()
        with self._changed:
            session = self._session
            self._changed.notify_all()
        if session is not None:
            session.end(StoreUnavailable("the client was closed"))
            session.join(2.0)
        self._thread.join(2.0)

    def _reason(self) -> KVStoreError:
        if self._closing.is_set():
            return StoreUnavailable("client: it was closed; make another")
        failure = self._failure
        if isinstance(failure, _REFUSALS):
            return error_of(failure.code, str(failure))
        reason = f": {failure}" if failure is not None else ": no answer yet"
        return StoreUnavailable(f"{self.address}: not connected{reason}; recompute, the client reconnects")

    # The background thread.

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while not self._closing.is_set():
            for address in self.addresses:
                self.address = address
                connected, failure = self._serve()
                if connected:
                    backoff_s = FIRST_BACKOFF_S
                if connected or self._closing.is_set():
                    break
            with self._changed:
                self._session = None
                self._failure = failure
                self._changed.notify_all()
            self._closing.wait(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _serve(self) -> tuple[bool, KVStoreError]:
        """Whether there was a session, and why there is none any more."""
        import grpc

        connected = False
        channel = grpc.insecure_channel(self.address, CHANNEL_OPTIONS)
        try:
            session = self._connect(channel)
            connected = True
            if self._connected_before:
                self._counters.add("reconnects")
            self._connected_before = True
            session.ended.wait()
            return connected, session.why_ended()
        except KVStoreError as error:
            return connected, error
        except Exception as error:
            return connected, StoreUnavailable(f"connecting failed: {error!r}")
        finally:
            channel.close()
            if self._heartbeat is not None:  # its session has ended
                self._heartbeat.join(2.0)
                self._heartbeat = None

    def _connect(self, channel: "grpc.Channel") -> Session:
        session = Session(channel, breaker=self._breaker, counters=self._counters, on_retired=self._on_retired)
        try:
            session.greet(self._hello, timeout_s=CONNECT_TIMEOUT_S)
            # From now on: to make an agent and register regions can take longer than a session may be silent.
            self._heartbeat = threading.Thread(
                target=_keep_alive, args=(session,), name="kvstore-heartbeat", daemon=True
            )
            self._heartbeat.start()
            self._on_session(session)
        except StoreTimeout:
            error = StoreUnavailable(f"no welcome within {CONNECT_TIMEOUT_S:g} s")
            session.end(error)
            raise error from None
        except KVStoreError as error:
            reason = session.why_ended() if not session.alive else error
            session.end(reason)
            raise reason from None
        except BaseException:
            session.end(StoreUnavailable("connecting failed"))
            raise
        self._breaker.reset()
        with self._changed:
            self._session = session
            self._failure = None
            self._changed.notify_all()
        if self._closing.is_set():
            session.end(StoreUnavailable("the client was closed"))
        return session


def _keep_alive(session: Session) -> None:
    """Returns when the session has ended; until then the daemon hears from it often enough."""
    interval_s = session.heartbeat_s / PINGS_PER_HEARTBEAT
    while not session.ended.wait(interval_s):
        now = time.monotonic()
        if now - session.heard_at > SILENT_HEARTBEATS * session.heartbeat_s:
            silent_s = now - session.heard_at
            session.end(StoreUnavailable(f"the daemon was silent for {silent_s:.1f} s"))
        elif now - session.sent_at >= interval_s / 2:  # not while it hears from us anyway
            session.tell(pb.ClientMessage(ping=pb.Ping()))
