"""The client's end of the shm socket: descriptors come in and go out, and requests that are answered at once.

Source: docs/spec/shm.md.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvstore.errors import KVStoreError, NotAuthenticated, StoreTimeout, StoreUnavailable, Unsupported, error_of
from kvstore.transport.shm import Op, Reply, Request

# Of one datagram in the kernel's memory, which takes some of the socket's buffer for itself.
OVERHEAD_BYTES: Final = 1024


class Exchange:
    """One session's connection to the shm socket, made when it is first needed. Thread-safe."""

    def __init__(self, socket_path: str, ticket: bytes) -> None:
        self._path = socket_path  # empty: the daemon offers no shared memory
        self._ticket = ticket
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._most_bytes = 0  # of a datagram
        self._buffer = bytearray(Reply.MAX_BYTES)
        self._unreachable = not socket_path
        self.no_other = ""  # why there is no other transport, for those who cannot reach this one
        self._closed = False

    def probe(self, *, deadline: float) -> None:
        """The socket can be reached from here, and it is that of this session's daemon.

        Raises: Unsupported, if not; StoreTimeout, StoreUnavailable as `_ask` does.
        """
        with self._lock:
            if self._socket is None:
                try:
                    self._connect(deadline)
                except OSError as error:
                    raise Unsupported(f"shm socket {self._path}: {error}; it is no socket of a daemon") from None

    def slab(self, number: int, *, deadline: float) -> tuple[int, int]:
        """(descriptor, number of slots) of a slab; the caller owns the descriptor.

        Raises: BlockMissing, if there is no such slab in this namespace; Unsupported, StoreTimeout,
        StoreUnavailable as `_ask` does.
        """
        reply, fds = self._ask(Request(Op.SLAB, number), [], deadline)
        if len(fds) != 1:
            _close_all(fds)
            raise StoreUnavailable(f"slab {number}: expected one descriptor, got {len(fds)}; reconnect")
        return fds[0], reply.num_slots

    def register(self, number: int, fd: int, *, size_bytes: int, deadline: float) -> None:
        """The daemon has mapped the region behind `fd`.

        Raises: what the daemon answers; Unsupported, StoreTimeout, StoreUnavailable as `_ask` does.
        """
        _, fds = self._ask(Request(Op.REGION, number, size_bytes), [fd], deadline)
        _close_all(fds)

    def revive(self, *, deadline: float) -> None:
        """A connection that was lost is made again, if that can be done now, of a daemon that answers."""
        if self._socket is not None or self._unreachable or self._closed or not self._lock.acquire(blocking=False):
            return
        try:
            if self._socket is None:
                self._connect(deadline)
        except (OSError, KVStoreError):
            pass  # the stream does as well
        finally:
            self._lock.release()

    def begin(self, message: bytes) -> bool:
        """This ClientMessage is on its way, and the caller must `finish`; False: it must take the stream.

        Never waits. Until `finish`, others take the stream.
        """
        if self._unreachable or not self._lock.acquire(blocking=False):
            return False  # another thread's call is under way
        sent = False
        try:
            request = Request(Op.CALL, body=message)
            if self._socket is not None and Request.SIZE + len(message) <= self._most_bytes:
                _send_now(self._socket, request)
                sent = True
        except BlockingIOError:
            pass  # the daemon takes nothing in
        except OSError:
            self._hang_up()
        finally:
            if not sent:
                self._lock.release()
        return sent

    def finish(self, *, undo: Callable[[], bytes], deadline: float) -> bytes | None:
        """The ServerMessage that answers what was begun; None, and nothing was done, if it must take the stream.

        What `undo` makes is sent, behind it, if the answer does not come in time. Raises: StoreTimeout; what the daemon
        answers.
        """
        connection = self._socket
        assert connection is not None, "a call was begun"
        try:
            try:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                size = connection.recv_into(self._buffer)
                reply = Reply.decode(bytes(memoryview(self._buffer)[:size]))
            except TimeoutError:
                with suppress(OSError):
                    _send_now(connection, Request(Op.TELL, body=undo()))
                raise
            if reply.code == Unsupported.code:
                return None
            if reply.code:
                raise error_of(reply.code, reply.message)
            return reply.body
        except TimeoutError:
            self._hang_up()
            raise StoreTimeout("call: no answer from the store within the deadline; recompute") from None
        except (OSError, Unsupported, StoreUnavailable):
            self._hang_up()
            return None
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """What was begun will not be finished."""
        self._hang_up()
        self._lock.release()

    def tell(self, message: bytes) -> bool:
        """The daemon will get this ClientMessage; False if it must take the stream. Never waits."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._socket is not None:
                _send_now(self._socket, Request(Op.TELL, body=message))
            return self._socket is not None
        except OSError:
            return False
        finally:
            self._lock.release()

    def close(self) -> None:
        """The connection is gone, and none is made any more; a call under way ends with StoreUnavailable."""
        self._closed = True
        connection = self._socket
        if connection is not None:
            with suppress(OSError):  # wakes a call that waits for its answer
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._hang_up()

    def _ask(self, request: Request, fds: list[int], deadline: float) -> tuple[Reply, list[int]]:
        """The answer to one request, and the descriptors that came with it.

        Raises: StoreTimeout; Unsupported, if the socket cannot be reached from here; StoreUnavailable, if the
        daemon closed it; the error that the daemon answers with.
        """
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not self._lock.acquire(timeout=remaining_s):
            raise StoreTimeout("shm socket: the deadline passed before the request was sent; recompute")
        try:
            connection = self._socket or self._connect(deadline)
            return _round_trip(connection, request.encode(), fds, deadline)
        except TimeoutError:
            # The answer may still come, and would be taken for that of the next request.
            self._hang_up()
            raise StoreTimeout(f"shm socket {self._path}: no answer within the deadline; recompute") from None
        except OSError as error:
            self._hang_up()
            raise StoreUnavailable(f"shm socket {self._path}: {error}; the client reconnects") from None
        finally:
            self._lock.release()

    def _connect(self, deadline: float) -> socket.socket:
        if self._closed:
            raise StoreUnavailable("shm socket: the session has ended; the client reconnects")
        if not self._path:
            raise self._out_of_reach("shared memory: the daemon offers none; run one with shared memory on this host")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, Request.MAX_BYTES)  # the kernel may give less
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            connection.connect(self._path)
            _round_trip(connection, Request(Op.ATTACH, ticket=self._ticket).encode(), [], deadline)
        except NotAuthenticated:
            connection.close()
            self._unreachable = True
            raise self._out_of_reach(
                f"shm socket {self._path}: expected the socket of this daemon, got that of another one, which is "
                "on this host alone"
            ) from None
        except (FileNotFoundError, PermissionError) as error:
            connection.close()
            self._unreachable = True
            raise self._out_of_reach(
                f"shm socket {self._path}: expected to reach the daemon's socket from here, got: "
                f"{error.strerror}; run the client on the daemon's host, mount the directory of that path at "
                "the same place in its container, and give its user access"
            ) from None
        except BaseException:
            connection.close()
            raise
        granted = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self._most_bytes = min(granted - OVERHEAD_BYTES, Request.MAX_BYTES)
        self._socket = connection
        return connection

    def _out_of_reach(self, why: str) -> Unsupported:
        return Unsupported(f"{why}; {self.no_other}" if self.no_other else why)

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _round_trip(connection: socket.socket, request: bytes, fds: list[int], deadline: float) -> tuple[Reply, list[int]]:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    socket.send_fds(connection, [request], fds)
    data, received, _, _ = socket.recv_fds(connection, Reply.MAX_TEXT_BYTES + 64, 4, socket.MSG_CMSG_CLOEXEC)
    try:
        reply = Reply.decode(data)
        if reply.code:
            raise error_of(reply.code, reply.message)
    except KVStoreError:
        _close_all(received)
        raise
    return reply, received


def _send_now(connection: socket.socket, request: Request) -> None:
    """Raises: BlockingIOError, if there is no room; OSError."""
    connection.settimeout(0)
    connection.send(request.encode())


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
