"""Keeps the disk tier in step with memory: writes down what was stored, brings up what is asked for, forgets.

Everything is decided on the daemon's loop; the disk is read and written in threads, a batch at a time. A store
never waits for it: what the disk cannot keep up with, beyond a bounded queue, stays in memory only.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from kvstore.types import HashArray, IntArray, Namespace
from kvstore_server.eviction import BoolArray
from kvstore_server.level import State
from kvstore_server.store import Store
from kvstore_server.threads import in_thread
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.disk import DiskFailed, DiskFull, DiskTier, Recovered
from kvstore_server.values import Rise, Space

log = structlog.get_logger()

BATCH_BYTES: Final = 64 << 20  # of one write: large enough that flushing it costs little
WRITES_AT_ONCE: Final = 2  # so that one writes while the other is flushed and entered into the catalog
LINGER_S: Final = 0.02  # what a small batch waits for more: each has its price, whatever its size
FIRST_PIECE_BYTES: Final = 8 << 20  # of one read: followers hear of its blocks when it is there
PIECE_BYTES: Final = 32 << 20  # of those that come after it
READS_AT_ONCE: Final = 2
BACKLOG_BYTES: Final = 4 << 30  # waiting to be written; more stays in memory only


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Blocks to write down, if they are still those of these generations when their turn comes."""

    space: Space
    rows: IntArray
    generations: IntArray


class Spill:
    """What lies below one store (`store.Below`). All methods run on the daemon's loop."""

    def __init__(self, store: Store, disk: DiskTier) -> None:
        self.failure = ""  # why the disk is not used any more
        self.disk = disk
        self._store = store
        self._waiting: deque[_Waiting] = deque()
        self._backlog_bytes = 0
        self._to_forget: deque[tuple[Space, HashArray, IntArray]] = deque()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._postponed = False  # what is to be forgotten waits until there is something else to do, too
        self._hurried = False  # somebody waits for all to be written
        self._enough = asyncio.Event()  # there is a whole batch to write, or no time to wait for one
        self._making_room = asyncio.Lock()
        self._in_flight: set[tuple[Namespace, int]] = set()  # rows being written
        self._spaces: set[Namespace] = set()  # that the disk knows
        self._reads = asyncio.Semaphore(READS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()  # reads

    def __repr__(self) -> str:
        state = f"failed: {self.failure}" if self.failure else f"{self._backlog_bytes} bytes to write"
        return f"<Spill [{state}]>"

    @property
    def backlog_bytes(self) -> int:
        """Bytes in memory that are yet to be written."""
        return self._backlog_bytes

    def restore(self, recovered: list[Recovered]) -> int:
        """What the disk holds can be found again; returns how many blocks."""
        for one in recovered:
            space = self._store.open_space(one.spec, with_slab=False)
            space.index.restore(one.hashes, parents=one.parents, slots=one.slots, written=one.stamps)
        return sum(len(one.hashes) for one in recovered)

    # What the store tells.

    def stored(self, space: Space, rows: IntArray) -> None:
        size_bytes = len(rows) * space.spec.block_bytes
        if self.failure or self._backlog_bytes + size_bytes > BACKLOG_BYTES:
            self._store.counters.blocks_unwritten += len(rows)
            return
        self._backlog_bytes += size_bytes
        self._waiting.append(_Waiting(space, rows, space.index.generations(rows)))
        if self._backlog_bytes >= BATCH_BYTES:
            self._enough.set()
        self._wake()

    def rise(self, rise: Rise) -> None:
        for piece in _pieces(rise):
            task = asyncio.create_task(self._bring_up(piece))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def statistics(self) -> list[TierStatistics]:
        return [self.disk.statistics()]

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
                    await self._linger()
                    while self._to_forget:  # before any write that could bring the same blocks back
                        await self._forget(*self._to_forget[0])
                        self._to_forget.popleft()
                    while self._waiting and len(writing) < WRITES_AT_ONCE:
                        writing.add(asyncio.create_task(self._write_down(self._next_batch())))
                    if writing:
                        done, writing = await asyncio.wait(writing, return_when=asyncio.FIRST_COMPLETED)
                        for error in filter(None, [task.exception() for task in done]):
                            raise error
                except DiskFull as error:
                    self._postpone(error)
                except DiskFailed as error:
                    self._fail(error)
                if not (self._waiting or writing) and (self._postponed or not self._to_forget):
                    self._postponed = False
                    self._work.clear()
                    self._idle.set()
        finally:
            await asyncio.gather(*writing, return_exceptions=True)

    async def _linger(self) -> None:
        """There is a whole batch to write, or it is time to write what there is."""
        if self._waiting and self._backlog_bytes < BATCH_BYTES and not self._hurried:
            self._enough.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._enough.wait(), LINGER_S)

    async def flush(self, timeout_s: float) -> bool:
        """What was stored is on disk; False, if not all of it in time."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        self._hurried = True
        self._enough.set()
        while not self._idle.is_set():
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                return False
            log.info("flushing to disk", left_mib=self._backlog_bytes >> 20)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), min(1.0, left_s))
        return True

    async def quiesce(self) -> None:
        """No read is under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Writing.

    def _next_batch(self) -> _Waiting:
        """Blocks of one namespace, in the order in which they were stored, about BATCH_BYTES of them."""
        first = self._waiting.popleft()
        space = first.space
        most = max(1, BATCH_BYTES // space.spec.block_bytes)
        taken, num_rows = [first], len(first.rows)
        while num_rows < most and self._waiting and self._waiting[0].space is space:
            taken.append(self._waiting.popleft())
            num_rows += len(taken[-1].rows)
        rows = np.concatenate([one.rows for one in taken])
        generations = np.concatenate([one.generations for one in taken])
        if len(rows) > most:
            self._waiting.appendleft(_Waiting(space, rows[most:], generations[most:]))
        self._backlog_bytes -= min(most, len(rows)) * space.spec.block_bytes
        return _Waiting(space, rows[:most], generations[:most])

    async def _write_down(self, batch: _Waiting) -> None:
        space, index = batch.space, batch.space.index
        rows = batch.rows[self._unchanged(batch) & ~index.disk.has(batch.rows)]
        names = [(space.namespace, row) for row in rows.tolist()]
        if not self._in_flight.isdisjoint(names):  # lost and stored again while it is being written: once is enough
            fresh = np.array([name not in self._in_flight for name in names])
            rows, names = rows[fresh], [name for name in names if name not in self._in_flight]
        index.lease(rows)  # so that their slots stay theirs
        self._in_flight.update(names)
        try:
            if len(rows):
                await self._write(space, rows)
        except DiskFailed as error:
            self._store.counters.blocks_unwritten += len(rows)
            if not isinstance(error, DiskFull):
                raise
            log.warning("disk full: blocks stay in memory only", blocks=len(rows), error=str(error))
        finally:
            self._in_flight.difference_update(names)
            index.unlease(rows)

    async def _write(self, space: Space, rows: IntArray) -> None:
        generations = space.index.generations(rows)
        try:
            slots, hashes = await self._write_once(space, rows)
        except DiskFull:  # no slab can be made now; there may be room in those that are there
            slots, hashes = await self._write_once(space, rows)
        self._store.counters.blocks_unwritten += len(rows) - len(slots)
        written = _Waiting(space, rows[: len(slots)], generations[: len(slots)])
        still = self._unchanged(written)
        self._store.written(space, written.rows[still], slots[still])
        if still.all():
            return
        lost = written.rows[~still]  # or cleared meanwhile, and maybe stored again
        self._to_forget.append((space, hashes[~still], slots[~still]))
        self._wake()
        self.stored(space, lost[space.index.states(lost) == State.COMMITTED])

    async def _write_once(self, space: Space, rows: IntArray) -> tuple[IntArray, HashArray]:
        """As many of these blocks, which are leased, as there is room for are on disk: their slots and hashes there."""
        index, tier = space.index, self._store.tier
        async with self._making_room:  # what another batch drops for it is forgotten before this one can write it
            if space.namespace not in self._spaces:
                await in_thread(self.disk.open_space, space.spec)
                self._spaces.add(space.namespace)
            slots = await self._make_room(space, len(rows))
        rows = rows[: len(slots)]
        hashes, memory = index.hashes_of(rows), index.memory.slots(rows)
        try:
            await in_thread(
                self.disk.write,
                space.spec,
                slots=slots,
                hashes=hashes,
                parents=index.parent_hashes(rows),
                addresses=tier.addresses(memory),
                checksums=tier.checksums(memory, num_parts=space.spec.num_parts),
            )
        except DiskFull:
            self.disk.free(slots)
            raise
        return slots, hashes

    async def _make_room(self, space: Space, count: int) -> IntArray:
        """Up to `count` slots on disk: free ones, those of a colder slab of others, those of our oldest blocks."""
        slots = self.disk.allocate(space.spec, count)
        try:
            while len(slots) < count and await self._take_over(space):
                slots = np.concatenate([slots, self.disk.allocate(space.spec, count - len(slots))])
            if len(slots) < count:
                await self._forget_or_later(space, *self._store.make_room_below(space, count - len(slots)))
                slots = np.concatenate([slots, self.disk.allocate(space.spec, count - len(slots))])
        except DiskFull:
            self.disk.free(slots)
            raise
        return slots

    async def _take_over(self, space: Space) -> bool:
        """There is room for one slab more, that of another namespace, whose every block was older than all of ours."""
        found = self._store.empty_slab_below(space, self.disk.arena)
        if found is None:
            return False
        owner, slab, hashes, slots = found
        await self._forget_or_later(owner, hashes, slots)
        self.disk.close_slab(slab)
        await in_thread(self.disk.delete_slab, slab)
        self.disk.slab_deleted(slab)
        return True

    async def _forget_or_later(self, space: Space, hashes: HashArray, slots: IntArray) -> None:
        """As `_forget`; if there is no room even for that, it is tried again later. Raises: DiskFull, DiskFailed."""
        try:
            await self._forget(space, hashes, slots)
        except DiskFull:
            self._to_forget.append((space, hashes, slots))
            raise

    async def _forget(self, space: Space, hashes: HashArray, slots: IntArray) -> None:
        """A restart does not find these blocks, so their slots can be used for others."""
        if len(hashes):
            await in_thread(self.disk.forget, space.spec, hashes)
            self.disk.free(slots)

    def _unchanged(self, batch: _Waiting) -> BoolArray:
        """`[n]` bool: which of these blocks are still in memory, as they were."""
        index = batch.space.index
        unchanged: BoolArray = (index.states(batch.rows) == State.COMMITTED) & (
            index.generations(batch.rows) == batch.generations
        )
        return unchanged

    def _postpone(self, error: DiskFull) -> None:
        """There is no room even to forget: what waits stays in memory only, and the rest is tried again later."""
        log.warning("disk full: it cannot even forget; tried again with the next store", error=str(error))
        self._drop_waiting()
        self._postponed = True

    def _fail(self, error: DiskFailed) -> None:
        self.failure = str(error)
        log.error("disk tier disabled: the store goes on without it", error=str(error))
        self._drop_waiting()
        self._to_forget.clear()

    def _drop_waiting(self) -> None:
        self._store.counters.blocks_unwritten += sum(len(one.rows) for one in self._waiting)
        self._waiting.clear()
        self._backlog_bytes = 0

    # Reading.

    async def _bring_up(self, piece: Rise) -> None:
        async with self._reads:
            good, checksums = await in_thread(
                self.disk.read,
                piece.space.spec,
                slots=piece.disk_slots,
                hashes=piece.hashes,
                addresses=piece.addresses,
            )
        self._store.risen(piece, good, checksums)

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()


def _pieces(rise: Rise) -> Iterator[Rise]:
    first, size_bytes = 0, FIRST_PIECE_BYTES
    while first < len(rise.rows):
        step = max(1, size_bytes // rise.space.spec.block_bytes)
        yield rise[first : first + step]
        first, size_bytes = first + step, PIECE_BYTES
