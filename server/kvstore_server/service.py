"""The Store service: decode, call, encode. The one place where errors of a session become statuses.

Each session has a reader, which handles one request after the other, and a teller, which sends what its follows
were told. Copies run as tasks beside them, a bounded number at a time. Whatever ends the stream, the session
gives back all it held.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import numpy as np
import structlog
from google.protobuf.message import DecodeError

from kvstore.errors import (
    BlockCorrupt,
    BlockMissing,
    InvalidRequest,
    KVStoreError,
    SpecMismatch,
    StoreFull,
    StoreUnavailable,
    WriterFailed,
)
from kvstore.spec import KVSpec
from kvstore.types import HASH_BYTES, AnyArray, BlockHash, BootId, HashArray, IntArray, SessionId, SlabId
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import (
    MAX_HASHES,
    MAX_LEASE_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    pack_u32,
    pack_u64,
    spec_from_proto,
    status_of,
    unpack_hashes,
    unpack_u32,
    unpack_u64,
)
from kvstore_server.access import authorize
from kvstore_server.config import Settings
from kvstore_server.connection import Connection, Context, bug_of
from kvstore_server.index import State
from kvstore_server.mover import Mover
from kvstore_server.session import Session as ClientSession
from kvstore_server.store import Store
from kvstore_server.values import Intake, Space

log = structlog.get_logger()

MAX_NAME_BYTES: Final = 256
SILENT_HEARTBEATS: Final = 3
CAPABILITIES: Final = ("follow", "verify", "call")
CALLABLE: Final = ("match", "prefetch", "release")  # answered at once, in a few bytes
CHECKSUMS: Final = "checksums"


class StoreService:
    """Serves `kvstore.v1.Store`; see proto/kvstore/v1/kvstore.proto for every request and its errors."""

    def __init__(
        self,
        store: Store,
        mover: Mover,
        settings: Settings,
        *,
        boot_id: BootId,
        shm_path: str,
        version: str,
        clock: Callable[[], float],
    ) -> None:
        self.connections: dict[SessionId, Connection] = {}
        self.draining = False
        self._store = store
        self._mover = mover
        self._settings = settings
        self._boot_id = boot_id
        self._shm_path = shm_path
        self._version = version
        self._clock = clock
        self._last_session = 0
        self._handlers: dict[str, Callable[[Connection, int, Any], pb.ServerMessage | None]] = {
            "match": self._match,
            "prefetch": self._prefetch,
            "load": self._load,
            "store": self._reserve,
            "commit": self._commit,
            "abort": self._abort,
            "release": self._release,
            "drop_regions": self._drop_regions,
            "slabs_dropped": self._slabs_dropped,
            "ping": self._ping,
        }
        self._starters: dict[str, Callable[[Connection, int, Any], Awaitable[None]]] = {
            "store_part": self._store_part,
            "verify": self._verify,
        }

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
            connection = await self._hello(requests, context)
        except KVStoreError as error:
            log.warning("session refused", error=str(error), peer=context.peer())
            await context.abort(code_of(error), str(error))
        session = connection.session
        undecoded = ""
        try:
            await connection.start(self._tell(connection), request_id=0)
            async for message in requests:
                connection.heard_at = self._clock()
                await self._handle(connection, message)
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
        space = connection.session.space
        if not any(other.session.space is space for other in self.connections.values()):
            self._store.close_space_if_empty(space)

    async def _hello(self, requests: AsyncIterator[pb.ClientMessage], context: Context) -> Connection:
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
        self.connections[session.id] = connection
        self._store.counters.sessions_opened += 1
        log.info("session opened", session=session.id, client=session.name, namespace=spec.namespace.hex()[:12])
        try:
            await connection.send(pb.ServerMessage(request_id=first.request_id, welcome=self._welcome(session)))
        except BaseException:
            await self._close(connection)
            raise
        return connection

    def _welcome(self, session: ClientSession) -> pb.Welcome:
        return pb.Welcome(
            boot_id=self._boot_id,
            session_id=session.id,
            namespace=session.space.namespace,
            heartbeat_ms=int(self._settings.heartbeat_s * 1000),
            shm=pb.ShmOffer(socket_path=self._shm_path, ticket=session.ticket),
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

    async def _handle(self, connection: Connection, message: pb.ClientMessage) -> None:
        kind = message.WhichOneof("body") or "none"
        reply: pb.ServerMessage | None = None
        try:
            if kind in self._starters:
                await self._starters[kind](connection, message.request_id, getattr(message, kind))
            else:
                reply = self._answer(connection, message, kind)
        except KVStoreError as error:
            reply = pb.ServerMessage(status=status_of(error))
        except Exception as error:
            reply = bug_of(error, message.request_id, kind=kind)
        if reply is not None:
            reply.request_id = message.request_id
            await connection.send(reply)

    def _answer(self, connection: Connection, message: pb.ClientMessage, kind: str) -> pb.ServerMessage | None:
        handler = self._handlers.get(kind)
        if handler is None:
            known = ", ".join([*self._handlers, *self._starters])
            raise InvalidRequest(f"request: expected one of {known}, got {kind}")
        return handler(connection, message.request_id, getattr(message, kind))

    def call(self, session: ClientSession, data: bytes) -> bytes:
        """The ServerMessage that answers one ClientMessage of the session, which came beside the stream.

        Raises: InvalidRequest, if it is none, or of a kind that must come on the stream; what the request raises.
        """
        connection = self.connections.get(session.id)
        if connection is None:
            raise StoreUnavailable("session: it is ending; open another")
        connection.heard_at = self._clock()
        try:
            message = pb.ClientMessage.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"call: expected a ClientMessage, got: {error}; use the same protocol") from None
        kind = message.WhichOneof("body") or "none"
        if kind not in CALLABLE:
            raise InvalidRequest(f"call: expected one of {', '.join(CALLABLE)}, got {kind}; send it on the stream")
        try:
            reply = self._answer(connection, message, kind)
        except KVStoreError:
            raise
        except Exception as error:
            reply = bug_of(error, message.request_id, kind=kind)
        assert reply is not None
        reply.request_id = message.request_id
        return reply.SerializeToString()

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
                            errors=[_gone(index) for index in failed],
                            last=last,
                        ),
                    )
                )

    # Requests.

    def _match(self, connection: Connection, _: int, request: pb.Match) -> pb.ServerMessage:
        num_blocks, num_writing = connection.session.match(unpack_hashes(request.hashes), _lease(request.lease))
        return pb.ServerMessage(matched=pb.Matched(num_blocks=num_blocks, num_writing=num_writing))

    def _prefetch(self, connection: Connection, _: int, request: pb.Prefetch) -> pb.ServerMessage:
        rows, _num_writing = connection.session.space.index.prefix(unpack_hashes(request.hashes))
        return pb.ServerMessage(prefetched=pb.Prefetched(num_blocks=len(rows)))

    def _load(self, connection: Connection, request_id: int, request: pb.Load) -> pb.ServerMessage:
        loaded = connection.session.load(
            request_id, unpack_hashes(request.hashes), lease=_lease(request.lease), follow=request.follow
        )
        located = pb.Located(
            slabs=pack_u32(loaded.location.slabs),
            slots=pack_u32(loaded.location.slots),
            generations=pack_u64(loaded.location.generations),
            errors=[pb.BlockError(index=index, status=status_of(error)) for index, error in loaded.errors.items()],
            writing=pack_u32(loaded.writing),
        )
        if loaded.writing:
            connection.told.set()  # parts that arrived before; told after this answer, because both wait their turn
        return pb.ServerMessage(located=located)

    def _reserve(self, connection: Connection, _: int, request: pb.Store_) -> pb.ServerMessage:
        if self.draining:
            raise StoreFull("the store is draining and takes nothing new; skip this save")
        if len(request.parent) not in (0, HASH_BYTES):
            raise InvalidRequest(f"parent: expected {HASH_BYTES} bytes or none, got {len(request.parent)}")
        write = connection.session.reserve(
            parent=BlockHash(request.parent) if request.parent else None,
            hashes=unpack_hashes(request.hashes),
            parts=unpack_u32(request.parts, name="parts").tolist(),
        )
        return pb.ServerMessage(reserved=pb.Reserved(write_id=write.id, outcomes=bytes(write.outcomes)))

    async def _store_part(self, connection: Connection, request_id: int, request: pb.StorePart) -> None:
        intake = connection.session.plan_intake(
            request.write_id,
            blocks=unpack_u32(request.blocks, name="blocks"),
            parts=unpack_u32(request.parts, name="parts"),
            region=request.region,
            offsets=unpack_u64(request.offsets, name="offsets"),
        )
        await connection.start(self._take_in(connection, request_id, intake), request_id=request_id, bounded=True)

    async def _take_in(self, connection: Connection, request_id: int, intake: Intake) -> None:
        num_committed = await connection.finish(self._bring_in(intake))
        reply = pb.ServerMessage(request_id=request_id, part_stored=pb.PartStored(num_committed=num_committed))
        if intake.num_left_out or any(pending.given_up for pending in intake.blocks):
            error = WriterFailed("a block was given up by another writer meanwhile; commit tells which")
            reply = pb.ServerMessage(request_id=request_id, status=status_of(error))
        await connection.send(reply)

    async def _bring_in(self, intake: Intake) -> int:
        checksums = await self._mover.take_in(intake.copies)
        return self._store.parts_arrived(intake, checksums)

    def _commit(self, connection: Connection, _: int, request: pb.Commit) -> pb.ServerMessage:
        outcomes = connection.session.commit(request.write_id)
        return pb.ServerMessage(committed=pb.Committed(outcomes=bytes(outcomes)))

    def _abort(self, connection: Connection, _: int, request: pb.Abort) -> pb.ServerMessage:
        return pb.ServerMessage(aborted=pb.Aborted(num_blocks=connection.session.abort(request.write_id)))

    def _release(self, connection: Connection, _: int, request: pb.Release) -> pb.ServerMessage:
        num_blocks = connection.session.release(_lease(request.lease))
        return pb.ServerMessage(released=pb.Released(num_blocks=num_blocks))

    async def _verify(self, connection: Connection, request_id: int, request: pb.Verify) -> None:
        hashes = unpack_hashes(request.hashes)
        await connection.start(self._check(connection, request_id, hashes), request_id=request_id, bounded=True)

    async def _check(self, connection: Connection, request_id: int, hashes: HashArray) -> None:
        errors = await connection.finish(self._drop_corrupt(connection.session.space, hashes))
        reply = pb.Verified(
            errors=[pb.BlockError(index=position, status=status_of(error)) for position, error in errors.items()]
        )
        await connection.send(pb.ServerMessage(request_id=request_id, verified=reply))

    async def _drop_corrupt(self, space: Space, hashes: HashArray) -> dict[int, KVStoreError]:
        """Blocks that do not match their checksums are dropped; errors of these, and of those not stored."""
        rows = space.index.find(hashes)
        committed = space.index.states(rows) == State.COMMITTED
        errors: dict[int, KVStoreError] = {}
        for position in np.flatnonzero(~committed).tolist():
            errors[position] = BlockMissing(f"block {hashes[position].tobytes().hex()[:12]}…: not stored; recompute")
        if not self._settings.checksums:
            return errors
        checked, held = np.flatnonzero(committed), rows[committed]
        space.index.lease(held)
        try:
            for position in checked[await self._differ(space, held)].tolist():
                block = hashes[position].tobytes().hex()
                errors[position] = BlockCorrupt(f"block {block[:12]}…: checksum differs; dropped; recompute")
                log.error("block lost: its bytes do not match their checksum", block=block)
                self._store.lose(space, BlockHash(hashes[position].tobytes()))
        finally:
            space.index.unlease(held)
        return errors

    async def _differ(self, space: Space, rows: IntArray) -> AnyArray:
        """`[n]` bool: which of these blocks, which are leased, do not match the checksums in their headers."""
        tier, slots = self._store.tier, space.index.slots(rows)
        begins, sizes = np.array(space.part_ranges, np.int64).T
        addresses = (tier.addresses(slots)[:, None] + begins).ravel()
        found = await self._mover.hash(addresses, np.tile(sizes, len(slots)))
        expected = tier.checksums(slots, num_parts=space.spec.num_parts)
        differ: AnyArray = (found.reshape(expected.shape) != expected).any(axis=1)
        return differ

    def _drop_regions(self, connection: Connection, _: int, request: pb.DropRegions) -> pb.ServerMessage:
        connection.session.drop_regions(request.regions)
        return pb.ServerMessage(regions_dropped=pb.RegionsDropped())

    def _slabs_dropped(self, connection: Connection, _: int, request: pb.SlabsDropped) -> None:
        for slab in request.slabs:
            self._store.tier.unmapped(SlabId(slab), connection.session.id)

    def _ping(self, connection: Connection, _: int, request: pb.Ping) -> pb.ServerMessage:
        return pb.ServerMessage(pong=pb.Pong())


def _lease(name: str) -> str:
    if len(name.encode()) > MAX_LEASE_BYTES:
        raise InvalidRequest(f"lease: expected at most {MAX_LEASE_BYTES} bytes, got {len(name.encode())}; shorten it")
    return name


def _gone(index: int) -> pb.BlockError:
    error = WriterFailed("its writer left before all parts had arrived; recompute, or match again")
    return pb.BlockError(index=index, status=status_of(error))


def code_of(error: KVStoreError) -> grpc.StatusCode:
    return next(code for code in grpc.StatusCode if code.value[0] == error.code)
