"""`kvstore bench disk`: the disk tier beside plain O_DIRECT copies in one run, with daemons in their own processes.

Every bandwidth is the median of `rounds`; the paths take turns within a round, so that what else the machine
does falls on all of them alike.
"""

import itertools
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import numpy as np

from kvstore.errors import InvalidRequest, StoreBug, StoreUnavailable
from kvstore.hashing import pack, unpack
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import HASH_BYTES, AnyArray, BlockHash, ByteArray, HashArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore_client import ClientOptions, KVClient, Region
from kvstore_server.commands.measure import (
    RunningDaemon,
    bench_chain,
    bench_spec,
    load_all,
    progress,
    random_bytes,
    running_daemon,
    store_all,
    timed,
)
from kvstore_server.config import Settings
from kvstore_server.spill import BATCH_BYTES
from kvstore_server.tiers.disk import DiskTier

CALL_BYTES: Final = 1 << 20  # of the plain copies
DEADLINE_S: Final = 120.0

NUM_CHAINS, CHAIN_BLOCKS, RESTARTS = 1000, 100, 5
SMALL_BYTES: Final = 4096

STORES, TURNS = 30, 20  # stores timed in a row, and how often each mode gets its turn

# A daemon that is starting is asked again at once.
_EAGER: Final = tuple((f"grpc.{kind}_reconnect_backoff_ms", 10) for kind in ("initial", "min", "max"))

Copy = Callable[[int, Sequence[memoryview], int], int]  # pwritev or preadv


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for."""

    folder: Path
    size_bytes: int
    part_bytes: int
    threads: int
    rounds: int

    @property
    def num_blocks(self) -> int:
        return self.size_bytes // self.part_bytes

    def disk_capacity(self, size_bytes: int) -> int:
        """Room for as many bytes of blocks, their headers, and slabs that are not full."""
        return size_bytes + size_bytes // 4 + 4 * Settings().slab_bytes

    def daemon_flags(self, name: str, *, size_bytes: int) -> tuple[object, ...]:
        capacity = ("--disk-capacity", self.disk_capacity(size_bytes), "--disk-reserve", 0)
        return ("--disk-path", self.folder / name, *capacity, "--disk-threads", self.threads)


def run_disk(*, path: Path, size_bytes: int, part_bytes: int, threads: int, rounds: int) -> dict[str, float | int]:
    """Measures and returns all figures; progress goes to standard error. What it made in `path` is gone.

    Raises: InvalidRequest, if the sizes do not fit each other, or the file system has no O_DIRECT.
    """
    if size_bytes <= 0 or size_bytes % CALL_BYTES or size_bytes % part_bytes or part_bytes % mmap.PAGESIZE:
        raise InvalidRequest(
            f"size, part: expected a working set of whole MiB and of whole parts, which are whole pages, got "
            f"{size_bytes} and {part_bytes} bytes; correct them"
        )
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=path) as folder:
        job = _Job(Path(folder), size_bytes, part_bytes, threads, rounds)
        figures = _bandwidths(job) | _restarts(job) | _acknowledgements(job)
    return figures | {
        "size_bytes": size_bytes,
        "part_bytes": part_bytes,
        "threads": threads,
        "rounds": rounds,
    }


# Bandwidths.


def _bandwidths(job: _Job) -> dict[str, float | int]:
    progress("filling memory with random bytes")
    source, target = _aligned(job.size_bytes), _aligned(job.size_bytes)
    random_bytes(source)
    target[:] = 0
    spec = bench_spec("bench", job.part_bytes)
    seconds: dict[str, list[float]] = {}
    with _plain_file(job) as fd, _open_tier(job, "tier", size_bytes=job.size_bytes) as tier:
        in_process = _TierCopy(tier, spec, source=source, target=target)
        for number in range(job.rounds + 1):  # the first only warms up
            progress(f"round {number} of {job.rounds}: {job.num_blocks} blocks of {job.part_bytes >> 10} KiB")
            hashes = bench_chain(spec, job.num_blocks, seed=number)
            took = {"direct_write": timed(lambda: _plain_copy(os.pwritev, fd, source, job.threads))}
            took["direct_read"] = timed(lambda: _plain_copy(os.preadv, fd, target, job.threads))
            _expect_copied(source, target)
            took |= in_process.round(hashes)
            _expect_copied(source, target)
            took |= _through_daemons(job, spec, hashes, source=source, target=target)
            _expect_copied(source, target)
            if number:
                for name, value in took.items():
                    seconds.setdefault(name, []).append(value)
    gbps = {name: job.size_bytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    figures: dict[str, float | int] = {f"{name}_gbps": round(value, 2) for name, value in gbps.items()}
    for name, limit in (("write", "write"), ("read", "read"), ("store", "write"), ("load", "read")):
        figures[f"{name}_ratio"] = round(gbps[name] / gbps[f"direct_{limit}"], 3)
    return figures


@contextmanager
def _plain_file(job: _Job) -> Iterator[int]:
    """A file of the size of the working set, its blocks allocated, past the page cache."""
    path = job.folder / "plain"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        raise InvalidRequest(f"{path}: expected a file system with O_DIRECT, got: {error}; give another path") from None
    try:
        os.posix_fallocate(fd, 0, job.size_bytes)
        yield fd
    finally:
        os.close(fd)
        path.unlink()


def _plain_copy(copy: Copy, fd: int, memory: ByteArray, threads: int) -> None:
    """The limit: all of the memory to or from the file, flushed if written, and nothing else."""
    view = memory.data

    def work(first: int) -> None:
        for begin in range(first * CALL_BYTES, memory.size, CALL_BYTES * threads):
            count = copy(fd, [view[begin : begin + CALL_BYTES]], begin)
            assert count == CALL_BYTES, f"{count} of {CALL_BYTES} bytes at {begin}"

    _on_threads(work, threads)
    if copy is os.pwritev:
        os.fdatasync(fd)


def _on_threads(work: Callable[[int], None], threads: int) -> None:
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@contextmanager
def _open_tier(job: _Job, name: str, *, size_bytes: int) -> Iterator[DiskTier]:
    tier = DiskTier(
        job.folder / name,
        capacity_bytes=job.disk_capacity(size_bytes),
        slab_bytes=Settings().slab_bytes,
        reserve_bytes=0,
        num_threads=job.threads,
    )
    try:
        tier.recover()
        yield tier
    finally:
        tier.close()


class _TierCopy:
    """`DiskTier.write` and `.read` in this process, in batches, as the daemon calls them."""

    def __init__(self, tier: DiskTier, spec: KVSpec, *, source: ByteArray, target: ByteArray) -> None:
        self._tier = tier
        self._spec = spec
        self._batch = max(1, BATCH_BYTES // spec.block_bytes)
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
            "write": timed(lambda: self._write(slots, records, _parents(hashes))),
            "read": timed(lambda: self._read(slots, records)),
        }
        self._tier.forget(self._spec, records)
        self._tier.free(slots)
        return took

    def _write(self, slots: IntArray, hashes: HashArray, parents: HashArray) -> None:
        for batch in self._batches(len(slots)):
            self._tier.write(
                self._spec,
                slots=slots[batch],
                hashes=hashes[batch],
                parents=parents[batch],
                addresses=self._sources[batch],
                checksums=self._checksums[batch],
            )

    def _read(self, slots: IntArray, hashes: HashArray) -> None:
        for batch in self._batches(len(slots)):
            addresses = self._targets[batch]
            good, _ = self._tier.read(self._spec, slots=slots[batch], hashes=hashes[batch], addresses=addresses)
            assert good.all(), f"read {good.sum()} of {len(good)} blocks"

    def _batches(self, count: int) -> Iterator[slice]:
        return (slice(first, first + self._batch) for first in range(0, count, self._batch))


def _through_daemons(
    job: _Job, spec: KVSpec, hashes: list[BlockHash], *, source: ByteArray, target: ByteArray
) -> dict[str, float]:
    """Seconds until all is on disk, and, with another daemon, until all is back; nothing of it is left."""
    flags = job.daemon_flags("daemon", size_bytes=job.size_bytes)
    with running_daemon(*flags, size_bytes=job.size_bytes) as daemon, _client(daemon, spec) as client:
        region = client.region(job.size_bytes)
        region.array[:] = source
        _await_memory(daemon)
        with _watching(daemon) as events:
            store_s = timed(lambda: _store_durably(client, hashes, region, events))
    with running_daemon(*flags, size_bytes=job.size_bytes) as daemon, _client(daemon, spec) as client:
        target[:] = 0
        _await_memory(daemon)
        load_s = timed(lambda: load_all(client, hashes, target))
        with _admin(daemon) as admin:
            admin.Clear(pb.ClearRequest(), timeout=DEADLINE_S)
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
    with _admin(daemon) as admin:
        events = admin.Watch(pb.WatchRequest(snapshot=True), timeout=DEADLINE_S)
        try:
            while next(events).kind != pb.Event.SNAPSHOT_END:
                pass
            yield events
        finally:
            events.cancel()


# Restarts.


def _restarts(job: _Job) -> dict[str, float | int]:
    """How soon a daemon serves that finds many blocks on disk, and how soon it has one chain of them in memory."""
    spec = bench_spec("bench-small", SMALL_BYTES)
    num_blocks = NUM_CHAINS * CHAIN_BLOCKS
    progress(f"writing {num_blocks} small blocks for the restart")
    chains = [bench_chain(spec, CHAIN_BLOCKS, seed=seed) for seed in range(NUM_CHAINS)]
    size_bytes = num_blocks * 2 * SMALL_BYTES  # a header takes as much as a block
    _prepare_catalog(job, spec, chains, size_bytes=size_bytes)
    flags = job.daemon_flags("restart", size_bytes=size_bytes)
    ready_s, hit_ms = [], []
    target = _aligned(CHAIN_BLOCKS * SMALL_BYTES)
    for number in range(RESTARTS):
        progress(f"restart {number + 1} of {RESTARTS}")
        _drop_cache(job.folder / "restart")
        started = time.perf_counter()
        with running_daemon(*flags, size_bytes=job.size_bytes) as daemon, _admin(daemon) as admin:
            stats = admin.Stats(pb.StatsRequest(), wait_for_ready=True, timeout=DEADLINE_S)
            ready_s.append(time.perf_counter() - started)
            if stats.blocks_committed != num_blocks:
                raise StoreBug(f"restart: expected {num_blocks} blocks, found {stats.blocks_committed}; report it")
            with _client(daemon, spec) as client:
                hit_ms.append(timed(lambda: _hit(client, chains[number], target)) * 1e3)  # noqa: B023 - called at once
    return {
        "restart_100k_ready_s": round(statistics.median(ready_s), 2),
        "first_hit_ms": round(statistics.median(hit_ms), 2),
    }


def _prepare_catalog(job: _Job, spec: KVSpec, chains: list[list[BlockHash]], *, size_bytes: int) -> None:
    block = _aligned(SMALL_BYTES)
    checksum = hash_pieces(np.array([address_of(block)]), np.array([SMALL_BYTES]))
    with _open_tier(job, "restart", size_bytes=size_bytes) as tier:
        tier.open_space(spec)
        for first in range(0, len(chains), 100):
            group = chains[first : first + 100]
            hashes = [block_hash for each in group for block_hash in each]
            count = len(hashes)
            tier.write(
                spec,
                slots=tier.allocate(spec, count),
                hashes=unpack(pack(hashes)),
                parents=np.concatenate([_parents(each) for each in group]),
                addresses=np.full(count, address_of(block)),
                checksums=np.full((count, 1), checksum[0], np.uint64),
            )


def _drop_cache(folder: Path) -> None:
    """The page cache holds none of these files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _hit(client: KVClient, hashes: list[BlockHash], target: ByteArray) -> None:
    with client.match(hashes) as match:
        assert match.num_blocks == len(hashes), f"found {match.num_blocks} of {len(hashes)} blocks"
        load_all(client, hashes, target)


# Acknowledgements.


class _Mode:
    """One of the ways in which stores are timed: a daemon that is always full, and two clients of it."""

    def __init__(self, job: _Job, daemon: RunningDaemon, stack: ExitStack, *, seed: int) -> None:
        self._spec = bench_spec("bench-ack", job.part_bytes)
        self._num_fill = job.num_blocks
        self._seeds = itertools.count(seed)
        self._client, self._filler = (stack.enter_context(_client(daemon, self._spec)) for _ in range(2))
        self._admin = stack.enter_context(_admin(daemon))
        self._region = self._client.region(job.part_bytes)
        self._fill_region = self._filler.region(job.size_bytes)
        for region in (self._region, self._fill_region):
            random_bytes(region.array)
        _await_memory(daemon)

    def fill(self) -> None:
        """As many blocks as the working set has were stored by another client."""
        hashes = bench_chain(self._spec, self._num_fill, seed=next(self._seeds))
        store_all(self._filler, hashes, self._fill_region)

    def backlog(self) -> int:
        """Blocks that are stored and wait for the disk."""
        counters = self._admin.Stats(pb.StatsRequest(), timeout=DEADLINE_S).counters
        return int(counters.blocks_stored - counters.blocks_written - counters.blocks_unwritten)

    def drain(self) -> None:
        """All that was stored is on disk."""
        deadline = time.monotonic() + DEADLINE_S
        while self.backlog():
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"disk: the queue of writes is not empty after {DEADLINE_S:g} s; see the log")
            time.sleep(0.01)

    def turn(self) -> list[float]:
        """Milliseconds of each of some stores in a row, of one block each, until they are acknowledged."""
        hashes = bench_chain(self._spec, STORES, seed=next(self._seeds))
        return [timed(lambda: store_all(self._client, [one], self._region)) * 1e3 for one in hashes]  # noqa: B023


def _acknowledgements(job: _Job) -> dict[str, float | int]:
    """Latencies of stores without a disk, with one that has nothing else to do, and with one that is behind."""
    size_bytes = 2 * job.size_bytes
    flags = job.daemon_flags("acks", size_bytes=size_bytes)
    samples: dict[str, list[float]] = {"off": [], "on": [], "saturated": []}
    behind = 0
    with ExitStack() as stack:
        without = _Mode(job, stack.enter_context(running_daemon(size_bytes=size_bytes)), stack, seed=0)
        disk = _Mode(job, stack.enter_context(running_daemon(*flags, size_bytes=size_bytes)), stack, seed=1 << 20)
        for number in range(TURNS + 1):  # the first only warms up
            progress(f"acknowledgements: turn {number} of {TURNS}")
            for name, mode in (("off", without), ("on", disk), ("saturated", disk)):
                mode.fill()
                if name == "on":
                    mode.drain()
                took = mode.turn()
                if number:
                    samples[name] += took
                    behind += name == "saturated" and mode.backlog() > 0
                if name == "saturated":
                    mode.drain()
    figures: dict[str, float | int] = {}
    for name, values in samples.items():
        ordered = sorted(values)
        figures[f"store_ack_p50_ms_{name}"] = round(ordered[len(ordered) // 2], 3)
        figures[f"store_ack_p99_ms_{name}"] = round(ordered[int(len(ordered) * 0.99)], 3)
    for name in ("on", "saturated"):
        ratio = figures[f"store_ack_p99_ms_{name}"] / figures["store_ack_p99_ms_off"]
        figures[f"ack_ratio_{name}"] = round(ratio, 3)
    return figures | {"saturated_share": round(behind / TURNS, 2)}


# Within.


def _aligned(size_bytes: int) -> ByteArray:
    """Memory that O_DIRECT takes."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


def _parents(hashes: list[BlockHash]) -> HashArray:
    return unpack(pack([BlockHash(bytes(HASH_BYTES)), *hashes[:-1]]))


def _expect_copied(source: AnyArray, target: AnyArray) -> None:
    assert np.array_equal(source, target), "what was read is not what was written"
    target[:] = 0


@contextmanager
def _client(daemon: RunningDaemon, spec: KVSpec) -> Iterator[KVClient]:
    with KVClient(daemon.address, spec, options=ClientOptions(name="bench", timeout_s=DEADLINE_S)) as client:
        client.wait_ready(30)
        yield client


@contextmanager
def _admin(daemon: RunningDaemon) -> Iterator[AdminStub]:
    with grpc.insecure_channel(daemon.address, _EAGER) as channel:
        yield AdminStub(channel)


def _await_memory(daemon: RunningDaemon) -> None:
    """The daemon has taken its memory, which it does in the background after the start."""
    wanted = daemon.cpu_capacity - Settings().slab_bytes
    deadline = time.monotonic() + DEADLINE_S
    while int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[2]) * mmap.PAGESIZE < wanted:
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"{daemon.address}: its {wanted} bytes of memory are not there; free some memory")
        time.sleep(0.01)
