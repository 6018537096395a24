"""Filling buffers: pieces wait in a heap, lowest part first, and copy threads work them off.

The reader thread only queues what it hears; the copy threads take it from there. State is changed under
one condition, and whoever waits for a part waits on that.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.errors import BlockCorrupt, BlockMissing, KVStoreError, StoreBug, StoreTimeout, StoreUnavailable
from kvstore.types import AnyArray, BlockHash, ByteArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import error_from_status, unpack_u32
from kvstore_client.buffers import Rows
from kvstore_client.cuda_arrays import CudaRows
from kvstore_client.options import Counters
from kvstore_client.progress import Progress
from kvstore_client.session import Answer


class Readable(Protocol):
    """Where the blocks of a load come from: mapped slabs, or the daemon on another host. Any thread may ask."""

    in_place: bool  # whether they can be read without anything being moved

    def piece_blocks(self, part: int) -> int:
        """How many blocks of this part make a piece."""
        ...

    def view(self, block: int, part: int) -> ByteArray:
        """`[part_bytes]`, read-only, not checked. Raises: IndexError, KeyError, if there is none."""
        ...

    def held(self, blocks: IntArray) -> AnyArray:
        """`[n]` bool: which of these blocks can, at this moment, still be read."""
        ...

    def copy(
        self, part: int, blocks: IntArray, into: Rows | CudaRows | None, *, checksums: bool, stopped: Callable[[], bool]
    ) -> dict[int, KVStoreError]:
        """The part of these blocks is in `into` (row i: block i) and checked, but for the blocks returned.

        Without `into` it can be viewed. Ends early once `stopped` says so; nothing is written to `into` after that.
        """
        ...

    def missing(self, block: int) -> BlockMissing: ...

    def interrupt(self) -> None:
        """Copies that wait look again whether they were stopped. Waits for nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load is to do."""

    hashes: Sequence[BlockHash]
    parts: Sequence[int]  # ascending
    part_bytes: Sequence[int]  # of all parts of the spec
    into: Mapping[int, Rows | CudaRows] | None  # by part; None: the blocks are viewed in place
    lease: str
    owns_lease: bool  # made for this load
    checksums: bool
    timeout_s: float  # of waits that bring none


class Filling:
    """The work behind one load. `changed` guards everything; methods say whether they need it held.

    `on_over` is called without it, maybe more than once, when nothing is left to do. `on_corrupt` gets the
    blocks whose checksums did not match.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        pool: Executor,
        num_workers: int,
        counters: Counters,
        on_over: Callable[[], None],
        on_corrupt: Callable[[list[int]], None],
    ) -> None:
        self.changed = threading.Condition()
        self.progress = Progress(plan.parts, len(plan.hashes))
        self.source: Readable | None = None
        self.stopped = False
        self.failure: KVStoreError | None = None  # the load as a whole has failed
        self.active = 0  # pieces being copied
        self._plan = plan
        self._pool = pool
        self._num_workers = num_workers
        self._counters = counters
        self._on_over = on_over
        self._on_corrupt = on_corrupt
        self._heard: deque[pb.ServerMessage] = deque()  # by the reader thread; for the copy threads
        self._pieces: list[tuple[int, int, IntArray]] = []  # heap of (part, first block, blocks)
        self._workers = 0

    def __repr__(self) -> str:
        state = "complete" if not self.progress.left else "stopped" if self.stopped else "under way"
        return f"<Filling [{len(self._pieces)} pieces wait, {self.active} active; {self.progress!r}; {state}]>"

    def detach(self) -> None:
        """Whoever waited for the end is told nothing more, and can go without waiting for the cycle collector."""
        self._on_over = _tell_nobody
        self._on_corrupt = _tell_nobody

    def begin(self, source: Readable, *, errors: dict[int, KVStoreError], writing: IntArray) -> None:
        """Blocks that can be read are scheduled; those in writing are as their parts arrive."""
        progress = self.progress
        with self.changed:
            self.source = source
            progress.follow(writing)
            for block, error in errors.items():
                progress.fail(block, error)
            readable = np.ones(len(self._plan.hashes), bool)
            readable[writing] = False
            blocks = progress.without_error(np.flatnonzero(readable))
            if not self._touches_bytes(source):
                self._take_as_they_lie(source, blocks)
            else:
                for part in self._plan.parts:
                    self._schedule(source, part, blocks)
            wanted = min(self._num_workers, len(self._pieces) + len(self._heard))
        for _ in range(wanted):
            self._hire()
        if not progress.left:
            self._on_over()

    def hear(self, answer: Answer) -> None:
        """On the reader thread: something arrived for this load, or its session ended. Never waits."""
        if isinstance(answer, KVStoreError):
            with self.changed:
                if self.progress.left:
                    self.fail(answer)
            return
        with self.changed:
            self._heard.append(answer)
            begun = self.source is not None
        if begun:
            self._hire()

    # The copy threads.

    def _hire(self) -> None:
        with self.changed:
            if self.stopped or self._workers >= self._num_workers:
                return
            self._workers += 1
        try:
            self._pool.submit(self._work)
        except RuntimeError:  # the pool was shut down
            with self.changed:
                self._workers -= 1
                self.fail(StoreUnavailable("client: it was closed; make another"))

    def _work(self) -> None:
        source = self.source
        assert source is not None
        while True:
            with self.changed:
                self._take_in(source)
                if self.stopped or not self._pieces:
                    self._workers -= 1
                    break
                part, _, blocks = heapq.heappop(self._pieces)
                self.active += 1
                more = bool(self._pieces)
            if more:
                self._hire()
            self._copy_piece(source, part, blocks)
        if not self.progress.left:
            self._on_over()

    def _copy_piece(self, source: Readable, part: int, blocks: IntArray) -> None:
        plan = self._plan
        into = plan.into[part] if plan.into is not None else None
        try:
            errors = source.copy(part, blocks, into, checksums=plan.checksums, stopped=self._is_stopped)
        except KVStoreError as failure:
            with self.changed:
                self.active -= 1
                self.fail(failure)
            return
        except Exception as failure:
            bug = StoreBug(f"part {part}: copying failed: {failure!r}; report it")
            errors = dict.fromkeys(blocks.tolist(), bug)
        with self.changed:
            self.active -= 1
            counted = not self.stopped
            if counted:
                for block, error in errors.items():
                    self.progress.fail(block, error)
                self.progress.put(part, blocks)
            self.changed.notify_all()
        if counted:
            self._count(part, len(blocks) - len(errors), errors)

    def _count(self, part: int, num_good: int, errors: dict[int, KVStoreError]) -> None:
        if self._plan.into is not None:
            self._counters.add("bytes_loaded", num_good * self._plan.part_bytes[part])
        if not errors:
            return
        self._counters.add("generation_misses", sum(isinstance(e, BlockMissing) for e in errors.values()))
        corrupt = [block for block, error in errors.items() if isinstance(error, BlockCorrupt)]
        if corrupt:
            self._counters.add("checksum_failures", len(corrupt))
            self._on_corrupt(corrupt)

    def _is_stopped(self) -> bool:
        return self.stopped

    # With the condition held.

    def _touches_bytes(self, source: Readable) -> bool:
        """Whether there is anything to do for the copy threads."""
        return self._plan.into is not None or self._plan.checksums or not source.in_place

    def _take_in(self, source: Readable) -> None:
        """What the reader thread queued becomes pieces and errors."""
        if not self._heard:
            return
        while self._heard and not self.stopped:
            answer = self._heard.popleft()
            try:
                if answer.HasField("status"):
                    raise error_from_status(answer.status)
                self._take_in_arrived(source, answer.arrived)
            except KVStoreError as error:
                self.fail(error)
        self.changed.notify_all()

    def _take_in_arrived(self, source: Readable, arrived: pb.Arrived) -> None:
        blocks = unpack_u32(arrived.blocks, name="arrived.blocks")
        parts = unpack_u32(arrived.parts, name="arrived.parts")
        if len(blocks) != len(parts) or (blocks >= len(self._plan.hashes)).any():
            raise StoreBug(f"arrived: expected pairs of parts and of {len(self._plan.hashes)} blocks; report it")
        for failed in arrived.errors:
            self.progress.fail(failed.index, error_from_status(failed.status))
        for part in np.unique(parts).tolist():
            fresh = self.progress.arrive(part, blocks[parts == part])
            if not len(fresh):  # a part that others asked for, or known before
                continue
            if not self._touches_bytes(source):
                self.progress.put(part, fresh)
            else:
                self._schedule(source, part, fresh)
        if arrived.last:
            for block in self.progress.never_arrived():
                bug = StoreBug(f"block {block}: the store ended it, but not all parts arrived; report it")
                self.progress.fail(block, bug)

    def _take_as_they_lie(self, source: Readable, blocks: IntArray) -> None:
        still = source.held(blocks)
        if not still.all():
            self._counters.add("generation_misses", int((~still).sum()))
            for block in blocks[~still].tolist():
                self.progress.fail(block, source.missing(block))
        self.progress.put_all(blocks)

    def _schedule(self, source: Readable, part: int, blocks: IntArray) -> None:
        step = source.piece_blocks(part)
        for first in range(0, len(blocks), step):
            piece = blocks[first : first + step]
            heapq.heappush(self._pieces, (part, int(piece[0]), piece))

    def wait_for_change(self, deadline: float, what: str) -> None:
        """Something has changed; at the deadline, the load has failed."""
        if not self.changed.wait(max(0.0, deadline - time.monotonic())):
            self._counters.add("timeouts")
            self.fail(
                StoreTimeout(
                    f"load: {what} not in place within the deadline, {self.progress.left} of "
                    f"{self.progress.total} parts of blocks left; recompute"
                )
            )

    def fail(self, error: KVStoreError) -> None:
        self.failure = self.failure or error
        self.stop()

    def stop(self) -> None:
        self.stopped = True
        self._pieces.clear()
        if self.source is not None:
            self.source.interrupt()
        self.changed.notify_all()

    def quiesce(self) -> None:
        """No copy thread touches the buffers any more: at most one piece of each was waited for."""
        while self.active:
            self.changed.wait()


def _tell_nobody(*_: object) -> None:
    """Stands for the callbacks of a load that is over."""
