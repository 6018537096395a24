"""Movement between memory and a real directory, without a daemon: write-through, room on disk, rising, scrubbing."""

import asyncio
from pathlib import Path

import pytest
from builders import block_bytes, chain, records
from houses import DEADLINE_S, SLAB_BYTES, A, B, disk_house, flip_a_bit_of, run

from kvstore_server import spill
from kvstore_server.level import State
from kvstore_server.scrub import Scrubber
from kvstore_server.spill import WritePolicy
from kvstore_server.tiers.disk import DiskFailed, DiskFull
from kvstore_server.watermarks import Watermarks


def test_what_was_stored_is_found_again_and_rises_bit_exact(tmp_path: Path) -> None:
    """Covers: D2, D4, F6."""
    hashes = chain(8, of=A)

    async def first() -> None:
        async with disk_house(tmp_path) as at:
            at.put(A, hashes)
            await at.settle()
            assert at.store.counters.blocks_written == 8

    async def second() -> None:
        async with disk_house(tmp_path) as at:
            space = at.store.spaces[A.namespace]
            session = at.session(space)
            assert session.match(records(hashes), "held") == (8, 0, 0)
            loaded = session.load(1, records(hashes), lease="held")
            assert loaded.writing == list(range(8))
            await at.settle()
            rows = space.index.find(records(hashes))
            assert (space.index.states(rows) == State.COMMITTED).all()
            assert at.bytes_in_memory(space, rows) == [block_bytes(A, one).tobytes() for one in hashes]
            session.end()

    run(first)
    run(second)


def test_a_chain_longer_than_memory_is_kept_whole_below(tmp_path: Path) -> None:
    """Covers: E6, E11."""

    async def test() -> None:
        async with disk_house(tmp_path, memory_slabs=2) as at:
            hashes = chain(60, of=A)
            for first in range(0, 60, 6):
                space = at.put(A, hashes[first : first + 6], parent=hashes[first - 1] if first else None)
                await at.settle()
            assert at.store.match(space, records(hashes))[0].size == 60
            assert space.index.count(State.COLD) > 30

    run(test)


def test_a_full_disk_drops_the_oldest_and_stays_within_its_limit(tmp_path: Path) -> None:
    """Covers: E1, E2."""

    async def test() -> None:
        async with disk_house(tmp_path, disk_slabs=2) as at:
            for seed in range(8):
                space = at.put(A, chain(4, of=A, seed=seed))
                await at.settle()
            assert at.disk.statistics().slab_bytes <= 2 * SLAB_BYTES
            assert at.store.counters.blocks_dropped > 0
            newest = space.index.find(records(chain(4, of=A, seed=7)))
            assert space.index.disk.has(newest).all()
            assert len(space.index.disk.rows()) * A.block_bytes == at.disk.statistics().used_bytes

    run(test)


def test_a_namespace_takes_a_slab_on_disk_from_a_colder_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with disk_house(tmp_path, disk_slabs=2) as at:
            for seed in range(4):
                old = at.put(A, chain(5, of=A, seed=seed))
                await at.settle()
            assert at.disk.arena.slab_bytes(B.namespace) == 0
            hashes = chain(3, of=B)
            new = at.put(B, hashes)
            await at.settle()
            assert new.index.disk.has(new.index.find(records(hashes))).all()
            assert at.disk.statistics().slab_bytes <= 2 * SLAB_BYTES
            assert len(old.index.disk.rows()) < 20

    run(test)


def test_a_block_that_has_gone_bad_is_dropped_by_the_scrubber(tmp_path: Path) -> None:
    """Covers: A25, F6."""

    async def test() -> None:
        async with disk_house(tmp_path) as at:
            hashes = chain(4, of=A)
            space = at.put(A, hashes)
            await at.settle()
            scrubber = Scrubber(at.spill, bytes_per_s=1 << 30)
            assert await scrubber.check(space, records(hashes)) == 4 * A.block_bytes
            assert at.store.counters.blocks_lost == 0
            flip_a_bit_of(block_bytes(A, hashes[2]).tobytes()[:64], tmp_path)
            await scrubber.check(space, records(hashes))
            await at.settle()
            rows = space.index.find(records(hashes))
            assert space.index.disk.has(rows).tolist() == [True, True, False, True]
            assert (space.index.states(rows) == State.COMMITTED).all(), "memory still has it"
            assert at.store.counters.blocks_lost == 1

    run(test)


def test_a_bad_copy_is_a_miss_for_whoever_waits_for_it(tmp_path: Path) -> None:
    """Covers: A1, A2."""
    hashes = chain(3, of=A)

    async def first() -> None:
        async with disk_house(tmp_path) as at:
            at.put(A, hashes)
            await at.settle()

    async def second() -> None:
        async with disk_house(tmp_path) as at:
            space = at.store.spaces[A.namespace]
            session = at.session(space)
            session.load(7, records(hashes), lease="x")
            await at.settle()
            _, follow = session.follows[7]
            assert follow.failed == [(1, True)]
            assert not follow.open_indices
            assert session.match(records(hashes), "")[:2] == (1, 0)
            session.end()
            at.put(A, hashes)
            await at.settle()
            assert at.store.match(space, records(hashes))[0].size == 3

    run(first)
    flip_a_bit_of(block_bytes(A, hashes[1]).tobytes()[:64], tmp_path)
    run(second)


@pytest.mark.parametrize(("error", "fails"), [(DiskFull("no room"), False), (DiskFailed("broken"), True)])
def test_a_disk_that_fails_costs_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DiskFailed, fails: bool
) -> None:
    """Covers: A1, D12, E2."""

    async def test() -> None:
        async with disk_house(tmp_path) as at:

            def refuse(*_: object, **__: object) -> None:
                raise error

            monkeypatch.setattr(at.disk, "write", refuse)
            hashes = chain(4, of=A)
            space = at.put(A, hashes)
            await at.settle()
            assert bool(at.spill.failure) is fails
            assert at.store.counters.blocks_unwritten == 4
            assert len(space.index.disk.rows()) == 0
            assert at.store.match(space, records(hashes))[0].size == 4
            assert space.index.num_leased == 0

    run(test)


def test_with_the_policy_evict_only_the_oldest_are_written_and_nothing_is_lost_when_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: E6, E11."""
    monkeypatch.setattr(spill, "LOOK_BYTES", 1)

    async def test() -> None:
        policy = WritePolicy("evict", Watermarks(high=0.6, low=0.3))
        async with disk_house(tmp_path, disk_slabs=32, policy=policy) as at:
            hashes = chain(60, of=A)
            space = at.put(A, hashes[:12])
            await at.settle()
            assert at.store.counters.blocks_written == 0, "memory is far from full"
            for first in range(12, 60, 6):
                at.put(A, hashes[first : first + 6], parent=hashes[first - 1])
                await at.settle()
            index = space.index
            rows = index.find(records(hashes))
            assert (index.states(rows) >= State.COMMITTED).all()
            assert index.count(State.COLD) > 0
            only_here = rows[index.memory.has(rows) & ~index.disk.has(rows)]
            assert 0 < len(only_here) * A.block_bytes <= at.tier.arena.capacity_bytes * 0.6
            assert index.stamps.of(only_here).min() > index.stamps.of(rows[index.disk.has(rows)]).max()

    run(test)


def test_what_the_queue_had_no_room_for_is_written_when_memory_fills_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: E6."""
    monkeypatch.setattr(spill, "LOOK_BYTES", 1)
    monkeypatch.setattr(spill, "BACKLOG_BYTES", 0)

    async def test() -> None:
        async with disk_house(tmp_path, policy=WritePolicy("through", Watermarks(high=0.5, low=0.0))) as at:
            space = at.put(A, chain(6, of=A))
            await at.settle()
            assert (at.store.counters.blocks_unwritten, at.store.counters.blocks_written) == (6, 0)
            at.put(A, chain(30, of=A)[6:], parent=chain(30, of=A)[5])
            await at.settle()
            assert space.index.disk.has(space.index.stored()).all()

    run(test)


def test_a_flush_writes_all_that_is_in_memory_only(tmp_path: Path) -> None:
    """Covers: F6."""
    hashes = chain(8, of=A)

    async def first() -> None:
        async with disk_house(tmp_path, policy=WritePolicy("evict", Watermarks(high=1.0, low=1.0))) as at:
            at.put(A, hashes)
            await at.settle()
            assert at.store.counters.blocks_written == 0
            assert await at.spill.flush(DEADLINE_S)
            assert at.store.counters.blocks_written == 8

    async def second() -> None:
        async with disk_house(tmp_path) as at:
            assert at.store.match(at.store.spaces[A.namespace], records(hashes))[0].size == 8

    run(first)
    run(second)


def test_a_write_waits_while_others_are_stored_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: A2."""
    monkeypatch.setattr(spill, "QUIET_S", 60.0)
    monkeypatch.setattr(spill, "LINGER_S", 0.05)

    async def test() -> None:
        async with disk_house(tmp_path) as at:
            hashes = chain(4, of=A)
            at.put(A, hashes)
            await asyncio.wait_for(at.durable.wait(), DEADLINE_S)

    run(test)


def test_what_a_small_memory_would_soon_evict_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: E11."""
    monkeypatch.setattr(spill, "QUIET_S", 600.0)
    monkeypatch.setattr(spill, "LINGER_S", 600.0)

    async def test() -> None:
        async with disk_house(tmp_path) as at:
            hashes = chain(4, of=A)
            assert 3 * A.block_bytes < at.tier.arena.capacity_bytes / 16 < 4 * A.block_bytes
            at.put(A, hashes[:3])
            await asyncio.sleep(0)
            at.put(A, hashes[3:], parent=hashes[2])
            await asyncio.wait_for(at.durable.wait(), DEADLINE_S)

    run(test)


def test_what_was_cleared_is_not_found_after_a_restart(tmp_path: Path) -> None:
    hashes = chain(4, of=A)

    async def first() -> None:
        async with disk_house(tmp_path) as at:
            space = at.put(A, hashes)
            await at.settle()
            assert at.store.clear(space) == (4, 0)
            await at.settle()
            assert at.disk.statistics().used_bytes == 0

    async def second() -> None:
        async with disk_house(tmp_path) as at:
            assert A.namespace not in at.store.spaces

    run(first)
    run(second)
