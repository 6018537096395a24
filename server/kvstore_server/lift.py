"""Copies of what is loaded often, kept on the GPU: made in the background, and brought back when memory has let go.

A copy is never the only promise: a GPU that fails costs its copies, and blocks that are on disk too come from there.
"""

import asyncio
from typing import Final

import numpy as np
import structlog

from kvstore.transport.cuda import DeviceFailed, DeviceFull
from kvstore.types import HashArray, IntArray, Namespace
from kvstore_server.backlog import Backlog, Batch
from kvstore_server.eviction import BoolArray
from kvstore_server.rising import Risers
from kvstore_server.store import Store
from kvstore_server.threads import in_thread
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.gpu import GpuTier
from kvstore_server.values import Rise, Space

log = structlog.get_logger()

READS_AT_ONCE: Final = 4  # each is checked by one thread, which is slower than the bus
BACKLOG_BYTES: Final = 1 << 30  # waiting to be copied; what comes on top can wait for its next load


class Lift:
    """The GPU beside one store's memory. All methods run on the daemon's loop."""

    def __init__(self, store: Store, tier: GpuTier) -> None:
        self.failure = ""  # why the GPU is not used any more
        self.tier = tier
        self._store = store
        self._risers = Risers(store, tier, at_once=READS_AT_ONCE)
        self._backlog = Backlog()
        self._loaded_once: dict[Namespace, BoolArray] = {}  # by row; a hint, which may be of a block that is gone
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def __repr__(self) -> str:
        state = f"failed: {self.failure}" if self.failure else f"{self._backlog.size_bytes} bytes to copy"
        return f"<Lift [{state}]>"

    # What the store tells.

    def loaded(self, space: Space, rows: IntArray) -> None:
        """Those that were loaded before will be copied to the GPU."""
        if self.failure or not len(rows):
            return
        before = self._seen(space, int(rows.max()))
        again = rows[before[rows]]
        before[rows] = True
        index = space.index
        again = again[index.memory.has(again) & ~index.gpu.has(again)]
        batch = Batch.of(space, again)
        if len(again) and self._backlog.size_bytes + batch.size_bytes <= BACKLOG_BYTES:
            before[again] = False  # so that it is not queued twice
            self._backlog.add(batch)
            self._idle.clear()
            self._work.set()

    def rise(self, rise: Rise) -> None:
        self._risers.begin(rise)

    @property
    def rise_bytes_per_s(self) -> float:
        """As `Risers.bytes_per_s`."""
        return self._risers.bytes_per_s

    def forgotten(self, space: Space, hashes: HashArray, slots: IntArray) -> None:
        # A read that is under way there compares what it got with the checksums of the block that it wanted.
        self.tier.free(slots)

    def has_slabs(self, space: Space) -> bool:
        return bool(self.tier.arena.slabs_of(space.namespace))

    def statistics(self) -> TierStatistics:
        return self.tier.statistics()

    # The life of the worker.

    async def run(self) -> None:
        """Copies, until cancelled."""
        while True:
            await self._work.wait()
            while self._backlog and not self.failure:
                await self._copy_up(self._backlog.next())
            self._work.clear()
            self._idle.set()

    async def settle(self) -> None:
        """Nothing waits to be copied, and no read is under way."""
        await self._idle.wait()
        await self._risers.quiesce()

    async def quiesce(self) -> None:
        """No read is under way."""
        await self._risers.quiesce()

    async def _copy_up(self, batch: Batch) -> None:
        batch = batch.to_copy(batch.space.index.gpu)
        batch.space.index.lease(batch.rows)  # so that their slots in memory stay theirs
        try:
            await self._write(batch)
        except DeviceFull as error:
            log.warning("gpu full: blocks are not copied there", blocks=len(batch.rows), error=str(error))
        except DeviceFailed as error:
            await self._fail(error)
        except Exception:  # or no block would ever be copied again
            log.exception("copy failed: this is a bug of the store", blocks=len(batch.rows))
        finally:
            batch.space.index.unlease(batch.rows)

    async def _write(self, batch: Batch) -> None:
        """As many of these blocks, which are leased, as there is room for are on the GPU. Raises: DeviceFailed."""
        space, index, memory = batch.space, batch.space.index, self._store.tier
        slots = await self._make_room(space, len(batch.rows))
        there = batch[: len(slots)].unchanged()  # the others were lost meanwhile
        self.tier.free(slots[~there])
        batch, slots = batch[: len(slots)][there], slots[there]
        written = np.zeros(len(slots), np.bool_)
        try:
            places = index.memory.slots(batch.rows)
            mapped = memory.mappings(places)  # even if one of the blocks is lost, and its slab given up
            await in_thread(
                self.tier.write,
                space.spec,
                slots=slots,
                hashes=index.hashes_of(batch.rows),
                parents=index.parent_hashes(batch.rows),
                addresses=memory.addresses(places),
                checksums=memory.checksums(places, num_parts=space.spec.num_parts),
            )
            del mapped
            written = batch.unchanged()  # the others were cleared meanwhile, or lost
            self._store.lower.written(space, "gpu", batch.rows[written], slots[written])
        finally:
            self.tier.free(slots[~written])

    async def _make_room(self, space: Space, count: int) -> IntArray:
        """Up to `count` slots: free ones, those of a colder slab of others, those of our oldest blocks.

        Raises: DeviceFailed.
        """
        lower = self._store.lower
        slots = self.tier.allocate(space.spec, count)
        if len(slots) < count:
            found = lower.empty_slab(space, "gpu", self.tier.arena)
            if found is not None:
                _, slab, _, freed = found
                self.tier.free(freed)
                self.tier.close_slab(slab)
                await in_thread(self.tier.delete_slab, slab)
                self.tier.slab_deleted(slab)
            else:
                self.tier.free(lower.make_room(space, "gpu", count - len(slots))[1])
            slots = np.concatenate([slots, self.tier.allocate(space.spec, count - len(slots))])
        return slots

    def _seen(self, space: Space, row: int) -> BoolArray:
        """`[more than row]` bool of this namespace."""
        seen = self._loaded_once.get(space.namespace, np.zeros(0, np.bool_))
        if len(seen) <= row:
            seen = np.concatenate([seen, np.zeros(2 * row + 1024 - len(seen), np.bool_)])
            self._loaded_once[space.namespace] = seen
        return seen

    async def _fail(self, error: DeviceFailed) -> None:
        self.failure = str(error)
        log.error("gpu tier disabled: the store goes on without it", error=self.failure)
        self._backlog.clear()
        await self._risers.quiesce()  # what still came from there is to leave it too
        self._store.lower.abandon("gpu")
