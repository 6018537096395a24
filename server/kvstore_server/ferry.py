"""The remote tier beside one store: cold blocks are copied there in the background, and brought back when missed.

What leaves the host was copied before it had to: nothing waits for the remote tier, no store, no eviction, no match.
What it cannot keep up with is evicted uncopied. Where it fails, the store goes on as without it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import structlog

from kvstore.hashing import unpack
from kvstore.types import AnyArray, BlockHash, HashArray, IntArray, Namespace
from kvstore_server.cold import Lowest, Told, coldest, filled_share
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

Block = tuple[Namespace, BlockHash]


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
        self._told = Told()  # of these each was copied, or could not be
        # What comes before cold blocks in their chains: a host that starts empty finds a chain from its beginning only.
        self._heads: dict[Block, None] = {}
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
            except Exception:
                log.exception("remote tier disabled: this is a bug of the store")
                return
        async with asyncio.TaskGroup() as workers:  # which ends when all have; a gather does not
            workers.create_task(self._seeker.run())
            workers.create_task(self._copy_cold())

    async def settle(self) -> None:
        """What was asked for was fetched or is not there, and no look is due."""
        await self._seeker.settle()
        await self._idle.wait()

    async def _copy_cold(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                while cold := await self._look():
                    await self._copy_all(cold)
                while self._heads and not self._work.is_set():  # what is cold by now comes before them
                    await self._copy_all(
                        [self._heads.popitem()[0] for _ in range(min(self._at_once, len(self._heads)))]
                    )
            except Exception:  # or nothing would ever be copied again
                log.exception("copy failed: this is a bug of the store")
            if not self._work.is_set():
                self._idle.set()

    async def _look(self) -> list[Block]:
        """The coldest blocks that no look found before, as many as are copied before the next; their heads wait."""
        lowest = self._lowest
        uses = [self._told.uses(space, lowest) for space in self._store.spaces.values()]
        chosen = await in_thread(
            coldest,
            uses,
            filled=filled_share(self._arenas),
            watermarks=self._watermarks,
            most_bytes=ROUND_BYTES,
        )
        for one, positions in chosen:
            self._told.note(one, positions)
        runs = [(one.space, one.unchanged(positions)) for one, positions in chosen]
        cold = [block for space, rows in runs for block in _blocks(space, rows)]
        known = set(cold)
        for space, rows in runs:
            parents = zip(rows.tolist(), space.index.parent_hashes(rows).tolist(), strict=True)
            for row in [row for row, parent in parents if (space.namespace, parent) not in known]:
                before = space.index.before(row)
                heads = _blocks(space, before)  # the last of them is copied first
                self._heads |= dict.fromkeys(heads)
                self.tier.use(space.namespace, [block_hash for _, block_hash in heads])
        return cold

    @property
    def _lowest(self) -> Lowest:
        return "disk" if self._disks is not None and not self._disks.failure else "cpu"

    @property
    def _arenas(self) -> list[SlabArena]:
        if self._disks is not None and self._lowest == "disk":
            return [tier.arena for tier in self._disks.tiers]
        return [self._store.tier.arena]

    # Copying.

    async def _copy_all(self, blocks: Sequence[Block]) -> None:
        """Each of the blocks that is still here was copied, or could not be."""
        waiting = deque(blocks)
        async with asyncio.TaskGroup() as copies:
            for _ in range(self._at_once):
                copies.create_task(self._copy_from(waiting))

    async def _copy_from(self, waiting: deque[Block]) -> None:
        """One block after the other, until none waits. During an outage they wait, and one is tried now and then."""
        while waiting:
            await self.tier.until_writable()
            if not waiting:
                return
            block = waiting.popleft()
            try:
                await self._copy(*block)
            except NotAsked:
                waiting.appendleft(block)

    async def _copy(self, namespace: Namespace, block_hash: BlockHash) -> None:
        """The block, if it is still here, is in the remote tier, if that can be. Raises: NotAsked."""
        space = self._store.spaces.get(namespace)
        if space is None or self.tier.holds(namespace, block_hash):
            await asyncio.sleep(0)  # after a restart there are many of these, and others want a turn
            return
        row = space.index.find(one := unpack(block_hash))
        if space.index.states(row)[0] < State.COMMITTED:
            return  # gone meanwhile, or a hole
        parent = space.index.parent_hashes(row)
        parcel = Parcel(self.tier.layout(space.spec))
        checksums = await self._take(space, row, parcel)
        if checksums is not None:
            await self.tier.write(space.spec, block_hash, parcel.seal(one, parent=parent, checksums=checksums))

    async def _take(self, space: Space, row: IntArray, parcel: Parcel) -> AnyArray | None:
        """The bytes of this block are in the parcel, compared; its checksums, None if it went meanwhile.

        It is not leased: the coldest blocks are the next to be evicted, and a store would find no room. So its slot may
        be another's while it is read, which its checksums tell.
        """
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


def _blocks(space: Space, rows: IntArray) -> list[Block]:
    return [(space.namespace, BlockHash(block_hash)) for block_hash in space.index.hashes_of(rows).tolist()]
