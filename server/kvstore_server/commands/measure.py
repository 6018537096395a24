"""What the benchmarks share: blocks to store, daemons in their own processes, and timing."""

import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import grpc
import numpy as np

from kvstore.errors import StoreUnavailable
from kvstore.hashing import chain, pack, unpack
from kvstore.spec import KVSpec
from kvstore.types import HASH_BYTES, BlockHash, ByteArray, HashArray
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore_client import BlockRows, Client, ClientOptions, KVClient, Region
from kvstore_server.config import Settings
from kvstore_server.tiers.disk import DiskTier

STOP_TIMEOUT_S: Final = 30.0
DEADLINE_S: Final = 120.0

# A daemon that is starting is asked again at once.
EAGER: Final = tuple((f"grpc.{kind}_reconnect_backoff_ms", 10) for kind in ("initial", "min", "max"))


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that may not listen yet."""

    address: str
    pid: int
    cpu_capacity: int


@dataclass(frozen=True, slots=True)
class DiskJob:
    """What was asked of `kvstore bench disk`; `folder` is on the file system to measure."""

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
        """Of a daemon with a disk tier in the folder `name`, with room for as many bytes of blocks."""
        capacity = ("--disk-capacity", self.disk_capacity(size_bytes), "--disk-reserve", 0)
        return ("--disk-path", self.folder / name, *capacity, "--disk-threads", self.threads)


def bench_spec(model: str, part_bytes: int) -> KVSpec:
    """Blocks of one part."""
    return KVSpec.uniform(
        model=model,
        revision="r1",
        dtype="uint8",
        block_tokens=16,
        layers=1,
        bytes_per_part=part_bytes,
        layout="bench",
    )


def bench_chain(spec: KVSpec, num_blocks: int, *, seed: int) -> list[BlockHash]:
    """A chain that has no block in common with those of other seeds."""
    tokens = np.arange(num_blocks * spec.block_tokens, dtype=np.uint32)
    tokens[0] = (1 << 32) - 1 - seed
    return chain(spec.namespace, tokens, block_tokens=spec.block_tokens)


@contextmanager
def running_daemon(*flags: object, size_bytes: int) -> Iterator[RunningDaemon]:
    """A daemon in its own process, with room in memory for the working set and an eighth more."""
    cpu_capacity = size_bytes + size_bytes // 8 + (192 << 20)
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        path = Path(folder) / "kvstore.sock"
        command = [sys.executable, "-m", "kvstore_server.cli", "serve", "--log-level", "warning"]
        own = ("--unix-socket", path, "--tcp-port", 0, "--cpu-capacity", cpu_capacity)
        process = subprocess.Popen([*command, *map(str, own), *map(str, flags)])
        try:
            yield RunningDaemon(f"unix:{path}", process.pid, cpu_capacity)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def aligned_memory(size_bytes: int) -> ByteArray:
    """Memory that O_DIRECT takes."""
    return np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)


def parents_of(hashes: list[BlockHash]) -> HashArray:
    """The block before each, which the first does not have, as the daemon takes them."""
    return unpack(pack([BlockHash(bytes(HASH_BYTES)), *hashes[:-1]]))


@contextmanager
def connected(daemon: RunningDaemon, spec: KVSpec) -> Iterator[KVClient]:
    """A client that is ready."""
    with KVClient(daemon.address, spec, options=ClientOptions(name="bench", timeout_s=DEADLINE_S)) as client:
        client.wait_ready(30)
        yield client


@contextmanager
def admin_of(daemon: RunningDaemon) -> Iterator[AdminStub]:
    """Its Admin service, which may not answer yet."""
    with grpc.insecure_channel(daemon.address, EAGER) as channel:
        yield AdminStub(channel)


def await_memory(daemon: RunningDaemon) -> None:
    """The daemon has taken its memory, which it does in the background after the start."""
    wanted = daemon.cpu_capacity - Settings().slab_bytes
    deadline = time.monotonic() + DEADLINE_S
    while int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[2]) * mmap.PAGESIZE < wanted:
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"{daemon.address}: its {wanted} bytes of memory are not there; free some memory")
        time.sleep(0.01)


@contextmanager
def open_tier(job: DiskJob, name: str, *, size_bytes: int) -> Iterator[DiskTier]:
    """The disk tier in this process, with room for as many bytes of blocks."""
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


def timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def random_bytes(into: ByteArray) -> None:
    """The memory is there, and holds bytes that do not compress; no two blocks are alike."""
    period = (1 << 20) + 64
    into[:] = np.resize(np.random.default_rng(0).integers(0, 256, period, np.uint8), into.size)


def store_all(client: Client, hashes: list[BlockHash], region: Region) -> None:
    """All of these blocks, none of which was there, are stored; the region is one after the other."""
    with client.store(hashes) as write:
        write.put_blocks(region.array.reshape(len(hashes), -1))
    assert write.num_new == len(hashes), f"stored {write.num_new} of {len(hashes)} blocks"


def load_all(client: Client, hashes: list[BlockHash], target: ByteArray) -> None:
    """All of these blocks are in the target, one after the other."""
    with client.load(hashes, into=BlockRows(target.reshape(len(hashes), -1))) as load:
        result = load.wait()
    assert result.num_loaded == len(hashes), f"loaded {result.num_loaded} of {len(hashes)} blocks"


def compared(seconds: dict[str, list[float]], *, limit: str) -> dict[str, Any]:
    """p50 and p99 of either of two, in milliseconds, and the `ratio` of the other to `limit`."""
    points = {name: (np.percentile(of, [50, 99]) * 1e3).tolist() for name, of in seconds.items()}
    shown = {name: {"p50_ms": round(p50, 3), "p99_ms": round(p99, 3)} for name, (p50, p99) in points.items()}
    (other,) = points.keys() - {limit}
    ratios = [round(mine / theirs, 2) for mine, theirs in zip(points[other], points[limit], strict=True)]
    return {**shown, "ratio": dict(zip(("p50", "p99"), ratios, strict=True))}


def progress(text: str) -> None:
    click.echo(f"bench: {text}", err=True)
