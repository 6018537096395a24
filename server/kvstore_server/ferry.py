"""The remote tier beside one store: cold blocks are copied there in the background, and brought back when missed.

What leaves the host was copied before it had to: nothing waits for the remote tier, no store, no eviction, no match.
What it cannot keep up with is evicted uncopied. Where it fails, the store goes on as without it.
"""

import asyncio
import time
from collections import deque
from typing import Final

import numpy as np
import structlog

from kvstore.hashing import pack, unpack
from kvstore.types import AnyArray, BlockHash, HashArray, IntArray
from kvstore_server.cold import Lowest, Uses, coldest, filled_share
from kvstore_server.level import State
from kvstore_server.seek import Seeker
from kvstore_server.store import Store
from kvstore_server.threads import in_thread
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.disks import Disks
from kvstore_server.tiers.objects import Parcel
from kvstore_server.tiers.places import RemoteFailed
from kvstore_server.tiers.remote import NotAsked, RemoteTier
from kvstore_server.tiers.slab import SlabArena
from kvstore_server.values import Change, Space
from kvstore_server.watermarks import Watermarks

log = structlog.get_logger()

LOOKS: Final = 64  # for cold blocks, while as much is stored as the lowest tier holds: a look reads every row
ROUND_BYTES: Final = 256 << 20  # copied between two looks


class Ferry:
    """Both ways. All methods run on the daemon's loop."""

    def __init__(
        self,
        store: Store,
        tier: RemoteTier,
        *,
        disks: Disks | None,
        watermarks: Watermarks,
        at_once: int,
        min_blocks: int,
    ) -> None:
        """What is cold is read from the `disks`, if there are some, else from memory."""
        self.tier = tier
        self._store = store
        self._disks = disks
        self._watermarks = watermarks
        self._at_once = at_once
        self._seeker = Seeker(store, tier, at_once=at_once, min_blocks=min_blocks, clock=time.monotonic)
        self._looked_until = 0  # blocks last used until this tick were copied, or could not be
        self._bytes_to_look = 0
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        return f"<Ferry [{'idle' if self._idle.is_set() else 'at work'}, {self.tier!r}]>"

    # What the store tells.

    def changed(self, change: Change) -> None:
        """The tier may have filled up enough for a look at what is cold."""
        space = self._store.spaces.get(change.namespace)
        if not change.stored or space is None:
            return
        self._bytes_to_look += len(change.hashes) * space.spec.block_bytes
        if self._bytes_to_look * LOOKS >= sum(arena.capacity_bytes for arena in self._arenas):
            self._bytes_to_look = 0
            self._idle.clear()
            self._work.set()

    def sought(self, space: Space, hashes: HashArray, num_found: int) -> None:
        self._seeker.sought(space, hashes, num_found)

    def statistics(self) -> TierStatistics:
        return self.tier.statistics()

    # The life of the workers.

    async def run(self) -> None:
        """Copies and fetches, until cancelled; then nothing of either is under way."""
        while True:
            await self.tier.until_writable()
            try:
                await self.tier.list()
                break
            except RemoteFailed:
                pass  # the tier has told
        await asyncio.gather(self._seeker.run(), self._copy_cold())

    async def settle(self) -> None:
        """What was asked for was fetched or is not there, and no look is due."""
        await self._seeker.settle()
        await self._idle.wait()

    async def _copy_cold(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                while waiting := await self._look():
                    await asyncio.gather(*(self._copy_from(waiting) for _ in range(self._at_once)))
            except Exception:  # or nothing would ever be copied again
                log.exception("copy failed: this is a bug of the store")
            if not self._work.is_set():
                self._idle.set()

    async def _look(self) -> deque[tuple[Space, BlockHash]]:
        """The coldest blocks that no look found before, as many as are copied before the next."""
        lowest = self._lowest
        uses = [Uses.of(space, lowest) for space in self._store.spaces.values()]
        found, self._looked_until = await in_thread(
            coldest,
            uses,
            filled=filled_share(self._arenas),
            watermarks=self._watermarks,
            after=self._looked_until,
            most_bytes=ROUND_BYTES,
        )
        return deque(
            (one.space, BlockHash(block_hash)) for one, chosen in found for block_hash in one.hashes(chosen).tolist()
        )

    @property
    def _lowest(self) -> Lowest:
        return "disk" if self._disks is not None and not self._disks.failure else "cpu"

    @property
    def _arenas(self) -> list[SlabArena]:
        if self._disks is not None and self._lowest == "disk":
            return [tier.arena for tier in self._disks.tiers]
        return [self._store.tier.arena]

    # Copying.

    async def _copy_from(self, waiting: deque[tuple[Space, BlockHash]]) -> None:
        """One block after the other, until none waits. During an outage they wait, and one is tried now and then."""
        while waiting:
            await self.tier.until_writable()
            if not waiting:
                return
            space, block_hash = waiting.popleft()
            try:
                await self._copy(space, block_hash)
            except NotAsked:
                waiting.appendleft((space, block_hash))

    async def _copy(self, space: Space, block_hash: BlockHash) -> None:
        """The block is in the remote tier, if it is still here, and it is not known to be there."""
        if self.tier.holds(space.namespace, block_hash):
            await asyncio.sleep(0)  # after a restart many are, and others want a turn
            return
        one = unpack(pack([block_hash]))
        row = space.index.find(one)
        if space.index.states(row)[0] < State.COMMITTED:
            return  # gone meanwhile
        parent = space.index.parent_hashes(row)
        parcel = Parcel(self.tier.layout(space.spec))
        space.index.lease(row)  # so that its slot stays its own; if it is lost all the same, the checksums tell
        try:
            checksums = await self._take(space, row, parcel)
        finally:
            space.index.unlease(row)
        if checksums is not None:
            await self.tier.write(space.spec, block_hash, parcel.seal(one, parent=parent, checksums=checksums))

    async def _take(self, space: Space, row: IntArray, parcel: Parcel) -> AnyArray | None:
        """The bytes of this block, which is leased, are in the parcel, compared; its checksums, None if it is lost."""
        spec, index, memory = space.spec, space.index, self._store.tier
        if index.states(row)[0] == State.COMMITTED:
            slot = index.memory.slots(row)
            expected, mapped = memory.checksums(slot, num_parts=spec.num_parts)[0], memory.mappings(slot)
            found = await in_thread(parcel.take, int(memory.addresses(slot)[0]))
            del mapped
            return found if (found == expected).all() else None
        if self._disks is None or not index.disk.has(row)[0]:
            return None  # on the GPU only
        good, read = await in_thread(
            self._disks.read,
            spec,
            slots=index.disk.slots(row),
            hashes=index.hashes_of(row),
            addresses=np.array([parcel.address]),
        )
        return read[0] if good[0] else None
