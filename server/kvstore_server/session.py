"""One client's session: what it holds, and how all of it is given back. No I/O, no clock.

A session holds leases, writes that are not committed, regions and follows; `end` gives back every one of them,
whatever state they are in.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.errors import BlockMissing, InvalidRequest, StoreFull
from kvstore.transport.shm import TICKET_BYTES
from kvstore.types import BlockHash, ByteArray, HashArray, IntArray, Outcome, SessionId, WriteId
from kvstore_server.store import Store
from kvstore_server.values import Found, Intake, Loaded, RemoteRegion, Space, Write
from kvstore_server.writes import Follow

MAX_LEASES: Final = 65_536
MAX_WRITES: Final = 65_536


class Session:
    """What one client holds. `wake` is called when one of its follows has something to tell."""

    def __init__(
        self,
        *,
        number: SessionId,
        name: str,
        space: Space,
        store: Store,
        wake: Callable[[], None],
        max_region_bytes: int,
    ) -> None:
        self.id = number
        self.name = name
        self.space = space
        self.ticket = secrets.token_bytes(TICKET_BYTES)
        self.ended = False
        self.follows: dict[int, tuple[str, Follow]] = {}  # by request id, with the lease it belongs to
        self._store = store
        self._wake = wake
        self._max_region_bytes = max_region_bytes
        self._leases: dict[str, list[IntArray]] = {}
        self._writes: dict[WriteId, Write] = {}
        self._waiting: list[Write] = []  # committed by this writer, while other ranks owe parts
        self._regions: dict[int, ByteArray | RemoteRegion] = {}

    def __repr__(self) -> str:
        return (
            f"<Session {self.id} {self.name!r} [{len(self._leases)} leases of {self.blocks_leased} blocks, "
            f"{len(self._writes)} writes, {len(self._regions)} regions]>"
        )

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def blocks_leased(self) -> int:
        return sum(len(rows) for held in self._leases.values() for rows in held)

    @property
    def num_writes(self) -> int:
        return len(self._writes) + len(self._waiting)

    @property
    def region_bytes(self) -> int:
        return sum(
            region.size_bytes if isinstance(region, RemoteRegion) else region.size for region in self._regions.values()
        )

    # Reading.

    def match(self, hashes: HashArray, lease: str) -> Found:
        """The lease, if named, holds exactly the blocks that are stored."""
        rows, num_writing = self._store.match(self.space, hashes)
        if lease:
            self.space.index.lease(rows)  # before the old ones go, so that common blocks are held throughout
            self.release(lease)
            self._hold(lease, rows)
        return Found(len(rows), num_writing, self.space.index.num_warm(rows))

    def load(
        self, request_id: int, hashes: HashArray, *, lease: str, follow: bool = False, whole: bool = False
    ) -> Loaded:
        """The lease holds the blocks that can be served, too. `whole` as for the store."""
        if not lease:
            raise InvalidRequest("lease: expected a name, got none; a load needs something to hold its blocks")
        follower = Follow(request_id, self._wake)
        loaded = self._store.load(self.space, hashes, follower, follow=follow, whole=whole)
        if loaded.writing:
            self.follows[request_id] = (lease, follower)
        try:
            self._hold(lease, loaded.rows)
        except StoreFull:
            self.release(lease)
            raise
        return loaded

    def release(self, lease: str) -> int:
        """The lease, and every follow under it, is over; returns how many blocks it held."""
        for request_id in [number for number, (name, _) in self.follows.items() if name == lease]:
            _, follow = self.follows.pop(request_id)
            self.space.writes.unfollow(follow)
        held = self._leases.pop(lease, [])
        for rows in held:
            self.space.index.unlease(rows)
        return sum(len(rows) for rows in held)

    def _hold(self, lease: str, rows: IntArray) -> None:
        if lease not in self._leases and len(self._leases) >= MAX_LEASES:
            self.space.index.unlease(rows)
            raise StoreFull(f"leases: expected at most {MAX_LEASES} in a session; release those that are not needed")
        if len(rows):
            self._leases.setdefault(lease, []).append(rows)

    # Writing.

    def reserve(
        self,
        request_id: int,
        *,
        parent: BlockHash | None,
        hashes: HashArray,
        parts: Sequence[int],
        heads: Sequence[int] = (),
    ) -> Write:
        """A write of this session, with the outcome for each block."""
        if len(self._writes) >= MAX_WRITES:
            raise StoreFull(f"writes: expected at most {MAX_WRITES} open in a session; commit or abort some")
        write = self._store.reserve(self.space, parent=parent, hashes=hashes, parts=parts, heads=heads)
        write.request_id = request_id
        self._writes[write.id] = write
        return write

    def plan_intake(
        self, write_id: int, *, blocks: IntArray, parts: IntArray, region: int, offsets: IntArray
    ) -> Intake:
        """What to copy. Raises: BlockMissing, for an unknown write or region; InvalidRequest, as the store does."""
        memory = self._region(region)
        return self._store.plan_intake(
            self._write(write_id), blocks=blocks, parts=parts, region=memory, offsets=offsets
        )

    def commit(self, write_id: int) -> list[Outcome]:
        """This writer sends no more; what has become of each block."""
        write = self._write(write_id)
        del self._writes[write.id]
        self._store.finish_write(write)
        outcomes = self._store.outcomes(write)
        self._waiting = [other for other in self._waiting if Outcome.WRITING in self._store.outcomes(other)]
        if any(outcomes[position] is Outcome.WRITING for position in write.pending):
            self._waiting.append(write)
        return outcomes

    def abort(self, write_id: int) -> int:
        """The blocks of the write that are not committed are given up; returns how many."""
        return self._abort(self._write(write_id))

    def abort_request(self, request_id: int) -> int:
        """As `abort`, of the write that this request reserved."""
        for write in self._writes.values():
            if write.request_id == request_id:
                return self._abort(write)
        raise BlockMissing(f"request {request_id}: expected a Store of this session whose write is open; none is")

    def _abort(self, write: Write) -> int:
        del self._writes[write.id]
        return self._store.finish_write(write, abort=True)

    def _write(self, write_id: int) -> Write:
        write = self._writes.get(WriteId(write_id))
        if write is None:
            raise BlockMissing(f"write {write_id}: expected an open write of this session; reserve the blocks again")
        return write

    # Regions.

    def check_region(self, region: int, size_bytes: int) -> None:
        """Raises: InvalidRequest, if the id is taken; StoreFull, if the session's regions would be too large."""
        if region in self._regions:
            raise InvalidRequest(f"region {region}: expected an id that is not in use, got one that is")
        if self.region_bytes + size_bytes > self._max_region_bytes:
            raise StoreFull(
                f"regions: expected at most {self._max_region_bytes} bytes in a session, got "
                f"{self.region_bytes + size_bytes}; drop regions, or raise max_region_bytes in the configuration"
            )

    def add_region(self, region: int, memory: ByteArray | RemoteRegion) -> None:
        self._regions[region] = memory

    def is_remote(self, region: int) -> bool:
        """Whether it is a region of another host."""
        return isinstance(self._regions.get(region), RemoteRegion)

    def remote_region(self, region: int) -> RemoteRegion:
        """Raises: BlockMissing, if it is unknown; InvalidRequest, if it is on this host."""
        memory = self._region(region)
        if not isinstance(memory, RemoteRegion):
            raise InvalidRequest(f"region {region}: expected one registered with RegisterRegion, got one of this host")
        return memory

    def _region(self, region: int) -> ByteArray | RemoteRegion:
        memory = self._regions.get(region)
        if memory is None:
            raise BlockMissing(f"region {region}: expected one registered by this session; register it first")
        return memory

    def drop_regions(self, regions: Sequence[int]) -> None:
        """Copies under way keep the memory mapped until they are done."""
        for region in regions:
            self._regions.pop(region, None)

    # The end.

    def end(self) -> None:
        """Everything is given back. Idempotent."""
        if self.ended:
            return
        self.ended = True
        for lease in [*self._leases, *(name for name, _ in self.follows.values())]:
            self.release(lease)
        for write in [*self._writes.values(), *self._waiting]:
            self._store.finish_write(write, abort=True)
        self._writes.clear()
        self._waiting.clear()
        self._regions.clear()
        self._store.tier.session_ended(self.id)
