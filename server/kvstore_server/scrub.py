"""Reads everything on disk again, slowly, and drops what has gone bad before anybody asks for it."""

import asyncio
import mmap
from typing import Final

import numpy as np
import structlog

from kvstore.transport.memory import address_of
from kvstore.types import AnyArray, HashArray, IntArray
from kvstore_server.level import State
from kvstore_server.spill import Spill
from kvstore_server.threads import in_thread
from kvstore_server.tiers.records import PAGE_BYTES
from kvstore_server.values import Space

log = structlog.get_logger()

PIECE_BYTES: Final = 4 << 20
PAUSE_S: Final = 1.0  # between two rounds


class Scrubber:
    """Checks `bytes_per_s` of the blocks of one store that lie on disk, again and again. Runs on the daemon's loop."""

    def __init__(self, spill: Spill, *, bytes_per_s: int) -> None:
        self._store = spill.store
        self._spill = spill
        self._bytes_per_s = bytes_per_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for space in list(self._store.spaces.values()):
                hashes = space.index.hashes_of(space.index.disk.rows())
                step = max(1, PIECE_BYTES // space.spec.block_bytes)
                for first in range(0, len(hashes), step):
                    piece = hashes[first : first + step]
                    await self.check(space, piece)
                    # Also for what was passed over, or a load of everything would be raced through meanwhile.
                    await asyncio.sleep(len(piece) * space.spec.block_bytes / self._bytes_per_s)
            await asyncio.sleep(PAUSE_S)

    async def check(self, space: Space, hashes: HashArray) -> int:
        """Those of the blocks that are on disk were read and compared, and what differs was dropped; bytes read."""
        index = space.index
        rows = index.find(hashes)
        states = index.states(rows)
        rows = rows[(states == State.COMMITTED) | (states == State.COLD)]
        rows = rows[index.disk.has(rows)]
        if not len(rows):
            return 0
        checked, slots = index.hashes_of(rows), index.disk.slots(rows)
        good = await in_thread(self._read, space, checked, slots)
        # Nothing held them meanwhile: what is not where it was says nothing. What rises is compared by its reader.
        there = (index.find(checked) == rows) & (index.disk.slots(rows) == slots)
        there &= index.states(rows) != State.RISING
        bad = rows[~good & there]
        if len(bad):
            log.error("blocks on disk had gone bad and were dropped", blocks=len(bad))
            self._store.lower.lose(space, "disk", bad)
        self._store.counters.blocks_scrubbed += len(rows)
        return len(rows) * space.spec.block_bytes

    def _read(self, space: Space, hashes: HashArray, slots: IntArray) -> AnyArray:
        stride = -(-space.spec.block_bytes // PAGE_BYTES) * PAGE_BYTES
        scratch = np.frombuffer(mmap.mmap(-1, len(slots) * stride), np.uint8)
        addresses = address_of(scratch) + stride * np.arange(len(slots), dtype=np.int64)
        good, _ = self._spill.disks.read(space.spec, slots=slots, hashes=hashes, addresses=addresses)
        return good
