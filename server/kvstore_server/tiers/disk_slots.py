"""Which slots of the disk tier are in use, and how its slabs are cut. Bookkeeping: touches no file.

A slab's records are all of one room (`RecordLayout.rooms`), so that a compressed block takes less of the capacity
than a plain one. Runs on the daemon's loop, but for what is said to run in threads.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from kvstore.spec import KVSpec
from kvstore.types import IntArray, Namespace, SlabId
from kvstore_server.table import NONE
from kvstore_server.tiers.catalog import SlabEntry
from kvstore_server.tiers.records import Packed, RecordLayout
from kvstore_server.tiers.slab import MAX_SLOTS, SLOT_BITS, SlabArena

RETRY_AFTER_S: Final = 60.0  # how long no slab is opened after the file system had no room for one


class DiskSlots:
    """Slabs and slots of all namespaces within the capacity. The slot class of the arena is the room in bytes."""

    def __init__(self, *, capacity_bytes: int, slab_bytes: int, clock: Callable[[], float]) -> None:
        self.arena = SlabArena(capacity_bytes)
        self.slabs: dict[SlabId, SlabEntry] = {}
        self.layouts: dict[Namespace, RecordLayout] = {}
        self.used_bytes = 0  # of the blocks in slots in use, as their users count them
        self._slab_bytes = slab_bytes
        self._clock = clock
        self._grow_after_s = float("-inf")

    def layout(self, spec: KVSpec) -> RecordLayout:
        """Of a namespace that was added. Threads, too."""
        layout = self.layouts.get(spec.namespace)
        assert layout is not None, "open_space comes first"
        return layout

    def add_space(self, spec: KVSpec) -> None:
        """The namespace can have slabs. Threads, too."""
        self.layouts[spec.namespace] = RecordLayout.of(spec)

    def adopt(self, slab: SlabId, entry: SlabEntry, used: IntArray) -> None:
        """A slab of a namespace that was added is there, these of its slots in use."""
        layout = self.layouts[entry.namespace]
        self.arena.adopt(
            slab,
            entry.namespace,
            num_slots=entry.num_slots,
            size_bytes=entry.size_bytes,
            used=used,
            slot_class=entry.record_bytes - layout.header_bytes,
        )
        self.slabs[slab] = entry
        self.used_bytes += len(used) * layout.spec.block_bytes

    def allocate(self, layout: RecordLayout, count: int, *, room_bytes: int) -> IntArray:
        """Up to `count` slots of this room, now in use; slabs are opened while the capacity allows it."""
        namespace = layout.spec.namespace
        found = [self.arena.allocate(namespace, count, slot_class=room_bytes)]
        missing = count - len(found[0])
        while missing and self._open_slab(layout, room_bytes):
            found.append(self.arena.allocate(namespace, missing, slot_class=room_bytes))
            missing -= len(found[-1])
        slots = np.concatenate(found)
        self.used_bytes += len(slots) * layout.spec.block_bytes
        return slots

    def allocate_for(self, layout: RecordLayout, packed: Packed) -> IntArray:
        """`[n]`: a slot now in use for each block, NONE where there is none.

        Blocks whose own room has no slot left, and no slab can be opened for it, get one of the next larger rooms.
        """
        slots = np.full(len(packed), NONE, np.int64)
        needed = layout.rooms_for(packed.sizes)
        # The largest first: the others must not take what only these fit into.
        for room_bytes in np.unique(needed)[::-1].tolist():
            rows = np.flatnonzero(needed == room_bytes)
            found = [self.allocate(layout, len(rows), room_bytes=room_bytes)]
            for larger in layout.rooms[layout.rooms > room_bytes].tolist():
                missing = len(rows) - sum(map(len, found))
                found.append(self.arena.allocate(layout.spec.namespace, missing, slot_class=larger))
                self.used_bytes += len(found[-1]) * layout.spec.block_bytes
            mine = np.concatenate(found)
            slots[rows[: len(mine)]] = mine
        return slots

    def free(self, slots: IntArray) -> list[SlabId]:
        """These slots of one namespace can be allocated again; returns those of their slabs that are empty now."""
        if not len(slots):
            return []
        touched = [SlabId(slab) for slab in np.unique(slots >> SLOT_BITS).tolist()]
        namespace = self.slabs[touched[0]].namespace
        self.arena.free(slots)
        self.used_bytes -= len(slots) * self.layouts[namespace].spec.block_bytes
        return [slab for slab in touched if not self.arena.num_used(slab)]

    def empty_slabs(self, spec: KVSpec) -> list[SlabId]:
        """The slabs of this namespace, of any room, in which no slot is in use."""
        return [slab for slab in self.arena.slabs_of(spec.namespace) if not self.arena.num_used(slab)]

    def has_packed(self) -> bool:
        """Whether there are slabs that only compressed blocks fit into."""
        return any(entry.record_bytes < self.layouts[entry.namespace].record_bytes for entry in self.slabs.values())

    def forget(self, slab: SlabId) -> None:
        """The bytes of the closed slab can be used for others."""
        self.arena.forget(slab)
        del self.slabs[slab]

    def rooms(self, layout: RecordLayout, slots: IntArray) -> IntArray:
        """`[n]`: the room of the slab of each slot; that of a plain block for a slab that is not this namespace's.

        Threads, too.
        """
        numbers, which = np.unique(slots >> SLOT_BITS, return_inverse=True)
        rooms = np.full(len(numbers), layout.data_bytes, np.int64)
        for place, number in enumerate(numbers.tolist()):
            entry = self.slabs.get(SlabId(number))
            if entry is not None and entry.namespace == layout.spec.namespace:
                rooms[place] = entry.record_bytes - layout.header_bytes
        return rooms[which]

    def stop_growing(self) -> None:
        """For a while, no slab is opened: the file system has no room. Threads, too."""
        self._grow_after_s = self._clock() + RETRY_AFTER_S

    def grow_again(self) -> None:
        """The file system has room again: a slab was deleted there. Threads, too."""
        self._grow_after_s = float("-inf")

    def _open_slab(self, layout: RecordLayout, room_bytes: int) -> bool:
        left_bytes = self.arena.capacity_bytes - self.arena.used_bytes
        record_bytes = layout.header_bytes + room_bytes
        num_slots = min(max(self._slab_bytes, record_bytes), left_bytes) // record_bytes
        if num_slots == 0 or self._clock() < self._grow_after_s:
            return False
        num_slots = min(num_slots, MAX_SLOTS)
        entry = SlabEntry(layout.spec.namespace, num_slots, num_slots * record_bytes)
        slab = self.arena.open(
            entry.namespace, num_slots=entry.num_slots, size_bytes=entry.size_bytes, slot_class=room_bytes
        )
        self.slabs[slab] = entry
        return True
