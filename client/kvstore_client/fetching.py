"""Blocks of a load that lie on another host: the daemon is asked to write pieces of them into this client's memory.

A piece goes straight to where the caller wants it, if that lies in a region, and else through staging, which device
memory never does. The daemon
answers when it writes no more for that piece; until then the memory is used for nothing else, whoever stopped waiting.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from kvstore.errors import BlockCorrupt, BlockMissing, KVStoreError, StoreBug, StoreUnavailable
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, copy_and_hash_pieces, copy_pieces
from kvstore.types import AnyArray, ByteArray, IntArray, Memory
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import error_from_status, pack_u32, pack_u64
from kvstore_client.buffers import Rows
from kvstore_client.cuda_arrays import CudaRows
from kvstore_client.filling import LoadPlan
from kvstore_client.region import AnyRegion, check_usable, closed_meanwhile, offsets_in
from kvstore_client.regions import Regions
from kvstore_client.session import Answer, Session
from kvstore_client.staging import Staging, Stagings

PIECE_BYTES: Final = 32 << 20  # of one piece, if it has more than one block
PIECE_BLOCKS: Final = 1024
FETCHES_AT_ONCE: Final = 4  # of one load
QUIET_S: Final = 1.0  # for the daemon's word that it writes no more to a region; then the session is given up

# Of each block of a piece, whether its bytes match their checksum; and the errors that the daemon gave, by place.
_Fetched: TypeAlias = tuple[AnyArray, dict[int, KVStoreError]]


class RemoteSource:
    """The blocks of one load, by their index in it. Any thread may copy from it."""

    in_place = False

    def __init__(
        self,
        spec: KVSpec,
        plan: LoadPlan,
        generations: IntArray,
        *,
        session: Session,
        regions: Regions,
        stagings: Stagings,
    ) -> None:
        self._hashes = plan.hashes
        self._generations = generations
        self._sizes = {part: spec.part_bytes[part] for part in plan.parts}
        self._session = session
        self._regions = regions
        self._stagings = stagings
        self._staging: Staging | None = None
        self._timeout_s = plan.timeout_s
        self._answered = threading.Condition()
        self._views: dict[int, dict[int, ByteArray]] = {part: {} for part in plan.parts}  # by part, then block

    def piece_blocks(self, part: int) -> int:
        most_bytes = min(PIECE_BYTES, self._stagings.size_bytes // FETCHES_AT_ONCE)
        return min(PIECE_BLOCKS, max(1, most_bytes // self._sizes[part]))

    def view(self, block: int, part: int) -> ByteArray:
        """`[part_bytes]`, this client's own copy, read-only. Raises: KeyError, if there is none."""
        return self._views[part][block]

    def held(self, blocks: IntArray) -> AnyArray:
        """`[n]`: all of them, as they are copies."""
        return np.ones(len(blocks), bool)

    def missing(self, block: int) -> BlockMissing:
        return BlockMissing(f"block {self._name(block)}: gone from where it was located; recompute it")

    def interrupt(self) -> None:
        with self._answered:
            self._answered.notify_all()
        staging = self._staging
        if staging is not None:
            staging.wake()

    def copy(
        self, part: int, blocks: IntArray, into: Rows | CudaRows | None, *, checksums: bool, stopped: Callable[[], bool]
    ) -> dict[int, KVStoreError]:
        """As `Readable.copy`. Checksums are compared wherever the daemon keeps them: bytes crossed a network."""
        size_bytes = self._sizes[part]
        if into is None:
            own = np.empty((len(blocks), size_bytes), np.uint8)
            targets = address_of(own) + size_bytes * np.arange(len(blocks))
            errors = self._copy(part, blocks, targets, Memory.HOST, stopped)
            own.flags.writeable = False
            self._views[part].update(zip(blocks.tolist(), own, strict=True))
            return errors
        return self._copy(part, blocks, into.addresses(blocks), into.memory, stopped)

    def _copy(
        self, part: int, blocks: IntArray, targets: IntArray, memory: Memory, stopped: Callable[[], bool]
    ) -> dict[int, KVStoreError]:
        region = self._regions.containing(targets, self._sizes[part], memory=memory)
        if region is not None:
            check_usable(region, self._session)
            found, errors = self._fetch_into(region, part, blocks, targets, stopped)
        elif memory is Memory.CUDA:  # nothing may touch it here
            raise closed_meanwhile()
        else:
            found, errors = self._fetch_staged(part, blocks, targets, stopped)
        for place in np.flatnonzero(~found).tolist():
            wrong = f"block {self._name(int(blocks[place]))}: part {part} does not match its checksum; recompute it"
            errors.setdefault(place, BlockCorrupt(wrong))
        return {int(blocks[place]): error for place, error in errors.items()}

    def _fetch_into(
        self, region: AnyRegion, part: int, blocks: IntArray, targets: IntArray, stopped: Callable[[], bool]
    ) -> _Fetched:
        """The daemon writes where the caller wants it, and writes no more once this returned."""
        fetch = _Fetch(self._answered, lambda: None)
        self._session.start(self._request(part, blocks, region.number, offsets_in(region, targets)), fetch.hear)
        if not fetch.wait(stopped) and not fetch.wait_quiet(QUIET_S):
            self._session.end(StoreUnavailable("the daemon did not say that it had stopped writing to a region"))
        if stopped():
            return _nothing(len(blocks))
        errors, expected = _decode(fetch.taken(), len(blocks))
        if expected is None:
            return np.ones(len(blocks), bool), errors
        return region.checksums(targets, self._sizes[part]) == expected, errors

    def _fetch_staged(self, part: int, blocks: IntArray, targets: IntArray, stopped: Callable[[], bool]) -> _Fetched:
        """The daemon writes to staging, and from there it is copied."""
        deadline = time.monotonic() + self._timeout_s
        size_bytes = self._sizes[part]
        staging = self._staging = self._stagings.of(self._session, deadline=deadline)
        offset, memory = staging.take(size_bytes * len(blocks), deadline=deadline, stopped=stopped)
        places = size_bytes * np.arange(len(blocks), dtype=np.int64)
        fetch = _Fetch(self._answered, partial(staging.give, offset, size_bytes * len(blocks)))
        self._session.start(self._request(part, blocks, staging.region.number, offset + places), fetch.hear)
        try:
            if not fetch.wait(stopped):
                return _nothing(len(blocks))
            errors, expected = _decode(fetch.taken(), len(blocks))
            pieces = targets, address_of(memory) + places, np.full(len(blocks), size_bytes)
            if expected is None:
                copy_pieces(*pieces)
                return np.ones(len(blocks), bool), errors
            return copy_and_hash_pieces(*pieces) == expected, errors
        finally:
            fetch.let_go()

    def _request(self, part: int, blocks: IntArray, region: int, offsets: IntArray) -> pb.ClientMessage:
        fetch = pb.Fetch(
            hashes=b"".join([self._hashes[block] for block in blocks.tolist()]),
            generations=pack_u64(self._generations[blocks]),
            parts=pack_u32([part]),
            region=region,
            offsets=pack_u64(offsets),
        )
        return pb.ClientMessage(fetch=fetch)

    def _name(self, block: int) -> str:
        return f"{block} ({self._hashes[block].hex()[:12]}…)"


class _Fetch:
    """One piece that the daemon was asked for: its answer, and memory that two hold, the daemon and a copy thread.

    `give` is called once both have let go. `answered` may be shared with others.
    """

    def __init__(self, answered: threading.Condition, give: Callable[[], None]) -> None:
        self._answered = answered
        self._give = give
        self._holders = 2
        self._answer: Answer | None = None

    def hear(self, answer: Answer) -> None:
        """On the reader thread: the daemon writes no more."""
        with self._answered:
            self._answer = answer
            self._answered.notify_all()
        self.let_go()

    def wait(self, stopped: Callable[[], bool]) -> bool:
        """Whether there is an answer, and not `stopped`."""
        with self._answered:
            self._answered.wait_for(lambda: self._answer is not None or stopped())
            return self._answer is not None

    def wait_quiet(self, timeout_s: float) -> bool:
        """Whether there is an answer by then."""
        with self._answered:
            return self._answered.wait_for(lambda: self._answer is not None, timeout_s)

    def taken(self) -> pb.Fetched:
        """The result. Raises: the error that the daemon answered with, or that ended the session."""
        answer = self._answer
        if answer is None or isinstance(answer, KVStoreError):
            raise answer or StoreUnavailable("fetch: no answer; recompute")
        if answer.HasField("status"):
            raise error_from_status(answer.status)
        return answer.fetched

    def let_go(self) -> None:
        with self._answered:
            self._holders -= 1
            last = not self._holders
        if last:
            self._give()


def _decode(fetched: pb.Fetched, num_blocks: int) -> tuple[dict[int, KVStoreError], AnyArray | None]:
    """Errors by place, and the checksums, if the daemon keeps them."""
    errors = {error.index: error_from_status(error.status) for error in fetched.errors}
    expected = np.frombuffer(fetched.checksums, "<u8")
    if len(expected) not in (0, num_blocks) or max(errors, default=0) >= num_blocks:
        raise StoreBug(f"fetched: expected checksums of {num_blocks} blocks, got {len(expected)}; report it")
    return errors, expected if len(expected) else None


def _nothing(num_blocks: int) -> _Fetched:
    return np.ones(num_blocks, bool), {}
