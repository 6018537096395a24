"""What every tier promises, whatever it keeps blocks on. A tier is done when it passes.

Subclass the suites that apply and give them the fixture `tier`, and `overwrite`, which goes past the tier, where it is
asked for.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pytest
from builders import block_bytes, chain, records, spec
from disk_faults import served, store

from kvstore.spec import KVSpec
from kvstore.types import BlockHash, ByteArray, IntArray, SlabId
from kvstore_server.tiers.slab import slab_of

CAPACITY_BYTES: Final = 8 << 20
SLAB_BYTES: Final = 400 << 10

TINY = spec()
TWIN = spec(model="twin")  # of TINY: the same sizes
PAGE = spec(bytes_per_part=2048, model="page")
ODD = spec(layers=3, bytes_per_part=1667, model="odd")
UNEQUAL = replace(spec(layers=3, model="unequal"), part_bytes=(1, 4096, 517))
LARGE = spec(bytes_per_part=300_001, model="large")
SPECS = (TINY, TWIN, PAGE, ODD, UNEQUAL, LARGE)

Overwrite = Callable[[ByteArray, ByteArray], None]


@dataclass
class Held:
    """The oracle: which block each slot holds that is in use."""

    tier: Any
    blocks: dict[int, tuple[KVSpec, BlockHash]] = field(default_factory=dict)

    def store(self, kv: KVSpec, hashes: list[BlockHash]) -> IntArray:
        slots = store(self.tier, kv, hashes)
        assert self.blocks.keys().isdisjoint(slots.tolist()), "a slot was given out twice"
        self.blocks |= {slot: (kv, one) for slot, one in zip(slots.tolist(), hashes, strict=True)}
        assert len(self.blocks) >= len(set(slots.tolist())) == len(hashes)
        return slots

    def free(self, kv: KVSpec, slots: IntArray) -> None:
        self.tier.forget(kv, records([self.blocks.pop(slot)[1] for slot in slots.tolist()]))
        self.tier.free(slots)

    def of(self, kv: KVSpec) -> IntArray:
        return np.array([slot for slot, (owner, _) in self.blocks.items() if owner is kv], np.int64)

    def check(self) -> None:
        """Everything is read as it was written, and the statistics are exact."""
        for kv in {kv.namespace: kv for kv, _ in self.blocks.values()}.values():
            slots = self.of(kv)
            assert all(served(self.tier, kv, slots, records([self.blocks[slot][1] for slot in slots.tolist()])))
        self.check_usage()

    def check_usage(self) -> None:
        shown = self.tier.statistics()
        assert shown.used_bytes == sum(kv.block_bytes for kv, _ in self.blocks.values())
        assert shown.used_bytes <= shown.slab_bytes == self.tier.arena.used_bytes <= shown.capacity_bytes
        assert shown.capacity_bytes == CAPACITY_BYTES
        assert shown.num_slabs == self.tier.arena.num_slabs
        self.tier.arena.validate()


class TierSuite:
    """Promises of all tiers."""

    @pytest.fixture
    def tier(self) -> Any:
        """Empty, of CAPACITY_BYTES in slabs of SLAB_BYTES."""
        raise NotImplementedError

    @pytest.fixture
    def held(self, tier: Any) -> Held:
        return Held(tier)

    @pytest.mark.parametrize("kv", SPECS, ids=lambda kv: kv.model)
    def test_blocks_are_read_bit_by_bit_as_they_were_written(self, held: Held, kv: KVSpec) -> None:
        held.check()
        for seed in range(2):
            held.store(kv, chain(3, of=kv, seed=seed))
            held.check()

    def test_the_same_hashes_in_many_namespaces_are_different_blocks(self, held: Held) -> None:
        """Covers: A12."""
        hashes = chain(4)
        for first in range(0, 4, 2):
            for kv in SPECS:
                held.store(kv, hashes[first : first + 2])
        held.check()

    def test_a_batch_over_several_slabs_in_any_order(self, held: Held) -> None:
        hashes = chain(200, of=ODD)
        slots = held.store(ODD, hashes)
        assert len({slab_of(slot) for slot in slots.tolist()}) > 2
        order = np.random.default_rng(1).permutation(len(hashes))
        assert all(served(held.tier, ODD, slots[order], records(hashes)[order]))
        held.check()

    def test_a_batch_written_to_slots_in_any_order(self, held: Held) -> None:
        tier, hashes = held.tier, chain(200, of=ODD)
        tier.open_space(ODD)
        slots = np.random.default_rng(1).permutation(tier.allocate(ODD, len(hashes)))
        store(tier, ODD, hashes, slots=slots)
        assert all(served(tier, ODD, slots, records(hashes)))

    def test_calls_for_different_blocks_may_overlap(self, held: Held) -> None:
        tier, kv, size = held.tier, ODD, 20
        tier.open_space(kv)
        slots = tier.allocate(kv, 8 * size)
        hashes = chain(len(slots), of=kv)

        def work(start: int) -> bool:
            mine = slice(start, start + size)
            store(tier, kv, hashes[mine], slots=slots[mine])
            return all(served(tier, kv, slots[mine], records(hashes[mine])))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(0, len(slots), size)))
        assert all(served(tier, kv, slots, records(hashes)))

    def test_nothing_to_do_is_nothing(self, held: Held) -> None:
        none = held.store(TINY, [])
        assert served(held.tier, TINY, none, records([])) == []
        held.free(TINY, none)
        held.check()

    def test_the_capacity_is_a_limit_for_all_namespaces_together(self, held: Held) -> None:
        """Covers: E1."""
        tier = held.tier
        for kv in SPECS:
            tier.open_space(kv)
        slots = tier.allocate(LARGE, 4).tolist()
        assert len(slots) == 4
        slots += tier.allocate(PAGE, 100).tolist()
        for kv in SPECS:
            slots += tier.allocate(kv, 1 << 18).tolist()  # whatever is left
        assert len(slots) == len(set(slots))
        shown = tier.statistics()
        assert shown.used_bytes <= shown.slab_bytes <= CAPACITY_BYTES
        assert CAPACITY_BYTES - shown.slab_bytes < SLAB_BYTES
        for kv in SPECS:
            assert len(tier.allocate(kv, 1)) == 0
        tier.arena.validate()

    def test_freed_slots_are_given_out_again(self, held: Held) -> None:
        slots = held.store(ODD, chain(9, of=ODD))
        held.free(ODD, slots[3:7])
        held.check()
        again = held.store(ODD, chain(4, of=ODD, seed=1))
        assert set(again.tolist()) == set(slots[3:7].tolist())
        held.check()

    def test_a_slot_that_was_written_over_does_not_serve_the_block_before(self, held: Held) -> None:
        """Covers: A2."""
        old = chain(3)
        slots = held.store(TINY, old)
        held.free(TINY, slots)
        held.store(TINY, chain(3, seed=1))
        assert not any(served(held.tier, TINY, slots, records(old)))
        held.check()

    def test_a_slot_serves_only_the_block_that_it_holds(self, held: Held) -> None:
        hashes = chain(4)
        slots = held.store(TINY, hashes)
        asked = [hashes[0], hashes[2], hashes[1], hashes[3]]
        assert served(held.tier, TINY, slots, records(asked)) == [True, False, False, True]

    def test_a_slot_serves_no_other_namespace(self, held: Held) -> None:
        """Covers: A12."""
        slots = held.store(TINY, chain(2))
        for kv in (TWIN, ODD):
            held.tier.open_space(kv)
            assert served(held.tier, kv, slots, records(chain(2))) == [False, False]

    def test_a_slot_that_was_never_written_serves_nothing(self, held: Held) -> None:
        tier = held.tier
        held.store(TINY, chain(1))
        slots = tier.allocate(TINY, 2)
        assert served(tier, TINY, slots, records(chain(2))) == [False, False]

    def test_a_slab_that_is_empty_makes_room_for_another_namespace(self, held: Held) -> None:
        """Covers: E1."""
        tier = held.tier
        tier.open_space(PAGE)
        hashes = chain(6, of=LARGE)
        slots = held.store(LARGE, hashes)  # each in a slab of its own
        fill(tier, PAGE)
        held.free(LARGE, slots[2:3])
        assert len(tier.allocate(PAGE, 1)) == 0
        give_up(tier, slab_of(int(slots[2])))
        assert len(tier.allocate(PAGE, 10)) == 10
        assert not any(served(tier, LARGE, slots[2:3], records(hashes[2:3])))
        assert all(served(tier, LARGE, slots[3:], records(hashes[3:])))
        tier.arena.validate()

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_the_order_no_block_is_lost_mixed_up_or_miscounted(self, held: Held, seed: int) -> None:
        chance = random.Random(seed)
        specs = (TINY, ODD, UNEQUAL)
        for step in range(40):
            kv = chance.choice(specs)
            slots = held.of(kv)
            if chance.random() < 0.6:
                held.store(kv, chain(chance.randint(1, 40), of=kv, seed=step + 1))
            else:
                held.free(kv, slots[np.random.default_rng(step).random(len(slots)) < chance.random()])
            for slab in held.tier.arena.slabs_of(kv.namespace):
                if not held.tier.arena.num_used(slab) and chance.random() < 0.5:
                    give_up(held.tier, slab)
            held.check()


class VolatileTierSuite(TierSuite):
    """Promises of the tiers that keep nothing over a restart."""

    def test_a_slot_that_was_freed_serves_nothing(self, held: Held) -> None:
        hashes = chain(4)
        slots = held.store(TINY, hashes)
        held.free(TINY, slots[1:3])
        assert served(held.tier, TINY, slots, records(hashes)) == [True, False, False, True]


class CheckedTierSuite(TierSuite):
    """Promises of the tiers that check what they read, and whose slabs are given back in steps."""

    @pytest.fixture
    def overwrite(self, tier: Any) -> Overwrite:
        """Where the first bytes lie, which is one place, the second do; the tier does not know."""
        raise NotImplementedError

    @pytest.mark.parametrize("offset", [0, 1, 4096, 4097, UNEQUAL.block_bytes - 1])
    def test_a_block_with_one_wrong_bit_is_not_served_and_the_others_are(
        self, held: Held, overwrite: Overwrite, offset: int
    ) -> None:
        """Covers: A25."""
        hashes = chain(3, of=UNEQUAL)
        slots = held.store(UNEQUAL, hashes)
        spoiled = block_bytes(UNEQUAL, hashes[1])
        spoiled[offset] ^= 1
        overwrite(block_bytes(UNEQUAL, hashes[1]), spoiled)
        assert served(held.tier, UNEQUAL, slots, records(hashes)) == [True, False, True]

    def test_the_bytes_of_another_block_are_not_served(self, held: Held, overwrite: Overwrite) -> None:
        """Covers: A12, A25."""
        hashes = chain(3)
        slots = held.store(TINY, hashes)
        overwrite(block_bytes(TINY, hashes[2]), block_bytes(TINY, hashes[0]))
        assert served(held.tier, TINY, slots, records(hashes)) == [True, True, False]

    def test_a_slab_counts_until_its_memory_is_given_back(self, held: Held) -> None:
        """Covers: E1."""
        tier = held.tier
        slots = held.store(LARGE, chain(6, of=LARGE))
        tier.open_space(PAGE)
        fill(tier, PAGE)
        held.free(LARGE, slots[:1])
        tier.close_slab(slab_of(int(slots[0])))
        assert len(tier.allocate(PAGE, 1)) == 0
        tier.delete_slab(slab_of(int(slots[0])))
        assert len(tier.allocate(PAGE, 1)) == 0
        tier.slab_deleted(slab_of(int(slots[0])))
        assert len(tier.allocate(PAGE, 1)) == 1


def fill(tier: Any, kv: KVSpec) -> None:
    """There is no room for one block more of this namespace."""
    while len(tier.allocate(kv, 1000)):
        pass


def give_up(tier: Any, slab: SlabId) -> None:
    tier.close_slab(slab)
    tier.delete_slab(slab)
    tier.slab_deleted(slab)
