"""What the benchmarks share: blocks to store, daemons in their own processes, and timing."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from kvstore.hashing import chain
from kvstore.spec import KVSpec
from kvstore.types import BlockHash, ByteArray
from kvstore_client import BlockRows, KVClient, Region

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class RunningDaemon:
    """A daemon that may not listen yet."""

    address: str
    pid: int
    cpu_capacity: int


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


def timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def random_bytes(into: ByteArray) -> None:
    """The memory is there, and holds bytes that do not compress; no two blocks are alike."""
    period = (1 << 20) + 64
    into[:] = np.resize(np.random.default_rng(0).integers(0, 256, period, np.uint8), into.size)


def store_all(client: KVClient, hashes: list[BlockHash], region: Region) -> None:
    """All of these blocks, none of which was there, are stored; the region is one after the other."""
    with client.store(hashes) as write:
        write.put_blocks(region.array.reshape(len(hashes), -1))
    assert write.num_new == len(hashes), f"stored {write.num_new} of {len(hashes)} blocks"


def load_all(client: KVClient, hashes: list[BlockHash], target: ByteArray) -> None:
    """All of these blocks are in the target, one after the other."""
    with client.load(hashes, into=BlockRows(target.reshape(len(hashes), -1))) as load:
        result = load.wait()
    assert result.num_loaded == len(hashes), f"loaded {result.num_loaded} of {len(hashes)} blocks"


def progress(text: str) -> None:
    click.echo(f"bench: {text}", err=True)
