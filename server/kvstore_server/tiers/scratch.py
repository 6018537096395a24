"""Memory for compressed bytes, used again: the kernel takes as long to clear new pages as LZ4 takes to fill them."""

import mmap
import weakref
from dataclasses import dataclass

import numpy as np

from kvstore.transport.memory import address_of


@dataclass(frozen=True, eq=False)
class Scratch:
    """Some memory, aligned to pages, with anything in it; it is taken back when this object is garbage."""

    memory: mmap.mmap
    address: int


class ScratchPool:
    """Keeps up to `most` pieces of memory that nobody uses. Any thread, without a lock: garbage comes back here."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._free: list[mmap.mmap] = []

    def __len__(self) -> int:
        return len(self._free)

    def take(self, size_bytes: int) -> Scratch:
        """At least so many bytes."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = mmap.mmap(-1, size_bytes)
        if len(memory) < size_bytes:
            memory = mmap.mmap(-1, size_bytes)
        scratch = Scratch(memory, address_of(np.frombuffer(memory, np.uint8)))
        weakref.finalize(scratch, self._give_back, memory).atexit = False
        return scratch

    def _give_back(self, memory: mmap.mmap) -> None:
        if len(self._free) < self._most:
            self._free.append(memory)
