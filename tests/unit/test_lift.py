"""Movement between memory and a device: copies of what is loaded often, and what happens when the device fails."""

import ctypes

from builders import chain, records
from houses import SLAB_BYTES, A, B, gpu_house, run

from kvstore.transport.cuda import DeviceFailed


def test_what_is_loaded_twice_is_copied_and_served_from_there_when_memory_let_go() -> None:
    async def test() -> None:
        async with gpu_house() as at:
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
        async with gpu_house(gpu_slabs=1) as at:
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
        async with gpu_house(gpu_slabs=1) as at:
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
        async with gpu_house() as at:
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
        async with gpu_house() as at:
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
        async with gpu_house() as at:
            hashes = chain(6, of=A)
            space = at.put(A, hashes)
            await at.load(space, hashes, times=2)
            assert at.store.clear(space) == (6, 0)
            assert at.gpu.statistics().used_bytes == 0
            assert at.store.match(space, records(hashes))[0].size == 0

    run(test)
