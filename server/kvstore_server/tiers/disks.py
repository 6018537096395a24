"""The disks of one daemon as one: each a directory with its own limit, catalog and fate.

Blocks are dealt out in proportion to the capacities, so that all disks work on every batch. A disk that fails gets
no more of them; what it still reads is used. A slot here is one of a disk, with the disk's number above DISK_BITS;
slab ids are numbered in the same way.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import numpy as np
import structlog

from kvstore.spec import KVSpec
from kvstore.types import AnyArray, HashArray, IntArray, Namespace, SlabId
from kvstore_server.eviction import BoolArray
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.disk import DiskFailed, DiskFull, DiskTier, Recovered
from kvstore_server.tiers.records import Packed
from kvstore_server.tiers.slab import SLOT_BITS

DISK_BITS: Final = 56  # of a slot below the number of its disk
_SLAB_BITS: Final = DISK_BITS - SLOT_BITS
_GOLDEN: Final = 0.6180339887498949  # its multiples, modulo 1, are spread evenly however many there are

log = structlog.get_logger()


class Disks:
    """Several disk tiers. As with one, allocation runs on the daemon's loop, and what touches a disk in threads."""

    def __init__(self, tiers: Sequence[DiskTier]) -> None:
        """They share their `sequences`, belong to this object from now on, and are closed with it."""
        assert 0 < len(tiers) < 1 << (63 - DISK_BITS)
        self.tiers = list(tiers)
        self.failures: dict[int, str] = {}  # by number, of the disks that are not written any more
        capacities = np.array([tier.arena.capacity_bytes for tier in tiers], np.float64)
        self._bounds = np.cumsum(capacities / capacities.sum())[:-1]
        self._dealt = 0
        self._opened: dict[Namespace, set[int]] = {}  # the disks on which each can be written
        self._pool = ThreadPoolExecutor(len(tiers), "kvstore-disks")

    @property
    def failure(self) -> str:
        """Why no disk can be written any more; empty, if one can."""
        return "; ".join(self.failures.values()) if len(self.failures) == len(self.tiers) else ""

    # Allocation: the daemon's loop.

    def is_open(self, spec: KVSpec) -> bool:
        """Whether the namespace can be written on all disks that do not fail; else `open_space` has something to do."""
        return len(self._open_disks(spec)) + len(self.failures) == len(self.tiers)

    def allocate_for(self, spec: KVSpec, packed: Packed) -> IntArray:
        """`[n]` slots, now in use, for these blocks; NONE for those for which no disk has room."""
        slots = np.full(len(packed.sizes), NONE)
        shares = np.searchsorted(self._bounds, (self._dealt + np.arange(len(slots))) * _GOLDEN % 1.0, side="right")
        self._dealt += len(slots)
        live = self._open_disks(spec)
        dealt = [(number, shares == number) for number in live]
        left = [(number, shares >= 0) for number in live]  # what one has no room for, another may have
        for number, mine in dealt + left:
            missing = np.flatnonzero(mine & (slots == NONE))
            if len(missing):
                found = self.tiers[number].allocate_for(spec, packed[missing])
                slots[missing] = np.where(found == NONE, NONE, found | number << DISK_BITS)
        return slots

    def free(self, slots: IntArray) -> None:
        """As `DiskTier.free`."""
        for number, chosen in self._by_disk(slots):
            self.tiers[number].free(_local(slots[chosen]))

    def slabs_of(self, namespace: Namespace) -> list[SlabId]:
        return [
            _slab(number, slab)
            for number, tier in enumerate(self.tiers)
            if number not in self.failures
            for slab in tier.arena.slabs_of(namespace)
        ]

    def num_used(self, slab: SlabId) -> int:
        """Slots of the slab that are in use."""
        number, local = _of_slab(slab)
        return self.tiers[number].arena.num_used(local)

    def empty_slabs(self, spec: KVSpec) -> list[SlabId]:
        """Slabs of this namespace, on disks that can be written, in which nothing is."""
        return [
            _slab(number, slab)
            for number, tier in enumerate(self.tiers)
            if number not in self.failures
            for slab in tier.empty_slabs(spec)
        ]

    def close_slab(self, slab: SlabId) -> None:
        """As `DiskTier.close_slab`."""
        number, local = _of_slab(slab)
        self.tiers[number].close_slab(local)

    def slab_deleted(self, slab: SlabId) -> None:
        """As `DiskTier.slab_deleted`."""
        number, local = _of_slab(slab)
        self.tiers[number].slab_deleted(local)

    def statistics(self) -> list[TierStatistics]:
        return [tier.statistics() for tier in self.tiers]

    # Files: threads. All of these block.

    def recover(self) -> list[Recovered]:
        """As `DiskTier.recover`, of all disks. A block that is on two of them stays on the one that wrote it last."""
        by_space: dict[Namespace, list[Recovered]] = {}
        for number, tier in enumerate(self.tiers):
            for one in tier.recover():
                tagged = Recovered(one.spec, one.hashes, one.parents, one.slots | number << DISK_BITS, one.stamps)
                by_space.setdefault(one.spec.namespace, []).append(tagged)
        return [self._joined(parts) for parts in by_space.values()]

    def open_space(self, spec: KVSpec) -> None:
        """The namespace can be written, on every disk that neither fails nor is full. Twice is once.

        Raises: DiskFull, if there is none.
        """
        opened: list[int] = []

        def open_on(number: int) -> None:
            self.tiers[number].open_space(spec)
            opened.append(number)

        full = self._on_each(range(len(self.tiers)), open_on)
        self._opened[spec.namespace] = set(opened)
        if full and not opened:
            raise full[0]

    def pack(self, spec: KVSpec, *, addresses: IntArray) -> Packed:
        """As `DiskTier.pack`, by a disk that can be written: all have the same codecs. Raises: DiskFull."""
        packed: list[Packed] = []

        def pack_by(number: int) -> None:
            packed.append(self.tiers[number].pack(spec, addresses=addresses))

        for number in self._open_disks(spec):
            for error in self._on_each([number], pack_by):
                raise error
            if packed:
                return packed[0]
        return Packed.plain(spec, addresses)  # no disk is left: nothing is written

    def write(
        self,
        spec: KVSpec,
        *,
        slots: IntArray,
        hashes: HashArray,
        parents: HashArray,
        checksums: AnyArray,
        packed: Packed,
    ) -> BoolArray:
        """`[n]`: which of these blocks are on disk, flushed, and found again after a crash.

        The disk of the others failed, or its file system was full: nothing of them is found, and their slots are still
        in use.
        """
        shares = dict(self._by_disk(slots))
        written = np.zeros(len(slots), np.bool_)

        def write_share(number: int) -> None:
            chosen = shares[number]
            self.tiers[number].write(
                spec,
                slots=_local(slots[chosen]),
                hashes=hashes[chosen],
                parents=parents[chosen],
                addresses=packed.addresses[chosen],
                checksums=checksums[chosen],
                packed=packed[chosen],
            )
            written[chosen] = True

        self._on_each(list(shares), write_share)
        return written

    def read(
        self, spec: KVSpec, *, slots: IntArray, hashes: HashArray, addresses: IntArray
    ) -> tuple[AnyArray, AnyArray]:
        """As `DiskTier.read`."""
        good = np.zeros(len(slots), np.bool_)
        checksums = np.zeros((len(slots), spec.num_parts), np.uint64)
        shares = dict(self._by_disk(slots))

        def read_share(number: int) -> None:
            chosen = shares[number]
            good[chosen], checksums[chosen] = self.tiers[number].read(
                spec, slots=_local(slots[chosen]), hashes=hashes[chosen], addresses=addresses[chosen]
            )

        self._each(list(shares), read_share)  # reads raise nothing, and a disk that failed may still be read
        return good, checksums

    def forget(self, spec: KVSpec, *, hashes: HashArray, slots: IntArray) -> BoolArray:
        """`[n]`: which of these blocks, in these slots, a restart does not find; all but those on a full file system.

        A disk that failed counts as having forgotten: nothing is written there any more that could meet them.
        """
        shares = dict(self._by_disk(slots))
        forgotten = np.zeros(len(slots), np.bool_)
        for number, chosen in shares.items():
            forgotten[chosen] = number in self.failures

        def forget_share(number: int) -> None:
            self.tiers[number].forget(spec, hashes[shares[number]])
            forgotten[shares[number]] = True

        self._on_each(list(shares), forget_share)
        return forgotten

    def delete_slab(self, slab: SlabId) -> None:
        """As `DiskTier.delete_slab`; raises only DiskFull."""
        number, local = _of_slab(slab)
        for error in self._on_each([number], lambda number: self.tiers[number].delete_slab(local)):
            raise error

    def close(self) -> None:
        self._pool.shutdown()
        for tier in self.tiers:
            tier.close()

    # Within.

    def _open_disks(self, spec: KVSpec) -> list[int]:
        """Those on which the namespace can be written."""
        return sorted(self._opened.get(spec.namespace, set()) - self.failures.keys())

    def _on_each(self, numbers: Sequence[int], work: Callable[[int], None]) -> list[DiskFull]:
        """The work was done on those of the disks that can be written; returns what those said that are full."""

        def attempt(number: int) -> None:
            try:
                work(number)
            except DiskFull as error:
                log.warning("disk full", error=str(error))
                full.append(error)
            except DiskFailed as error:
                log.error("disk disabled: it is not written any more", error=str(error))
                self.failures[number] = str(error)

        full: list[DiskFull] = []
        self._each([number for number in numbers if number not in self.failures], attempt)
        return full

    def _each(self, numbers: Sequence[int], work: Callable[[int], None]) -> None:
        """At once, each in a thread of its own; the first, or only, one in this."""
        others = [self._pool.submit(work, number) for number in numbers[1:]]
        try:
            for number in numbers[:1]:
                work(number)
        finally:
            wait(others)  # also after a failure: the caller's memory is in use until then
        for other in others:
            other.result()

    @staticmethod
    def _by_disk(slots: IntArray) -> Iterator[tuple[int, IntArray]]:
        """Each disk that has some of the slots, and which of them they are."""
        numbers = slots >> DISK_BITS
        for number in np.unique(numbers).tolist():
            yield number, np.flatnonzero(numbers == number)

    def _joined(self, parts: list[Recovered]) -> Recovered:
        """One namespace over all disks. Of a block that is on two, the older copy is forgotten."""
        order = np.argsort(np.concatenate([one.stamps for one in parts]), kind="stable")
        hashes, parents, slots, stamps = (
            np.concatenate([getattr(one, name) for one in parts])[order]
            for name in ("hashes", "parents", "slots", "stamps")
        )
        spec = parts[0].spec
        _, last = np.unique(hashes[::-1], return_index=True)
        kept = np.sort(len(hashes) - 1 - last)
        if len(kept) < len(hashes):
            older = np.setdiff1d(np.arange(len(hashes)), kept)
            self.free(slots[older][self.forget(spec, hashes=hashes[older], slots=slots[older])])
        return Recovered(spec, hashes[kept], parents[kept], slots[kept], stamps[kept])


def _local(slots: IntArray) -> IntArray:
    """The slots as their disk knows them."""
    return slots & ((1 << DISK_BITS) - 1)


def _slab(number: int, local: SlabId) -> SlabId:
    return SlabId(local | number << _SLAB_BITS)


def _of_slab(slab: SlabId) -> tuple[int, SlabId]:
    """The number of its disk, and the slab as that one knows it."""
    return slab >> _SLAB_BITS, SlabId(slab & ((1 << _SLAB_BITS) - 1))
