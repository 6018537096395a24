"""The system calls of the disk tier, in one place, so that a test can count, delay or fail each of them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Transaction(Protocol):
    """What the catalog commits."""

    def commit(self) -> None: ...


class Files:
    """Each method is one step that can fail, with OSError; nothing here decides anything."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size_bytes(self, path: Path) -> int:
        return os.stat(path).st_size

    def free_bytes(self, path: Path) -> int:
        """What this process may still take of the file system."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def fallocate(self, fd: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, 0, size_bytes)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        """The names in the directory survive a power cut."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def commit(self, transaction: Transaction) -> None:
        """The transaction of the catalog is durable."""
        transaction.commit()
