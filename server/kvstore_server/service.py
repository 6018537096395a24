"""The Store service: the streams of all sessions, from Hello to whatever ends them.

Each session has a reader, which handles one request after the other, and a teller, which sends what its follows
were told. When the stream is over, the session gives back all it held.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc
import structlog
from google.protobuf.message import DecodeError

from kvstore.errors import (
    BlockCorrupt,
    InvalidRequest,
    KVStoreError,
    SpecMismatch,
    StoreUnavailable,
    WriterFailed,
)
from kvstore.spec import KVSpec
from kvstore.types import BootId, SessionId, SlabId
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import (
    MAX_HASHES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    pack_u32,
    spec_from_proto,
    status_of,
)
from kvstore_server.access import authorize
from kvstore_server.config import Settings
from kvstore_server.connection import Connection, Context
from kvstore_server.mover import Mover
from kvstore_server.requests import Requests
from kvstore_server.roster import Roster
from kvstore_server.session import Session as ClientSession
from kvstore_server.store import Store
from kvstore_server.transfers import Peer, Transfers

log = structlog.get_logger()

MAX_NAME_BYTES: Final = 256
SILENT_HEARTBEATS: Final = 3
CAPABILITIES: Final = ("follow", "verify", "call")
CHECKSUMS: Final = "checksums"


class StoreService:
    """Serves `kvstore.v1.Store`; see proto/kvstore/v1/kvstore.proto for every request and its errors."""

    def __init__(
        self,
        store: Store,
        mover: Mover,
        transfers: Transfers | None,
        roster: Roster,
        settings: Settings,
        *,
        boot_id: BootId,
        shm_path: str,
        version: str,
        clock: Callable[[], float],
    ) -> None:
        self.connections: dict[SessionId, Connection] = {}
        self._requests = Requests(store, mover, transfers, roster, checksums=settings.checksums)
        self._transfers = transfers
        self._leaving: set[asyncio.Task[None]] = set()  # peers whose transfers are not over
        self._store = store
        self._settings = settings
        self._boot_id = boot_id
        self._shm_path = shm_path
        self._version = version
        self._clock = clock
        self._last_session = 0

    @property
    def draining(self) -> bool:
        """Whether new sessions and stores are refused."""
        return self._requests.draining

    def drain(self) -> None:
        """New sessions and stores are refused from now on, and nothing is fetched from a remote tier."""
        self._requests.draining = True
        self._store.lower.seeks = False

    def session_of(self, ticket: bytes) -> ClientSession | None:
        """The living session with this ticket."""
        for connection in self.connections.values():
            if secrets.compare_digest(connection.session.ticket, ticket):
                return connection.session
        return None

    # The stream.

    async def Session(self, requests: AsyncIterator[pb.ClientMessage], context: Context) -> None:
        """One client's stream, from Hello to its end."""
        try:
            hello_id, connection = await self._hello(requests, context)
        except KVStoreError as error:
            log.warning("session refused", error=str(error), peer=context.peer())
            await context.abort(code_of(error), str(error))
        session = connection.session
        undecoded = ""
        try:
            await connection.send(pb.ServerMessage(request_id=hello_id, welcome=self._welcome(connection)))
            connection.start(lambda: self._tell(connection), request_id=0)
            async for message in requests:
                connection.heard_at = self._clock()
                await self._requests.handle(connection, message)
        except asyncio.CancelledError:
            if not connection.ending:
                raise
        except DecodeError as error:
            undecoded = f"message: expected a ClientMessage, got: {error}; use the same protocol"
        finally:
            await asyncio.shield(self._close(connection))
            log.info("session ended", session=session.id, client=session.name)
        if undecoded:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, undecoded)
        if connection.ending:
            await context.abort(grpc.StatusCode.UNAVAILABLE, connection.ending)

    async def _close(self, connection: Connection) -> None:
        """The session has given back everything; copies into its blocks are done first."""
        self.connections.pop(connection.session.id, None)
        await connection.stop()
        connection.session.end()
        if self._transfers is not None and connection.peer is not None:
            leaving = asyncio.create_task(self._transfers.remove(connection.peer))
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)
        space = connection.session.space
        if not any(other.session.space is space for other in self.connections.values()):
            self._store.close_space_if_empty(space)

    async def _hello(self, requests: AsyncIterator[pb.ClientMessage], context: Context) -> tuple[int, Connection]:
        """The id of the Hello, and the connection that it opened; nothing is awaited once that can be stopped."""
        try:
            first = await asyncio.wait_for(anext(aiter(requests)), self._settings.heartbeat_s * SILENT_HEARTBEATS)
        except (StopAsyncIteration, TimeoutError):
            raise InvalidRequest("stream: expected Hello as the first message, got none") from None
        except DecodeError as error:
            raise InvalidRequest(f"stream: expected Hello as the first message, got: {error}") from None
        if first.WhichOneof("body") != "hello":
            raise InvalidRequest(f"stream: expected Hello first, got {first.WhichOneof('body')}; send Hello")
        hello = first.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise SpecMismatch(
                f"protocol_version: store speaks {PROTOCOL_VERSION}, client speaks {hello.protocol_version}; "
                f"use a client of kvstore {self._version}"
            )
        if len(hello.client_name.encode()) > MAX_NAME_BYTES:
            raise InvalidRequest(f"client_name: expected at most {MAX_NAME_BYTES} bytes; shorten it")
        spec = spec_from_proto(hello.spec)
        authorize(self._settings.tokens, hello.token, tenant=spec.tenant)
        self._check_expected(spec, hello.expected_namespace)
        # Now: if its first message were cut short, grpc would send these again with the status, and then neither.
        await context.send_initial_metadata(())
        if self.draining:
            raise StoreUnavailable("the store is draining and takes no new sessions; use another, or wait")
        self._last_session += 1
        told = asyncio.Event()
        session = ClientSession(
            number=SessionId(self._last_session),
            name=hello.client_name,
            space=self._store.open_space(spec),
            store=self._store,
            wake=told.set,
            max_region_bytes=self._settings.max_region_bytes,
        )
        connection = Connection(session, context, now=self._clock(), told=told)
        if self._transfers is not None:
            connection.peer = Peer(connection.stop_reading)
        self.connections[session.id] = connection
        self._store.counters.sessions_opened += 1
        log.info("session opened", session=session.id, client=session.name, namespace=spec.namespace.hex()[:12])
        return first.request_id, connection

    def _welcome(self, connection: Connection) -> pb.Welcome:
        session, peer = connection.session, connection.peer
        return pb.Welcome(
            boot_id=self._boot_id,
            session_id=session.id,
            namespace=session.space.namespace,
            heartbeat_ms=int(self._settings.heartbeat_s * 1000),
            shm=pb.ShmOffer(socket_path=self._shm_path, ticket=session.ticket),
            ucx=None if peer is None else pb.UcxOffer(agent_name=peer.name),
            limits=pb.Limits(
                max_hashes=MAX_HASHES,
                max_message_bytes=MAX_MESSAGE_BYTES,
                max_region_bytes=self._settings.max_region_bytes,
            ),
            capabilities=[*CAPABILITIES, *([CHECKSUMS] if self._settings.checksums else [])],
            server_version=self._version,
        )

    def _check_expected(self, spec: KVSpec, expected: bytes) -> None:
        if not expected or expected == spec.namespace:
            return
        known = next((space for ns, space in self._store.spaces.items() if ns == expected), None)
        if known is None:
            raise SpecMismatch(
                f"expected_namespace: no namespace {expected.hex()[:12]}… is known here, and the spec gives "
                f"{spec.namespace.hex()[:12]}…; start the writer first, or compare the specs"
            )
        differences = "; ".join(map(str, known.spec.differences(spec)))
        raise SpecMismatch(f"spec: {differences}; configure both sides alike")

    async def reap_silent(self) -> None:
        """Sessions that were silent for three heartbeats are ended. Runs until cancelled."""
        limit_s = SILENT_HEARTBEATS * self._settings.heartbeat_s
        while True:
            await asyncio.sleep(self._settings.heartbeat_s / 2)
            now = self._clock()
            for connection in list(self.connections.values()):
                if now - connection.heard_at > limit_s:
                    self._store.counters.sessions_reaped += 1
                    log.warning(
                        "session reaped: it was silent for three heartbeats",
                        session=connection.session.id,
                        client=connection.session.name,
                        silent_s=round(now - connection.heard_at, 1),
                    )
                    connection.stop_reading("session: silent for three heartbeats; open another")

    def slab_closed(self, slab: SlabId, readers: frozenset[SessionId]) -> None:
        """Sessions that have the slab mapped are told to unmap it."""
        message = pb.ServerMessage(slabs_retired=pb.SlabsRetired(slabs=[slab]))
        for reader in readers:
            connection = self.connections.get(reader)
            if connection is not None:
                connection.post(message)

    def call(self, session: ClientSession, data: bytes) -> bytes:
        """The ServerMessage that answers one ClientMessage of the session, which came beside the stream.

        Raises: InvalidRequest, if it is none, or of a kind that must come on the stream; what the request raises.
        """
        connection = self.connections.get(session.id)
        if connection is None:
            raise StoreUnavailable("session: it is ending; open another")
        connection.heard_at = self._clock()
        return self._requests.call(connection, data)

    async def _tell(self, connection: Connection) -> None:
        """Follows are told what arrived, as it arrives, until the connection stops."""
        session = connection.session
        while True:
            await connection.told.wait()
            connection.told.clear()
            for message in connection.take_posted():
                await connection.send(message)
            for request_id, (_, follow) in list(session.follows.items()):
                last = not follow.open_indices
                if not (follow.arrived or follow.failed or last):
                    continue
                arrived, failed = follow.arrived, follow.failed
                follow.arrived, follow.failed = [], []
                if last:
                    session.follows.pop(request_id, None)
                await connection.send(
                    pb.ServerMessage(
                        request_id=request_id,
                        arrived=pb.Arrived(
                            blocks=pack_u32([block for block, _ in arrived]),
                            parts=pack_u32([part for _, part in arrived]),
                            errors=[_gone(index, rising) for index, rising in failed],
                            last=last,
                        ),
                    )
                )


def _gone(index: int, rising: bool) -> pb.BlockError:
    error: KVStoreError = WriterFailed("its writer left before all parts had arrived; recompute, or match again")
    if rising:
        error = BlockCorrupt("it could not be read from disk as it was written; dropped; recompute")
    return pb.BlockError(index=index, status=status_of(error))


def code_of(error: KVStoreError) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == error.code)
