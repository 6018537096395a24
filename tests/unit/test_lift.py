"""Movement between memory and a device: copies of what is loaded often, and what happens when the device fails."""

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from builders import block_bytes, chain, records, spec
from devices import HostDevice

from kvstore.spec import KVSpec
from kvstore.transport.memory import copy_and_hash_pieces
from kvstore.types import BlockHash, IntArray, SessionId
from kvstore_server.beside import TiersBeside
from kvstore_server.level import State
from kvstore_server.lift import Lift
from kvstore_server.session import Session
from kvstore_server.store import Store
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.devices import DeviceFailed
from kvstore_server.tiers.gpu import GpuTier
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.values import Space

A = spec(model="a", layers=2, bytes_per_part=10_000)
B = spec(model="b", layers=1, bytes_per_part=30_000)
SLAB_BYTES = 1 << 18


class House:
    """A store of two slabs beside a device of `gpu_slabs`."""

    def __init__(self, gpu_slabs: int) -> None:
        self.tier = CpuTier(capacity_bytes=2 * SLAB_BYTES, slab_bytes=SLAB_BYTES, page_lock=PageLock(wanted=False))
        self.store = Store(self.tier)
        self.device = HostDevice()
        self.gpu = GpuTier(self.device, capacity_bytes=gpu_slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES)
        self.lift = Lift(self.store, self.gpu)
        self.store.lower.below = TiersBeside(gpu=self.lift)
        self._requests = 0

    def put(self, kv: KVSpec, hashes: list[BlockHash]) -> Space:
        """The blocks are committed in memory."""
        space = self.store.open_space(kv)
        write = self.store.reserve(space, parent=None, hashes=records(hashes), parts=[])
        places = np.array(list(write.pending), np.int64)
        region = np.concatenate([block_bytes(kv, hashes[place]) for place in places])
        begins = np.array([begin for begin, _ in space.part_ranges])
        offsets = (np.arange(len(places))[:, None] * kv.block_bytes + begins).ravel()
        intake = self.store.plan_intake(
            write, blocks=places, parts=np.arange(kv.num_parts), region=region, offsets=offsets
        )
        copies = intake.copies
        self.store.parts_arrived(intake, copy_and_hash_pieces(copies.targets, copies.sources, copies.sizes))
        self.store.finish_write(write)
        return space

    async def load(self, space: Space, hashes: list[BlockHash], *, times: int = 1) -> int:
        """How many of the blocks were served, bit-exact."""
        for _ in range(times):
            session = Session(
                number=SessionId(1), name="t", space=space, store=self.store, wake=lambda: None, max_region_bytes=1
            )
            self._requests += 1
            session.load(self._requests, records(hashes), lease="held", follow=True)
            await self.lift.settle()
            rows = space.index.find(records(hashes))
            good = space.index.states(rows) == State.COMMITTED
            for block_hash, found in zip(np.array(hashes, object)[good], self.bytes_of(space, rows[good]), strict=True):
                assert found == block_bytes(space.spec, block_hash).tobytes(), "another block"
            session.end()
            await self.lift.settle()
        return int(good.sum())

    def bytes_of(self, space: Space, rows: IntArray) -> list[bytes]:
        addresses = self.tier.addresses(space.index.memory.slots(rows)).tolist()
        return [ctypes.string_at(address, space.spec.block_bytes) for address in addresses]

    def on_gpu(self, space: Space, hashes: list[BlockHash]) -> int:
        rows = space.index.find(records(hashes))
        return int(space.index.gpu.has(rows[rows >= 0]).sum())

    def in_memory(self, space: Space, hashes: list[BlockHash]) -> int:
        rows = space.index.find(records(hashes))
        return int(space.index.memory.has(rows[rows >= 0]).sum())


@asynccontextmanager
async def house(gpu_slabs: int = 4) -> AsyncIterator[House]:
    built = House(gpu_slabs)
    worker = asyncio.create_task(built.lift.run())
    try:
        yield built
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


def test_what_is_loaded_twice_is_copied_and_served_from_there_when_memory_let_go() -> None:
    async def test() -> None:
        async with house() as at:
            hot, cold = chain(6, of=A), chain(6, of=A, seed=1)
            space = at.put(A, hot)
            at.put(A, cold)
            assert await at.load(space, hot) == 6
            assert at.on_gpu(space, hot) == 0
            assert await at.load(space, hot) == 6
            assert (at.on_gpu(space, hot), at.on_gpu(space, cold)) == (6, 0)
            for seed in range(2, 8):
                at.put(A, chain(6, of=A, seed=seed))
            assert (at.in_memory(space, hot), at.in_memory(space, cold)) == (0, 0)
            assert at.store.match(space, records(hot))[0].size == 6
            assert at.store.match(space, records(cold))[0].size == 0
            assert await at.load(space, hot) == 6
            assert at.store.counters.blocks_risen == 6

    run(test)


def test_a_full_device_gives_up_the_oldest_copies() -> None:
    """Covers: E1, E6."""

    async def test() -> None:
        async with house(gpu_slabs=1) as at:
            chains = [chain(6, of=A, seed=seed) for seed in range(4)]
            for hashes in chains:
                space = at.put(A, hashes)
                await at.load(space, hashes, times=2)
            assert at.on_gpu(space, chains[-1]) == 6
            assert at.on_gpu(space, chains[0]) == 0
            assert at.gpu.statistics().slab_bytes <= SLAB_BYTES
            assert at.store.counters.blocks_lowered > 0

    run(test)


def test_a_slab_of_the_device_changes_hands() -> None:
    async def test() -> None:
        async with house(gpu_slabs=1) as at:
            old = at.put(A, chain(6, of=A))
            await at.load(old, chain(6, of=A), times=2)
            new = at.put(B, chain(6, of=B))
            await at.load(new, chain(6, of=B), times=2)
            assert at.on_gpu(new, chain(6, of=B)) == 6
            assert at.on_gpu(old, chain(6, of=A)) == 0
            assert at.store.match(old, records(chain(6, of=A)))[0].size == 6, "memory still has them"

    run(test)


def test_a_device_that_fails_costs_its_copies_and_nothing_in_memory() -> None:
    """Covers: A1, D12."""

    async def test() -> None:
        async with house() as at:
            gone, hot, warm = (chain(6, of=A, seed=seed) for seed in range(10, 13))
            space = at.put(A, gone)
            await at.load(space, gone, times=2)
            for seed in range(4):
                at.put(A, chain(6, of=A, seed=seed))
            at.put(A, hot)
            await at.load(space, hot, times=2)
            assert (at.on_gpu(space, gone), at.in_memory(space, gone), at.on_gpu(space, hot)) == (6, 0, 6)
            at.put(A, warm)

            def fail(step: str) -> None:
                if step in ("copy_in", "copy_out"):
                    raise DeviceFailed("fell off the bus")

            at.device.before = fail
            assert await at.load(space, warm, times=2) == 6
            assert at.lift.failure == "fell off the bus"
            assert (at.on_gpu(space, gone), at.on_gpu(space, hot)) == (0, 0)
            assert at.store.counters.blocks_lost == 6
            assert at.store.match(space, records(gone))[0].size == 0
            assert await at.load(space, hot) == 6
            assert await at.load(space, warm, times=2) == 6

    run(test)


def test_a_copy_that_cannot_be_read_is_a_miss_and_leaves_the_device() -> None:
    """Covers: A12."""

    async def test() -> None:
        async with house() as at:
            hot = chain(6, of=A)
            space = at.put(A, hot)
            await at.load(space, hot, times=2)
            for seed in range(2, 8):
                at.put(A, chain(6, of=A, seed=seed))
            assert at.in_memory(space, hot) == 0
            (address, _) = next(iter(at.device.allocated.items()))
            ctypes.memset(address, 0, 1)  # of the first slot
            assert await at.load(space, hot) == 5
            assert at.store.counters.blocks_lost == 1
            assert at.on_gpu(space, hot) == 5

    run(test)


def test_what_is_cleared_leaves_the_device() -> None:
    async def test() -> None:
        async with house() as at:
            hashes = chain(6, of=A)
            space = at.put(A, hashes)
            await at.load(space, hashes, times=2)
            assert at.store.clear(space) == (6, 0)
            assert at.gpu.statistics().used_bytes == 0
            assert at.store.match(space, records(hashes))[0].size == 0

    run(test)
