"""What each request of a session does: decode, call, encode. Where errors become statuses.

Most are answered at once; those that read or write many bytes go on beside the reader, a bounded number at a time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import numpy as np
import structlog
from google.protobuf.message import DecodeError

from kvstore.errors import (
    BlockCorrupt,
    BlockMissing,
    InvalidRequest,
    KVStoreError,
    MembersChanged,
    StoreFull,
    Unsupported,
    WriterFailed,
)
from kvstore.transport.shm import MAX_CALL_COPY_BYTES
from kvstore.transport.ucx import Op
from kvstore.types import HASH_BYTES, AnyArray, BlockHash, ByteArray, HashArray, IntArray, Memory, SlabId
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import MAX_LEASE_BYTES, pack_u32, pack_u64, status_of, unpack_hashes, unpack_u32, unpack_u64
from kvstore_server.connection import Connection, bug_of
from kvstore_server.delivery import delivered, plan_delivery
from kvstore_server.level import State
from kvstore_server.mover import Mover
from kvstore_server.roster import Roster
from kvstore_server.store import Store
from kvstore_server.transfers import Peer, Transfers, posts
from kvstore_server.values import Delivery, Intake, Pieces, RemoteRegion, Space

log = structlog.get_logger()

# Answered at once, and in few bytes.
CALLABLE: Final = ("match", "prefetch", "load", "release", "store", "store_part", "commit", "abort")


class Requests:
    """The requests that sessions make of one store. While `draining`, nothing new is taken in."""

    def __init__(
        self, store: Store, mover: Mover, transfers: Transfers | None, roster: Roster, *, checksums: bool
    ) -> None:
        self.draining = False
        self._roster = roster
        self._store = store
        self._mover = mover
        self._transfers = transfers
        self._checksums = checksums
        self._handlers: dict[str, Callable[[Connection, int, Any], pb.ServerMessage | None]] = {
            "match": self._match,
            "prefetch": self._prefetch,
            "load": self._load,
            "store": self._reserve,
            "commit": self._commit,
            "abort": self._abort,
            "release": self._release,
            "slabs_dropped": self._slabs_dropped,
            "ping": self._ping,
        }
        self._starters: dict[str, Callable[[Connection, int, Any], Awaitable[None]]] = {
            "store_part": self._store_part,
            "verify": self._verify,
            "drop_regions": self._drop_regions,
            "register_region": self._register_region,
            "fetch": self._fetch,
        }

    async def handle(self, connection: Connection, message: pb.ClientMessage) -> None:
        """The request, which came on the stream, is answered, or is being worked on beside the reader."""
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

    def call(self, connection: Connection, data: bytes) -> bytes:
        """The ServerMessage that answers one ClientMessage, which came beside the stream.

        Raises: InvalidRequest, if it is none, or of a kind that must come on the stream; what the request raises.
        """
        try:
            message = pb.ClientMessage.FromString(data)
        except DecodeError as error:
            raise InvalidRequest(f"call: expected a ClientMessage, got: {error}; use the same protocol") from None
        kind = message.WhichOneof("body") or "none"
        if kind not in CALLABLE or message.load.follow:
            raise InvalidRequest(f"call: expected one of {', '.join(CALLABLE)} (no follow), got {kind}; use the stream")
        try:
            if kind == "load":  # with errors, its answer might not fit into a datagram
                reply = self._load(connection, message.request_id, message.load, whole=True)
            elif kind == "store_part":
                reply = self._take_in_now(connection, message.store_part)
            else:
                reply = self._answer(connection, message, kind) or pb.ServerMessage()
        except KVStoreError:
            raise
        except Exception as error:
            reply = bug_of(error, message.request_id, kind=kind)
        reply.request_id = message.request_id
        return reply.SerializeToString()

    def _match(self, connection: Connection, _: int, request: pb.Match) -> pb.ServerMessage:
        found = connection.session.match(unpack_hashes(request.hashes), _lease(request.lease))
        speed = self._store.lower.below.rise_bytes_per_s()
        return pb.ServerMessage(matched=pb.Matched(**found._asdict(), rise_bytes_per_s=speed))

    def _prefetch(self, connection: Connection, _: int, request: pb.Prefetch) -> pb.ServerMessage:
        num_blocks = self._store.lower.prefetch(connection.session.space, unpack_hashes(request.hashes))
        return pb.ServerMessage(prefetched=pb.Prefetched(num_blocks=num_blocks))

    def _load(
        self, connection: Connection, request_id: int, request: pb.Load, *, whole: bool = False
    ) -> pb.ServerMessage:
        loaded = connection.session.load(
            request_id,
            unpack_hashes(request.hashes),
            lease=_lease(request.lease),
            follow=request.follow,
            whole=whole,
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

    def _reserve(self, connection: Connection, request_id: int, request: pb.Store_) -> pb.ServerMessage:
        epoch = self._roster.view.epoch
        if 0 < request.epoch < epoch:
            raise MembersChanged(f"epoch: expected {epoch}, got {request.epoch}; ask for the members again")
        if self.draining:
            raise StoreFull("the store is draining and takes nothing new; skip this save")
        if len(request.parent) not in (0, HASH_BYTES):
            raise InvalidRequest(f"parent: expected {HASH_BYTES} bytes or none, got {len(request.parent)}")
        write = connection.session.reserve(
            request_id,
            parent=BlockHash(request.parent) if request.parent else None,
            hashes=unpack_hashes(request.hashes),
            parts=unpack_u32(request.parts, name="parts").tolist(),
            heads=unpack_u32(request.heads, name="heads").tolist(),
        )
        return pb.ServerMessage(reserved=pb.Reserved(write_id=write.id, outcomes=bytes(write.outcomes)))

    async def _store_part(self, connection: Connection, request_id: int, request: pb.StorePart) -> None:
        def plan() -> Coroutine[Any, Any, pb.ServerMessage]:
            intake = _plan(connection, request)
            if isinstance(intake.copies.region, RemoteRegion):
                _, peer = self._reach(connection)
                return self._bring_over(connection, intake, intake.copies.region, peer.use(request.region))
            return self._bring_in(intake)

        await connection.answer_with(plan, request_id=request_id)

    async def _bring_in(self, intake: Intake) -> pb.ServerMessage:
        checksums = await self._mover.take_in(intake.copies)
        return _taken_in(intake, self._store.parts_arrived(intake, checksums))

    async def _bring_over(
        self, connection: Connection, intake: Intake, region: RemoteRegion, done: Callable[[], None]
    ) -> pb.ServerMessage:
        """Raises: StoreUnavailable, if the client's memory cannot be reached; its blocks are given up then."""
        slabs = self._store.tier.mappings(intake.slots)
        try:
            checksums = await self._read(connection, region, intake.copies.pieces, slabs)
        except BaseException:
            self._store.parts_lost(intake)
            raise
        finally:
            done()
        return _taken_in(intake, self._store.parts_arrived(intake, checksums))

    async def _read(
        self, connection: Connection, region: RemoteRegion, pieces: Pieces, slabs: list[ByteArray]
    ) -> AnyArray:
        """`[n]` checksums of the pieces, which are in their slots; a few are hashed while others are under way."""

        async def read(job: slice) -> AnyArray:
            await self._move(Op.READ, connection, region, pieces[job], slabs)
            if not self._checksums:
                return np.zeros(len(pieces.sizes[job]), np.uint64)
            return await self._mover.hash(pieces.local[job], pieces.sizes[job])

        jobs = [asyncio.create_task(read(job)) for job in posts(pieces.sizes)]
        await asyncio.gather(*jobs, return_exceptions=True)  # all are over before any failure is told
        return np.concatenate([np.zeros(0, np.uint64), *(job.result() for job in jobs)])  # none: all were given up

    async def _move(
        self, op: Op, connection: Connection, region: RemoteRegion, pieces: Pieces, slabs: list[ByteArray]
    ) -> None:
        transfers, peer = self._reach(connection)
        await transfers.move(op, peer, region, pieces, slabs)

    def _reach(self, connection: Connection) -> tuple[Transfers, Peer]:
        if self._transfers is None or connection.peer is None:
            raise Unsupported("ucx: this daemon offers none; set ucx_device in its configuration")
        return self._transfers, connection.peer

    async def _fetch(self, connection: Connection, request_id: int, request: pb.Fetch) -> None:
        def plan() -> Coroutine[Any, Any, pb.ServerMessage]:
            region = connection.session.remote_region(request.region)
            delivery = plan_delivery(
                connection.session.space,
                self._store.tier,
                unpack_hashes(request.hashes),
                generations=unpack_u64(request.generations, name="generations"),
                parts=unpack_u32(request.parts, name="parts"),
                region=region,
                offsets=unpack_u64(request.offsets, name="offsets"),
            )
            _, peer = self._reach(connection)
            return self._bring_out(connection, region, delivery, peer.use(region.number))

        await connection.answer_with(plan, request_id=request_id)

    async def _bring_out(
        self, connection: Connection, region: RemoteRegion, delivery: Delivery, done: Callable[[], None]
    ) -> pb.ServerMessage:
        slabs = self._store.tier.mappings(delivery.slots)
        try:
            await self._move(Op.WRITE, connection, region, delivery.pieces, slabs)
        finally:
            done()
            errors = delivered(delivery)
        fetched = pb.Fetched(errors=[pb.BlockError(index=at, status=status_of(error)) for at, error in errors.items()])
        if self._checksums:
            fetched.checksums = pack_u64(delivery.checksums.ravel())
        return pb.ServerMessage(fetched=fetched)

    async def _register_region(self, connection: Connection, request_id: int, request: pb.RegisterRegion) -> None:
        transfers, peer = self._reach(connection)

        def plan() -> Coroutine[Any, Any, pb.ServerMessage]:
            region = _region(connection, request)
            work = transfers.add(peer, request.metadata, region)
            return self._add_region(connection, region, work, peer.use(region.number))

        await connection.answer_with(plan, request_id=request_id)

    async def _add_region(
        self, connection: Connection, region: RemoteRegion, work: Awaitable[None], done: Callable[[], None]
    ) -> pb.ServerMessage:
        try:
            await work
        except KVStoreError as error:
            connection.session.drop_regions([region.number])
            log.warning("region refused", error=str(error), session=connection.session.id)
            return pb.ServerMessage(status=status_of(error))
        finally:
            done()
        return pb.ServerMessage(region_registered=pb.RegionRegistered())

    def _take_in_now(self, connection: Connection, request: pb.StorePart) -> pb.ServerMessage:
        """Raises: Unsupported, if that would keep everybody waiting."""
        parts = unpack_u32(request.parts, name="parts")
        sizes = np.array(connection.session.space.spec.part_bytes)
        size_bytes = len(request.blocks) // 4 * int(sizes[parts[parts < len(sizes)]].sum())
        if size_bytes > MAX_CALL_COPY_BYTES:
            raise Unsupported(f"call: a StorePart of at most {MAX_CALL_COPY_BYTES} bytes, got {size_bytes}; stream it")
        if connection.session.is_remote(request.region):
            raise Unsupported("call: a StorePart from a region of this host, got one of another; stream it")
        intake = _plan(connection, request)
        return _taken_in(intake, self._store.parts_arrived(intake, self._mover.take_in_now(intake.copies)))

    def _commit(self, connection: Connection, _: int, request: pb.Commit) -> pb.ServerMessage:
        outcomes = connection.session.commit(request.write_id)
        return pb.ServerMessage(committed=pb.Committed(outcomes=bytes(outcomes)))

    def _abort(self, connection: Connection, _: int, request: pb.Abort) -> pb.ServerMessage:
        if request.write_id:
            num_blocks = connection.session.abort(request.write_id)
        else:
            num_blocks = connection.session.abort_request(request.store_request_id)
        return pb.ServerMessage(aborted=pb.Aborted(num_blocks=num_blocks))

    def _release(self, connection: Connection, _: int, request: pb.Release) -> pb.ServerMessage:
        num_blocks = connection.session.release(_lease(request.lease))
        return pb.ServerMessage(released=pb.Released(num_blocks=num_blocks))

    async def _verify(self, connection: Connection, request_id: int, request: pb.Verify) -> None:
        hashes = unpack_hashes(request.hashes)
        await connection.answer_with(lambda: self._check(connection.session.space, hashes), request_id=request_id)

    async def _check(self, space: Space, hashes: HashArray) -> pb.ServerMessage:
        errors = await self._drop_corrupt(space, hashes)
        reply = pb.Verified(
            errors=[pb.BlockError(index=position, status=status_of(error)) for position, error in errors.items()]
        )
        return pb.ServerMessage(verified=reply)

    async def _drop_corrupt(self, space: Space, hashes: HashArray) -> dict[int, KVStoreError]:
        """Blocks that do not match their checksums are dropped; errors of these, and of those not stored."""
        rows = space.index.find(hashes)
        states = space.index.states(rows)
        committed = states == State.COMMITTED
        errors: dict[int, KVStoreError] = {}
        for position in np.flatnonzero(states < State.COMMITTED).tolist():
            errors[position] = BlockMissing(f"block {hashes[position].tobytes().hex()[:12]}…: not stored; recompute")
        if not self._checksums:
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
        tier, slots = self._store.tier, space.index.memory.slots(rows)
        begins, sizes = np.array(space.part_ranges, np.int64).T
        addresses = (tier.addresses(slots)[:, None] + begins).ravel()
        found = await self._mover.hash(addresses, np.tile(sizes, len(slots)))
        expected = tier.checksums(slots, num_parts=space.spec.num_parts)
        differ: AnyArray = (found.reshape(expected.shape) != expected).any(axis=1)
        return differ

    async def _drop_regions(self, connection: Connection, request_id: int, request: pb.DropRegions) -> None:
        connection.session.drop_regions(request.regions)
        connection.start(lambda: self._say_dropped(connection, request_id, request.regions), request_id=request_id)

    async def _say_dropped(self, connection: Connection, request_id: int, regions: Sequence[int]) -> None:
        if connection.peer is not None:
            await connection.peer.quiet(regions)
        reply = pb.ServerMessage(request_id=request_id, regions_dropped=pb.RegionsDropped())
        await connection.send(reply)

    def _slabs_dropped(self, connection: Connection, _: int, request: pb.SlabsDropped) -> None:
        for slab in request.slabs:
            self._store.tier.unmapped(SlabId(slab), connection.session.id)

    def _ping(self, connection: Connection, _: int, request: pb.Ping) -> pb.ServerMessage:
        return pb.ServerMessage(pong=pb.Pong())


def _plan(connection: Connection, request: pb.StorePart) -> Intake:
    return connection.session.plan_intake(
        request.write_id,
        blocks=unpack_u32(request.blocks, name="blocks"),
        parts=unpack_u32(request.parts, name="parts"),
        region=request.region,
        offsets=unpack_u64(request.offsets, name="offsets"),
    )


def _region(connection: Connection, request: pb.RegisterRegion) -> RemoteRegion:
    """The region, whose id and bytes are taken from now on. Raises: InvalidRequest; StoreFull."""
    connection.session.check_region(request.region, request.size_bytes)
    if not (request.size_bytes and request.address and request.address + request.size_bytes < 1 << 63):
        raise InvalidRequest(
            f"region {request.region}: expected an address and a size above 0 and below 2**63, got "
            f"{request.size_bytes} bytes at {request.address:#x}; correct it"
        )
    try:
        memory = Memory(request.memory)
    except ValueError:
        known = ", ".join(f"{one.value} ({one.name})" for one in Memory)
        raise InvalidRequest(
            f"region {request.region}: expected one of the memories {known}, got {request.memory}; run client and "
            "daemon of the same version"
        ) from None
    region = RemoteRegion(request.region, request.address, request.size_bytes, memory)
    connection.session.add_region(request.region, region)
    return region


def _taken_in(intake: Intake, num_committed: int) -> pb.ServerMessage:
    if intake.num_left_out or any(pending.given_up for pending in intake.blocks):
        error = WriterFailed("a block was given up by another writer meanwhile; commit tells which")
        return pb.ServerMessage(status=status_of(error))
    return pb.ServerMessage(part_stored=pb.PartStored(num_committed=num_committed))


def _lease(name: str) -> str:
    if len(name.encode()) > MAX_LEASE_BYTES:
        raise InvalidRequest(f"lease: expected at most {MAX_LEASE_BYTES} bytes, got {len(name.encode())}; shorten it")
    return name
