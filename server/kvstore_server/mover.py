"""Moves bytes, in threads that do not hold the interpreter while they copy; decides nothing.

Parts are hashed right after they are copied, while they are in the processor's cache.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import xxhash

from kvstore.types import ByteArray
from kvstore_server.values import Copy

# A job is cut at this size, so that the copies of several sessions take turns.
JOB_BYTES: Final = 8 << 20


class Mover:
    """`num_threads` copying threads. With `checksums` off, every checksum is 0."""

    def __init__(self, *, num_threads: int, checksums: bool) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvstore-mover")
        self._checksum = checksum_of if checksums else _no_checksum

    async def take_in(self, copies: Sequence[Copy]) -> list[int]:
        """All copies are done; returns the xxh3 of each, in order. Must not be cancelled: threads cannot be."""
        loop = asyncio.get_running_loop()
        jobs = [loop.run_in_executor(self._threads, _copy, job, self._checksum) for job in _jobs(copies)]
        return [checksum for job in await asyncio.gather(*jobs) for checksum in job]

    async def hash(self, parts: Sequence[ByteArray]) -> list[int]:
        """The xxh3 of each, in order."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: [checksum_of(part) for part in parts])

    def close(self) -> None:
        """Copies under way are done, and the threads gone."""
        self._threads.shutdown(wait=True)


def checksum_of(part: ByteArray) -> int:
    """xxh3-64 of the bytes of a part."""
    return xxhash.xxh3_64_intdigest(part.data)


def _jobs(copies: Sequence[Copy]) -> list[list[Copy]]:
    jobs: list[list[Copy]] = []
    room = 0
    for copy in copies:
        if room < copy.size_bytes or not jobs:
            jobs.append([])
            room = JOB_BYTES
        jobs[-1].append(copy)
        room -= copy.size_bytes
    return jobs


def _copy(copies: Sequence[Copy], checksum: Callable[[ByteArray], int]) -> list[int]:
    checksums = []
    for copy in copies:
        source = copy.source[copy.source_offset : copy.source_offset + copy.size_bytes]
        np.copyto(copy.target[copy.target_offset : copy.target_offset + copy.size_bytes], source)
        checksums.append(checksum(source))
    return checksums


def _no_checksum(_: ByteArray) -> int:
    return 0
