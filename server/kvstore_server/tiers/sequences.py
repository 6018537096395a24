"""Numbers for what is written to disk, larger for what is written later. Any thread."""

import threading

import numpy as np

from kvstore.types import AnyArray


class Sequences:
    """The disks of one daemon share one, so that what one wrote can be told from what another wrote before."""

    def __init__(self) -> None:
        self._next = 1
        self._taking = threading.Lock()

    def take(self, count: int) -> AnyArray:
        """`[count]` numbers that nobody had."""
        with self._taking:
            first = self._next
            self._next += count
        return np.arange(first, first + count, dtype=np.uint64)

    def begin_after(self, last: int) -> None:
        """No number up to this one is given out any more."""
        with self._taking:
            self._next = max(self._next, last + 1)
