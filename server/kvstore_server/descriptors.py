"""The shm socket: hands out descriptors of slabs, takes in those of regions, and answers quick requests.

A connection belongs to a session once it has shown the session's ticket. Nothing here blocks: requests are
datagrams, answered at once. Source: docs/spec/shm.md.
"""

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from kvstore.errors import BlockMissing, InvalidRequest, KVStoreError, NotAuthenticated, StoreUnavailable, Unsupported
from kvstore.transport.shm import Op, Reply, Request, check_region, map_memfd
from kvstore.types import SlabId
from kvstore_server.session import Session
from kvstore_server.tiers.cpu import CpuTier

log = structlog.get_logger()

MAX_FDS: Final = 4  # taken from one datagram; more than one is refused


class DescriptorSocket:
    """Listens on `path`.

    `session_of` finds the living session that a ticket belongs to; `call` answers one ClientMessage of a session.
    """

    def __init__(
        self,
        path: Path,
        tier: CpuTier,
        session_of: Callable[[bytes], Session | None],
        call: Callable[[Session, bytes], bytes],
    ) -> None:
        self.path = path
        self._tier = tier
        self._session_of = session_of
        self._call = call
        self._buffer = bytearray(Request.MAX_BYTES + 1)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._connections: dict[socket.socket, Session | None] = {}

    def start(self) -> None:
        """Connections are accepted from now on, on the running loop."""
        self._listener.bind(str(self.path))
        self.path.chmod(0o600)
        self._listener.listen(128)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Nothing is accepted or answered any more, and the socket file is gone."""
        for connection in list(self._connections):
            self._drop(connection)
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone already
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, Reply.MAX_BYTES)
            self._connections[connection] = None
            asyncio.get_running_loop().add_reader(connection, self._serve, connection)

    def _drop(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        del self._connections[connection]
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            data, received = self._receive(connection)
        except (BlockingIOError, ConnectionResetError):
            return  # reset: it left before it read an answer
        except OSError:
            data, received = b"", []
        if not data:
            self._drop(connection)
            return
        sent: list[int] = []
        told = False
        try:
            request = Request.decode(data)
            told = request.op is Op.TELL
            reply = self._answer(connection, request, received, sent)
        except KVStoreError as error:
            if not isinstance(error, Unsupported):  # that one only has to take the stream
                log.warning("shm request refused", error=str(error), session=repr(self._connections[connection]))
            reply = Reply(error.code, 0, str(error))
        try:
            if not told:
                socket.send_fds(connection, [reply.encode()], sent)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it left; what it sent before, and then its end, can still be read
        except OSError:
            self._drop(connection)  # it does not read its answers
        finally:
            for fd in (*received, *sent):
                os.close(fd)

    def _receive(self, connection: socket.socket) -> tuple[bytes, list[int]]:
        size, ancillary, _, _ = connection.recvmsg_into([self._buffer], socket.CMSG_SPACE(4 * MAX_FDS))
        fds = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        return bytes(memoryview(self._buffer)[:size]), fds.tolist()

    def _answer(self, connection: socket.socket, request: Request, received: list[int], sent: list[int]) -> Reply:
        """The reply; descriptors that go with it are added to `sent`."""
        if request.op is Op.ATTACH:
            self._connections[connection] = self._session_of(request.ticket)
            if self._connections[connection] is None:
                raise NotAuthenticated("ticket: expected that of a living session; open a session first")
            return Reply()
        session = self._connections[connection]
        if session is None:
            raise NotAuthenticated("connection: expected ATTACH first; show the session's ticket")
        if session.ended:
            raise StoreUnavailable("session: it has ended; open another")
        if request.op in (Op.CALL, Op.TELL):
            return Reply(body=self._call(session, request.body))
        if request.op is Op.SLAB:
            slab = SlabId(request.id)
            if not self._tier.belongs(slab, session.space.namespace):
                raise BlockMissing(f"slab {slab}: expected one of this namespace; match again")
            sent.append(self._tier.descriptor(slab, session.id))
            return Reply(num_slots=session.space.layout.num_slots)
        if len(received) != 1:
            raise InvalidRequest(f"region {request.id}: expected one descriptor, got {len(received)}")
        session.check_region(request.id, request.size_bytes)
        check_region(received[0], size_bytes=request.size_bytes, owner_uid=_peer_uid(connection))
        try:
            memory = map_memfd(received[0], request.size_bytes, writable=False)
        except OSError as error:
            raise InvalidRequest(
                f"region {request.id}: expected a memfd that can be mapped for reading, got: {error.strerror}; "
                "open it for reading and writing"
            ) from None
        session.add_region(request.id, memory)
        return Reply()


def _peer_uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
