"""The Admin service: what operators ask, and what routers watch."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from kvstore.errors import BlockMissing, InvalidRequest, KVStoreError
from kvstore.types import BootId, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import spec_to_proto, unpack_hashes
from kvstore_server.access import AUTHORIZATION, authorize
from kvstore_server.config import Settings
from kvstore_server.gaps import BOUNDS_S, LoopGaps
from kvstore_server.level import State
from kvstore_server.roster import Roster, View
from kvstore_server.service import StoreService, code_of
from kvstore_server.store import Store
from kvstore_server.values import Change, Space, change_of

MAX_EVENTS_BEHIND: Final = 10_000
_SNAPSHOT_BLOCKS: Final = 4096  # per event


class Journal:
    """Numbers the store's changes and hands them to the watchers. A watcher that falls behind is dropped."""

    def __init__(self, boot_id: BootId) -> None:
        self.sequence = 0
        self._boot_id = boot_id
        self._watchers: set[asyncio.Queue[pb.Event | None]] = set()

    def record(self, change: Change) -> None:
        """The change has a sequence number, and every watcher will be told."""
        self.sequence += 1
        if self._watchers:
            event = self.event(change, self.sequence)
            for watcher in list(self._watchers):
                if watcher.qsize() >= MAX_EVENTS_BEHIND:
                    self._watchers.discard(watcher)
                    watcher.put_nowait(None)
                else:
                    watcher.put_nowait(event)

    def event(self, change: Change, sequence: int) -> pb.Event:
        return pb.Event(
            boot_id=self._boot_id,
            sequence=sequence,
            kind=pb.Event.STORED if change.stored else pb.Event.REMOVED,
            namespace=change.namespace,
            hashes=change.hashes.tobytes(),
            parents=change.parents.tobytes(),
            tier=change.tier,
            block_tokens=change.block_tokens,
            segments=b"" if change.segments is None else change.segments.tobytes(),
        )

    def end_of_snapshot(self, sequence: int) -> pb.Event:
        return pb.Event(boot_id=self._boot_id, sequence=sequence, kind=pb.Event.SNAPSHOT_END)

    def watch(self) -> asyncio.Queue[pb.Event | None]:
        """A queue of all events from now on; None in it: this watcher fell behind and gets no more."""
        queue: asyncio.Queue[pb.Event | None] = asyncio.Queue()
        self._watchers.add(queue)
        return queue

    def unwatch(self, queue: asyncio.Queue[pb.Event | None]) -> None:
        self._watchers.discard(queue)


class AdminService:
    """Serves `kvstore.v1.Admin`."""

    def __init__(
        self,
        store: Store,
        service: StoreService,
        journal: Journal,
        roster: Roster,
        settings: Settings,
        gaps: LoopGaps,
        *,
        on_drain: Callable[[], Awaitable[None]],
        boot_id: BootId,
        version: str,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._service = service
        self._journal = journal
        self._roster = roster
        self._settings = settings
        self._gaps = gaps
        self._on_drain = on_drain
        self._boot_id = boot_id
        self._version = version
        self._clock = clock
        self._started_at = clock()
        self._members_told: set[asyncio.Event] = set()
        self._closed = False

    def close(self) -> None:
        """The streams of Members end, and no new one stays."""
        self._closed = True
        for told in self._members_told:
            told.set()

    def stats(self) -> pb.StatsReply:
        """What the daemon is doing at this moment."""
        now = self._clock()
        indexes = [space.index for space in self._store.spaces.values()]
        return pb.StatsReply(
            boot_id=self._boot_id,
            server_version=self._version,
            uptime_s=now - self._started_at,
            tiers=[
                pb.TierStats(**dataclasses.asdict(tier))
                for tier in (self._store.tier.statistics(), *self._store.lower.below.statistics())
            ],
            counters=pb.Counters(**dataclasses.asdict(self._store.counters)),
            blocks_committed=sum(index.num_stored for index in indexes),
            blocks_writing=sum(index.count(State.WRITING) for index in indexes),
            blocks_leased=sum(index.num_leased for index in indexes),
            blocks_pinned=sum(index.num_pinned for index in indexes),
            sessions=[
                pb.SessionStats(
                    session_id=connection.session.id,
                    client_name=connection.session.name,
                    namespace=connection.session.space.namespace,
                    num_leases=connection.session.num_leases,
                    blocks_leased=connection.session.blocks_leased,
                    num_writes=connection.session.num_writes,
                    region_bytes=connection.session.region_bytes,
                    age_s=int(now - connection.opened_at),
                )
                for connection in self._service.connections.values()
            ],
            draining=self._service.draining,
            loop_gaps=pb.LoopGaps(bounds_s=BOUNDS_S, counts=self._gaps.counts, total_s=self._gaps.total_s),
        )

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return self.stats()

    async def Namespaces(self, request: pb.NamespacesRequest, context: Any) -> pb.NamespacesReply:
        return pb.NamespacesReply(
            namespaces=[
                pb.NamespaceStats(
                    namespace=namespace,
                    spec=spec_to_proto(space.spec),
                    blocks_committed=space.index.num_stored,
                    slab_bytes=self._store.tier.arena.slab_bytes(namespace),
                )
                for namespace, space in self._store.spaces.items()
            ]
        )

    async def Clear(self, request: pb.ClearRequest, context: Any) -> pb.ClearReply:
        await self._authorize(context)
        if request.namespace:
            spaces = [await self._space(request.namespace, context)]
        else:
            spaces = list(self._store.spaces.values())
        results = [self._store.clear(space) for space in spaces]
        return pb.ClearReply(
            blocks_removed=sum(removed for removed, _ in results),
            blocks_kept=sum(kept for _, kept in results),
        )

    async def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinReply:
        return await self._set_pinned(request, context, pinned=True)

    async def Unpin(self, request: pb.PinRequest, context: Any) -> pb.PinReply:
        return await self._set_pinned(request, context, pinned=False)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        await self._authorize(context)
        self._service.drain()
        await self._on_drain()  # health checks say NOT_SERVING from now on
        return pb.DrainReply()

    async def Members(self, request: pb.MembersRequest, context: Any) -> AsyncIterator[pb.MembersReply]:
        told = self._roster.view
        yield _members_reply(told)
        changed = asyncio.Event()
        self._roster.watch(changed.set)
        self._members_told.add(changed)
        try:
            while request.watch and not self._closed:
                if self._roster.view != told:
                    told = self._roster.view
                    yield _members_reply(told)
                else:
                    await changed.wait()
                    changed.clear()
        finally:
            self._roster.unwatch(changed.set)
            self._members_told.discard(changed)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Event]:
        await self._authorize(context)
        queue = self._journal.watch()
        try:
            if request.snapshot:
                sequence = self._journal.sequence
                for event in self._snapshot(sequence):
                    yield event
            while True:
                event_or_end = await queue.get()
                if event_or_end is None:
                    await context.abort(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"watch: more than {MAX_EVENTS_BEHIND} events behind; watch again with a snapshot",
                    )
                else:
                    yield event_or_end
        finally:
            self._journal.unwatch(queue)

    def _snapshot(self, sequence: int) -> list[pb.Event]:
        """All committed blocks at this moment, and the end mark. Made at once, so that no change falls between."""
        events = []
        for space in self._store.spaces.values():
            stored = space.index.stored()
            for tier, level in (("cpu", space.index.memory), ("gpu", space.index.gpu), ("disk", space.index.disk)):
                rows = stored[level.has(stored)]
                for begin in range(0, len(rows), _SNAPSHOT_BLOCKS):
                    some = rows[begin : begin + _SNAPSHOT_BLOCKS]
                    change = change_of(space, some, tier=tier, placed=self._store.placed)
                    events.append(self._journal.event(change, sequence))
        return [*events, self._journal.end_of_snapshot(sequence)]

    async def _set_pinned(self, request: pb.PinRequest, context: Any, *, pinned: bool) -> pb.PinReply:
        await self._authorize(context)
        space = await self._space(request.namespace, context)
        try:
            hashes = unpack_hashes(request.hashes)
        except InvalidRequest as error:
            await context.abort(code_of(error), str(error))
        return pb.PinReply(num_blocks=self._store.set_pinned(space, hashes, pinned))

    async def _authorize(self, context: Any) -> None:
        """Where tokens are asked for, what changes or reveals blocks needs one for all tenants."""
        sent = dict(context.invocation_metadata() or ()).get(AUTHORIZATION, "").removeprefix("Bearer ")
        try:
            authorize(self._settings.tokens, sent, tenant=None)
        except KVStoreError as error:
            await context.abort(code_of(error), str(error))

    async def _space(self, namespace: bytes, context: Any) -> Space:
        space = self._store.spaces.get(Namespace(namespace))
        if space is None:
            error = BlockMissing(f"namespace {namespace.hex()[:12]}…: not known here; see `kvstore status --json`")
            await context.abort(code_of(error), str(error))
            raise error  # abort raises; this line tells the type checker so
        return space


def _members_reply(view: View) -> pb.MembersReply:
    return pb.MembersReply(
        members=[
            pb.Member(
                boot_id=member.boot_id,
                addresses=member.addresses,
                node_id=member.node_id,
                capacity_bytes=member.capacity_bytes,
                state=pb.Member.DRAINING if member.draining else pb.Member.UP,
            )
            for member in view.members
        ],
        epoch=view.epoch,
        replicas=view.replicas,
        stale=view.stale,
    )
