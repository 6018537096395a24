"""Memory that is used again, but not while it is in use."""

import mmap

from kvstore_server.tiers.scratch import ScratchPool


def test_memory_is_used_again_once_nobody_refers_to_it() -> None:
    pool = ScratchPool(most=2)
    first, second = pool.take(5000), pool.take(5000)
    addresses = {first.address, second.address}
    assert len(addresses) == 2
    assert pool.take(100).address not in addresses
    kept = first
    del first
    assert pool.take(5000).address not in addresses
    del kept, second
    assert {pool.take(5000).address, *addresses} == addresses


def test_memory_that_is_too_small_is_not_used() -> None:
    pool = ScratchPool(most=2)
    small = pool.take(mmap.PAGESIZE)
    del small
    large = pool.take(100 * mmap.PAGESIZE)
    assert len(large.memory) >= 100 * mmap.PAGESIZE
    large.memory[-1] = 1
    assert large.address % mmap.PAGESIZE == 0


def test_no_more_is_kept_than_was_said() -> None:
    pool = ScratchPool(most=2)
    held = [pool.take(5000) for _ in range(5)]
    before = {one.address for one in held}
    held.clear()
    # The others were given back to the system, and may come again from there: counted are those that the pool has.
    assert len(pool) == 2
    assert {pool.take(5000).address for _ in range(2)} <= before
