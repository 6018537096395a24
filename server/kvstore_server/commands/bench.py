"""`kvstore bench local`: the shm data path beside plain memcpy, in one run, with real daemons in their own processes.

Every bandwidth is the median of `rounds`; the paths take turns within a round, so that what else the machine
does falls on all of them alike.
"""

import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

import numpy as np

from kvstore.types import HASH_BYTES, BlockHash, ByteArray
from kvstore_client import ClientOptions, KVClient
from kvstore_server.commands.measure import (
    aligned_memory,
    bench_chain,
    bench_spec,
    load_all,
    progress,
    random_bytes,
    running_daemon,
    store_all,
    timed,
)

SMALL_BLOCKS = 8192

# Answers each datagram on standard input with two bytes, until there are no more.
ECHO = """
import socket
peer = socket.socket(fileno=0)
buffer = bytearray(1 << 20)
while peer.recv_into(buffer):
    peer.send(b"ok")
"""


def run_local(*, size_bytes: int, part_bytes: int, threads: int, rounds: int) -> dict[str, float | int]:
    """Measures and returns all figures; progress goes to standard error."""
    num_blocks = size_bytes // part_bytes
    spec = bench_spec("bench", part_bytes)
    copy = ("--copy-threads", threads)
    with ExitStack() as stack:
        checked = stack.enter_context(running_daemon("--checksums", *copy, size_bytes=size_bytes))
        raw = stack.enter_context(running_daemon("--no-checksums", *copy, size_bytes=size_bytes))
        options = ClientOptions(name="bench", copy_threads=threads, timeout_s=60)
        client = stack.enter_context(KVClient(checked.address, spec, options=options))
        raw_client = stack.enter_context(KVClient(raw.address, spec, options=options))
        for each in (client, raw_client):
            each.wait_ready(30)
        small = _small_blocks(checked.address, options, stack)
        progress("filling the regions with random bytes")
        region, raw_region = client.region(size_bytes), raw_client.region(size_bytes)
        # Aligned to pages: where a target begins 16 bytes into a cache line, as NumPy's own memory does, memcpy
        # runs at a third of its speed on some processors, and would be no limit to measure against.
        target = aligned_memory(size_bytes)
        random_bytes(region.array)
        raw_region.array[:] = region.array
        seconds: dict[str, list[float]] = {"memcpy": [], "store": [], "load": [], "store_raw": []}
        for number in range(rounds + 1):  # the first only warms up
            progress(f"round {number} of {rounds}: {num_blocks} blocks of {part_bytes >> 10} KiB")
            hashes = bench_chain(spec, num_blocks, seed=number)
            took = {
                "memcpy": timed(lambda: _memcpy(target, region.array, part_bytes, threads)),
                "store": timed(lambda: store_all(client, hashes, region)),  # noqa: B023 - called at once
                "load": timed(lambda: load_all(client, hashes, target)),  # noqa: B023
                "store_raw": timed(lambda: store_all(raw_client, hashes, raw_region)),  # noqa: B023
            }
            assert np.array_equal(target, region.array), "what was loaded is not what was stored"
            if number:
                for name, value in took.items():
                    seconds[name].append(value)
        view_us = _view_us(client, hashes)
        latencies = _match_latencies(*small)  # last: the daemons have taken all their memory by now
    gbps = {name: size_bytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    figures: dict[str, float | int] = {f"{name}_gbps": round(value, 2) for name, value in gbps.items()}
    figures |= {f"{name}_ratio": round(gbps[name] / gbps["memcpy"], 3) for name in ("load", "store", "store_raw")}
    figures |= {"view_us_per_block": round(view_us, 3), **latencies}
    return figures | {
        "size_bytes": size_bytes,
        "part_bytes": part_bytes,
        "threads": threads,
        "rounds": rounds,
    }


def _memcpy(target: ByteArray, source: ByteArray, piece: int, threads: int) -> None:
    """The limit: the same pieces copied by the same number of threads, and nothing else."""

    def copy(first: int) -> None:
        for begin in range(first * piece, source.size, piece * threads):
            np.copyto(target[begin : begin + piece], source[begin : begin + piece])

    workers = [threading.Thread(target=copy, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _view_us(client: KVClient, hashes: list[BlockHash]) -> float:
    """Microseconds a block for a load in place, views made and checked; the median of nine."""
    samples = []
    for _ in range(9):
        started = time.perf_counter()
        with client.load(hashes, view=True) as load:
            for block in range(len(hashes)):
                load.view(block, 0)
            load.check()
            samples.append(time.perf_counter() - started)
    return statistics.median(samples) / len(hashes) * 1e6


def _small_blocks(address: str, options: ClientOptions, stack: ExitStack) -> tuple[KVClient, list[BlockHash]]:
    """Blocks to match, held so that the large ones do not push them out."""
    spec = bench_spec("bench-small", 64)
    hashes = bench_chain(spec, SMALL_BLOCKS, seed=0)
    client = stack.enter_context(KVClient(address, spec, options=options))
    client.wait_ready(30)
    with client.store(hashes) as write:
        write.put_blocks(np.zeros((SMALL_BLOCKS, 64), np.uint8))
    stack.enter_context(client.match(hashes))
    return client, hashes


def _match_latencies(client: KVClient, hashes: list[BlockHash]) -> dict[str, float]:
    """Round trips of a match that finds everything and leases it; the release is not timed."""
    figures: dict[str, float] = {}
    for count, samples in ((1000, 2000), (SMALL_BLOCKS, 500)):
        progress(f"matching {count} blocks, {samples} times")
        asked = hashes[:count]
        micros = []
        for _ in range(samples):
            started = time.perf_counter()
            match = client.match(asked)
            micros.append((time.perf_counter() - started) * 1e6)
            assert match.num_blocks == count
            match.release()
        figures |= _percentiles(f"match_{count}", micros)
        figures |= _percentiles(f"echo_{count}", _echo_us(count * HASH_BYTES, samples))
    return figures


def _percentiles(name: str, micros: list[float]) -> dict[str, float]:
    """Of all but the first tenth, which warms up."""
    kept = sorted(micros[len(micros) // 10 :])
    return {
        f"{name}_p50_us": round(kept[len(kept) // 2], 1),
        f"{name}_p99_us": round(kept[int(len(kept) * 0.99)], 1),
    }


def _echo_us(size_bytes: int, samples: int) -> list[float]:
    """The limit: as many bytes as the hashes have, over a unix socket to another process that does nothing."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 19)
    message = bytes(size_bytes)
    with ours, subprocess.Popen([sys.executable, "-c", ECHO], stdin=theirs.fileno()) as process:
        theirs.close()
        micros = []
        for _ in range(samples):
            started = time.perf_counter()
            ours.send(message)
            ours.recv(16)
            micros.append((time.perf_counter() - started) * 1e6)
        ours.shutdown(socket.SHUT_RDWR)
        process.wait(10)
    return micros
