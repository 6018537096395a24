"""What the disk does wrong, as errors of its tier, and whether the tier can be used on."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvstore.errors import StoreUnavailable

FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class DiskFailed(Exception):
    """The tier cannot be used any more; the message says what happened, where, and what to do."""


class DiskFull(DiskFailed):
    """The file system has no room for this; the tier can be used on, after something in it was evicted."""


class Failures:
    """Remembers the failure after which a directory is not used any more. Any thread."""

    def __init__(self, directory: Path, *, on_full: Callable[[], None]) -> None:
        self._directory = directory
        self._on_full = on_full
        self._failure = ""

    @contextmanager
    def during(self, action: str) -> Iterator[None]:
        """An OSError within becomes DiskFull, or DiskFailed for good: what was flushed cannot be known any more."""
        if self._failure:
            raise DiskFailed(self._failure)
        try:
            yield
        except StoreUnavailable:  # an OSError too
            raise
        except OSError as error:
            message = f"{self._directory}: cannot {action}: {error}"
            if error.errno in FULL:
                self._on_full()
                raise DiskFull(f"{message}; free some space, or give the disk tier less capacity") from error
            self._failure = f"{message}; check the disk and its mount, then restart"
            raise DiskFailed(self._failure) from error
