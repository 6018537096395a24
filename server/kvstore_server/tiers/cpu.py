"""The cpu tier: slabs of shared memory, written by the daemon, readable by the clients they are handed to.

Who has a slab mapped is kept here, because the memory of a slab that was closed comes back only when the last
of its readers has unmapped it (docs/adr/0003). Runs on the daemon's loop, but for `add_spare`.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of
from kvstore.transport.shm import SlabLayout, create_memfd, populate, seal_slab
from kvstore.types import AnyArray, ByteArray, IntArray, Namespace, SessionId, SlabId
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.tiers.slab import MAX_SLOTS, SLOT_BITS, SlabArena, numbers_in


@dataclass(frozen=True, slots=True)
class Slab:
    """The memory of one slab: its descriptor, slots `[num_slots, slot_bytes]`, and the columns of its headers."""

    fd: int
    memory: ByteArray
    slots: ByteArray
    generations: AnyArray  # [num_slots]
    hashes: AnyArray  # [num_slots]
    checksums: AnyArray  # [num_slots, num_parts]

    @classmethod
    def of(cls, fd: int, memory: ByteArray, layout: SlabLayout) -> "Slab":
        headers = layout.headers(memory)
        return cls(fd, memory, layout.slots(memory), headers["generation"], headers["hash"], headers["checksums"])


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """A snapshot. `slab_bytes` is what the slabs take, `used_bytes` what the blocks in them take."""

    tier: str
    capacity_bytes: int
    slab_bytes: int
    used_bytes: int
    num_slabs: int
    pages: str
    place: str = ""  # the directory of a disk


class CpuTier:
    """Slots in shared memory. A slot that is not published shows generation 0, so that no reader accepts it."""

    def __init__(self, *, capacity_bytes: int, slab_bytes: int, page_lock: PageLock) -> None:
        self.arena = SlabArena(capacity_bytes)
        self.slab_bytes = slab_bytes
        self._page_lock = page_lock
        self._slabs: dict[SlabId, Slab] = {}
        self._readers: dict[SlabId, set[SessionId]] = {}
        self._spares: list[tuple[int, ByteArray]] = []
        self._spares_lock = threading.Lock()
        self._coming_bytes = 0  # of spares being made
        self._used_bytes = 0

    def layout(self, spec: KVSpec) -> SlabLayout:
        """How a slab of this spec is laid out."""
        layout = SlabLayout.fitting(
            size_bytes=min(self.slab_bytes, self.arena.capacity_bytes),
            num_parts=spec.num_parts,
            block_bytes=spec.block_bytes,
        )
        if layout.num_slots <= MAX_SLOTS:
            return layout
        return SlabLayout.of(num_slots=MAX_SLOTS, num_parts=spec.num_parts, block_bytes=spec.block_bytes)

    def open_slab(self, spec: KVSpec, layout: SlabLayout) -> bool:
        """The namespace has one slab more; False if the capacity does not allow it."""
        size_bytes = max(layout.size_bytes, self.slab_bytes)
        if not self.arena.fits(size_bytes):
            size_bytes = layout.size_bytes
            if not self.arena.fits(size_bytes):
                return False
        fd, memory = self._take_spare(size_bytes) or self._create(size_bytes)
        seal_slab(fd)
        self._page_lock.lock(memory)
        slab = self.arena.open(spec.namespace, num_slots=layout.num_slots, size_bytes=size_bytes)
        self._slabs[slab] = Slab.of(fd, memory, layout)
        self._readers[slab] = set()
        return True

    def close_slab(self, slab: SlabId) -> frozenset[SessionId]:
        """The slab, whose slots are all free, is given up; returns the sessions that must unmap it first."""
        self.arena.close(slab)
        closed = self._slabs.pop(slab)
        self._page_lock.unlock(closed.memory)
        os.close(closed.fd)
        readers = frozenset(self._readers[slab])
        self._forget_if_unread(slab)
        return readers

    # All of these take `[n]` slots of slabs that are open.

    def publish(self, slots: IntArray, *, generations: IntArray, hashes: AnyArray, used_bytes: int) -> None:
        """The slots belong to these blocks, of `used_bytes` each; who knew other generations takes a miss.

        `hashes` is `[n]` records of 32 bytes.
        """
        for slab, places, chosen in self._by_slab(slots):
            slab.hashes[places] = hashes[chosen]  # before the generation, which is 0 while the slot is free
            slab.generations[places] = generations[chosen]
        self._used_bytes += used_bytes * len(slots)

    def retract(self, slots: IntArray, *, used_bytes: int) -> None:
        """The slots hold nothing; readers take a miss from now on. They are not free yet."""
        for slab, places, _ in self._by_slab(slots):
            slab.generations[places] = 0
        self._used_bytes -= used_bytes * len(slots)

    def addresses(self, slots: IntArray) -> IntArray:
        """`[n]`: where in memory the bytes of each slot begin."""
        addresses = np.empty(len(slots), np.int64)
        for slab, places, chosen in self._by_slab(slots):
            addresses[chosen] = address_of(slab.slots) + places * slab.slots.strides[0]
        return addresses

    def mappings(self, slots: IntArray) -> list[ByteArray]:
        """The memory in which these slots lie. It stays mapped as long as the caller has it, even if its slab goes."""
        return [slab.memory for slab, _, _ in self._by_slab(slots)]

    def checksums(self, slots: IntArray, *, num_parts: int) -> AnyArray:
        """`[n, num_parts]` u64, from the headers of the slots."""
        checksums = np.empty((len(slots), num_parts), np.uint64)
        for slab, places, chosen in self._by_slab(slots):
            checksums[chosen] = slab.checksums[places]
        return checksums

    def set_checksums(self, slots: IntArray, parts: list[int], values: AnyArray) -> None:
        """`values`, `[n, len(parts)]`, are the checksums of these parts, in the headers of the slots."""
        for slab, places, chosen in self._by_slab(slots):
            slab.checksums[places[:, None], parts] = values[chosen]

    def _by_slab(self, slots: IntArray) -> Iterator[tuple[Slab, IntArray, AnyArray]]:
        for number, places, chosen in by_slab(slots):
            yield self._slabs[number], places, chosen

    def belongs(self, slab: SlabId, namespace: Namespace) -> bool:
        """Whether there is such a slab, and it holds blocks of this namespace."""
        return slab in self._slabs and slab in self.arena.slabs_of(namespace)

    def descriptor(self, slab: SlabId, session: SessionId) -> int:
        """A read-only descriptor of the slab, the caller's to close.

        From now on the session counts as a reader, until it says that it has unmapped the slab, or ends.
        """
        self._readers[slab].add(session)
        return os.open(f"/proc/self/fd/{self._slabs[slab].fd}", os.O_RDONLY | os.O_CLOEXEC)

    def unmapped(self, slab: SlabId, session: SessionId) -> None:
        """The session has the slab mapped no more; unknown slabs are ignored."""
        if slab in self._readers:
            self._readers[slab].discard(session)
            self._forget_if_unread(slab)

    def session_ended(self, session: SessionId) -> None:
        """The session has nothing mapped that counts."""
        for slab in list(self._readers):
            self.unmapped(slab, session)

    def add_spare(self) -> bool:
        """One more slab's memory is there, with all its pages; False when the capacity is reached. Any thread."""
        with self._spares_lock:
            if self._taken_bytes + self.slab_bytes > self.arena.capacity_bytes:
                return False
            self._coming_bytes += self.slab_bytes
        fd, memory = create_memfd("kvstore-slab", self.slab_bytes)
        populate(memory)
        with self._spares_lock:
            self._coming_bytes -= self.slab_bytes
            self._spares.append((fd, memory))
            while self._taken_bytes > self.arena.capacity_bytes:  # a slab was opened meanwhile
                os.close(self._spares.pop()[0])
        return True

    def statistics(self) -> TierStatistics:
        return TierStatistics(
            tier="cpu",
            capacity_bytes=self.arena.capacity_bytes,
            slab_bytes=self.arena.used_bytes,
            used_bytes=self._used_bytes,
            num_slabs=self.arena.num_slabs,
            pages=shmem_pages(),
        )

    def close(self) -> None:
        """All descriptors are closed; the memory goes when the last mapping does."""
        for slab in self._slabs.values():
            self._page_lock.unlock(slab.memory)
            os.close(slab.fd)
        for fd, _ in self._spares:
            os.close(fd)
        self._slabs.clear()
        self._spares.clear()

    @property
    def _taken_bytes(self) -> int:
        return self.arena.used_bytes + len(self._spares) * self.slab_bytes + self._coming_bytes

    def _create(self, size_bytes: int) -> tuple[int, ByteArray]:
        """Memory of this size, within the capacity: spares of another size are given up for it."""
        with self._spares_lock:
            while self._spares and self._taken_bytes + size_bytes > self.arena.capacity_bytes:
                os.close(self._spares.pop()[0])
            return create_memfd("kvstore-slab", size_bytes)

    def _take_spare(self, size_bytes: int) -> tuple[int, ByteArray] | None:
        with self._spares_lock:
            return self._spares.pop() if self._spares and size_bytes == self.slab_bytes else None

    def _forget_if_unread(self, slab: SlabId) -> None:
        if slab not in self._slabs and not self._readers[slab]:
            del self._readers[slab]
            self.arena.forget(slab)


def shmem_pages(read: Callable[[Path], str] = Path.read_text) -> str:
    """Which pages the kernel gives to memfds: "huge pages" or "4 KiB pages"."""
    try:
        setting = read(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    except OSError:
        return "4 KiB pages"
    granted = any(f"[{word}]" in setting for word in ("always", "within_size", "advise", "force"))
    return "huge pages" if granted else "4 KiB pages"


def slabs_and_places(slots: IntArray) -> tuple[IntArray, IntArray]:
    """`[n]` slab ids and `[n]` places in them, of `[n]` slots."""
    return slots >> SLOT_BITS, slots & (MAX_SLOTS - 1)


def by_slab(slots: IntArray) -> Iterator[tuple[SlabId, IntArray, AnyArray]]:
    """Each slab that has some of the slots, their places in it, and which of them they are."""
    slabs, places = slabs_and_places(slots)
    for number in numbers_in(slabs):
        chosen = slabs == number
        yield SlabId(number), places[chosen], chosen
