"""The tiers beside memory of one daemon, a GPU, disks and a remote place: opened, run, and stopped."""

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import structlog

from kvstore.errors import StoreUnavailable
from kvstore.transport.cuda import CudaDevice, DeviceFailed
from kvstore.types import HashArray, IntArray
from kvstore_server.config import ALL_OTHERS, Settings
from kvstore_server.ferry import Ferry
from kvstore_server.index import Beside
from kvstore_server.lift import Lift
from kvstore_server.scrub import Scrubber
from kvstore_server.spill import Spill, WritePolicy
from kvstore_server.store import Store
from kvstore_server.tiers.codec import Codec, load_blosc2
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.disk import DiskFailed, DiskTier
from kvstore_server.tiers.disks import Disks
from kvstore_server.tiers.gpu import GpuTier
from kvstore_server.tiers.places import open_place
from kvstore_server.tiers.remote import RemoteTier
from kvstore_server.tiers.sequences import Sequences
from kvstore_server.values import Change, Rise, Space
from kvstore_server.watermarks import Watermarks

log = structlog.get_logger()


class TiersBeside:
    """What the store tells (`lower.Below`) goes to the tier concerned. All methods run on the daemon's loop."""

    def __init__(self, *, gpu: Lift | None = None, disk: Spill | None = None, remote: Ferry | None = None) -> None:
        self.gpu = gpu
        self.disk = disk
        self.remote = remote
        self._workers: list[asyncio.Task[None]] = []

    @classmethod
    def open(cls, store: Store, settings: Settings) -> "TiersBeside":
        """The tiers that the settings name, found as they were left. Blocks.

        Raises: StoreUnavailable, InvalidRequest.
        """
        try:
            disk = _open_disks(store, settings) if settings.disk_directories else None
            gpu = _open_gpu(store, settings) if settings.gpu_capacity else None
            remote = _open_remote(store, settings, disk) if settings.remote_url else None
        except DiskFailed as error:
            raise StoreUnavailable(f"disk tier: {error}") from None
        except DeviceFailed as error:
            raise StoreUnavailable(f"gpu tier: {error}") from None
        return cls(gpu=gpu, disk=disk, remote=remote)

    def start(self, *, scrub_bytes_per_s: int) -> None:
        """What the disks hold can be found again, and blocks begin to move. Raises: StoreUnavailable."""
        if self.disk is not None:
            started = time.monotonic()
            try:
                num_blocks = self.disk.restore(self.disk.disks.recover())
            except DiskFailed as error:
                raise StoreUnavailable(f"disk tier: {error}") from None
            log.info("disk tier: restored", blocks=num_blocks, seconds=round(time.monotonic() - started, 2))
            self._workers.append(asyncio.create_task(self.disk.run()))
            if scrub_bytes_per_s:
                self._workers.append(asyncio.create_task(Scrubber(self.disk, bytes_per_s=scrub_bytes_per_s).run()))
        if self.gpu is not None:
            self._workers.append(asyncio.create_task(self.gpu.run()))
        if self.remote is not None:
            self._remote_worker = asyncio.create_task(self.remote.run())

    async def stop(self, timeout_s: float) -> None:
        """What exists only in memory is on disk, as far as the time allows; nothing runs and no file is open."""
        if self.remote is not None:  # what is under way there is dropped: nobody waits for a slow place
            self._remote_worker.cancel()
            await asyncio.gather(self._remote_worker, return_exceptions=True)
            await self.remote.tier.close()
        if self.disk is not None and not await self.disk.flush(timeout_s):
            log.warning("not all was flushed to disk in time", left_mib=self.disk.backlog_bytes >> 20)
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        # The GPU first: what cannot be read there is asked of a disk.
        if self.gpu is not None:
            await self.gpu.quiesce()
        if self.disk is not None:
            await self.disk.quiesce()
            await asyncio.to_thread(self.disk.disks.close)
        if self.gpu is not None:
            await asyncio.to_thread(self.gpu.tier.close)

    # What the store tells.

    def stored(self, space: Space, rows: IntArray) -> None:
        if self.disk is not None:
            self.disk.stored(space, rows)

    def loaded(self, space: Space, rows: IntArray) -> None:
        if self.gpu is not None:
            self.gpu.loaded(space, rows)

    def sought(self, space: Space, hashes: HashArray, num_found: int) -> None:
        if self.remote is not None:
            self.remote.sought(space, hashes, num_found)

    def changed(self, change: Change) -> None:
        if self.remote is not None:
            self.remote.changed(change)

    def rise(self, rise: Rise) -> None:
        self._of(rise.tier).rise(rise)

    def forgotten(self, space: Space, tier: Beside, hashes: HashArray, slots: IntArray) -> None:
        self._of(tier).forgotten(space, hashes, slots)

    def has_slabs(self, space: Space) -> bool:
        return any(tier.has_slabs(space) for tier in (self.gpu, self.disk) if tier is not None)

    def statistics(self) -> list[TierStatistics]:
        gpu = [self.gpu.statistics()] if self.gpu is not None else []
        disks = self.disk.statistics() if self.disk is not None else []
        return gpu + disks + ([self.remote.statistics()] if self.remote is not None else [])

    def rise_bytes_per_s(self) -> int:
        speeds = [int(tier.rise_bytes_per_s) for tier in (self.gpu, self.disk) if tier is not None]
        return min((speed for speed in speeds if speed), default=0)

    def _of(self, tier: Beside) -> Lift | Spill:
        found = self.gpu if tier == "gpu" else self.disk
        assert found is not None, "a block is in a tier that is not there"
        return found


def _open_disks(store: Store, settings: Settings) -> Spill:
    codecs = {model: Codec(name) for model, name in settings.disk_codecs.items()}
    if any(codec is not Codec.NONE for codec in codecs.values()):
        load_blosc2()  # or its absence would be told by the first write
    sequences = Sequences()
    with ExitStack() as opened:
        tiers = []
        for disk in settings.disk_directories:
            tier = DiskTier(
                Path(disk.path),
                capacity_bytes=disk.capacity,
                slab_bytes=settings.slab_bytes,
                reserve_bytes=disk.reserve,
                num_threads=settings.disk_threads,
                codec=lambda spec: codecs.get(spec.model, codecs.get(ALL_OTHERS, Codec.NONE)),
                sequences=sequences,
            )
            opened.callback(tier.close)
            tiers.append(tier)
        opened.pop_all()
    return Spill(store, Disks(tiers), policy=WritePolicy(settings.write_policy, _watermarks(settings)))


def _open_remote(store: Store, settings: Settings, disk: Spill | None) -> Ferry:
    tier = RemoteTier(
        open_place(settings.remote_url, at_once=settings.remote_requests),
        name=settings.remote_url,
        capacity_bytes=settings.remote_capacity,
        at_once=settings.remote_requests,
        clock=time.monotonic,
    )
    return Ferry(
        store,
        tier,
        disks=disk.disks if disk is not None else None,
        watermarks=_watermarks(settings),
        at_once=settings.remote_requests,
        min_blocks=settings.remote_min_blocks,
    )


def _watermarks(settings: Settings) -> Watermarks:
    return Watermarks(high=settings.watermark_high, low=settings.watermark_low)


def _open_gpu(store: Store, settings: Settings) -> Lift:
    device = CudaDevice(settings.gpu_device)
    return Lift(store, GpuTier(device, capacity_bytes=settings.gpu_capacity, slab_bytes=settings.slab_bytes))
