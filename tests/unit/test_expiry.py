"""Time to live: which blocks have expired, and that only those go."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import chain, records, spec

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore.types import BlockHash
from kvstore_server.config import load
from kvstore_server.eviction import Ticks
from kvstore_server.expiry import Expiry, Notes
from kvstore_server.index import Index
from kvstore_server.store import Store
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.pinning import PageLock

CHAIN = chain(4)

# Notes.


def test_a_tick_is_due_when_its_time_is_over_and_not_before() -> None:
    notes = Notes(60)
    assert notes.due(1000, 10) == 0
    assert notes.due(1001, 20) == 0
    assert notes.due(1059.9, 30) == 0
    assert notes.due(1060, 40) == 10
    assert notes.due(1060.9, 50) == 10
    assert notes.due(1061, 60) == 20
    assert notes.due(9999, 70) == 60


def test_a_clock_that_goes_back_makes_nothing_expire_early() -> None:
    notes = Notes(60)
    notes.due(1000, 10)
    assert notes.due(500, 20) == 0
    assert notes.due(565, 30) == 0
    assert notes.due(1060, 40) == 10, "tick 20 was noted at no time that is past"
    assert notes.due(1119, 50) == 10
    assert notes.due(1120, 60) == 40


def test_notes_are_few_however_long_the_time_to_live_is() -> None:
    notes = Notes(86_400)
    for second in range(2 * 86_400):
        due = notes.due(second, second + 1)
        assert due <= max(0, second + 1 - 86_400)
        assert due >= second + 1 - 86_400 - 90
    assert len(notes._notes) <= 1001


# The index.


def index_with_chain() -> Index:
    index = Index(Ticks())
    rows, _ = index.insert(records(CHAIN), parent=NONE, slots=np.arange(4), generations=np.arange(4) + 1)
    index.touch(rows)
    index.commit(rows)
    return index


def expired(index: Index, tick: int) -> list[BlockHash]:
    hashes = index.hashes_of(index.expired(tick)).tolist()
    return [block for block in CHAIN if block in hashes]


def test_blocks_have_expired_whose_last_use_is_not_past_the_tick() -> None:
    index = index_with_chain()
    assert expired(index, 0) == []
    assert expired(index, 4) == CHAIN
    index.touch(index.find(records(CHAIN[:2])))
    assert expired(index, 4) == CHAIN[2:]


def test_what_is_held_stays_and_so_does_what_comes_before_it() -> None:
    index = index_with_chain()
    third = index.find(records(CHAIN[2:3]))
    index.lease(third)
    assert expired(index, 4) == CHAIN[3:]
    index.unlease(third)
    index.pin(third)
    assert expired(index, 4) == CHAIN[3:]
    index.unpin(third)
    assert expired(index, 4) == CHAIN


def test_a_block_before_one_in_writing_stays() -> None:
    index = Index(Ticks())
    rows, _ = index.insert(records(CHAIN), parent=NONE, slots=np.arange(4), generations=np.arange(4) + 1)
    index.touch(rows)
    index.commit(rows[:3])
    assert expired(index, 4) == []


# The store.


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def store() -> Iterator[Store]:
    tier = CpuTier(capacity_bytes=4 << 16, slab_bytes=1 << 16, page_lock=PageLock(wanted=False))
    yield Store(tier)
    tier.close()


def put(store: Store, kv: KVSpec) -> list[BlockHash]:
    """A chain of four blocks is committed."""
    space, hashes = store.open_space(kv), chain(4, of=kv)
    index = space.index
    slots = store.tier.arena.allocate(kv.namespace, 4)
    rows, _ = index.insert(records(hashes), parent=NONE, slots=slots, generations=np.arange(4) + 1)
    index.touch(rows)
    index.commit(rows)
    return hashes


def num_stored(store: Store, kv: KVSpec) -> int:
    return len(store.open_space(kv).index.stored())


def test_a_block_that_was_not_used_for_its_time_is_gone_and_its_room_is_given_back(store: Store) -> None:
    clock, kv = Clock(), spec()
    expiry = Expiry(store, ttl_s={"default": 60}, clock=clock)
    hashes = put(store, kv)
    assert expiry.step() == 0
    clock.now_s += 59
    store.match(store.open_space(kv), records(hashes[:1]))
    assert expiry.step() == 0
    clock.now_s += 1
    assert expiry.step() == 3
    assert num_stored(store, kv) == 1
    (slab,) = store.tier.arena.slabs_of(kv.namespace)
    assert store.tier.arena.num_used(slab) == 1
    clock.now_s += 59
    assert expiry.step() == 1
    assert store.counters.blocks_removed == 4
    store.validate()


def test_each_tenant_has_its_own_time_and_those_not_named_that_of_all_others(store: Store) -> None:
    clock = Clock()
    a, b, c = spec(tenant="a"), spec(tenant="b"), spec(tenant="c")
    expiry = Expiry(store, ttl_s={"a": 10, "b": 20, "*": 30}, clock=clock)
    for kv in (a, b, c):
        put(store, kv)
    left = []
    for _ in range(4):
        expiry.step()
        left.append([num_stored(store, kv) for kv in (a, b, c)])
        clock.now_s += 10
    assert left == [[4, 4, 4], [0, 4, 4], [0, 0, 4], [0, 0, 0]]


def test_tenants_without_a_time_keep_their_blocks(store: Store) -> None:
    clock, kv = Clock(), spec(tenant="b")
    expiry = Expiry(store, ttl_s={"a": 10}, clock=clock)
    put(store, kv)
    for _ in range(3):
        expiry.step()
        clock.now_s += 1000
    assert num_stored(store, kv) == 4


async def steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The times at which the loop came by, until it was cancelled."""
    clock, seen = Clock(), []

    async def pause(seconds: float) -> None:
        seen.append(clock.now_s)
        clock.now_s += seconds
        if len(seen) == 12:
            raise asyncio.CancelledError

    monkeypatch.setattr("kvstore_server.expiry.asyncio.sleep", pause)
    with pytest.raises(asyncio.CancelledError):
        await Expiry(store, ttl_s={"*": 10}, clock=clock).run()
    return seen


def test_the_loop_comes_by_once_a_second(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, spec())
    assert asyncio.run(steps(store, monkeypatch)) == [1000.0 + second for second in range(12)]
    assert num_stored(store, spec()) == 0


# The setting.


def test_the_times_come_from_the_file_or_as_json_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('[ttl_s]\n"team-a" = 3600\n"*" = 86400.5\n')
    assert load(file, {}).ttl_s == {"team-a": 3600, "*": 86400.5}
    assert load(None, {"KVSTORE_TTL_S": '{"team-a": 60}'}).ttl_s == {"team-a": 60}
    with pytest.raises(InvalidRequest, match="environment: ttl_s: expected JSON such as"):
        load(None, {"KVSTORE_TTL_S": "60"})


@pytest.mark.parametrize("seconds", ["0", "-1"])
def test_a_time_that_is_none_is_refused(seconds: str) -> None:
    with pytest.raises(InvalidRequest, match=r"ttl_s\.team-a: expected more than 0 seconds"):
        load(None, {"KVSTORE_TTL_S": f'{{"team-a": {seconds}}}'})
