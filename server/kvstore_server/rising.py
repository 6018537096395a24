"""Blocks on their way from another tier into memory: read in pieces, so that readers hear of the first ones soon."""

import asyncio
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np
import structlog

from kvstore.spec import KVSpec
from kvstore.types import AnyArray, HashArray, IntArray
from kvstore_server.store import Store
from kvstore_server.threads import in_thread
from kvstore_server.values import Rise

log = structlog.get_logger()

MEMORY_S: Final = 4.0  # of reading, after which what came before counts half
FIRST_PIECE_BYTES: Final = 8 << 20  # of one read: followers hear of its blocks when it is there
PIECE_BYTES: Final = 32 << 20  # of those that come after it


class Readable(Protocol):
    """A tier that blocks are brought up from."""

    def read(
        self, spec: KVSpec, *, slots: IntArray, hashes: HashArray, addresses: IntArray
    ) -> tuple[AnyArray, AnyArray]:
        """`[n]` bool and `[n, num_parts]` u64: whether the block is whole at its address now, and its checksums."""
        ...


class Speed:
    """Bytes a second, over the time in which any were under way. What is long ago counts less."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0: none came yet."""
        return self._bytes / self._busy_s if self._busy_s else 0.0

    def begin(self, now_s: float) -> None:
        """Some are under way from now on."""
        self._count(now_s)
        self._under_way += 1

    def end(self, now_s: float, size_bytes: int) -> None:
        """So many have come."""
        self._count(now_s)
        self._under_way -= 1
        self._bytes += size_bytes

    def _count(self, now_s: float) -> None:
        if self._under_way:
            self._busy_s += now_s - self._since_s
        self._since_s = now_s
        if self._busy_s > MEMORY_S:
            self._busy_s, self._bytes = self._busy_s / 2, self._bytes / 2


class Risers:
    """Reads under way from one tier. Runs on the daemon's loop."""

    def __init__(self, store: Store, tier: Readable, *, at_once: int) -> None:
        self._store = store
        self._tier = tier
        self._turns = asyncio.Semaphore(at_once)
        self._speed = Speed()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def bytes_per_s(self) -> float:
        """How fast blocks came up lately; 0: none did yet."""
        return self._speed.bytes_per_s

    def begin(self, rise: Rise) -> None:
        """The plan is carried out, piece by piece, and the store told of each."""
        for piece in _pieces(rise):
            task = asyncio.create_task(self._bring_up(piece))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def quiesce(self) -> None:
        """No read is under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _bring_up(self, piece: Rise) -> None:
        clock = asyncio.get_running_loop().time
        async with self._turns:
            good = np.zeros(len(piece.rows), np.bool_)
            checksums = np.zeros((len(piece.rows), piece.space.spec.num_parts), np.uint64)
            self._speed.begin(clock())
            try:
                good, checksums = await in_thread(
                    self._tier.read,
                    piece.space.spec,
                    slots=piece.slots,
                    hashes=piece.hashes,
                    addresses=piece.addresses,
                )
            except Exception:  # or its blocks would be rising for ever, and their readers wait
                log.exception("read failed: this is a bug of the store", blocks=len(piece.rows))
            finally:
                self._speed.end(clock(), int(good.sum()) * piece.space.spec.block_bytes)
        self._store.lower.risen(piece, good, checksums)


def _pieces(rise: Rise) -> Iterator[Rise]:
    first, size_bytes = 0, FIRST_PIECE_BYTES
    while first < len(rise.rows):
        step = max(1, size_bytes // rise.space.spec.block_bytes)
        yield rise[first : first + step]
        first, size_bytes = first + step, PIECE_BYTES
