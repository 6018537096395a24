"""A write: parts of reserved blocks go to the daemon, as they lie from a region, else through staging."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, StoreTimeout, StoreUnavailable, WriterFailed
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, copy_pieces
from kvstore.transport.shm import MAX_CALL_COPY_BYTES
from kvstore.types import IntArray, Outcome, WriteId
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import error_from_status, pack_u32, pack_u64
from kvstore_client.buffers import Rows, RowsLike, as_rows
from kvstore_client.cuda_arrays import CudaRows
from kvstore_client.cuts import MESSAGE_BYTES, STAGED_BYTES, grids, spans
from kvstore_client.options import Counters
from kvstore_client.region import AnyRegion, check_usable, closed_meanwhile, offsets_in
from kvstore_client.regions import Regions
from kvstore_client.session import Answer, Session
from kvstore_client.staging import Stagings


class Write:
    """Blocks reserved for this client, until `commit` or `abort`.

    Made by `KVClient.store`; a context manager.

    Leaving the `with` block commits, or aborts if it is left by an exception. Not for use by several
    threads at once. Once a call has raised StoreTimeout, StoreUnavailable or what the daemon refused, the
    write is over: its blocks that are not committed are given up.
    """

    def __init__(
        self,
        session: Session,
        spec: KVSpec,
        reserved: pb.Reserved,
        *,
        parts: Sequence[int],
        regions: Regions,
        staging: Stagings,
        counters: Counters,
        timeout_s: float,
    ) -> None:
        self.outcomes = [Outcome(value) for value in reserved.outcomes]
        self.new_blocks = [index for index, outcome in enumerate(self.outcomes) if outcome is Outcome.NEW]
        self.parts = tuple(parts)
        self._session = session
        self._spec = spec
        self._id = WriteId(reserved.write_id)
        self._regions = regions
        self._staging = staging
        self._counters = counters
        self._timeout_s = timeout_s
        self._new = np.array(self.new_blocks, np.int64)
        self._put: set[int] = set()
        self._over: str = ""  # how it ended
        self._acks = threading.Condition()
        self._unacknowledged = 0
        self._failure: KVStoreError | None = None

    def __repr__(self) -> str:
        state = self._over or f"{len(self._put)} of {len(self.parts)} parts put, {self._unacknowledged} messages open"
        return f"<Write {self._id} [{self.num_new} of {len(self.outcomes)} blocks new; {state}]>"

    def __enter__(self) -> "Write":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self.abort()
        elif not self._over:
            self.commit()

    @property
    def num_new(self) -> int:
        return len(self.new_blocks)

    def put(self, part: int, rows: RowsLike, *, timeout_s: float | None = None) -> None:
        """The source may be reused; the daemon has this part of the new blocks, or will take it from staging.

        `rows` has one row for each block of the write, also for those that are not new, whose rows
        are not read. Rows in a region are not copied here: then this returns when the daemon has
        copied them. Rows in device memory must lie in a `KVClient.cuda_region`; what writes there must
        have ended before (synchronise its stream), as the daemon knows of no stream.

        Raises: InvalidRequest, if the rows do not fit, the part is not of this write, or was put before;
        Unsupported, if the session cannot reach that device memory (put it from host memory); StoreTimeout;
        StoreUnavailable; what the daemon answers. After StoreTimeout the daemon may still read rows in a
        region, until `abort` has returned.
        """
        if part not in self.parts:
            raise InvalidRequest(f"put: expected one of this write's parts {self.parts[:8]}, got {part}; correct it")
        size_bytes = self._spec.part_bytes[part]
        source = self._rows(rows, size_bytes, f"put(part {part})")
        self.send(source, (part,), [0], timeout_s=timeout_s)

    def put_blocks(self, rows: RowsLike, *, timeout_s: float | None = None) -> None:
        """As `put`, for all parts of this write: `rows` has a row of a whole block for each block.

        Raises: as `put` does.
        """
        source = self._rows(rows, self._spec.block_bytes, "put_blocks")
        begins = [self._spec.part_range(part)[0] for part in self.parts]
        self.send(source, self.parts, begins, timeout_s=timeout_s)

    def send(
        self, source: Rows | CudaRows, parts: Sequence[int], begins: list[int], *, timeout_s: float | None
    ) -> None:
        """As `put`, for parts of this write which begin at `begins` within each row."""
        self._check_open()
        if isinstance(source, CudaRows):  # before it counts as put: from host memory it still can be
            self._regions.check_reachable(source, self._session)
        self._claim(parts)
        self._move(source, parts, begins, timeout_s)

    def commit(self, timeout_s: float | None = None) -> list[Outcome]:
        """The write is over, and this is what became of each block: STORED, WRITING, FULL, ORPHAN or FAILED.

        Waits until the daemon has acknowledged all that was put. A block that was given up meanwhile, because
        another of its writers failed, is FAILED.

        Raises: what the daemon refused a part with; StoreTimeout; StoreUnavailable. The blocks that are not
        committed are given up then.
        """
        self._check_open()
        deadline = self._deadline(timeout_s)
        try:
            self._wait_acknowledged(deadline)
            answer = self._call(pb.ClientMessage(commit=pb.Commit(write_id=self._id)), deadline)
        except KVStoreError:
            self._give_up()
            raise
        self._over = "committed"
        self.outcomes = [Outcome(value) for value in answer.committed.outcomes]
        return self.outcomes

    def abort(self) -> None:
        """The write is over; its blocks that are not committed are given up. Never raises a store error.

        Idempotent.
        """
        if self._over in ("committed", "aborted"):
            return
        self._over = "aborted"
        try:
            self._session.call(self._abortion(), deadline=self._deadline(None))
        except KVStoreError:
            return  # it went with its session, or goes when that ends

    # Sending.

    def _rows(self, rows: RowsLike, row_bytes: int, where: str) -> Rows | CudaRows:
        in_region = self._regions.in_cuda_region
        return as_rows(rows, num_rows=len(self.outcomes), row_bytes=row_bytes, where=where, in_cuda_region=in_region)

    def _move(self, source: Rows | CudaRows, parts: Sequence[int], begins: list[int], timeout_s: float | None) -> None:
        """The new blocks' parts, which begin at `begins` within each row, are sent."""
        if not self.num_new:
            return
        deadline = self._deadline(timeout_s)
        try:
            self._check_going()
            addresses = source.addresses(self._new)
            region = self._regions.containing(addresses, source.row_bytes, memory=source.memory)
            if region is not None:
                self._send_region(region, addresses, parts, begins, deadline)
                self._wait_acknowledged(deadline)
            elif isinstance(source, CudaRows):  # nothing may touch them here
                raise closed_meanwhile()
            else:
                self._send_staged(source, parts, begins, deadline)
        except KVStoreError:
            self._give_up()
            raise

    def _send_region(
        self, region: AnyRegion, addresses: IntArray, parts: Sequence[int], begins: list[int], deadline: float
    ) -> None:
        check_usable(region, self._session)
        rows = offsets_in(region, addresses)
        sizes = [self._spec.part_bytes[part] for part in parts]
        for blocks, columns in grids(self.num_new, sizes, most_bytes=MESSAGE_BYTES):
            offsets = rows[blocks, None] + np.array(begins[columns], np.int64)
            size_bytes = sum(sizes[columns]) * len(offsets)
            message = self._part(self._new[blocks], parts[columns], region.number, offsets)
            if size_bytes <= MAX_CALL_COPY_BYTES:
                with suppress(WriterFailed):  # some blocks were given up by others; commit tells which
                    self._call(message, deadline)
                    self._counters.add("bytes_stored", size_bytes)
            else:
                self._send(message, size_bytes, lambda: None)

    def _send_staged(self, source: Rows, parts: Sequence[int], begins: list[int], deadline: float) -> None:
        staging = self._staging.of(self._session, deadline=deadline)
        sizes = [self._spec.part_bytes[part] for part in parts]
        for blocks, columns in grids(self.num_new, sizes, most_bytes=min(STAGED_BYTES, staging.size_bytes // 4)):
            indices = self._new[blocks]
            widths = sizes[columns]
            row_bytes = sum(widths)
            total_bytes = row_bytes * len(indices)
            where, memory = staging.take(total_bytes, deadline=deadline)
            give_back = partial(staging.give, where, total_bytes)
            try:
                offsets = row_bytes * np.arange(len(indices), dtype=np.int64)
                sources, targets = source.addresses(indices), address_of(memory) + offsets
                for begin, width in spans(begins[columns], widths):
                    copy_pieces(targets, sources + begin, np.full(len(indices), width))
                    targets = targets + width
                starts = np.concatenate([[0], np.cumsum(widths)[:-1]]).astype(np.int64)
                offsets = where + offsets[:, None] + starts
            except BaseException:
                give_back()
                raise
            self._send(self._part(indices, parts[columns], staging.region.number, offsets), total_bytes, give_back)

    def _part(self, blocks: IntArray, parts: Sequence[int], region: int, offsets: IntArray) -> pb.ClientMessage:
        part = pb.StorePart(
            write_id=self._id,
            blocks=pack_u32(blocks),
            parts=pack_u32(parts),
            region=region,
            offsets=pack_u64(offsets),
        )
        return pb.ClientMessage(store_part=part)

    def _call(self, message: pb.ClientMessage, deadline: float) -> pb.ServerMessage:
        """The answer; the write is given up at the daemon, too, if there is none in time."""
        answer, _ = self._session.call(message, deadline=deadline, undo=self._abortion)
        return answer

    def _abortion(self, _: int = 0) -> pb.ClientMessage:
        return pb.ClientMessage(abort=pb.Abort(write_id=self._id))

    def _send(self, message: pb.ClientMessage, size_bytes: int, give_back: Callable[[], None]) -> None:
        with self._acks:
            self._unacknowledged += 1
        self._session.start(message, partial(self._acknowledged, size_bytes, give_back))

    def _acknowledged(self, size_bytes: int, give_back: Callable[[], None], answer: Answer) -> None:
        """On the reader thread: the daemon has taken the bytes in, or will not."""
        give_back()
        error = answer if isinstance(answer, KVStoreError) else None
        if error is None and not isinstance(answer, KVStoreError) and answer.HasField("status"):
            error = error_from_status(answer.status)
        if error is None:
            self._counters.add("bytes_stored", size_bytes)
        with self._acks:
            self._unacknowledged -= 1
            # WriterFailed: some blocks were given up by others; commit tells which.
            if error is not None and self._failure is None and not isinstance(error, WriterFailed):
                self._failure = error
            self._acks.notify_all()

    def _wait_acknowledged(self, deadline: float) -> None:
        with self._acks:
            while self._unacknowledged and self._failure is None:
                if not self._acks.wait(max(0.0, deadline - time.monotonic())):
                    error = StoreTimeout(
                        f"write {self._id}: {self._unacknowledged} messages not acknowledged within the "
                        "deadline; skip this save"
                    )
                    self._session.report(error)
                    raise error
        self._check_going()

    # State.

    def _check_open(self) -> None:
        if self._over:
            raise InvalidRequest(
                f"write {self._id}: expected an open write, got one that was {self._over}; store again"
            )

    def _check_going(self) -> None:
        """Raises: why this write cannot go on."""
        if self._failure is not None:
            raise self._failure
        if not self._session.alive:
            raise StoreUnavailable(f"write {self._id}: its session has ended; recompute, the client reconnects")

    def _claim(self, parts: Sequence[int]) -> None:
        again = [part for part in parts if part in self._put]
        if again:
            raise InvalidRequest(f"put: expected each part once, got {again[:8]} again; put each part once")
        self._put.update(parts)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _give_up(self) -> None:
        """Over, without waiting: the daemon is told to give up what is not committed."""
        self._over = "given up"
        if self._session.alive:
            self._session.tell(self._abortion())
