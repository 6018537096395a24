"""LFU: how uses are counted and remembered, what they are worth, and the order over random histories."""

import numpy as np
import pytest
from builders import chain, records, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.types import BlockHash, IntArray
from kvstore_server import eviction
from kvstore_server.config import EVICTION_POLICIES, load
from kvstore_server.eviction import LRU, BoolArray, Stamps, Ticks
from kvstore_server.index import Index
from kvstore_server.lfu import LFU, LIFETIMES
from kvstore_server.store import Store
from kvstore_server.table import NONE
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.uses import MOST, Uses

ROWS = 64


def uses_of(num_rows: int = ROWS) -> Uses:
    uses = Uses(Stamps(Ticks()))
    uses.stamps.resize(num_rows)
    uses.resize(num_rows)
    return uses


def used(uses: Uses, rows: IntArray, *, after: int) -> list[int]:
    """The counts of these rows when they are used after so many other blocks."""
    uses.stamps.ticks.take(after)
    uses.touch(rows)
    uses.stamps.touch(rows)
    return list(uses.column[rows])


# Uses.


def test_a_new_block_was_used_once_and_the_touch_that_stores_it_is_the_same_use() -> None:
    uses, rows = uses_of(), np.arange(3)
    uses.begin(rows, records(chain(3)))
    assert used(uses, rows, after=0) == [1, 1, 1]


def test_uses_close_together_are_one() -> None:
    uses, rows = uses_of(), np.arange(1)
    uses.begin(rows, records(chain(1)))
    assert used(uses, rows, after=ROWS // 8) == [1]
    assert used(uses, rows, after=ROWS // 8) == [1]
    assert used(uses, rows, after=ROWS // 8 + 1) == [2]


def test_counts_end_at_the_most_that_tells_something() -> None:
    uses, rows = uses_of(), np.arange(1)
    uses.begin(rows, records(chain(1)))
    for _ in range(MOST + 2):
        used(uses, rows, after=ROWS)
    assert uses.column[0] == MOST


def test_a_parent_has_at_least_as_many_uses_as_those_that_follow_it() -> None:
    """Its last use may have been too close to count, where that of its child was not."""
    uses = uses_of()
    uses.begin(np.array([0, 1]), records(chain(2)))
    used(uses, np.array([0, 1]), after=0)
    used(uses, np.array([0]), after=ROWS // 8)
    assert used(uses, np.array([0, 1]), after=2) == [2, 2]


def test_what_a_block_had_before_it_was_forgotten_counts_when_it_comes_back() -> None:
    uses, hashes = uses_of(), records(chain(2))
    uses.begin(np.array([0, 1]), hashes)
    used(uses, np.array([0, 1]), after=ROWS)
    uses.end(np.array([0, 1]), hashes)
    uses.begin(np.array([7, 0]), hashes)
    assert uses.column[[7, 0]].tolist() == [3, 3]
    uses.begin(np.array([9]), records(chain(1, seed=1)))
    assert uses.column[9] == 1


def test_what_was_forgotten_is_found_after_the_columns_grew() -> None:
    uses, hashes = uses_of(), records(chain(9))
    uses.begin(np.arange(9), hashes)
    uses.end(np.arange(9), hashes)
    uses.stamps.resize(4 * ROWS)
    uses.resize(4 * ROWS)
    uses.begin(np.arange(9), hashes)
    assert uses.column[:9].tolist() == [2] * 9


# LFU.


def index_full_of(num_blocks: int) -> tuple[Index, list[BlockHash]]:
    """Blocks that each start a chain; the first was stored first."""
    index, hashes = Index(Ticks(), policy="lfu"), chain(num_blocks)
    for number, block in enumerate(hashes):
        add(index, block, slot=number)
    return index, hashes


def add(index: Index, block: BlockHash, *, slot: int, parent: BlockHash | None = None) -> None:
    before = NONE if parent is None else index.row(parent)
    rows, _ = index.insert(records([block]), parent=before, slots=np.array([slot]), generations=np.array([slot + 1]))
    index.touch(rows)
    index.commit(rows)


def lifetime_of(index: Index) -> int:
    policy = index.memory.policy
    assert isinstance(policy, LFU)
    return policy._keys._lifetime


def test_before_anything_was_evicted_uses_count_for_nothing() -> None:
    index, hashes = index_full_of(1)
    index.stamps.ticks.take(1024)
    index.touch(index.find(records(hashes)))
    later = chain(3, seed=1)
    for number, block in enumerate(later):
        add(index, block, slot=1 + number)
    assert index.evict(4)[0].tolist() == [*hashes, *later]


def test_a_block_used_twice_stays_four_times_as_long_as_one_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "SCAN_VICTIMS", 1)
    index, hashes = index_full_of(200)
    index.stamps.ticks.take(200)  # so that the next use is not the same
    index.touch(index.find(records(hashes[199:])))
    at = index.stamps.ticks.now
    for number, block in enumerate(chain(4000, seed=1)):
        (gone,) = index.evict(1)[0].tolist()
        if gone == hashes[199]:
            break
        add(index, block, slot=200 + number)
    assert gone == hashes[199]
    lifetime = lifetime_of(index)
    assert 150 <= lifetime <= 250  # as many as are stored before a new one goes
    assert abs(index.stamps.ticks.now - at - LIFETIMES[2] * lifetime) <= lifetime


def test_a_chain_goes_from_its_end_and_as_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(Ticks(), policy="lfu")
    hashes = chain(6)
    index.insert(records(hashes), parent=NONE, slots=np.arange(6), generations=np.arange(6) + 1)
    rows = index.find(records(hashes))
    index.touch(rows)
    index.commit(rows)
    monkeypatch.setattr(index.memory, "take", None)  # one by one
    assert index.evict(6)[0].tolist() == hashes[::-1]


def test_a_new_block_goes_before_those_that_were_found_already_if_they_were_used_more_often() -> None:
    index, hashes = index_full_of(40)
    index.stamps.ticks.take(1024)
    for block in hashes:
        index.touch(index.find(records([block])))
    policy = index.memory.policy
    assert isinstance(policy, LFU)
    policy._keys.learn(4000)
    assert index.evict(1)[0].tolist() == hashes[:1]
    (new,) = chain(1, seed=1)
    add(index, new, slot=40)
    assert index.evict(2)[0].tolist() == [new, hashes[1]]


@given(seed=st.integers(0, 2**32), scan=st.sampled_from([1, 3, 16, 10_000]))
@settings(max_examples=40, deadline=None)
def test_each_victim_is_the_one_with_the_smallest_key_of_those_that_may_go(seed: int, scan: int) -> None:
    """The oracle counts and sorts in dicts; of the policy it takes only how long a lifetime is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "SCAN_VICTIMS", scan)
        patch.setattr(eviction, "SCAN_ROWS", 50)
        Histories(np.random.default_rng(seed)).run(250)


class Histories:
    """An index and its oracle, which are told the same."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.index = Index(Ticks(), policy="lfu")
        self.apart = 1024 // 8
        self.parent: dict[BlockHash, BlockHash | None] = {}
        self.stamp: dict[BlockHash, int] = {}
        self.uses: dict[BlockHash, int] = {}
        self.forgotten: dict[BlockHash, int] = {}
        self.held: list[BlockHash] = []
        self.new = chain(300)
        self.last_slot = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            action = self.random.random()
            blocks = list(self.parent)
            if action < 0.45 or not blocks:
                self.store([None, *blocks][self.random.integers(len(blocks) + 1)])
            elif action < 0.65:
                self.touch(blocks[self.random.integers(len(blocks))])
            elif action < 0.72:
                self.held.append(blocks[self.random.integers(len(blocks))])
                self.index.lease(self.index.find(records(self.held[-1:])))
            elif action < 0.82 and self.held:
                block = self.held.pop(self.random.integers(len(self.held)))
                self.index.unlease(self.index.find(records([block])))
            else:
                self.evict(int(self.random.integers(1, 5)))
            self.index.stamps.ticks.take(int(self.random.integers(80)))
            self.index.validate()
            for block in self.parent:
                row = self.index.row(block)
                assert self.index.stamps.at(row) == self.stamp[block]
                assert self.index._uses is not None
                assert self.index._uses.column[row] == self.uses[block]

    def store(self, parent: BlockHash | None) -> None:
        comes_back = self.forgotten and self.random.random() < 0.3
        block = min(self.forgotten) if comes_back else self.new.pop()
        self.parent[block] = parent
        self.uses[block] = min(self.forgotten.pop(block, 0) + 1, MOST)
        self.stamp[block] = self.index.stamps.ticks.now
        self.last_slot += 1
        before = NONE if parent is None else self.index.row(parent)
        slots = np.array([self.last_slot])
        rows, _ = self.index.insert(records([block]), parent=before, slots=slots, generations=slots)
        self.touch(block)
        self.index.commit(rows)

    def touch(self, block: BlockHash) -> None:
        now = stamp = self.index.stamps.ticks.now
        self.index.touch(self.index.find(records([block])))
        uses_of_child = 0
        at: BlockHash | None = block
        while at is not None:  # leaf first, so that a parent is younger
            if now - self.stamp[at] > self.apart:
                self.uses[at] = min(self.uses[at] + 1, MOST)
            uses_of_child = self.uses[at] = max(uses_of_child, self.uses[at])
            stamp += 1
            self.stamp[at] = stamp
            at = self.parent[at]

    def evict(self, count: int) -> None:
        victims = self.index.evict(count)[0].tolist()
        lifetime = lifetime_of(self.index)
        for block in victims:
            free = self.free()
            key = {each: self.stamp[each] + (self.uses[each] ** 2 - 1) * lifetime for each in free}
            assert key[block] == min(key.values())
            del self.parent[block]
            self.forgotten[block] = self.uses[block]
        assert len(victims) == count or not self.free()

    def free(self) -> set[BlockHash]:
        return set(self.parent) - set(self.parent.values()) - set(self.held)


class Everything:
    """Candidates that may all go, each once."""

    def __init__(self, num_rows: int) -> None:
        self.there = np.ones(num_rows, np.bool_)

    def unheld(self, rows: slice) -> BoolArray:
        return self.there[rows]

    def take(self, row: int) -> bool:
        return self.take_all(np.array([row]))

    def take_all(self, rows: IntArray) -> bool:
        could = bool(self.there[rows].all())
        self.there[rows] = False
        return could


def test_no_block_is_passed_over_that_has_the_key_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "SCAN_VICTIMS", 3)
    monkeypatch.setattr(eviction, "SCAN_ROWS", 10)
    stamps = Stamps(Ticks())
    stamps.resize(256)
    stamps.column[:] = 1 + np.arange(256) % 5
    victims = LRU(stamps).victims(256, Everything(256))
    assert sorted(victims) == list(range(256))
    assert stamps.of(np.array(victims)).tolist() == sorted(stamps.column.tolist())


# Names.


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_policy_of_the_settings_can_be_had(policy: str) -> None:
    chosen = load(None, {"KVSTORE_EVICTION_POLICY": policy}).eviction_policy
    assert type(Index(Ticks(), policy=chosen).memory.policy).__name__ == policy.upper()


def test_a_store_gives_its_policy_to_both_tiers_of_each_namespace() -> None:
    tier = CpuTier(capacity_bytes=1 << 16, slab_bytes=1 << 16, page_lock=PageLock(wanted=False))
    index = Store(tier, policy="lfu").open_space(spec()).index
    assert isinstance(index.memory.policy, LFU)
    assert isinstance(index.disk.policy, LFU)
    assert index.memory.policy is not index.disk.policy
    tier.close()


def test_an_unknown_policy_is_refused_with_the_names_known() -> None:
    with pytest.raises(InvalidRequest, match="eviction_policy: expected one of lru, lfu, got 'fifo'"):
        load(None, {"KVSTORE_EVICTION_POLICY": "fifo"})
