"""The disk tier: slab files of equal records, and a catalog of what lies in them. Data, flush, catalog, then visible.

Two halves, kept apart. Allocation is bookkeeping (`disk_slots`), touches no file and runs on the daemon's loop.
Everything that touches the disk, or compresses, blocks and runs in threads; calls for different blocks may overlap.
Whoever calls keeps the order for one block: pack, allocate, write, read as often as wanted, forget, free.

Source: docs/spec/disk.md for the bytes; `recovery` for what a restart finds.
"""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import structlog

from kvstore.errors import StoreUnavailable
from kvstore.spec import KVSpec
from kvstore.types import AnyArray, HashArray, IntArray, SlabId
from kvstore_server.tiers import catalog, recovery
from kvstore_server.tiers.catalog import Catalog, WrongFormat
from kvstore_server.tiers.codec import Codec, load_blosc2
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.disk_slots import RETRY_AFTER_S, DiskSlots
from kvstore_server.tiers.failures import FULL, DiskFailed, DiskFull, Failures
from kvstore_server.tiers.files import Files
from kvstore_server.tiers.packing import Packer
from kvstore_server.tiers.records import PAGE_BYTES, Packed
from kvstore_server.tiers.recovery import Recovered
from kvstore_server.tiers.sequences import Sequences
from kvstore_server.tiers.slab import SLOT_BITS
from kvstore_server.tiers.slab_files import SlabFiles

__all__ = ["RETRY_AFTER_S", "DiskFailed", "DiskFull", "DiskTier", "Files", "Packed", "Recovered"]

log = structlog.get_logger()


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
        codec: Callable[[KVSpec], Codec] = lambda spec: Codec.NONE,
        sequences: Sequences | None = None,
    ) -> None:
        """The directory is this tier's alone; made, if it was not there. Call `recover` next. Blocks.

        Slab files take at most `capacity_bytes`, and are made only while `reserve_bytes` of the file system stay
        free. The catalog comes on top: 512 bytes a block at most. `codec` is asked once for each namespace that is
        written; what was written before is read whatever it says. `sequences` are shared with the daemon's other disks.

        Raises: StoreUnavailable, if another daemon has it; InvalidRequest, if LMDB is not installed; DiskFailed, if
        it cannot be used, or another version wrote it.
        """
        self.directory = directory
        self._slots = DiskSlots(capacity_bytes=capacity_bytes, slab_bytes=slab_bytes, clock=clock)
        self.arena = self._slots.arena
        self._files = files or Files()
        self._listed: set[SlabId] = set()  # in the catalog
        self._failures = Failures(directory, on_full=self._slots.stop_growing)
        self._sequences = sequences or Sequences()
        with ExitStack() as opened, self._failures.during("open"):
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
            self._packer = Packer(
                codec_of=codec,
                each=self._slab_files.each,
                num_threads=num_threads,
                read_bytes_per_s=self._read_bytes_per_s,
            )
            self._files.sync_directory(directory / "catalog")
            self._files.sync_directory(directory)
            self._opened = opened.pop_all()

    # Allocation: the daemon's loop.

    def allocate(self, spec: KVSpec, count: int) -> IntArray:
        """Up to `count` slots for plain blocks, now in use; slabs are opened while the capacity allows it."""
        layout = self._slots.layout(spec)
        return self._slots.allocate(layout, count, room_bytes=layout.data_bytes)

    def allocate_for(self, spec: KVSpec, packed: Packed) -> IntArray:
        """`[n]`: a slot for each block, now in use, NONE where there is none; slabs are opened as by `allocate`.

        A block takes a slot of its size, or a larger one, where there is no other. What has none may fit once
        `empty_slabs` are closed: their bytes are then free for slabs of another size.
        """
        return self._slots.allocate_for(self._slots.layout(spec), packed)

    def free(self, slots: IntArray) -> None:
        """These slots, all in use and of one namespace, can be allocated again.

        Only after `forget` of what was in them, or a write that failed or was never made. A slab that is empty now,
        and whose file could not be made, is gone.
        """
        for slab in self._slots.free(slots):
            if not self._slab_files.is_made(slab):
                self.close_slab(slab)
                self.slab_deleted(slab)

    def empty_slabs(self, spec: KVSpec) -> list[SlabId]:
        """The slabs of this namespace, for records of any size, in which no slot is in use."""
        return self._slots.empty_slabs(spec)

    def close_slab(self, slab: SlabId) -> None:
        """The slab, whose slots are all free, gives out no more. Next: `delete_slab`, then `slab_deleted`."""
        self.arena.close(slab)

    def slab_deleted(self, slab: SlabId) -> None:
        """The bytes of the closed slab, whose file is gone, can be used for others."""
        self._slots.forget(slab)
        self._listed.discard(slab)

    def statistics(self) -> TierStatistics:
        """`used_bytes` are those of the blocks in slots in use, uncompressed; `pages` says how files are accessed."""
        return TierStatistics(
            tier="disk",
            capacity_bytes=self.arena.capacity_bytes,
            slab_bytes=self.arena.used_bytes,
            used_bytes=self._slots.used_bytes,
            num_slabs=self.arena.num_slabs,
            pages="O_DIRECT" if self._slab_files.is_direct else "buffered",
            place=str(self.directory),
        )

    # Files: threads. All of these block.

    def recover(self) -> list[Recovered]:
        """What is there from before, one for each namespace that has blocks; counted as used from now on.

        Once, before anything else, while nothing else runs. Reads no data of blocks.

        Raises: DiskFailed; InvalidRequest, if there are compressed blocks and blosc2 is not installed.
        """
        with self._failures.during("recover"):
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
        for recovered in plan.recovered:
            self._slots.add_space(recovered.spec)
            self._sequences.begin_after(int(recovered.stamps.max()))
        for slab, entry in plan.slabs.items():
            self._slots.adopt(slab, entry, plan.used_slots[slab])
            self._slab_files.adopt(slab)
            self._listed.add(slab)
        if self._slots.has_packed():
            load_blosc2()  # or each of these blocks would be lost on its first read
        return plan.recovered

    def open_space(self, spec: KVSpec) -> None:
        """The namespace can be written, and its spec is found again after a restart. Doing so twice is one.

        Raises: DiskFailed.
        """
        with self._failures.during("open a namespace"):
            if spec.namespace not in self._slots.layouts:
                self.catalog.put_spec(spec)
                self._slots.add_space(spec)

    def pack(self, spec: KVSpec, *, addresses: IntArray) -> Packed:
        """The `[n]` blocks as they are to lie on disk, by the codec of their namespace; for `allocate_for`, `write`.

        At each address, aligned to 4,096, lie `block_bytes`, in memory of a multiple of 4,096 bytes. Blocks that do
        not shrink stay where they are, plain. With `auto`, the first 1 MiB or more that come at once decide.

        Raises: DiskFailed, if `auto` cannot measure the disk; InvalidRequest, if blosc2 is needed and not installed.
        """
        return self._packer.pack(self._slots.layout(spec), addresses)

    def write(
        self,
        spec: KVSpec,
        *,
        slots: IntArray,
        hashes: HashArray,
        parents: HashArray,
        addresses: IntArray,
        checksums: AnyArray,
        packed: Packed | None = None,
    ) -> None:
        """These `[n]` blocks are on disk, flushed, and found again after a crash.

        `parents` are zeros where there is none. At each address, aligned to 4,096, lie `block_bytes`, in memory of a
        multiple of 4,096 bytes; `checksums` is `[n, num_parts]`, the xxh3 of every part. With `packed`, in the same
        order, that is what is written, and the slots are those that `allocate_for` gave for it. The caller's memory
        is not used once this returns or raises.

        Raises: DiskFull, DiskFailed, and then none of these blocks is in the catalog; the slots are still in use.
        """
        if not len(slots):
            return
        layout = self._slots.layout(spec)
        order = np.argsort(slots)  # so that what lies together in a file lies together in the headers
        slots, hashes, parents = slots[order], hashes[order], parents[order]
        packed = (Packed.plain(spec, addresses) if packed is None else packed)[order]
        sequences = self._sequences.take(len(slots))[order]
        with self._failures.during("write"):
            headers = layout.headers(
                packed, hashes=hashes, parents=parents, sequences=sequences, checksums=checksums[order]
            )
            slabs = [SlabId(slab) for slab in np.unique(slots >> SLOT_BITS).tolist()]
            for slab in slabs:
                self._slab_files.make(slab, self._slots.slabs[slab].size_bytes)
            self._slab_files.write(
                layout, slots=slots, rooms=self._slots.rooms(layout, slots), headers=headers, packed=packed
            )
            # Only now: what the catalog names must be there after a power cut.
            self.catalog.put_blocks(
                spec.namespace,
                hashes=hashes,
                parents=parents,
                slots=slots,
                sequences=sequences,
                slabs={slab: self._slots.slabs[slab] for slab in slabs if slab not in self._listed},
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
        layout = self._slots.layout(spec)
        rooms = self._slots.rooms(layout, slots)
        return self._slab_files.read(layout, slots=slots, rooms=rooms, hashes=hashes, addresses=addresses)

    def forget(self, spec: KVSpec, hashes: HashArray) -> None:
        """None of these blocks is found after a restart; those that are not there are ignored.

        Raises: DiskFull, DiskFailed, and then all of them may still be found: do not free their slots.
        """
        if not len(hashes):
            return
        with self._failures.during("forget"):
            self.catalog.commit([(catalog.BLOCKS, key, None) for key in catalog.block_keys(spec.namespace, hashes)])

    def delete_slab(self, slab: SlabId) -> None:
        """The file of a closed slab is gone. Raises: DiskFull, DiskFailed."""
        with self._failures.during("delete a slab"):
            self.catalog.commit([(catalog.SLABS, catalog.slab_key(slab), None)])
            self._slab_files.delete([self._slab_files.path(slab).name])
        self._slots.grow_again()

    def close(self) -> None:
        """The directory can be opened again. Nothing is lost that was written; no call may be under way."""
        self._opened.close()

    # Within.

    def _read_bytes_per_s(self) -> float | None:
        """How fast the disk reads; None, if it is too full to find out."""
        with self._failures.during("measure the disk"):
            try:
                return self._slab_files.read_bytes_per_s()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                return None


def _lock(fd: int, directory: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreUnavailable(
            f"{directory}: another daemon has it; stop that one, or give this one another directory"
        ) from error
