"""`kvstore bench disk`: the disk tier beside plain O_DIRECT copies in one run, with daemons in their own processes.

Every bandwidth is the median of `rounds`; the paths take turns within a round, so that what else the machine
does falls on all of them alike.
"""

import mmap
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
import numpy as np

from kvstore.errors import InvalidRequest, StoreUnavailable
from kvstore.hashing import pack, unpack
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import HASH_BYTES, AnyArray, BlockHash, ByteArray, HashArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import KVClient, Region
from kvstore_server.backlog import BATCH_BYTES
from kvstore_server.commands.bench_disk_daemon import acknowledgements, restarts
from kvstore_server.commands.measure import (
    DEADLINE_S,
    DiskJob,
    RunningDaemon,
    admin_of,
    aligned_memory,
    await_memory,
    bench_chain,
    bench_spec,
    connected,
    load_all,
    open_tier,
    parents_of,
    progress,
    random_bytes,
    running_daemon,
    store_all,
    timed,
)
from kvstore_server.commands.plain import CALL_BYTES, plain_copy, plain_file
from kvstore_server.rising import PIECE_BYTES
from kvstore_server.spill import READS_AT_ONCE, WRITES_AT_ONCE
from kvstore_server.tiers.disk import DiskTier

WARM_UPS: Final = 2  # rounds that are not timed: after them the disk of the daemons is full, as the others' files are


def run_disk(*, path: Path, size_bytes: int, part_bytes: int, threads: int, rounds: int) -> dict[str, float | int]:
    """Measures and returns all figures; progress goes to standard error. What it made in `path` is gone.

    Raises: InvalidRequest, if the sizes do not fit each other, or the file system has no O_DIRECT or too little room.
    """
    if size_bytes <= 0 or size_bytes % CALL_BYTES or size_bytes % part_bytes or part_bytes % mmap.PAGESIZE:
        raise InvalidRequest(
            f"size, part: expected a working set of whole MiB and of whole parts, which are whole pages, got "
            f"{size_bytes} and {part_bytes} bytes; correct them"
        )
    found = os.statvfs(path)
    free_bytes, needed_bytes = found.f_bavail * found.f_frsize, 7 * size_bytes + (2 << 30)
    if free_bytes < needed_bytes:
        raise InvalidRequest(
            f"path: expected {needed_bytes} bytes free on the file system of {path.resolve()}, got {free_bytes}; free "
            "some, or take a smaller working set"
        )
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=path) as folder:
        job = DiskJob(Path(folder), size_bytes, part_bytes, threads, rounds)
        figures = _bandwidths(job) | restarts(job) | acknowledgements(job)
    return figures | {
        "size_bytes": size_bytes,
        "part_bytes": part_bytes,
        "threads": threads,
        "rounds": rounds,
    }


# Bandwidths.


def _bandwidths(job: DiskJob) -> dict[str, float | int]:
    progress("filling memory with random bytes")
    source, target = aligned_memory(job.size_bytes), aligned_memory(job.size_bytes)
    random_bytes(source)
    target[:] = 0
    spec = bench_spec("bench", job.part_bytes)
    seconds: dict[str, list[float]] = {}
    with (
        plain_file(job.folder / "plain", job.size_bytes) as fd,
        open_tier(job, "tier", size_bytes=job.size_bytes) as tier,
    ):
        in_process = _TierCopy(tier, spec, source=source, target=target)
        for number in range(WARM_UPS + job.rounds):
            progress(
                f"round {number + 1} of {WARM_UPS + job.rounds}: {job.num_blocks} blocks of {job.part_bytes >> 10} KiB"
            )
            hashes = bench_chain(spec, job.num_blocks, seed=number)
            took = {"direct_write": timed(lambda: plain_copy(os.pwritev, fd, source, job.threads))}
            took["direct_read"] = timed(lambda: plain_copy(os.preadv, fd, target, job.threads))
            _expect_copied(source, target)
            took |= in_process.round(hashes)
            _expect_copied(source, target)
            took |= _through_daemons(job, spec, hashes, source=source, target=target)
            _expect_copied(source, target)
            if number >= WARM_UPS:
                for name, value in took.items():
                    seconds.setdefault(name, []).append(value)
    gbps = {name: job.size_bytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    figures: dict[str, float | int] = {f"{name}_gbps": round(value, 2) for name, value in gbps.items()}
    for name, limit in (("write", "write"), ("read", "read"), ("store", "write"), ("load", "read")):
        figures[f"{name}_ratio"] = round(gbps[name] / gbps[f"direct_{limit}"], 3)
    return figures


class _TierCopy:
    """`DiskTier.write` and `.read` in this process, in batches, and as many at once, as the daemon calls them."""

    def __init__(self, tier: DiskTier, spec: KVSpec, *, source: ByteArray, target: ByteArray) -> None:
        self._tier = tier
        self._spec = spec
        places = spec.block_bytes * np.arange(source.size // spec.block_bytes)
        self._sources = address_of(source) + places
        self._targets = address_of(target) + places
        # Taken when a block is stored, and so no part of a write.
        self._checksums = hash_pieces(self._sources, np.full(len(places), spec.block_bytes)).reshape(-1, 1)
        tier.open_space(spec)

    def round(self, hashes: list[BlockHash]) -> dict[str, float]:
        """Seconds of either; nothing of it is left."""
        slots = self._tier.allocate(self._spec, len(hashes))
        assert len(slots) == len(hashes), f"room for {len(slots)} of {len(hashes)} blocks"
        records = unpack(pack(hashes))
        took = {
            "write": timed(lambda: self._write(slots, records, parents_of(hashes))),
            "read": timed(lambda: self._read(slots, records)),
        }
        self._tier.forget(self._spec, records)
        self._tier.free(slots)
        return took

    def _write(self, slots: IntArray, hashes: HashArray, parents: HashArray) -> None:
        def write(batch: slice) -> None:
            self._tier.write(
                self._spec,
                slots=slots[batch],
                hashes=hashes[batch],
                parents=parents[batch],
                addresses=self._sources[batch],
                checksums=self._checksums[batch],
            )

        self._batches(write, len(slots), batch_bytes=BATCH_BYTES, at_once=WRITES_AT_ONCE)

    def _read(self, slots: IntArray, hashes: HashArray) -> None:
        def read(batch: slice) -> None:
            addresses = self._targets[batch]
            good, _ = self._tier.read(self._spec, slots=slots[batch], hashes=hashes[batch], addresses=addresses)
            assert good.all(), f"read {good.sum()} of {len(good)} blocks"

        self._batches(read, len(slots), batch_bytes=PIECE_BYTES, at_once=READS_AT_ONCE)

    def _batches(self, work: Callable[[slice], None], count: int, *, batch_bytes: int, at_once: int) -> None:
        step = max(1, batch_bytes // self._spec.block_bytes)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(work, (slice(first, first + step) for first in range(0, count, step))))


def _through_daemons(
    job: DiskJob, spec: KVSpec, hashes: list[BlockHash], *, source: ByteArray, target: ByteArray
) -> dict[str, float]:
    """Seconds until all is on disk, and, with another daemon, until all is back."""
    flags = job.daemon_flags("daemon", size_bytes=job.size_bytes)
    with running_daemon(*flags, size_bytes=job.size_bytes) as daemon, connected(daemon, spec) as client:
        region = client.region(job.size_bytes)
        region.array[:] = source
        await_memory(daemon)
        with _watching(daemon) as events:
            store_s = timed(lambda: _store_durably(client, hashes, region, events))
    with running_daemon(*flags, size_bytes=job.size_bytes) as daemon, connected(daemon, spec) as client:
        target[:] = 0
        await_memory(daemon)
        load_s = timed(lambda: load_all(client, hashes, target))
    return {"store": store_s, "load": load_s}


def _store_durably(client: KVClient, hashes: list[BlockHash], region: Region, events: Iterator[pb.Event]) -> None:
    store_all(client, hashes, region)
    missing = len(hashes)
    try:
        while missing:
            event = next(events)
            if event.kind == pb.Event.STORED and event.tier == "disk":
                missing -= len(event.hashes) // HASH_BYTES
    except grpc.RpcError as error:
        raise StoreUnavailable(
            f"disk: {missing} of {len(hashes)} blocks were not written: {error.details()}; take a smaller working set"
        ) from None


@contextmanager
def _watching(daemon: RunningDaemon) -> Iterator[Iterator[pb.Event]]:
    """What happens from now on."""
    with admin_of(daemon) as admin:
        events = admin.Watch(pb.WatchRequest(snapshot=True), timeout=DEADLINE_S)
        try:
            while next(events).kind != pb.Event.SNAPSHOT_END:
                pass
            yield events
        finally:
            events.cancel()


def _expect_copied(source: AnyArray, target: AnyArray) -> None:
    assert np.array_equal(source, target), "what was read is not what was written"
    target[:] = 0
