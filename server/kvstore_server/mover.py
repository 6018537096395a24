"""Moves bytes, in threads that do not hold the interpreter while they copy; decides nothing."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from kvstore.transport.memory import copy_and_hash_pieces, copy_pieces, hash_pieces
from kvstore.types import AnyArray, IntArray
from kvstore_server.values import Copies

# A job is cut at this size, so that the copies of several sessions take turns.
JOB_BYTES: Final = 32 << 20


class Mover:
    """`num_threads` copying threads. With `checksums` off, every checksum is 0."""

    def __init__(self, *, num_threads: int, checksums: bool) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvstore-mover")
        self._checksums = checksums

    async def take_in(self, copies: Copies) -> AnyArray:
        """All copies are done; returns `[n]` xxh3. Must not be cancelled: threads cannot be."""
        return await self._in_threads(copies.sizes, lambda job: self._copy(copies, job))

    def take_in_now(self, copies: Copies) -> AnyArray:
        """As `take_in`, in this thread: for copies that take less time than going to another."""
        return self._copy(copies, slice(None))

    async def hash(self, addresses: IntArray, sizes: IntArray) -> AnyArray:
        """`[n]`: the xxh3 of each piece of memory, which must stay mapped. Must not be cancelled."""
        return await self._in_threads(sizes, lambda job: hash_pieces(addresses[job], sizes[job]))

    def close(self) -> None:
        """Copies under way are done, and the threads gone."""
        self._threads.shutdown(wait=True)

    def _copy(self, copies: Copies, job: slice) -> AnyArray:
        pieces = copies.targets[job], copies.sources[job], copies.sizes[job]
        if self._checksums:
            return copy_and_hash_pieces(*pieces)
        copy_pieces(*pieces)
        return np.zeros(len(pieces[0]), np.uint64)

    async def _in_threads(self, sizes: IntArray, work: Callable[[slice], AnyArray]) -> AnyArray:
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(self._threads, work, job) for job in cut(sizes)]
        done = await asyncio.gather(*jobs)
        return np.concatenate(done) if done else np.zeros(0, np.uint64)


def cut(sizes: IntArray) -> Iterator[slice]:
    """Runs of pieces of at most JOB_BYTES, or of one larger piece."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(sizes):
        before = ends[first] - sizes[first]
        last = max(first + 1, int(np.searchsorted(ends, before + JOB_BYTES, side="right")))
        yield slice(first, last)
        first = last
