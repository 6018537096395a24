"""The slab files of the disk tier: made, written, read and deleted. Knows nothing of the catalog.

Everything here blocks and may be called from several threads at once, for different slots. The files are opened for
each call, so that a directory that vanished is noticed, and none stays open.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import structlog

from kvstore.types import AnyArray, HashArray, IntArray, SlabId
from kvstore_server.tiers.files import Files
from kvstore_server.tiers.records import MAX_CALL_BYTES, Packed, RecordLayout, chunks, transfer
from kvstore_server.tiers.scratch import ScratchPool
from kvstore_server.tiers.slab import SLOT_BITS, place_of, slab_of

PROBE_CALLS: Final = 8  # of MAX_CALL_BYTES each

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Records that one call brought."""

    chosen: IntArray  # which of those that were asked for
    headers: AnyArray
    wrong: AnyArray  # what is wrong with each but for its data, as text


class SlabFiles:
    """Files `<slab>.slab` in one directory, read and written around the page cache where the file system can."""

    def __init__(self, directory: Path, *, reserve_bytes: int, num_threads: int, files: Files) -> None:
        """The directory is there. Raises: OSError."""
        directory.mkdir(mode=0o700, exist_ok=True)
        self.directory = directory
        self.reserve_bytes = reserve_bytes
        self._files = files
        self._made: set[SlabId] = set()
        self._making = threading.Lock()
        self._direct = self._direct_flag()
        self._num_threads = num_threads
        self._scratch = ScratchPool(most=num_threads)
        self._pool = ThreadPoolExecutor(num_threads, "kvstore-disk")

    @property
    def is_direct(self) -> bool:
        """Whether files are read and written with O_DIRECT."""
        return bool(self._direct)

    def path(self, slab: SlabId) -> Path:
        return self.directory / f"{slab}.slab"

    def sizes_bytes(self) -> dict[str, int]:
        """The size of each file that is named like a slab, by name. Raises: OSError."""
        return {path.name: self._files.size_bytes(path) for path in self.directory.glob("*.slab")}

    def is_made(self, slab: SlabId) -> bool:
        """Whether the file is there, by what this process knows."""
        return slab in self._made

    def adopt(self, slab: SlabId) -> None:
        """The file of this slab was there before."""
        self._made.add(slab)

    def make(self, slab: SlabId, size_bytes: int) -> None:
        """The file is there with room for all of its bytes, and its name survives a power cut. Twice is once.

        Raises: OSError, and then there is none; ENOSPC also, if less than the reserve would stay free.
        """
        with self._making:
            if slab in self._made:
                return
            self._expect_room(size_bytes)
            fd = self._files.open(self.path(slab), os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                self._files.fallocate(fd, size_bytes)
                self._files.sync_directory(self.directory)
            except OSError:
                self._files.unlink(self.path(slab))
                raise
            finally:
                self._files.close(fd)
            self._made.add(slab)

    def write(
        self, layout: RecordLayout, *, slots: IntArray, rooms: IntArray, headers: AnyArray, packed: Packed
    ) -> None:
        """The `[n]` records, by ascending slot of such rooms, are flushed. Their files were made. Raises: OSError."""
        slabs = [SlabId(slab) for slab in np.unique(slots >> SLOT_BITS).tolist()]
        sizes = layout.rooms_for(packed.sizes)  # of which the memory is, and which fill most slots
        with ExitStack() as opened:
            fds = {}
            for slab in slabs:
                fds[slab] = self._files.open(self.path(slab), os.O_WRONLY | self._direct)
                opened.callback(self._files.close, fds[slab])

            def write_chunk(chosen: IntArray) -> None:
                first = int(slots[chosen[0]])
                buffers = layout.buffers(headers[chosen[0] :], packed.addresses[chosen], sizes[chosen].tolist())
                offset = place_of(first) * (layout.header_bytes + int(rooms[chosen[0]]))
                transfer(self._files.pwritev, fds[slab_of(first)], buffers, offset)

            most = layout.records_per_call(len(slots), num_threads=self._num_threads)
            self.each(write_chunk, chunks(slots, most=most, ends=sizes < rooms))
            for fd in fds.values():
                self._files.fdatasync(fd)

    def read(
        self, layout: RecordLayout, *, slots: IntArray, rooms: IntArray, hashes: HashArray, addresses: IntArray
    ) -> tuple[AnyArray, AnyArray]:
        """`[n]` bool and `[n, num_parts]` u64: whether the block is whole at its address now, and its checksums.

        `rooms` are those of the slabs. What is wrong with the others is logged; nothing is raised for it.
        """
        good = np.zeros(len(slots), np.bool_)
        checksums = np.zeros((len(slots), len(layout.part_sizes)), np.uint64)

        def read_chunk(chosen: IntArray) -> list[_Read]:
            first, room_bytes = int(slots[chosen[0]]), int(rooms[chosen[0]])
            headers, stored = layout.scratch(len(chosen)), addresses[chosen]
            if room_bytes < layout.data_bytes:
                scratch = self._scratch.take(len(chosen) * room_bytes)
                stored = scratch.address + room_bytes * np.arange(len(chosen))
            try:
                buffers = layout.buffers(headers, stored, [room_bytes] * len(chosen))
                self._read_records(first, buffers, record_bytes=layout.header_bytes + room_bytes)
            except OSError as error:
                if len(chosen) == 1:
                    self._report(first, str(error))
                    return []
                # One bad block must not take the others with it.
                return [read for one in chosen.tolist() for read in read_chunk(np.array([one]))]
            wrong = layout.unpack(
                headers, hashes=hashes[chosen], stored=stored, room_bytes=room_bytes, addresses=addresses[chosen]
            )
            return [_Read(chosen, headers, wrong)]

        most = layout.records_per_call(len(slots), num_threads=self._num_threads)
        for reads in self._results(read_chunk, chunks(slots, most=most)):
            for read in reads:  # checked here, while the threads go on reading: the disk does not wait for it
                chosen, wrong = read.chosen, read.wrong
                layout.check_data(read.headers, addresses[chosen], wrong)
                good[chosen] = wrong == ""
                checksums[chosen] = read.headers["checksums"]
                for bad in np.flatnonzero(wrong != "").tolist():
                    self._report(int(slots[chosen[bad]]), str(wrong[bad]))
        return good, checksums

    def delete(self, names: Sequence[str]) -> None:
        """There are no such files any more. Raises: OSError."""
        for name in names:
            self._files.unlink(self.directory / name)
        self._files.sync_directory(self.directory)

    def close(self) -> None:
        """No thread is left."""
        self._pool.shutdown()

    def read_bytes_per_s(self) -> float:
        """How fast this disk reads now, in calls as those of blocks, measured on a file that is gone afterwards.

        Raises: OSError; ENOSPC also, if less than the reserve would stay free.
        """
        probe = self.directory / "probe"
        self._expect_room(PROBE_CALLS * MAX_CALL_BYTES)
        memory = mmap.mmap(-1, MAX_CALL_BYTES)
        memory.write(os.urandom(MAX_CALL_BYTES))
        fd = self._files.open(probe, os.O_RDWR | os.O_CREAT | self._direct)
        try:
            for call in range(PROBE_CALLS):
                transfer(self._files.pwritev, fd, [memoryview(memory)], call * MAX_CALL_BYTES)
            self._files.fdatasync(fd)

            def read_one(call: IntArray) -> None:
                transfer(
                    self._files.preadv, fd, [memoryview(mmap.mmap(-1, MAX_CALL_BYTES))], int(call[0]) * MAX_CALL_BYTES
                )

            begin = time.perf_counter()
            self.each(read_one, list(np.arange(PROBE_CALLS).reshape(-1, 1)))
            return PROBE_CALLS * MAX_CALL_BYTES / (time.perf_counter() - begin)
        finally:
            self._files.close(fd)
            self._files.unlink(probe)

    def each(self, work: Callable[[IntArray], None], parts: Sequence[IntArray]) -> None:
        """The work is done for all parts, and none of it goes on; raises what the first that failed did."""
        if len(parts) == 1:
            work(parts[0])
            return
        futures = [self._pool.submit(work, part) for part in parts]
        wait(futures)  # also after a failure: the caller's memory is in use until then
        for future in futures:
            future.result()

    def _results(self, work: Callable[[IntArray], T], parts: Sequence[IntArray]) -> Iterator[T]:
        """What the work returns for each part, as it comes; otherwise as `each`."""
        if len(parts) == 1:
            yield work(parts[0])
            return
        futures = [self._pool.submit(work, part) for part in parts]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            wait(futures)

    def _expect_room(self, size_bytes: int) -> None:
        """Raises: OSError, if less than the reserve would stay free."""
        free_bytes = self._files.free_bytes(self.directory)
        if free_bytes - size_bytes < self.reserve_bytes:
            reason = f"{size_bytes} bytes are needed; of {free_bytes} that are free, {self.reserve_bytes} are kept"
            raise OSError(errno.ENOSPC, reason, str(self.directory))

    def _read_records(self, first: int, buffers: list[memoryview], *, record_bytes: int) -> None:
        fd = self._files.open(self.path(slab_of(first)), os.O_RDONLY | self._direct)
        try:
            transfer(self._files.preadv, fd, buffers, place_of(first) * record_bytes)
        finally:
            self._files.close(fd)

    def _direct_flag(self) -> int:
        """O_DIRECT, where the file system has it, found out with a file that is gone afterwards."""
        probe = self.directory / "probe"
        self._files.close(self._files.open(probe, os.O_RDWR | os.O_CREAT))
        try:
            self._files.close(self._files.open(probe, os.O_RDONLY | os.O_DIRECT))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            log.warning("disk.buffered", directory=str(self.directory), reason="the file system has no O_DIRECT")
            return 0
        finally:
            self._files.unlink(probe)
        return os.O_DIRECT

    def _report(self, slot: int, problem: str) -> None:
        log.error("disk.read", path=str(self.path(slab_of(slot))), record=place_of(slot), problem=problem)
