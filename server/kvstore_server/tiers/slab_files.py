"""The slab files of the disk tier: made, written, read and deleted. Knows nothing of the catalog.

Everything here blocks and may be called from several threads at once, for different slots. The files are opened for
each call, so that a directory that vanished is noticed, and none stays open.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import structlog

from kvstore.types import AnyArray, HashArray, IntArray, SlabId
from kvstore_server.tiers.files import Files
from kvstore_server.tiers.records import RecordLayout, chunks, transfer
from kvstore_server.tiers.slab import SLOT_BITS, place_of, slab_of

log = structlog.get_logger()


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
            free_bytes = self._files.free_bytes(self.directory)
            if free_bytes - size_bytes < self.reserve_bytes:
                reason = f"{size_bytes} bytes are needed; of {free_bytes} that are free, {self.reserve_bytes} are kept"
                raise OSError(errno.ENOSPC, reason, str(self.path(slab)))
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

    def write(self, layout: RecordLayout, *, slots: IntArray, headers: AnyArray, addresses: IntArray) -> None:
        """The `[n]` records, by ascending slot, are flushed. Their files were made before. Raises: OSError."""
        slabs = [SlabId(slab) for slab in np.unique(slots >> SLOT_BITS).tolist()]
        with ExitStack() as opened:
            fds = {}
            for slab in slabs:
                fds[slab] = self._files.open(self.path(slab), os.O_WRONLY | self._direct)
                opened.callback(self._files.close, fds[slab])

            def write_chunk(chosen: IntArray) -> None:
                first = int(slots[chosen[0]])
                buffers = layout.buffers(headers[chosen[0] :], addresses[chosen])
                offset = place_of(first) * layout.record_bytes
                transfer(self._files.pwritev, fds[slab_of(first)], buffers, offset)

            self._each(write_chunk, chunks(slots, most=layout.records_per_call))
            for fd in fds.values():
                self._files.fdatasync(fd)

    def read(
        self, layout: RecordLayout, *, slots: IntArray, hashes: HashArray, addresses: IntArray
    ) -> tuple[AnyArray, AnyArray]:
        """`[n]` bool and `[n, num_parts]` u64: whether the block is whole at its address now, and its checksums.

        What is wrong with the others is logged; nothing is raised for it.
        """
        good = np.zeros(len(slots), np.bool_)
        checksums = np.zeros((len(slots), len(layout.part_sizes)), np.uint64)

        def read_chunk(chosen: IntArray) -> None:
            headers = layout.scratch(len(chosen))
            try:
                self._read_records(layout, int(slots[chosen[0]]), layout.buffers(headers, addresses[chosen]))
            except OSError as error:
                if len(chosen) == 1:
                    self._report(int(slots[chosen[0]]), str(error))
                else:  # one bad block must not take the others with it
                    for one in chosen.tolist():
                        read_chunk(np.array([one]))
                return
            wrong = layout.check(headers, hashes=hashes[chosen], addresses=addresses[chosen])
            good[chosen] = wrong == ""
            checksums[chosen] = headers["checksums"]
            for bad in np.flatnonzero(wrong != "").tolist():
                self._report(int(slots[chosen[bad]]), str(wrong[bad]))

        self._each(read_chunk, chunks(slots, most=layout.records_per_call))
        return good, checksums

    def delete(self, names: Sequence[str]) -> None:
        """There are no such files any more. Raises: OSError."""
        for name in names:
            self._files.unlink(self.directory / name)
        self._files.sync_directory(self.directory)

    def close(self) -> None:
        """No thread is left."""
        self._pool.shutdown()

    def _read_records(self, layout: RecordLayout, first: int, buffers: list[memoryview]) -> None:
        fd = self._files.open(self.path(slab_of(first)), os.O_RDONLY | self._direct)
        try:
            transfer(self._files.preadv, fd, buffers, place_of(first) * layout.record_bytes)
        finally:
            self._files.close(fd)

    def _each(self, work: Callable[[IntArray], None], parts: Sequence[IntArray]) -> None:
        """The work is done for all parts, and none of it goes on; raises what the first that failed did."""
        if len(parts) == 1:
            work(parts[0])
            return
        futures = [self._pool.submit(work, part) for part in parts]
        wait(futures)  # also after a failure: the caller's memory is in use until then
        for future in futures:
            future.result()

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
