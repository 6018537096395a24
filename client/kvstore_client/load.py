"""The handle of a load: wait for a part or for all, view in place, cancel, release."""

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.types import AnyArray, BlockHash, ByteArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.filling import Filling, LoadPlan, Readable
from kvstore_client.options import Counters
from kvstore_client.session import Answer, Session


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of a load."""

    num_loaded: int  # leading blocks that are entirely in place
    errors: dict[int, KVStoreError]  # by index of the block

    def __repr__(self) -> str:
        first = f", first: {self.errors[min(self.errors)]!r}" if self.errors else ""
        return f"<LoadResult [{self.num_loaded} loaded, {len(self.errors)} errors{first}]>"


class Load:
    """Blocks on their way into the caller's buffers, or to be viewed in place. Made by `KVClient.load`.

    A context manager: leaving it cancels what is not done and releases the lease. Without it, a load with
    `into` releases a lease that was made for it when it is over; one with `view` holds it until `release`.

    `errors` grows while blocks fail and is final after `wait`. After `wait` or `wait_part` raised, and after
    `cancel`, nothing writes to the buffers any more.
    """

    def __init__(
        self, session: Session, plan: LoadPlan, *, pool: Executor, num_workers: int, counters: Counters
    ) -> None:
        self.hashes: Sequence[BlockHash] = plan.hashes
        self._session = session
        self._plan = plan
        self._counters = counters
        self._filling = Filling(
            plan,
            pool=pool,
            num_workers=num_workers,
            counters=counters,
            on_over=self._settle,
            on_corrupt=self._verify,
        )
        self._progress = self._filling.progress
        self.errors = self._progress.errors
        self._changed = self._filling.changed
        self._request_id = 0
        self._released = False
        self._settled = False

    def __repr__(self) -> str:
        return f"<Load [{self.num_blocks} blocks x {len(self._plan.parts)} parts; {self._filling!r}]>"

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()
        self.release()

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)

    @property
    def lease(self) -> str:
        return self._plan.lease

    def in_place(self) -> AnyArray:
        """`[num_blocks]` bool: which blocks are entirely in place."""
        with self._changed:
            return self._progress.complete()

    # What callers wait for.

    def wait_part(self, part: int, timeout_s: float | None = None) -> None:
        """This part of all blocks is in place and checked.

        Raises: the error of the first block that failed, and the load is stopped; StoreTimeout;
        StoreUnavailable, if control is lost; InvalidRequest, if the part was not asked for.
        """
        filling, progress = self._filling, self._progress
        if not progress.has(part):
            raise InvalidRequest(f"wait_part: expected a part that the load was asked for, got {part}; add it to parts")
        deadline = self._deadline(timeout_s)
        with self._changed:
            while not self.errors and progress.part_missing(part) and not filling.stopped:
                filling.wait_for_change(deadline, f"part {part}")
            if not self.errors and not progress.part_missing(part):
                return
            self._filling.stop()
            self._filling.quiesce()
            error = filling.failure or (self.errors[min(self.errors)] if self.errors else None)
        self._settle()
        raise error or InvalidRequest("wait_part: expected a load under way, got one that was cancelled")

    def wait(self, timeout_s: float | None = None) -> LoadResult:
        """Every part of every block is in place and checked, or the block has its error.

        Of a load that was cancelled, what is in place. Raises: StoreTimeout, and the load is stopped;
        StoreUnavailable, if control is lost.
        """
        filling, progress = self._filling, self._progress
        deadline = self._deadline(timeout_s)
        with self._changed:
            while progress.left and not filling.stopped:
                filling.wait_for_change(deadline, "blocks")
            self._filling.quiesce()
            failure = filling.failure if progress.left else None
            result = LoadResult(progress.num_loaded(), dict(self.errors))
        self._settle()
        if failure is not None:
            raise failure
        return result

    def view(self, block: int, part: int) -> ByteArray:
        """`[part_bytes]` uint8, read-only, in place: valid under the lease; `check` after use.

        Checksums were compared on the way here, if options.integrity is "always".

        Raises: the block's error; InvalidRequest, if there is no such block or part, if it cannot be read
        yet, or if the lease was released.
        """
        progress = self._progress
        source = self._filling.source
        if source is None or progress.left or self.errors or self._released or block < 0:
            self._check_viewable(block, part)
        assert source is not None
        try:
            return source.view(block, part)
        except (IndexError, KeyError):
            self._check_viewable(block, part)
            raise

    def check(self) -> None:
        """All blocks without an error are still where views show them.

        Raises: BlockMissing, if one is not: what was read through its views must not be used.
        """
        if self._filling.source is None:
            return
        blocks = self._progress.without_error(np.arange(self.num_blocks))
        still = self._filling.source.held(blocks)
        if not still.all():
            self._counters.add("generation_misses", int((~still).sum()))
            raise self._filling.source.missing(int(blocks[int(still.argmin())]))

    def cancel(self) -> None:
        """Nothing is copied any more; what is in place stays so. Idempotent."""
        with self._changed:
            self._filling.stop()
            self._filling.quiesce()
        self._settle()

    def release(self) -> None:
        """The lease is given back, without waiting for the daemon; views must not be used any more.

        Idempotent.
        """
        with self._changed:
            if self._released:
                return
            self._released = True
            if not self._filling.active:
                self._filling.detach()
        self._session.forget(self._request_id)
        if self._session.alive:
            self._session.tell(pb.ClientMessage(release=pb.Release(lease=self.lease)))

    # How the client sets it going.

    def begin(self, source: Readable, request_id: int, *, errors: dict[int, KVStoreError], writing: IntArray) -> None:
        """The blocks were located: what can be read is on its way."""
        self._request_id = request_id
        self._filling.begin(source, errors=errors, writing=writing)

    def hear(self, answer: Answer) -> None:
        """On the reader thread: something arrived for this load, or its session ended. Never waits."""
        self._filling.hear(answer)

    # What becomes of it.

    def _verify(self, blocks: list[int]) -> None:
        if self._session.alive:
            packed = b"".join(self.hashes[block] for block in blocks)
            self._session.tell(pb.ClientMessage(verify=pb.Verify(hashes=packed)))

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._plan.timeout_s if timeout_s is None else timeout_s)

    def _settle(self) -> None:
        """Nothing more is heard of a load that is over; a lease that only served the copy is given back."""
        with self._changed:
            if self._settled or self._filling.active:
                return
            self._settled = True
        self._session.forget(self._request_id)
        if self._plan.owns_lease and self._plan.into is not None and self._request_id:
            self.release()

    def _check_viewable(self, block: int, part: int) -> None:
        if not 0 <= block < self.num_blocks or not self._progress.has(part):
            raise InvalidRequest(
                f"view: expected a block below {self.num_blocks} and a part that was asked for, got block "
                f"{block}, part {part}; correct it"
            )
        if self._released:
            raise InvalidRequest("view: expected a lease that is held, got one that was released; load again")
        if block in self.errors:
            raise self.errors[block]
        if not self._progress.in_place(part, block):
            raise self._filling.failure or InvalidRequest(
                f"view: part {part} of block {block} cannot be read yet; wait for it"
            )
