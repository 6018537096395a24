"""A store with a real disk, or with memory that stands for a device's, beside it; without a daemon."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from builders import block_bytes, records, spec
from devices import HostDevice

from kvstore.spec import KVSpec
from kvstore.transport.memory import copy_and_hash_pieces
from kvstore.types import BlockHash, ByteArray, IntArray, SessionId
from kvstore_server.beside import TiersBeside
from kvstore_server.ferry import Ferry
from kvstore_server.level import State
from kvstore_server.lift import Lift
from kvstore_server.session import Session
from kvstore_server.spill import Spill, WritePolicy
from kvstore_server.store import Store
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.disk import DiskTier
from kvstore_server.tiers.disks import Disks
from kvstore_server.tiers.gpu import GpuTier
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.tiers.places import Place
from kvstore_server.tiers.remote import RemoteTier
from kvstore_server.tiers.sequences import Sequences
from kvstore_server.values import Change, Space
from kvstore_server.watermarks import Watermarks

A = spec(model="a", layers=2, bytes_per_part=10_000)
B = spec(model="b", layers=1, bytes_per_part=30_000)
THROUGH = WritePolicy("through", Watermarks(high=0.8, low=0.6))
SLAB_BYTES = 1 << 18
DEADLINE_S = 20


class House:
    """A store over memory of so many slabs."""

    def __init__(self, memory_slabs: int) -> None:
        self.tier = CpuTier(
            capacity_bytes=memory_slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES, page_lock=PageLock(wanted=False)
        )
        self.durable = asyncio.Event()  # some block is on disk
        self.store = Store(self.tier, on_change=self.changed)

    def changed(self, change: Change) -> None:
        if change.tier == "disk":
            self.durable.set()

    def put(self, kv: KVSpec, hashes: list[BlockHash], *, parent: BlockHash | None = None) -> Space:
        """The blocks are committed in memory, as far as there is room."""
        space = self.store.open_space(kv)
        write = self.store.reserve(space, parent=parent, hashes=records(hashes), parts=[])
        places = np.array(list(write.pending), np.int64)
        if len(places):
            region: ByteArray = np.concatenate([block_bytes(kv, hashes[place]) for place in places])
            begins = np.array([begin for begin, _ in space.part_ranges])
            offsets = (np.arange(len(places))[:, None] * kv.block_bytes + begins).ravel()
            intake = self.store.plan_intake(
                write, blocks=places, parts=np.arange(kv.num_parts), region=region, offsets=offsets
            )
            copies = intake.copies
            self.store.parts_arrived(intake, copy_and_hash_pieces(copies.targets, copies.sources, copies.sizes))
        self.store.finish_write(write)
        return space

    def session(self, space: Space, wake: Callable[[], None] = lambda: None) -> Session:
        return Session(
            number=SessionId(1), name="test", space=space, store=self.store, wake=wake, max_region_bytes=1 << 20
        )

    def bytes_in_memory(self, space: Space, rows: IntArray) -> list[bytes]:
        addresses = self.tier.addresses(space.index.memory.slots(rows)).tolist()
        return [ctypes.string_at(address, space.spec.block_bytes) for address in addresses]


class DiskHouse(House):
    """With disks of `disk_slabs` each, in the folder itself if it is one, and the worker between them."""

    def __init__(
        self,
        folder: Path,
        *,
        memory_slabs: int = 4,
        disk_slabs: int = 16,
        num_disks: int = 1,
        policy: WritePolicy = THROUGH,
    ) -> None:
        super().__init__(memory_slabs)
        sequences = Sequences()
        self.disks = Disks(
            [
                DiskTier(
                    folder / str(number) if num_disks > 1 else folder,
                    capacity_bytes=disk_slabs * SLAB_BYTES,
                    slab_bytes=SLAB_BYTES,
                    reserve_bytes=0,
                    num_threads=2,
                    sequences=sequences,
                )
                for number in range(num_disks)
            ]
        )
        self.disk = self.disks.tiers[0]
        self.spill = Spill(self.store, self.disks, policy=policy)
        self.store.lower.below = TiersBeside(disk=self.spill)
        self.spill.restore(self.disks.recover())

    async def settle(self) -> None:
        assert await self.spill.settle(DEADLINE_S)
        await self.spill.quiesce()

    def on_disk(self, space: Space, hashes: list[BlockHash]) -> int:
        rows = space.index.find(records(hashes))
        return int(space.index.disk.has(rows[rows >= 0]).sum())


class GpuHouse(House):
    """With two slabs of memory, and a device of `gpu_slabs`."""

    def __init__(self, gpu_slabs: int) -> None:
        super().__init__(memory_slabs=2)
        self.device = HostDevice()
        self.gpu = GpuTier(self.device, capacity_bytes=gpu_slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES)
        self.lift = Lift(self.store, self.gpu)
        self.store.lower.below = TiersBeside(gpu=self.lift)
        self._requests = 0

    async def load(self, space: Space, hashes: list[BlockHash], *, times: int = 1) -> int:
        """How many of the blocks were served, bit-exact."""
        for _ in range(times):
            session = self.session(space)
            self._requests += 1
            session.load(self._requests, records(hashes), lease="held", follow=True)
            await self.lift.settle()
            rows = space.index.find(records(hashes))
            good = space.index.states(rows) == State.COMMITTED
            found = self.bytes_in_memory(space, rows[good])
            for block_hash, held in zip(np.array(hashes, object)[good], found, strict=True):
                assert held == block_bytes(space.spec, block_hash).tobytes(), "another block"
            session.end()
            await self.lift.settle()
        return int(good.sum())

    def on_gpu(self, space: Space, hashes: list[BlockHash]) -> int:
        rows = space.index.find(records(hashes))
        return int(space.index.gpu.has(rows[rows >= 0]).sum())

    def in_memory(self, space: Space, hashes: list[BlockHash]) -> int:
        rows = space.index.find(records(hashes))
        return int(space.index.memory.has(rows[rows >= 0]).sum())


class RemoteHouse(DiskHouse):
    """With a place for cold blocks; `disk_slabs` of 0: and no disk."""

    def __init__(
        self,
        folder: Path,
        place: Place,
        *,
        memory_slabs: int = 4,
        disk_slabs: int = 0,
        capacity_bytes: int = 1 << 30,
        at_once: int = 2,
        min_blocks: int = 2,
    ) -> None:
        if disk_slabs:
            super().__init__(folder, memory_slabs=memory_slabs, disk_slabs=disk_slabs)
        else:
            House.__init__(self, memory_slabs)
        self.remote = RemoteTier(
            place, name="test", capacity_bytes=capacity_bytes, at_once=at_once, clock=asyncio.get_running_loop().time
        )
        self.ferry = Ferry(
            self.store,
            self.remote,
            disks=self.disks if disk_slabs else None,
            watermarks=Watermarks(high=0.5, low=0.25),
            at_once=at_once,
            min_blocks=min_blocks,
        )
        spill = self.spill if disk_slabs else None
        self.beside = TiersBeside(disk=spill, remote=self.ferry)
        self.store.lower.below = self.beside

    def changed(self, change: Change) -> None:
        super().changed(change)
        if hasattr(self, "beside"):
            self.beside.changed(change)

    def match(self, kv: KVSpec, hashes: list[BlockHash]) -> int:
        """How many blocks a match finds here now."""
        return len(self.store.match(self.store.open_space(kv), records(hashes))[0])

    def check(self, kv: KVSpec, hashes: list[BlockHash]) -> None:
        """Those of the blocks that are in memory are they, byte by byte."""
        space = self.store.open_space(kv)
        rows = space.index.find(records(hashes))
        here = np.flatnonzero(space.index.states(rows) == State.COMMITTED)
        wanted = [block_bytes(kv, hashes[place]).tobytes() for place in here.tolist()]
        assert self.bytes_in_memory(space, rows[here]) == wanted


@asynccontextmanager
async def remote_house(folder: Path, place: Place, **sizes: int) -> AsyncIterator[RemoteHouse]:
    """As `disk_house`."""
    before = asyncio.all_tasks()
    built = RemoteHouse(folder, place, **sizes)
    workers = [asyncio.create_task(built.ferry.run())]
    if sizes.get("disk_slabs"):
        workers.append(asyncio.create_task(built.spill.run()))
    try:
        yield built
        assert not any(worker.done() for worker in workers), "a worker ended"
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert asyncio.all_tasks() == before, "something is under way"
        if sizes.get("disk_slabs"):
            await built.spill.quiesce()
            built.disks.close()
        assert all(space.index.num_leased == 0 for space in built.store.spaces.values())
        built.store.validate()
        built.tier.close()


@asynccontextmanager
async def disk_house(folder: Path, *, policy: WritePolicy = THROUGH, **sizes: int) -> AsyncIterator[DiskHouse]:
    """Its worker runs; afterwards it ran to the end, and everything holds."""
    built = DiskHouse(folder, policy=policy, **sizes)
    worker = asyncio.create_task(built.spill.run())
    try:
        yield built
        assert not worker.done(), "the worker ended"
        built.store.validate()
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        await built.spill.quiesce()
        built.disks.close()
        built.tier.close()


@asynccontextmanager
async def gpu_house(gpu_slabs: int = 4) -> AsyncIterator[GpuHouse]:
    """As `disk_house`; and every slot of the device is a block's."""
    built = GpuHouse(gpu_slabs)
    worker = asyncio.create_task(built.lift.run())
    try:
        yield built
        assert not worker.done(), "the worker ended"
        built.store.validate()
        built.gpu.arena.validate()
        rows = sum(len(space.index.gpu.rows()) for space in built.store.spaces.values())
        slabs = [slab for kv in (A, B) for slab in built.gpu.arena.slabs_of(kv.namespace)]
        assert rows == sum(built.gpu.arena.num_used(slab) for slab in slabs)
        assert all(space.index.num_leased == 0 for space in built.store.spaces.values())
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        await built.lift.quiesce()
        built.gpu.close()
        built.tier.close()


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def flip_a_bit_of(text: bytes, folder: Path) -> None:
    """In the one slab file that holds it."""
    for path in folder.glob("slabs/*"):
        data = bytearray(path.read_bytes())
        if (at := data.find(text)) >= 0:
            data[at] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError("no file holds it")
