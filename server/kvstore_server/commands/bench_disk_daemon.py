"""What `kvstore bench disk` measures of daemons beside bandwidth: how soon they serve, how soon they acknowledge."""

import itertools
import os
import statistics
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.errors import StoreBug, StoreUnavailable
from kvstore.hashing import pack, unpack
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import BlockHash, ByteArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import KVClient
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
from kvstore_server.commands.plain import plain_writer

NUM_CHAINS, CHAIN_BLOCKS, RESTARTS = 1000, 100, 3
SMALL_BYTES: Final = 4096

STORES, TURNS = 30, 10  # stores timed in a row, and how often each mode gets its turn


def restarts(job: DiskJob) -> dict[str, float | int]:
    """How soon a daemon serves that finds many blocks on disk, and how soon it has one chain of them in memory."""
    spec = bench_spec("bench-small", SMALL_BYTES)
    num_blocks = NUM_CHAINS * CHAIN_BLOCKS
    progress(f"writing {num_blocks} small blocks for the restart")
    chains = [bench_chain(spec, CHAIN_BLOCKS, seed=seed) for seed in range(NUM_CHAINS)]
    size_bytes = num_blocks * 2 * SMALL_BYTES  # a header takes as much as a block
    _prepare_catalog(job, spec, chains, size_bytes=size_bytes)
    flags = job.daemon_flags("restart", size_bytes=size_bytes)
    ready_s, hit_ms = [], []
    target = aligned_memory(CHAIN_BLOCKS * SMALL_BYTES)
    for number in range(RESTARTS):
        progress(f"restart {number + 1} of {RESTARTS}")
        _drop_cache(job.folder / "restart")
        started = time.perf_counter()
        with running_daemon(*flags, size_bytes=job.size_bytes) as daemon, admin_of(daemon) as admin:
            stats = admin.Stats(pb.StatsRequest(), wait_for_ready=True, timeout=DEADLINE_S)
            ready_s.append(time.perf_counter() - started)
            if stats.blocks_committed != num_blocks:
                raise StoreBug(f"restart: expected {num_blocks} blocks, found {stats.blocks_committed}; report it")
            with connected(daemon, spec) as client:
                hit_ms.append(timed(lambda: _hit(client, chains[number], target)) * 1e3)  # noqa: B023 - called at once
    return {
        "restart_100k_ready_s": round(statistics.median(ready_s), 2),
        "first_hit_ms": round(statistics.median(hit_ms), 2),
    }


def _prepare_catalog(job: DiskJob, spec: KVSpec, chains: list[list[BlockHash]], *, size_bytes: int) -> None:
    block = aligned_memory(SMALL_BYTES)
    checksum = hash_pieces(np.array([address_of(block)]), np.array([SMALL_BYTES]))
    with open_tier(job, "restart", size_bytes=size_bytes) as tier:
        tier.open_space(spec)
        for first in range(0, len(chains), 100):
            group = chains[first : first + 100]
            hashes = [block_hash for each in group for block_hash in each]
            count = len(hashes)
            tier.write(
                spec,
                slots=tier.allocate(spec, count),
                hashes=unpack(pack(hashes)),
                parents=np.concatenate([parents_of(each) for each in group]),
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


class _Mode:
    """One of the ways in which stores are timed: a daemon that is always full, and two clients of it."""

    def __init__(self, job: DiskJob, daemon: RunningDaemon, stack: ExitStack, *, seed: int) -> None:
        self._spec = bench_spec("bench-ack", job.part_bytes)
        self._num_fill = job.num_blocks
        self._seeds = itertools.count(seed)
        self._client, self._filler = (stack.enter_context(connected(daemon, self._spec)) for _ in range(2))
        self._admin = stack.enter_context(admin_of(daemon))
        self._region = self._client.region(job.part_bytes)
        self._fill_region = self._filler.region(job.size_bytes)
        for region in (self._region, self._fill_region):
            random_bytes(region.array)
        await_memory(daemon)

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


def acknowledgements(job: DiskJob) -> dict[str, float | int]:
    """Latencies of stores with a disk tier off, on and behind; and off, beside plain writes of another process."""
    size_bytes = 2 * job.size_bytes
    flags = job.daemon_flags("acks", size_bytes=size_bytes)
    # `off` is what `on` is compared with, and `busy` what `saturated` is: the first store after a rest is slower.
    samples: dict[str, list[float]] = {"off": [], "busy": [], "beside": [], "on": [], "saturated": []}
    behind = 0
    drain_s = 0.0
    with ExitStack() as stack:
        without = _Mode(job, stack.enter_context(running_daemon(size_bytes=size_bytes)), stack, seed=0)
        disk = _Mode(job, stack.enter_context(running_daemon(*flags, size_bytes=size_bytes)), stack, seed=1 << 20)
        for number in range(TURNS + 1):  # the first only warms up
            progress(f"acknowledgements: turn {number} of {TURNS}")
            for name in samples:
                mode = disk if name in ("on", "saturated") else without
                mode.fill()
                if name == "on":
                    drain_s = timed(mode.drain)
                elif name == "off":
                    time.sleep(drain_s)
                with plain_writer(job.folder / "beside", job.threads) if name == "beside" else nullcontext():
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
    for ratio, name, limit in (
        ("on", "on", "off"),
        ("saturated", "saturated", "busy"),
        ("saturated_beside", "saturated", "beside"),
    ):
        p99, limit_p99 = (figures[f"store_ack_p99_ms_{one}"] for one in (name, limit))
        figures[f"ack_ratio_{ratio}"] = round(p99 / limit_p99, 3)
    return figures | {"saturated_share": round(behind / TURNS, 2)}
