"""Blocks are written to disk in the background, forgotten there, and brought up again.

Nothing here makes a store wait. Blocks that are being written or brought up are leased, so their slots stay theirs.
What the disks cannot keep up with, beyond a bounded queue, stays in memory only, until memory fills up.
"""

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import structlog

from kvstore.types import HashArray, IntArray, Namespace, SlabId
from kvstore_server.backlog import BATCH_BYTES, Backlog, Batch
from kvstore_server.level import State
from kvstore_server.rising import Risers
from kvstore_server.store import Store
from kvstore_server.table import NONE
from kvstore_server.threads import in_thread
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.disk import DiskFull, Recovered
from kvstore_server.tiers.disks import Disks
from kvstore_server.tiers.records import Packed
from kvstore_server.values import Rise, Space
from kvstore_server.watermarks import Watermarks, newest_first, unwritten

log = structlog.get_logger()

WRITES_AT_ONCE: Final = 2  # so that one writes while the other is flushed and entered into the catalog
# Small batches have their price, whatever their size, and take processor time from stores. So one waits until no store
# came for a while, but not for ever.
QUIET_S: Final = 0.02
LINGER_S: Final = 0.25
READS_AT_ONCE: Final = 2
BACKLOG_BYTES: Final = 4 << 30  # waiting to be written; more stays in memory only
LOOK_BYTES: Final = BATCH_BYTES // 2  # stored between two looks at how full memory is: a look reads every row


@dataclass(frozen=True, slots=True)
class WritePolicy:
    """When blocks are written down: `through`, once they are stored; `evict`, before memory is full.

    With both, the watermarks say how much memory may hold that is nowhere else.
    """

    when: Literal["through", "evict"]
    watermarks: Watermarks


class Spill:
    """The disks beside one store's memory. All methods run on the daemon's loop."""

    def __init__(self, store: Store, disks: Disks, *, policy: WritePolicy) -> None:
        self.failure = ""  # why no disk is written any more
        self.disks = disks
        self.store = store
        self._policy = policy
        self._risers = Risers(store, disks, at_once=READS_AT_ONCE)
        self._backlog = Backlog()
        self._to_forget: deque[tuple[Space, HashArray, IntArray]] = deque()
        self._to_delete: deque[SlabId] = deque()  # slabs that are closed
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._postponed = False  # what is to be forgotten waits until there is something else to do, too
        self._hurried = False  # somebody waits for all to be written
        # What does not wait for more: a batch, or as much of a small memory as is not evicted before it is written.
        self._enough_bytes = min(BATCH_BYTES, store.tier.arena.capacity_bytes // 16)
        self._enough = asyncio.Event()  # there is as much as that, or no time to wait for it
        self._num_stores = 0
        self._bytes_to_look = 0  # stored, and left to a look at how full memory is
        self._making_room = asyncio.Lock()
        self._in_flight: set[tuple[Namespace, int]] = set()  # rows being written

    def __repr__(self) -> str:
        state = f"failed: {self.failure}" if self.failure else f"{self.backlog_bytes} bytes to write"
        return f"<Spill [{state}]>"

    @property
    def backlog_bytes(self) -> int:
        """Bytes in memory that wait to be written."""
        return self._backlog.size_bytes

    def restore(self, recovered: list[Recovered]) -> int:
        """What the disks hold can be found again; returns how many blocks."""
        for one in recovered:
            space = self.store.open_space(one.spec, with_slab=False)
            space.index.restore(one.hashes, parents=one.parents, slots=one.slots, written=one.stamps)
        return sum(len(one.hashes) for one in recovered)

    # What the store tells.

    def stored(self, space: Space, rows: IntArray) -> None:
        self._num_stores += 1
        batch = Batch.of(space, rows)
        if self.failure:
            self.store.counters.blocks_unwritten += len(rows)
        elif self._policy.when == "through" and self.backlog_bytes + batch.size_bytes <= BACKLOG_BYTES:
            self._queue(batch)
        else:
            if self._policy.when == "through":
                self.store.counters.blocks_unwritten += len(rows)
            self._bytes_to_look += batch.size_bytes
            if self._bytes_to_look >= LOOK_BYTES:
                self._wake()

    def rise(self, rise: Rise) -> None:
        self._risers.begin(rise)

    @property
    def rise_bytes_per_s(self) -> float:
        """As `Risers.bytes_per_s`."""
        return self._risers.bytes_per_s

    def has_slabs(self, space: Space) -> bool:
        return bool(self.disks.slabs_of(space.namespace))

    def statistics(self) -> list[TierStatistics]:
        return self.disks.statistics()

    def forgotten(self, space: Space, hashes: HashArray, slots: IntArray) -> None:
        if not self.failure:  # else nothing is written there any more that could meet what is left
            self._to_forget.append((space, hashes, slots))
            self._wake()

    # The life of the worker.

    async def run(self) -> None:
        """Writes and forgets, until cancelled."""
        writing: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self._work.wait()
                try:
                    self._look()
                    await self._linger()
                    while self._to_forget:  # before any write that could bring the same blocks back
                        await self._forget(*self._to_forget.popleft())
                    while self._backlog and len(writing) < WRITES_AT_ONCE:
                        writing.add(asyncio.create_task(self._write_down(self._backlog.next())))
                except DiskFull as full:
                    self._postpone(full)
                if writing:  # also on a full disk, which is not to be asked again before one of them ended
                    done, writing = await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
                    for error in filter(None, [task.exception() for task in done]):
                        raise error
                if self.disks.failure and not self.failure:
                    self._fail()
                is_done = not (self._backlog or writing) and self._bytes_to_look < LOOK_BYTES
                if is_done and (self._postponed or not self._to_forget):
                    self._postponed = False
                    self._work.clear()
                    self._idle.set()
        finally:
            await asyncio.gather(*writing, return_exceptions=True)

    async def flush(self, timeout_s: float) -> bool:
        """All that is in memory is on disk; False, if not all of it in time. The most recently used goes first."""
        if not self.failure:
            self._backlog.clear()  # which is part of what follows
            for batch in newest_first(unwritten(self.store.spaces.values())):
                self._queue(batch)
        return await self.settle(timeout_s)

    async def settle(self, timeout_s: float) -> bool:
        """Nothing waits to be written or forgotten; False, if not in time. From now on no batch waits for more."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._hurried = True
        self._enough.set()
        while not self._idle.is_set():
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                return False
            log.info("flushing to disk", left_mib=self.backlog_bytes >> 20)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), min(1.0, left_s))
        return True

    async def quiesce(self) -> None:
        """No read is under way."""
        await self._risers.quiesce()

    def _look(self) -> None:
        """If memory fills up, the oldest of what is nowhere else waits to be written."""
        if self._bytes_to_look < LOOK_BYTES or self._backlog:
            return
        self._bytes_to_look = 0
        if self.failure:
            return
        for batch in self._policy.watermarks.to_write(self.store.tier, self.store.spaces.values()):
            self._queue(batch)

    async def _linger(self) -> None:
        """There is a whole batch to write, or nobody stores just now, or it has been long enough."""
        deadline = asyncio.get_running_loop().time() + LINGER_S
        seen = -1
        while (
            self._backlog and self.backlog_bytes < self._enough_bytes and seen != self._num_stores and not self._hurried
        ):
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            seen = self._num_stores
            self._enough.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._enough.wait(), min(QUIET_S, left_s))

    # Writing.

    def _queue(self, batch: Batch) -> None:
        self._backlog.add(batch)
        if self.backlog_bytes >= self._enough_bytes:
            self._enough.set()
        self._wake()

    async def _write_down(self, batch: Batch) -> None:
        space, index = batch.space, batch.space.index
        batch = batch.to_copy(index.disk)
        names = [(space.namespace, row) for row in batch.rows.tolist()]
        if not self._in_flight.isdisjoint(names):  # lost and stored again while it is being written: once is enough
            batch = batch[np.array([name not in self._in_flight for name in names])]
            names = [name for name in names if name not in self._in_flight]
        index.lease(batch.rows)  # so that their slots stay theirs
        self._in_flight.update(names)
        try:
            left = batch
            # The second time: a disk could make no slab, but there may be room in those that are there.
            for _ in range(2):
                if len(left.rows) and not self.disks.failure:
                    left = await self._write(left)
            self.store.counters.blocks_unwritten += len(left.rows)
        except DiskFull as error:
            self.store.counters.blocks_unwritten += len(left.rows)
            log.warning("disk full: blocks stay in memory only", blocks=len(left.rows), error=str(error))
        except Exception:  # or no block would ever be written again
            self.store.counters.blocks_unwritten += len(left.rows)
            log.exception("write failed: this is a bug of the store", blocks=len(left.rows))
        finally:
            self._in_flight.difference_update(names)
            index.unlease(batch.rows)

    async def _write(self, batch: Batch) -> Batch:
        """Those of these blocks, which are leased, that could be are on disk; returns the others. Raises: DiskFull."""
        space, index, tier = batch.space, batch.space.index, self.store.tier
        if not self.disks.is_open(space.spec):
            await in_thread(self.disks.open_space, space.spec)
        batch = batch[batch.unchanged()]  # the others were lost meanwhile
        memory = index.memory.slots(batch.rows)
        # Now: the slot of a block that is lost from here on may hold another, whose bytes must not match.
        checksums, mapped = tier.checksums(memory, num_parts=space.spec.num_parts), tier.mappings(memory)
        packed = await in_thread(self.disks.pack, space.spec, addresses=tier.addresses(memory))
        packed = replace(packed, memory=(*packed.memory, *mapped))
        async with self._making_room:  # what another batch drops for it is forgotten before this one can write it
            slots = await self._make_room(space, packed)
        fits = np.flatnonzero(slots != NONE)
        tried, slots = batch[fits], slots[fits]
        hashes = index.hashes_of(tried.rows)
        written = np.zeros(len(batch.rows), np.bool_)
        written[fits] = done = await in_thread(
            self.disks.write,
            space.spec,
            slots=slots,
            hashes=hashes,
            parents=index.parent_hashes(tried.rows),
            checksums=checksums[fits],
            packed=packed[fits],
        )
        self.disks.free(slots[~done])
        tried, slots, hashes = tried[done], slots[done], hashes[done]
        still = tried.unchanged()
        self.store.lower.written(space, "disk", tried.rows[still], slots[still])
        if not still.all():  # cleared meanwhile, and maybe stored again
            lost = tried.rows[~still]
            self.forgotten(space, hashes[~still], slots[~still])
            self.stored(space, lost[index.states(lost) == State.COMMITTED])
        return batch[~written]

    async def _make_room(self, space: Space, packed: Packed) -> IntArray:
        """`[n]` slots on disk, NONE where there is no room.

        Free ones, those of a colder slab of others, those of our oldest blocks, and if these are too small, of our
        coldest slab. Raises: DiskFull.
        """
        slots = self.disks.allocate_for(space.spec, packed)
        try:
            while (slots == NONE).any() and await self._take_over(space):
                self._allocate_more(space, packed, slots)
            missing = int((slots == NONE).sum())
            if missing:
                await self._forget(space, *self.store.lower.make_room(space, "disk", missing))
                self._allocate_more(space, packed, slots)
            while (slots == NONE).any() and await self._give_up_empty(space):
                self._allocate_more(space, packed, slots)
            if (slots == NONE).any() and await self._take_over(space, own=True):
                self._allocate_more(space, packed, slots)
        except DiskFull:
            self.disks.free(slots[slots != NONE])
            raise
        return slots

    def _allocate_more(self, space: Space, packed: Packed, slots: IntArray) -> None:
        missing = np.flatnonzero(slots == NONE)
        slots[missing] = self.disks.allocate_for(space.spec, packed[missing])

    async def _take_over(self, space: Space, *, own: bool = False) -> bool:
        """There is room for one slab more: that of another namespace, whose every block was older than all of ours.

        With `own`: our coldest.
        """
        if self._to_delete:  # there was no room even for that
            await self._delete_closed()
            return True
        found = self.store.lower.empty_slab(space, "disk", self.disks, own=own)
        if found is None:
            return False
        owner, slab, hashes, slots = found
        await self._forget(owner, hashes, slots)
        await self._delete_slab(slab)
        return True

    async def _give_up_empty(self, space: Space) -> bool:
        """There is room for one slab more: one of ours held nothing, but its slots were too small."""
        for slab in self.disks.empty_slabs(space.spec)[:1]:
            await self._delete_slab(slab)
            return True
        return False

    async def _delete_slab(self, slab: SlabId) -> None:
        self.disks.close_slab(slab)
        self._to_delete.append(slab)
        await self._delete_closed()

    async def _delete_closed(self) -> None:
        while self._to_delete:
            await in_thread(self.disks.delete_slab, self._to_delete[0])
            self.disks.slab_deleted(self._to_delete.popleft())

    async def _forget(self, space: Space, hashes: HashArray, slots: IntArray) -> None:
        """A restart does not find these blocks, so their slots can be used for others.

        Raises: DiskFull, if there is no room even for that; it is tried again later.
        """
        if not len(hashes):
            return
        forgotten = await in_thread(self.disks.forget, space.spec, hashes=hashes, slots=slots)
        self.disks.free(slots[forgotten])
        if not forgotten.all():
            self._to_forget.append((space, hashes[~forgotten], slots[~forgotten]))
            raise DiskFull("no room even to forget blocks; free some space, or give the disk tier less capacity")

    def _postpone(self, error: DiskFull) -> None:
        """There is no room even to forget: what waits stays in memory only, and the rest is tried again later."""
        log.warning("disk full: tried again with the next store", error=str(error))
        self.store.counters.blocks_unwritten += self._backlog.clear()
        self._postponed = True

    def _fail(self) -> None:
        self.failure = self.disks.failure
        log.error("disk tier disabled: the store goes on without it", error=self.failure)
        self.store.counters.blocks_unwritten += self._backlog.clear()
        self._to_forget.clear()

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()
