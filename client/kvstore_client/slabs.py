"""Slabs of the daemon, mapped read-only and kept until the daemon retires them or the session ends.

A mapping goes when the last array over it goes, so a view stays valid (if stale) whatever the daemon does.
"""

import os
import threading
import time
import weakref

from kvstore.errors import StoreBug, StoreTimeout, StoreUnavailable
from kvstore.spec import KVSpec
from kvstore.transport.shm import SlabLayout, map_memfd
from kvstore.types import AnyArray, ByteArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.session import Session


class Slab:
    """One mapped slab: `table` is `[num_slots, slot_bytes]`, read-only."""

    __slots__ = ("_generations", "_hashes", "checksums", "number", "table")

    def __init__(self, number: int, layout: SlabLayout, memory: ByteArray) -> None:
        headers = layout.headers(memory)
        self.number = number
        self.table = layout.slots(memory)
        self.checksums: AnyArray = headers["checksums"]  # [num_slots, num_parts]
        self._generations = headers["generation"]
        self._hashes = headers["hash"]

    def holds(self, slots: IntArray, generations: IntArray, hashes: AnyArray) -> AnyArray:
        """`[n]` bool: which of these slots hold, at this moment, that generation of that block."""
        same: AnyArray = (self._generations[slots] == generations) & (self._hashes[slots] == hashes)
        return same


class Slabs:
    """The slabs that the current session has mapped. Thread-safe.

    Mappings are not carried over to another session: the daemon tells each session only of the slabs that it
    asked for, so a slab kept from an earlier one might be retired without a word.
    """

    def __init__(self, spec: KVSpec) -> None:
        self._spec = spec
        self._fetching = threading.Lock()  # held over the exchange, so that each slab is fetched once
        self._maps = _Maps(None)

    def __repr__(self) -> str:
        return f"<Slabs [{len(self._maps.slabs)} in use, {len(self._maps.mapped)} mapped]>"

    def adopt(self, session: Session | None) -> None:
        """From now on slabs are those of this session; earlier mappings go with their last view."""
        self._maps = _Maps(session)

    def get(self, session: Session, number: int, *, deadline: float) -> Slab:
        """The slab, mapped.

        Raises: BlockMissing, if it is gone; StoreUnavailable, if the session has ended; Unsupported,
        if the shm socket cannot be reached; StoreTimeout.
        """
        maps = self._maps
        slab = maps.slabs.get(number)
        if slab is not None and maps.session is session:
            return slab
        if not self._fetching.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreTimeout(f"slab {number}: the deadline passed while others were mapped; recompute")
        try:
            maps = self._maps
            if maps.session is not session or not session.alive:
                raise StoreUnavailable("slabs: the session that asks has ended; recompute, the client reconnects")
            slab = maps.slabs.get(number)
            if slab is None:
                slab = maps.slabs[number] = self._fetch(maps, session, number, deadline)
            return slab
        finally:
            self._fetching.release()

    def retire(self, session: Session, numbers: list[int]) -> None:
        """These hold nothing any more: each goes with its last view, and the daemon is told then.

        Never waits.
        """
        maps = self._maps
        if maps.session is not session:
            return
        for number in numbers:
            maps.retired.add(number)
            maps.slabs.pop(number, None)
            if number not in maps.mapped:
                maps.tell_dropped(number)

    def _fetch(self, maps: "_Maps", session: Session, number: int, deadline: float) -> Slab:
        fd, num_slots = session.exchange.slab(number, deadline=deadline)
        try:
            layout = SlabLayout.of(
                num_slots=num_slots, num_parts=self._spec.num_parts, block_bytes=self._spec.block_bytes
            )
            if num_slots < 1 or os.fstat(fd).st_size < layout.size_bytes:
                raise StoreBug(
                    f"slab {number}: expected {layout.size_bytes} bytes, got {os.fstat(fd).st_size}; report it"
                )
            memory = map_memfd(fd, layout.size_bytes, writable=False)
        finally:
            os.close(fd)
        maps.mapped.add(number)
        weakref.finalize(memory, maps.unmapped, number).atexit = False
        return Slab(number, layout, memory)


class _Maps:
    """What one session has mapped.

    Finalizers run in whatever thread and at whatever moment, maybe within `retire`:
    so there is no lock, and who takes a number out of `retired` (one step) is who tells the daemon.
    """

    def __init__(self, session: Session | None) -> None:
        self.session = session
        self.slabs: dict[int, Slab] = {}
        self.mapped: set[int] = set()  # also those that are retired, while views of them are left
        self.retired: set[int] = set()  # those that the daemon waits for

    def unmapped(self, number: int) -> None:
        self.mapped.discard(number)
        self.tell_dropped(number)

    def tell_dropped(self, number: int) -> None:
        try:
            self.retired.remove(number)
        except KeyError:
            return
        if self.session is not None:
            self.session.tell(pb.ClientMessage(slabs_dropped=pb.SlabsDropped(slabs=[number])))
