"""The gpu tier: slots in device memory. What they hold, and its checksums, is kept in host memory beside them.

Two halves, as in the disk tier. Allocation is bookkeeping and runs on the daemon's loop; only a new slab takes device
memory. Copies block and run in threads; calls for different blocks may overlap. Whoever calls keeps the order for one
block: allocate, write, read as often as wanted, forget, free. Nothing here outlives the process.

Source: docs/adr/0011.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore.transport.cuda import Device, DeviceFailed, DeviceFull
from kvstore.types import HASH_BYTES, AnyArray, HashArray, IntArray, SlabId
from kvstore_server.tiers.cpu import TierStatistics, by_slab, slabs_and_places
from kvstore_server.tiers.records import part_checksums, round_up
from kvstore_server.tiers.slab import MAX_SLOTS, SlabArena, place_of, slab_of

RETRY_AFTER_S: Final = 60.0  # how long no slab is opened after the device had no memory for one
SLOT_ALIGN_BYTES: Final = 512

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Slab:
    """Where its slots lie on the device, and the columns that say what they hold; those are in host memory."""

    spec: KVSpec
    address: int
    hashes: HashArray  # [num_slots]; zeros: nothing
    checksums: AnyArray  # [num_slots, num_parts]


class GpuTier:
    """Blocks of all namespaces on one device, which is this tier's to close."""

    def __init__(
        self,
        device: Device,
        *,
        capacity_bytes: int,
        slab_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Device memory is taken a slab at a time, and is `capacity_bytes` at most. Blocks.

        Raises: InvalidRequest, if the device can never have as much; DeviceFailed.
        """
        total_bytes = device.memory().total_bytes
        if capacity_bytes > total_bytes:
            raise InvalidRequest(
                f"gpu: expected a capacity of at most the {total_bytes} bytes of {device.name}, got {capacity_bytes}"
            )
        self.slab_bytes = slab_bytes
        self.arena = SlabArena(capacity_bytes)
        self._device = device
        self._clock = clock
        self._grow_after_s = float("-inf")
        self._slabs: dict[SlabId, _Slab] = {}
        self._used_bytes = 0
        self._failure = ""

    # Allocation: the daemon's loop.

    def allocate(self, spec: KVSpec, count: int) -> IntArray:
        """Up to `count` slots, now in use; slabs are opened while the capacity and the device allow it."""
        found = [self.arena.allocate(spec.namespace, count)]
        missing = count - len(found[0])
        while missing and self._open_slab(spec):
            found.append(self.arena.allocate(spec.namespace, missing))
            missing -= len(found[-1])
        slots = np.concatenate(found)
        self._used_bytes += len(slots) * spec.block_bytes
        return slots

    def free(self, slots: IntArray) -> None:
        """These slots, all in use and of one namespace, hold nothing and can be allocated again."""
        for number, places, _ in by_slab(slots):
            slab = self._slabs[number]
            slab.hashes[places] = np.void(bytes(HASH_BYTES))
            self._used_bytes -= len(places) * slab.spec.block_bytes
        self.arena.free(slots)

    def close_slab(self, slab: SlabId) -> None:
        """The slab, whose slots are all free, gives out no more. Next: `delete_slab`, then `slab_deleted`."""
        self.arena.close(slab)

    def slab_deleted(self, slab: SlabId) -> None:
        """The bytes of the closed slab, whose memory was given back, can be used for others."""
        self.arena.forget(slab)

    def statistics(self) -> TierStatistics:
        """`used_bytes` are those of the blocks in slots in use; `pages` says on which device."""
        return TierStatistics(
            tier="gpu",
            capacity_bytes=self.arena.capacity_bytes,
            slab_bytes=self.arena.used_bytes,
            used_bytes=self._used_bytes,
            num_slabs=self.arena.num_slabs,
            pages=self._device.name,
        )

    # The device: threads. All of these block.

    def open_space(self, spec: KVSpec) -> None:
        """The namespace can be written, for which nothing needs to be done. Raises: DeviceFailed."""
        self._expect_working()

    def write(
        self,
        spec: KVSpec,
        *,
        slots: IntArray,
        hashes: HashArray,
        parents: HashArray,
        addresses: IntArray,
        checksums: AnyArray,
    ) -> None:
        """These `[n]` blocks are on the device, and can be read.

        At each address lie `block_bytes`; `checksums` is `[n, num_parts]`, the xxh3 of every part. `parents` are not
        kept: no restart asks for them. The caller's memory is not used once this returns or raises.

        Raises: DeviceFailed, and then none of these blocks can be read; the slots are still in use.
        """
        with self._failing():
            if not len(slots):
                return
            on_device, on_host, sizes = _runs(slots, self._places(slots), addresses, block_bytes=spec.block_bytes)
            self._device.copy_in(targets=on_device, sources=on_host, sizes=sizes)
        for number, places, chosen in by_slab(slots):
            slab = self._slabs[number]
            slab.checksums[places] = checksums[chosen]
            slab.hashes[places] = hashes[chosen]

    def read(
        self, spec: KVSpec, *, slots: IntArray, hashes: HashArray, addresses: IntArray
    ) -> tuple[AnyArray, AnyArray]:
        """`[n]` bool and `[n, num_parts]` u64: whether the block is whole at its address now, and its checksums.

        At each address there is room for `block_bytes`. A block that cannot be read, or that fails a check, is logged
        and not good; what is at its address then means nothing. Never raises for what the device does.
        """
        wrong, checksums = self._expected(spec, slots, hashes)
        held = np.flatnonzero(wrong == "")
        if len(held):
            try:
                self._copy_out(spec, slots[held], addresses[held])
            except DeviceFailed as error:
                log.error("gpu.read", blocks=len(held), problem=str(error))
                return np.zeros(len(slots), np.bool_), checksums
            sizes = np.array(spec.part_bytes, np.int64)
            found = part_checksums(addresses[held], offsets=np.cumsum(sizes) - sizes, sizes=sizes)
            is_whole = (found == checksums[held]).all(axis=1)
            wrong[held[~is_whole]] = "checksum of the data"
        for bad in np.flatnonzero(wrong != "").tolist():
            slab, place = slab_of(int(slots[bad])), place_of(int(slots[bad]))
            log.error("gpu.read", device=self._device.name, slab=slab, slot=place, problem=str(wrong[bad]))
        return wrong == "", checksums

    def forget(self, spec: KVSpec, hashes: HashArray) -> None:
        """None of these blocks is found after a restart, for which nothing needs to be done. Raises: DeviceFailed."""
        self._expect_working()

    def delete_slab(self, slab: SlabId) -> None:
        """The memory of a closed slab was given back. Raises: DeviceFailed."""
        with self._failing():
            self._device.free(self._slabs.pop(slab).address)
        self._grow_after_s = float("-inf")  # the device has memory again

    def close(self) -> None:
        """The device is closed and its memory given back, as far as it still does that; no call may be under way."""
        with contextlib.suppress(DeviceFailed):
            while self._slabs:
                self._device.free(self._slabs.popitem()[1].address)
            self._device.close()

    # Within.

    def _open_slab(self, spec: KVSpec) -> bool:
        slot_bytes = _slot_bytes(spec)
        room_bytes = self.arena.capacity_bytes - self.arena.used_bytes
        num_slots = min(max(self.slab_bytes, slot_bytes), room_bytes) // slot_bytes
        if num_slots == 0 or self._clock() < self._grow_after_s:
            return False
        num_slots = min(num_slots, MAX_SLOTS)
        size_bytes = num_slots * slot_bytes
        try:
            with self._failing():
                address = self._device.allocate(size_bytes)
        except DeviceFull as error:
            self._grow_after_s = self._clock() + RETRY_AFTER_S
            log.warning("gpu full: no slab can be made for a while", retry_after_s=RETRY_AFTER_S, error=str(error))
            return False
        except DeviceFailed:  # the next write says so
            return False
        slab = self.arena.open(spec.namespace, num_slots=num_slots, size_bytes=size_bytes)
        hashes = np.zeros(num_slots, f"V{HASH_BYTES}")
        self._slabs[slab] = _Slab(spec, address, hashes, np.zeros((num_slots, spec.num_parts), np.uint64))
        return True

    def _expected(self, spec: KVSpec, slots: IntArray, hashes: HashArray) -> tuple[AnyArray, AnyArray]:
        """`[n]`: what is wrong with each slot, as text, "" where it holds this block; `[n, num_parts]` checksums."""
        wrong = np.full(len(slots), "no such slab", dtype="U20")
        checksums = np.zeros((len(slots), spec.num_parts), np.uint64)
        for number, places, chosen in by_slab(slots):
            slab = self._slabs.get(number)
            if slab is None:
                continue
            if slab.spec.namespace != spec.namespace:
                wrong[chosen] = "another namespace"
                continue
            wrong[chosen] = np.where(slab.hashes[places] == hashes[chosen], "", "another block")
            checksums[chosen] = slab.checksums[places]
        return wrong, checksums

    def _copy_out(self, spec: KVSpec, slots: IntArray, addresses: IntArray) -> None:
        with self._failing():
            on_device, on_host, sizes = _runs(slots, self._places(slots), addresses, block_bytes=spec.block_bytes)
            self._device.copy_out(targets=on_host, sources=on_device, sizes=sizes)

    def _places(self, slots: IntArray) -> IntArray:
        """`[n]`: where on the device each slot begins."""
        places = np.empty(len(slots), np.int64)
        for number, within, chosen in by_slab(slots):
            slab = self._slabs[number]
            places[chosen] = slab.address + within * _slot_bytes(slab.spec)
        return places

    def _expect_working(self) -> None:
        if self._failure:
            raise DeviceFailed(self._failure)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """A device that failed within, but for want of memory, is not used again."""
        self._expect_working()
        try:
            yield
        except DeviceFull:
            raise
        except DeviceFailed as error:
            self._failure = str(error)
            raise


def _slot_bytes(spec: KVSpec) -> int:
    return round_up(spec.block_bytes, SLOT_ALIGN_BYTES)


def _runs(
    slots: IntArray, on_device: IntArray, on_host: IntArray, *, block_bytes: int
) -> tuple[IntArray, IntArray, IntArray]:
    """What to copy for `[n]` slots, one at least: where on the device, where on the host, how many bytes.

    Blocks that lie side by side in both are one copy, but never across slabs: it must lie within one allocation. On
    the host it does, because the slots of two slabs have headers between them.
    """
    order = np.argsort(slots)
    on_device, on_host = on_device[order], on_host[order]
    slabs, _ = slabs_and_places(slots[order])
    apart = (np.diff(slabs) != 0) | (np.diff(on_device) != block_bytes) | (np.diff(on_host) != block_bytes)
    first = np.flatnonzero(np.append(True, apart))
    return on_device[first], on_host[first], np.diff(np.append(first, len(slots))) * block_bytes
