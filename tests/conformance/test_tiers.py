"""Each tier passes the suite."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conformance.tier_suite import CAPACITY_BYTES, SLAB_BYTES, CheckedTierSuite, Overwrite, VolatileTierSuite
from devices import HostDevice, Noting, cuda_device, overwrite_on, places_of, stand_in_for_cuda
from disk_faults import open_tier

from kvstore.spec import KVSpec
from kvstore.transport.cuda import CudaDevice
from kvstore.transport.memory import copy_pieces
from kvstore.transport.shm import map_memfd
from kvstore.types import AnyArray, ByteArray, HashArray, IntArray, Namespace, SessionId, SlabId
from kvstore_server.tiers.cpu import CpuTier, TierStatistics
from kvstore_server.tiers.disk import DiskTier
from kvstore_server.tiers.gpu import GpuTier
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.tiers.slab import place_of, slab_of


class TestDisk(CheckedTierSuite):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[DiskTier]:
        tier = open_tier(tmp_path, capacity_bytes=CAPACITY_BYTES, slab_bytes=SLAB_BYTES)
        yield tier
        tier.close()

    @pytest.fixture
    def overwrite(self, tier: DiskTier) -> Overwrite:
        def overwrite(old: ByteArray, new: ByteArray) -> None:
            files = (tier.directory / "slabs").iterdir()
            ((path, place),) = [(path, place) for path in files for place in places_of(old, path.read_bytes())]
            with path.open("r+b") as file:
                file.seek(place)
                file.write(new.tobytes())
                os.fsync(file)

        return overwrite


class TestGpu(CheckedTierSuite, VolatileTierSuite):
    """The gpu tier over host memory that stands for a device's."""

    @pytest.fixture
    def device(self) -> HostDevice | Noting:
        return HostDevice()

    @pytest.fixture
    def tier(self, device: HostDevice | Noting) -> Iterator[GpuTier]:
        tier = GpuTier(device, capacity_bytes=CAPACITY_BYTES, slab_bytes=SLAB_BYTES)
        yield tier
        tier.close()
        assert not device.allocated

    @pytest.fixture
    def overwrite(self, device: HostDevice | Noting) -> Overwrite:
        return lambda old, new: overwrite_on(device, old, new)


class TestGpuWithStandIn(TestGpu):
    """The calls of CUDA, over a stand-in for it."""

    @pytest.fixture
    def device(self, monkeypatch: pytest.MonkeyPatch) -> HostDevice | Noting:
        stand_in_for_cuda(monkeypatch)
        return Noting(CudaDevice(0))


@pytest.mark.gpu
class TestGpuWithCuda(TestGpu):
    @pytest.fixture
    def device(self) -> HostDevice | Noting:
        return Noting(cuda_device())


class TestCpu(VolatileTierSuite):
    @pytest.fixture
    def tier(self) -> Iterator["CpuByBatch"]:
        tier = CpuByBatch()
        yield tier
        tier.close()


class CpuByBatch:
    """The cpu tier as the store and its clients use it, with the methods of the others."""

    def __init__(self) -> None:
        page_lock = PageLock(wanted=False)
        self.tier = CpuTier(capacity_bytes=CAPACITY_BYTES, slab_bytes=SLAB_BYTES, page_lock=page_lock)
        self.arena = self.tier.arena
        self._specs: dict[Namespace, KVSpec] = {}
        self._last_generation = 0

    def open_space(self, spec: KVSpec) -> None:
        self._specs[spec.namespace] = spec

    def allocate(self, spec: KVSpec, count: int) -> IntArray:
        found = self.arena.allocate(spec.namespace, count)
        while len(found) < count and self.tier.open_slab(spec, self.tier.layout(spec)):
            found = np.append(found, self.arena.allocate(spec.namespace, count - len(found)))
        self._publish(spec, found, np.zeros(len(found), "V32"))
        return found

    def free(self, slots: IntArray) -> None:
        for slot in slots.tolist():
            self.tier.retract(np.array([slot]), used_bytes=self._spec_of(slab_of(slot)).block_bytes)
        self.arena.free(slots)

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
        self.tier.retract(slots, used_bytes=spec.block_bytes)
        copy_pieces(self.tier.addresses(slots), addresses, np.full(len(slots), spec.block_bytes))
        self.tier.set_checksums(slots, list(range(spec.num_parts)), checksums)
        self._publish(spec, slots, hashes)

    def read(
        self, spec: KVSpec, *, slots: IntArray, hashes: HashArray, addresses: IntArray
    ) -> tuple[AnyArray, AnyArray]:
        """As a client does: by what the headers say."""
        good = np.array(
            [self._holds(spec, slot, one) for slot, one in zip(slots.tolist(), hashes, strict=True)], np.bool_
        )
        checksums = np.zeros((len(slots), spec.num_parts), np.uint64)
        checksums[good] = self.tier.checksums(slots[good], num_parts=spec.num_parts)
        copy_pieces(addresses[good], self.tier.addresses(slots[good]), np.full(good.sum(), spec.block_bytes))
        return good, checksums

    def forget(self, spec: KVSpec, hashes: HashArray) -> None:
        pass

    def close_slab(self, slab: SlabId) -> None:
        assert self.tier.close_slab(slab) == frozenset()

    def delete_slab(self, slab: SlabId) -> None:
        pass

    def slab_deleted(self, slab: SlabId) -> None:
        pass

    def statistics(self) -> TierStatistics:
        return self.tier.statistics()

    def close(self) -> None:
        self.tier.close()

    def _publish(self, spec: KVSpec, slots: IntArray, hashes: HashArray) -> None:
        self._last_generation += 1
        generations = np.full(len(slots), self._last_generation)
        self.tier.publish(slots, generations=generations, hashes=hashes, used_bytes=spec.block_bytes)

    def _spec_of(self, slab: SlabId) -> KVSpec:
        return next(spec for name, spec in self._specs.items() if self.tier.belongs(slab, name))

    def _holds(self, spec: KVSpec, slot: int, block_hash: np.void) -> bool:
        slab, session = slab_of(slot), SessionId(1)
        if not self.tier.belongs(slab, spec.namespace):
            return False
        fd = self.tier.descriptor(slab, session)
        layout = self.tier.layout(spec)
        header = layout.headers(map_memfd(fd, layout.size_bytes, writable=False))[place_of(slot)]
        is_it = bool(header["generation"] and header["hash"] == block_hash)
        os.close(fd)
        self.tier.unmapped(slab, session)
        return is_it
