"""The disk tier: slab files of equal records, and a catalog of what lies in them. Data, flush, catalog, then visible.

Two halves, kept apart. Allocation is bookkeeping, touches no file and runs on the daemon's loop. Everything that
touches the disk blocks, and runs in threads; calls for different blocks may overlap. Whoever calls keeps the order
for one block: allocate, write, read as often as wanted, forget, free.

Source: docs/spec/disk.md for the bytes; `recovery` for what a restart finds.
"""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import structlog

from kvstore.errors import StoreUnavailable
from kvstore.spec import KVSpec
from kvstore.types import AnyArray, HashArray, IntArray, Namespace, SlabId
from kvstore_server.tiers import catalog, recovery
from kvstore_server.tiers.catalog import Catalog, SlabEntry, WrongFormat
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.files import Files
from kvstore_server.tiers.records import PAGE_BYTES, RecordLayout
from kvstore_server.tiers.recovery import Recovered
from kvstore_server.tiers.slab import MAX_SLOTS, SLOT_BITS, SlabArena, slab_of
from kvstore_server.tiers.slab_files import SlabFiles

__all__ = ["DiskFailed", "DiskFull", "DiskTier", "Files", "Recovered"]

RETRY_AFTER_S: Final = 60.0  # how long no slab is opened after the file system had no room for one

log = structlog.get_logger()


class DiskFailed(Exception):
    """The tier cannot be used any more; the message says what happened, where, and what to do."""


class DiskFull(DiskFailed):
    """The file system has no room for this; the tier can be used on, after something in it was evicted."""


class DiskTier:
    """Blocks of all namespaces in one directory. What `write` returned for is found by `recover` after any crash."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity_bytes: int,
        slab_bytes: int,
        reserve_bytes: int,
        num_threads: int,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The directory is this tier's alone; made, if it was not there. Call `recover` next. Blocks.

        Slab files take at most `capacity_bytes`, and are made only while `reserve_bytes` of the file system stay
        free. The catalog comes on top: 512 bytes a block at most.

        Raises: StoreUnavailable, if another daemon has it; InvalidRequest, if LMDB is not installed; DiskFailed, if
        it cannot be used, or another version wrote it.
        """
        self.directory = directory
        self.slab_bytes = slab_bytes
        self.arena = SlabArena(capacity_bytes)
        self._files = files or Files()
        self._clock = clock
        self._grow_after_s = float("-inf")
        self._layouts: dict[Namespace, RecordLayout] = {}
        self._slabs: dict[SlabId, SlabEntry] = {}
        self._listed: set[SlabId] = set()  # in the catalog
        self._used_bytes = 0
        self._failure = ""
        self._counting = threading.Lock()
        self._next_sequence = 1
        with ExitStack() as opened, self._failing("open"):
            for path in (directory, directory / "catalog"):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._files.open(directory / "lock", os.O_RDWR | os.O_CREAT)
            opened.callback(self._files.close, lock)
            _lock(lock, directory)
            max_blocks = capacity_bytes // (2 * PAGE_BYTES)  # a header and some data each
            try:
                self.catalog = Catalog(directory / "catalog", max_blocks=max_blocks, files=self._files)
            except WrongFormat as error:
                raise DiskFailed(str(error)) from error
            opened.callback(self.catalog.close)
            self._slab_files = SlabFiles(
                directory / "slabs", reserve_bytes=reserve_bytes, num_threads=num_threads, files=self._files
            )
            opened.callback(self._slab_files.close)
            self._files.sync_directory(directory / "catalog")
            self._files.sync_directory(directory)
            self._opened = opened.pop_all()

    # Allocation: the daemon's loop.

    def allocate(self, spec: KVSpec, count: int) -> IntArray:
        """Up to `count` slots, now in use; slabs are opened while the capacity allows it. Their files come later."""
        found = [self.arena.allocate(spec.namespace, count)]
        missing = count - len(found[0])
        while missing and self._open_slab(self._layout(spec)):
            found.append(self.arena.allocate(spec.namespace, missing))
            missing -= len(found[-1])
        slots = np.concatenate(found)
        self._used_bytes += len(slots) * spec.block_bytes
        return slots

    def free(self, slots: IntArray) -> None:
        """These slots, all in use and of one namespace, can be allocated again.

        Only after `forget` of what was in them, or a write that failed or was never made. A slab that is empty now,
        and whose file could not be made, is gone.
        """
        if not len(slots):
            return
        touched = {slab_of(slot) for slot in slots.tolist()}
        namespace = self._slabs[next(iter(touched))].namespace
        self.arena.free(slots)
        self._used_bytes -= len(slots) * self._layouts[namespace].spec.block_bytes
        for slab in touched:
            if not self._slab_files.is_made(slab) and not self.arena.num_used(slab):
                self.close_slab(slab)
                self.slab_deleted(slab)

    def close_slab(self, slab: SlabId) -> None:
        """The slab, whose slots are all free, gives out no more. Next: `delete_slab`, then `slab_deleted`."""
        self.arena.close(slab)

    def slab_deleted(self, slab: SlabId) -> None:
        """The bytes of the closed slab, whose file is gone, can be used for others."""
        self.arena.forget(slab)
        del self._slabs[slab]
        self._listed.discard(slab)

    def statistics(self) -> TierStatistics:
        """`used_bytes` are those of the blocks in slots in use; `pages` says how files are read and written."""
        return TierStatistics(
            tier="disk",
            capacity_bytes=self.arena.capacity_bytes,
            slab_bytes=self.arena.used_bytes,
            used_bytes=self._used_bytes,
            num_slabs=self.arena.num_slabs,
            pages="O_DIRECT" if self._slab_files.is_direct else "buffered",
        )

    # Files: threads. All of these block.

    def recover(self) -> list[Recovered]:
        """What is there from before, one for each namespace that has blocks; counted as used from now on.

        Once, before anything else, while nothing else runs. Reads no data of blocks.

        Raises: DiskFailed.
        """
        with self._failing("recover"):
            plan = recovery.plan(
                self.catalog.load(),
                sizes_bytes=self._slab_files.sizes_bytes(),
                capacity_bytes=self.arena.capacity_bytes,
            )
            for reason, lost in plan.lost.items():
                log.warning("disk.recover", directory=str(self.directory), lost=lost, reason=reason)
            if plan.changes:
                self.catalog.commit(plan.changes)
            if plan.unwanted_files:
                self._slab_files.delete(plan.unwanted_files)
        for slab, entry in plan.slabs.items():
            self.arena.adopt(
                slab,
                entry.namespace,
                num_slots=entry.num_slots,
                size_bytes=entry.size_bytes,
                used=plan.used_slots[slab],
            )
            self._slab_files.adopt(slab)
            self._slabs[slab] = entry
            self._listed.add(slab)
        for recovered in plan.recovered:
            self._layouts[recovered.spec.namespace] = RecordLayout.of(recovered.spec)
            self._used_bytes += len(recovered.slots) * recovered.spec.block_bytes
            self._next_sequence = max(self._next_sequence, int(recovered.stamps.max()) + 1)
        return plan.recovered

    def open_space(self, spec: KVSpec) -> None:
        """The namespace can be written, and its spec is found again after a restart. Doing so twice is one.

        Raises: DiskFailed.
        """
        with self._failing("open a namespace"):
            if spec.namespace not in self._layouts:
                self.catalog.put_spec(spec)
                self._layouts[spec.namespace] = RecordLayout.of(spec)

    def write(
        self,
        spec: KVSpec,
        *,
        slots: IntArray,
        hashes: HashArray,
        parents: HashArray,
        addresses: IntArray,
        checksums: AnyArray,
    ) -> None:
        """These `[n]` blocks are on disk, flushed, and found again after a crash.

        `parents` are zeros where there is none. At each address, aligned to 4,096, lie `block_bytes`, in memory of a
        multiple of 4,096 bytes; `checksums` is `[n, num_parts]`, the xxh3 of every part. The caller's memory is
        not used once this returns or raises.

        Raises: DiskFull, DiskFailed, and then none of these blocks is in the catalog; the slots are still in use.
        """
        if not len(slots):
            return
        layout = self._layout(spec)
        order = np.argsort(slots)  # so that what lies together in a file lies together in the headers
        slots, hashes, parents = slots[order], hashes[order], parents[order]
        addresses, checksums = addresses[order], checksums[order]
        sequences = self._take_sequences(len(slots))[order]
        with self._failing("write"):
            headers = layout.headers(hashes=hashes, parents=parents, sequences=sequences, checksums=checksums)
            slabs = [SlabId(slab) for slab in np.unique(slots >> SLOT_BITS).tolist()]
            for slab in slabs:
                self._slab_files.make(slab, self._slabs[slab].size_bytes)
            self._slab_files.write(layout, slots=slots, headers=headers, addresses=addresses)
            # Only now: what the catalog names must be there after a power cut.
            self.catalog.put_blocks(
                spec.namespace,
                hashes=hashes,
                parents=parents,
                slots=slots,
                sequences=sequences,
                slabs={slab: self._slabs[slab] for slab in slabs if slab not in self._listed},
            )
            self._listed.update(slabs)

    def read(
        self, spec: KVSpec, *, slots: IntArray, hashes: HashArray, addresses: IntArray
    ) -> tuple[AnyArray, AnyArray]:
        """`[n]` bool and `[n, num_parts]` u64: whether the block is whole at its address now, and its checksums.

        At each address, aligned to 4,096, there is room for `block_bytes` rounded up to a multiple of 4,096. A block
        that cannot be read, or that fails a check, is logged and not good; what is at its address then means
        nothing. Never raises for what the disk does.
        """
        return self._slab_files.read(self._layout(spec), slots=slots, hashes=hashes, addresses=addresses)

    def forget(self, spec: KVSpec, hashes: HashArray) -> None:
        """None of these blocks is found after a restart; those that are not there are ignored.

        Raises: DiskFull, DiskFailed, and then all of them may still be found: do not free their slots.
        """
        if not len(hashes):
            return
        with self._failing("forget"):
            self.catalog.commit([(catalog.BLOCKS, key, None) for key in catalog.block_keys(spec.namespace, hashes)])

    def delete_slab(self, slab: SlabId) -> None:
        """The file of a closed slab is gone. Raises: DiskFull, DiskFailed."""
        with self._failing("delete a slab"):
            self.catalog.commit([(catalog.SLABS, catalog.slab_key(slab), None)])
            self._slab_files.delete([self._slab_files.path(slab).name])

    def close(self) -> None:
        """The directory can be opened again. Nothing is lost that was written; no call may be under way."""
        self._opened.close()

    # Within.

    def _layout(self, spec: KVSpec) -> RecordLayout:
        layout = self._layouts.get(spec.namespace)
        assert layout is not None, "open_space comes first"
        return layout

    def _open_slab(self, layout: RecordLayout) -> bool:
        room_bytes = self.arena.capacity_bytes - self.arena.used_bytes
        num_slots = min(max(self.slab_bytes, layout.record_bytes), room_bytes) // layout.record_bytes
        if num_slots == 0 or self._clock() < self._grow_after_s:
            return False
        num_slots = min(num_slots, MAX_SLOTS)
        entry = SlabEntry(layout.spec.namespace, num_slots, num_slots * layout.record_bytes)
        slab = self.arena.open(entry.namespace, num_slots=entry.num_slots, size_bytes=entry.size_bytes)
        self._slabs[slab] = entry
        return True

    def _take_sequences(self, count: int) -> AnyArray:
        with self._counting:
            first = self._next_sequence
            self._next_sequence += count
        return np.arange(first, first + count, dtype=np.uint64)

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        """An OSError within becomes DiskFull, or DiskFailed for good: what was flushed cannot be known any more."""
        if self._failure:
            raise DiskFailed(self._failure)
        try:
            yield
        except StoreUnavailable:  # an OSError too
            raise
        except OSError as error:
            message = f"{self.directory}: cannot {action}: {error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._grow_after_s = self._clock() + RETRY_AFTER_S
                raise DiskFull(f"{message}; free some space, or give the disk tier less capacity") from error
            self._failure = f"{message}; check the disk and its mount, then restart"
            raise DiskFailed(self._failure) from error


def _lock(fd: int, directory: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreUnavailable(
            f"{directory}: another daemon has it; stop that one, or give this one another directory"
        ) from error
