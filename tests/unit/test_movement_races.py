"""What happens between two steps of a movement: blocks lost, cleared and stored again, disks and devices that fail."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import block_bytes, chain, records
from houses import DEADLINE_S, A, B, disk_house, flip_a_bit_of, gpu_house, run

from kvstore.transport.cuda import DeviceFailed, DeviceFull
from kvstore.types import BlockHash
from kvstore_server.eviction import Ticks
from kvstore_server.index import Index
from kvstore_server.level import State
from kvstore_server.scrub import Scrubber
from kvstore_server.tiers.disk import DiskFailed, DiskFull


class Pause:
    """A call of this method waits in its thread, after its work, until it may go on; later calls do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self._go_on = threading.Event()
        work = getattr(owner, name)

        def slow(*args: Any, **fields: Any) -> Any:
            monkeypatch.setattr(owner, name, work)
            done = work(*args, **fields)
            self._loop.call_soon_threadsafe(self._reached.set)
            self._go_on.wait(DEADLINE_S)
            return done

        monkeypatch.setattr(owner, name, slow)

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), DEADLINE_S)

    def go_on(self) -> None:
        self._go_on.set()


def raising(error: Exception) -> Any:
    def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


async def stored(tmp_path: Path, hashes: list[BlockHash]) -> None:
    """A directory in which these blocks are."""
    async with disk_house(tmp_path) as at:
        at.put(A, hashes)
        await at.settle()


# Blocks that are lost, or stored again, while they are written.


def test_bytes_of_another_block_are_never_written_as_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: A1, A2, A16, A20. The slot of a block that is lost meanwhile holds another when it is written."""
    hashes = chain(1, of=A)

    async def first() -> None:
        async with disk_house(tmp_path, memory_slabs=1) as at:
            pause = Pause(monkeypatch, at.disks, "pack")
            space = at.put(A, hashes)
            await pause.reached()
            at.store.lose(space, hashes[0])
            at.put(A, chain(6, of=A, seed=5))
            monkeypatch.setattr(at.spill, "forgotten", lambda *_: None)  # a crash before it is forgotten
            pause.go_on()
            await at.settle()

    async def second() -> None:
        async with disk_house(tmp_path) as at:
            space = at.store.spaces[A.namespace]
            session = at.session(space)
            session.load(1, records(hashes), lease="held")
            await at.settle()
            rows = space.index.find(records(hashes))
            if space.index.states(rows)[0] == State.COMMITTED:
                assert at.bytes_in_memory(space, rows) == [block_bytes(A, hashes[0]).tobytes()], "another block"
            session.end()

    run(first)
    run(second)


def test_a_block_stored_again_while_it_is_written_takes_one_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: C2, D5."""

    async def test() -> None:
        async with disk_house(tmp_path) as at:
            hashes = chain(2, of=A)
            pause = Pause(monkeypatch, at.disks, "write")
            space = at.put(A, hashes)
            await pause.reached()
            at.store.lose(space, hashes[1])
            at.put(A, hashes[1:], parent=hashes[0])
            pause.go_on()
            await at.settle()
            assert at.on_disk(space, hashes) == 2
            assert at.disk.statistics().used_bytes == 2 * A.block_bytes

    run(test)


def test_a_block_lost_before_it_is_written_does_not_end_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with disk_house(tmp_path) as at:
            hashes = chain(2, of=A)
            pause = Pause(monkeypatch, at.disks, "open_space")
            space = at.put(A, hashes)
            await pause.reached()
            at.store.lose(space, hashes[1])
            pause.go_on()
            await at.settle()
            assert at.on_disk(space, hashes) == 1

    run(test)


def test_a_block_lost_before_it_is_copied_up_does_not_end_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with gpu_house(gpu_slabs=1) as at:
            await at.load(at.put(A, chain(4, of=A)), chain(4, of=A), times=2)
            others = chain(3, of=B)
            space = at.put(B, others)
            await at.load(space, others)
            pause = Pause(monkeypatch, at.gpu, "delete_slab")
            at.lift.loaded(space, space.index.find(records(others)))
            await pause.reached()
            at.store.lose(space, others[2])
            pause.go_on()
            await at.lift.settle()
            assert at.on_gpu(space, others[:2]) == 2

    run(test)


# Disks that fail or are full.


def test_a_namespace_that_comes_after_the_first_disk_failed_is_written_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: D12."""

    async def test() -> None:
        async with disk_house(tmp_path, num_disks=2) as at:
            monkeypatch.setattr(at.disk, "write", raising(DiskFailed("broken")))
            monkeypatch.setattr(at.disk, "open_space", raising(DiskFailed("broken")))
            at.put(A, chain(4, of=A))
            await at.settle()
            assert list(at.disks.failures) == [0]
            space = at.put(B, chain(3, of=B))
            await at.settle()
            assert at.on_disk(space, chain(3, of=B)) == 3

    run(test)


@pytest.mark.parametrize(
    ("name", "error", "failed"),
    [
        ("open_space", DiskFull("no room"), []),
        ("open_space", DiskFailed("broken"), [0]),
        ("pack", DiskFailed("broken"), [0]),
    ],
)
def test_what_one_disk_cannot_do_is_left_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: DiskFailed, failed: list[int]
) -> None:
    """Covers: D12, E2."""

    async def test() -> None:
        async with disk_house(tmp_path, num_disks=2) as at:
            monkeypatch.setattr(at.disk, name, raising(error))
            space = at.put(B, chain(3, of=B))
            await at.settle()
            assert list(at.disks.failures) == failed
            assert at.on_disk(space, chain(3, of=B)) == 3
            monkeypatch.undo()
            more = at.put(B, chain(12, of=B, seed=1))
            await at.settle()
            assert at.on_disk(more, chain(12, of=B, seed=1)) == 12
            assert bool(at.disks.tiers[0].statistics().used_bytes) is not bool(failed), "it is used once it can be"

    run(test)


def test_an_error_that_nobody_thought_of_costs_its_batch_and_not_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with disk_house(tmp_path) as at:
            monkeypatch.setattr(at.disks, "pack", raising(ValueError("a bug")))
            at.put(A, chain(3, of=A))
            await at.settle()
            assert at.store.counters.blocks_unwritten == 3
            monkeypatch.undo()
            space = at.put(A, chain(3, of=A, seed=4))
            await at.settle()
            assert at.on_disk(space, chain(3, of=A, seed=4)) == 3

    run(test)


def test_a_disk_too_full_to_forget_is_not_asked_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: E2."""

    async def test() -> None:
        async with disk_house(tmp_path) as at:
            first = at.put(A, chain(4, of=A))
            await at.settle()
            slow, slower = threading.Event(), threading.Event()
            write, begun = at.disk.write, asyncio.Event()
            loop = asyncio.get_running_loop()
            waits = [slow, slower]
            tries = 0

            def wait_and_write(*args: Any, **fields: Any) -> None:
                mine = waits.pop(0)
                if not waits:
                    loop.call_soon_threadsafe(begun.set)
                mine.wait(DEADLINE_S)
                write(*args, **fields)

            def refuse(*_: object, **__: object) -> None:
                nonlocal tries
                tries += 1
                slower.set()
                raise DiskFull("no room")

            monkeypatch.setattr(at.disk, "write", wait_and_write)
            monkeypatch.setattr(at.disk, "forget", refuse)
            at.put(B, chain(3, of=B))
            at.put(A, chain(3, of=A, seed=9))
            await asyncio.wait_for(begun.wait(), DEADLINE_S)
            at.store.clear(first)
            slow.set()
            await at.settle()
            assert 0 < tries < 5

    run(test)


def test_no_slab_of_others_is_given_up_in_vain_while_none_can_be_made(tmp_path: Path) -> None:
    """Covers: E1, E2."""

    async def test() -> None:
        async with disk_house(tmp_path, disk_slabs=3) as at:
            for seed in range(5):
                old = at.put(A, chain(6, of=A, seed=seed))
                await at.settle()
            kept = len(old.index.disk.rows())
            at.disk._slots.stop_growing()  # as the last ENOSPC left it
            new = at.put(B, chain(3, of=B))
            await at.settle()
            left = len(old.index.disk.rows())
            assert at.on_disk(new, chain(3, of=B)) == 3 or left == kept, f"{kept - left} blocks were dropped in vain"
            assert at.disk.arena.num_slabs == 3

    run(test)


def test_no_slab_on_the_device_is_given_up_in_vain_while_none_can_be_made() -> None:
    async def test() -> None:
        async with gpu_house(gpu_slabs=1) as at:
            old, new = at.put(A, chain(4, of=A)), at.put(B, chain(3, of=B))
            await at.load(old, chain(4, of=A), times=2)
            at.gpu._grow_after_s = float("inf")
            await at.load(new, chain(3, of=B), times=2)
            assert at.on_gpu(new, chain(3, of=B)) == 3 or at.on_gpu(old, chain(4, of=A)) == 4

    run(test)


def test_a_slab_that_could_not_be_deleted_is_deleted_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: D5, E2."""

    async def test() -> None:
        async with disk_house(tmp_path, disk_slabs=2) as at:
            for seed in range(2):
                at.put(A, chain(6, of=A, seed=seed))
                await at.settle()
            delete = at.disk.delete_slab

            def refuse_once(*_: object) -> None:
                monkeypatch.setattr(at.disk, "delete_slab", delete)
                raise DiskFull("no room")

            monkeypatch.setattr(at.disk, "delete_slab", refuse_once)
            for seed in range(4):
                new = at.put(B, chain(2, of=B, seed=seed))
                await at.settle()
            assert at.disk.arena.num_lingering == 0
            assert len(new.index.disk.rows()) > 0

    run(test)


def test_the_room_of_a_namespace_that_is_gone_is_used_for_others(tmp_path: Path) -> None:
    """Covers: D4, E1."""

    async def disk() -> None:
        async with disk_house(tmp_path, disk_slabs=2) as at:
            old = at.put(A, chain(12, of=A))
            await at.settle()
            assert at.disk.arena.num_slabs == 2
            at.store.clear(old)
            await at.settle()
            at.store.close_space_if_empty(old)  # its last session ends
            new = at.put(B, chain(3, of=B))
            await at.settle()
            assert at.on_disk(new, chain(3, of=B)) == 3

    async def gpu() -> None:
        async with gpu_house(gpu_slabs=1) as at:
            old = at.put(A, chain(4, of=A))
            await at.load(old, chain(4, of=A), times=2)
            at.store.clear(old)
            at.store.close_space_if_empty(old)
            new = at.put(B, chain(3, of=B))
            await at.load(new, chain(3, of=B), times=2)
            assert at.on_gpu(new, chain(3, of=B)) == 3

    run(disk)
    run(gpu)


# Reads.


def test_a_read_that_raises_is_a_miss_and_leaves_nothing_leased(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: B1, B5, C2."""
    hashes = chain(3, of=A)

    async def test() -> None:
        async with disk_house(tmp_path) as at:
            monkeypatch.setattr(at.disks, "read", raising(OSError(12, "Cannot allocate memory")))
            space = at.store.spaces[A.namespace]
            session = at.session(space)
            session.load(7, records(hashes), lease="x", follow=True)
            await at.settle()
            assert space.index.count(State.RISING) == 0
            assert not session.follows[7][1].open_indices
            session.end()
            assert space.index.num_leased == 0
            assert at.spill.rise_bytes_per_s == 0, "what brought nothing is not fast"

    run(lambda: stored(tmp_path, hashes))
    run(test)


def test_a_bad_block_that_is_scrubbed_while_it_rises_is_lost_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: C2, D5."""
    hashes = chain(3, of=A)

    async def test() -> None:
        async with disk_house(tmp_path) as at:
            space = at.store.spaces[A.namespace]
            scrubbing = Pause(monkeypatch, at.disks, "read")
            check = asyncio.create_task(Scrubber(at.spill, bytes_per_s=1 << 30).check(space, records(hashes)))
            await scrubbing.reached()
            loading = Pause(monkeypatch, at.disks, "read")
            session = at.session(space)
            session.load(7, records(hashes), lease="x")
            await loading.reached()
            scrubbing.go_on()
            await check
            loading.go_on()
            await at.settle()
            session.end()
            assert at.store.match(space, records(hashes))[0].size == 1

    run(lambda: stored(tmp_path, hashes))
    flip_a_bit_of(block_bytes(A, hashes[1]).tobytes()[:64], tmp_path)
    run(test)


def test_a_device_full_at_a_copy_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with gpu_house() as at:
            hashes = chain(4, of=A)
            space = at.put(A, hashes)
            monkeypatch.setattr(at.device, "copy_in", raising(DeviceFull("out of memory")))
            await at.load(space, hashes, times=2)
            monkeypatch.undo()
            assert not at.lift.failure
            await at.load(space, hashes, times=2)
            assert at.on_gpu(space, hashes) == 4

    run(test)


def test_what_came_from_a_device_that_failed_meanwhile_is_not_said_to_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        async with gpu_house() as at:
            hashes = chain(4, of=A)
            space = at.put(A, hashes)
            await at.load(space, hashes, times=2)
            at.put(B, chain(14, of=B))
            assert at.in_memory(space, hashes) == 0
            pause = Pause(monkeypatch, at.gpu, "read")
            session = at.session(space)
            session.load(99, records(hashes), lease="x", follow=True)
            await pause.reached()
            failing = asyncio.create_task(at.lift._fail(DeviceFailed("gone")))
            pause.go_on()
            await failing
            await at.lift.quiesce()
            session.end()
            assert at.on_gpu(space, hashes) == 0

    run(test)


# What a restart finds.


@pytest.mark.timeout(20)
def test_a_circle_of_parents_on_disk_is_cut() -> None:
    """A client that lies about parents cannot hang the daemon after its restart."""
    one, other, after = chain(3, of=A)
    index = Index(Ticks())
    hashes = records([one, other, after])
    index.restore(hashes, parents=records([other, one, one]), slots=np.arange(3), written=np.arange(1, 4))
    index.touch(index.find(hashes[:1]))
    index.validate()


def test_a_namespace_whose_last_sessions_end_at_once_is_closed_once(tmp_path: Path) -> None:
    """The second end finds it gone, or, made again meanwhile, another one, whose room it leaves alone."""

    async def test() -> None:
        async with disk_house(tmp_path) as at:
            old = at.store.open_space(A)
            at.store.close_space_if_empty(old)
            at.store.close_space_if_empty(old)
            new = at.store.open_space(A)
            at.store.close_space_if_empty(old)
            assert at.store.spaces[A.namespace] is new
            assert at.store.tier.arena.slabs_of(A.namespace)

    run(test)
