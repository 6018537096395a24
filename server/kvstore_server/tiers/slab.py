"""A tier's arena, cut into slabs of one namespace each, cut into equal slots. Pure allocation: no memory here.

A slot is named by one integer, `slab id << SLOT_BITS | place in the slab`. Slab ids are never used twice, so a
slot of a slab that is gone can never be taken for one of a slab that is there.

A tier whose slots have several sizes numbers them: slots of one namespace and one `slot_class` are interchangeable.
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore.types import IntArray, Namespace, SlabId

SLOT_BITS: Final = 20
MAX_SLOTS: Final = 1 << SLOT_BITS


def slot_id(slab: SlabId, place: int) -> int:
    return slab << SLOT_BITS | place


def slab_of(slot: int) -> SlabId:
    return SlabId(slot >> SLOT_BITS)


def place_of(slot: int) -> int:
    return slot & (MAX_SLOTS - 1)


_Pool = tuple[Namespace, int]  # the namespace and the slot class


@dataclass(slots=True)
class _Slab:
    pool: _Pool
    num_slots: int
    size_bytes: int
    num_used: int = 0


@dataclass(slots=True)
class SlabArena:
    """`capacity_bytes` shared by the slabs of all namespaces.

    A slab that is closed still counts against the capacity until `forget`: its readers may have it mapped.
    """

    capacity_bytes: int
    _slabs: dict[SlabId, _Slab] = field(default_factory=dict)
    _free: dict[_Pool, list[int]] = field(default_factory=dict)
    _lingering: dict[SlabId, int] = field(default_factory=dict)
    _used_bytes: int = 0
    _next_id: int = 1

    @property
    def used_bytes(self) -> int:
        """Bytes of all slabs, closed ones that linger included."""
        return self._used_bytes

    @property
    def filled_bytes(self) -> int:
        """Bytes of slots in use, each with its share of its slab."""
        return sum(slab.size_bytes * slab.num_used // slab.num_slots for slab in self._slabs.values())

    @property
    def num_slabs(self) -> int:
        return len(self._slabs)

    @property
    def num_lingering(self) -> int:
        """Closed slabs that still count."""
        return len(self._lingering)

    def slabs_of(self, namespace: Namespace) -> list[SlabId]:
        return [number for number, slab in self._slabs.items() if slab.pool[0] == namespace]

    def slab_bytes(self, namespace: Namespace) -> int:
        return sum(slab.size_bytes for slab in self._slabs.values() if slab.pool[0] == namespace)

    def fits(self, size_bytes: int) -> bool:
        """Whether a slab of this size can be opened."""
        return self._used_bytes + size_bytes <= self.capacity_bytes

    def open(self, namespace: Namespace, *, num_slots: int, size_bytes: int, slot_class: int = 0) -> SlabId:
        """A new slab of the namespace, all slots free. It must fit."""
        assert self.fits(size_bytes)
        assert 0 < num_slots <= MAX_SLOTS
        slab = SlabId(self._next_id)
        self._next_id += 1
        pool = (namespace, slot_class)
        self._slabs[slab] = _Slab(pool, num_slots, size_bytes)
        self._used_bytes += size_bytes
        # Reversed, so that slots are given out from the front.
        self._free.setdefault(pool, []).extend(slot_id(slab, place) for place in reversed(range(num_slots)))
        return slab

    def adopt(
        self,
        slab: SlabId,
        namespace: Namespace,
        *,
        num_slots: int,
        size_bytes: int,
        used: IntArray,
        slot_class: int = 0,
    ) -> None:
        """A slab found after a restart is there under its own id, with these slots, each once, in use.

        It must fit, and its id must be new. Ids of slabs opened later are larger.
        """
        assert self.fits(size_bytes)
        assert 0 < num_slots <= MAX_SLOTS
        assert slab > 0
        assert slab not in self._slabs
        assert slab not in self._lingering
        is_free = np.ones(num_slots, np.bool_)
        assert ((used >> SLOT_BITS) == slab).all(), "a slot of another slab"
        is_free[used & (MAX_SLOTS - 1)] = False
        free = np.flatnonzero(is_free)[::-1]
        assert len(free) == num_slots - len(used), "a slot is in use twice"
        pool = (namespace, slot_class)
        self._slabs[slab] = _Slab(pool, num_slots, size_bytes, num_used=len(used))
        self._used_bytes += size_bytes
        self._free.setdefault(pool, []).extend((free + slot_id(slab, 0)).tolist())
        self._next_id = max(self._next_id, slab + 1)

    def allocate(self, namespace: Namespace, count: int, *, slot_class: int = 0) -> IntArray:
        """Up to `count` free slots of the namespace and class, now in use."""
        free = self._free.get((namespace, slot_class), [])
        kept = max(0, len(free) - count)
        slots = np.array(free[kept:][::-1], np.int64)
        del free[kept:]
        for slab, num_slots in _by_slab(slots):
            self._slabs[slab].num_used += num_slots
        return slots

    def free(self, slots: IntArray) -> None:
        """These slots, all in use and of one namespace, can be allocated again; of each class the last first."""
        pools: dict[_Pool, list[SlabId]] = {}
        for slab, num_slots in _by_slab(slots):
            assert self._slabs[slab].num_used >= num_slots, "a slot was freed twice"
            self._slabs[slab].num_used -= num_slots
            pools.setdefault(self._slabs[slab].pool, []).append(slab)
        for pool, slabs in pools.items():
            mine = slots if len(pools) == 1 else slots[np.isin(slots >> SLOT_BITS, slabs)]
            self._free.setdefault(pool, []).extend(mine.tolist())

    def num_free(self, namespace: Namespace) -> int:
        """Slots that `allocate` can give out."""
        return sum(len(slots) for pool, slots in self._free.items() if pool[0] == namespace)

    def num_used(self, slab: SlabId) -> int:
        """Slots of the slab that are in use."""
        return self._slabs[slab].num_used

    def close(self, slab: SlabId) -> None:
        """The slab, whose slots are all free, gives out no more; its bytes count until `forget`."""
        closed = self._slabs.pop(slab)
        assert closed.num_used == 0, "a slab with blocks in it was closed"
        free = [slot for slot in self._free.pop(closed.pool) if slab_of(slot) != slab]
        if free:
            self._free[closed.pool] = free
        self._lingering[slab] = closed.size_bytes

    def forget(self, slab: SlabId) -> None:
        """Nobody has the closed slab mapped any more: its bytes can be used."""
        self._used_bytes -= self._lingering.pop(slab)

    def validate(self) -> None:
        """Every invariant of this class holds, else AssertionError. For tests."""
        free = [slot for slots in self._free.values() for slot in slots]
        assert len(free) == len(set(free)), "a slot is free twice"
        for number, slab in self._slabs.items():
            mine = [slot for slot in self._free.get(slab.pool, ()) if slab_of(slot) == number]
            assert len(mine) == slab.num_slots - slab.num_used, "used slots are miscounted"
            assert all(place_of(slot) < slab.num_slots for slot in mine)
        assert len(free) == sum(slab.num_slots - slab.num_used for slab in self._slabs.values())
        total = sum(slab.size_bytes for slab in self._slabs.values()) + sum(self._lingering.values())
        assert total == self._used_bytes <= self.capacity_bytes


def _by_slab(slots: IntArray) -> list[tuple[SlabId, int]]:
    """Each slab, and how many of the slots are its."""
    slabs = slots >> SLOT_BITS
    return [(SlabId(slab), int(np.count_nonzero(slabs == slab))) for slab in numbers_in(slabs)]


def numbers_in(slabs: IntArray) -> list[int]:
    """Each of the numbers once, ascending."""
    if len(slabs) and (slabs == slabs[0]).all():  # nearly always, and sorting takes five times as long
        return [int(slabs[0])]
    return np.unique(slabs).tolist()  # type: ignore[no-any-return]
