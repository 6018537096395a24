"""What `kvstore bench disk` compares with: plain O_DIRECT copies, and nothing else."""

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.types import ByteArray

CALL_BYTES: Final = 1 << 20
_WRITER_BYTES: Final = 256 << 20

Copy = Callable[[int, Sequence[memoryview], int], int]  # pwritev or preadv


@contextmanager
def plain_file(path: Path, size_bytes: int) -> Iterator[int]:
    """A file of this size, its blocks allocated, past the page cache; gone afterwards."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        raise InvalidRequest(f"{path}: expected a file system with O_DIRECT, got: {error}; give another path") from None
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        yield fd
    finally:
        os.close(fd)
        path.unlink()


def plain_copy(copy: Copy, fd: int, memory: ByteArray, threads: int) -> None:
    """The limit: all of the memory to or from the file, flushed if written, and nothing else."""
    view = memory.data

    def work(first: int) -> None:
        for begin in range(first * CALL_BYTES, memory.size, CALL_BYTES * threads):
            count = copy(fd, [view[begin : begin + CALL_BYTES]], begin)
            assert count == CALL_BYTES, f"{count} of {CALL_BYTES} bytes at {begin}"

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    if copy is os.pwritev:
        os.fdatasync(fd)


@contextmanager
def plain_writer(path: Path, threads: int) -> Iterator[None]:
    """Meanwhile a process of its own, which has begun, writes to the disk as fast as plain copies can."""
    command = [sys.executable, "-m", "kvstore_server.commands.plain", str(path), str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise InvalidRequest(f"{path}: expected a file that can be written; see the error above")
            yield
        finally:
            process.kill()
            path.unlink(missing_ok=True)


def _write_on(path: Path, threads: int) -> None:
    memory = np.frombuffer(mmap.mmap(-1, _WRITER_BYTES), np.uint8)
    memory[:] = 1
    with plain_file(path, _WRITER_BYTES) as fd:
        plain_copy(os.pwritev, fd, memory, threads)
        sys.stdout.write("writing\n")
        sys.stdout.flush()
        while True:
            plain_copy(os.pwritev, fd, memory, threads)


if __name__ == "__main__":
    _write_on(Path(sys.argv[1]), int(sys.argv[2]))
