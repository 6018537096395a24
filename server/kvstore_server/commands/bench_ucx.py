"""`kvstore bench ucx`: loads and stores over ucx beside a bare transfer of the same pieces, in one run.

The bare transfer is what NIXL does between two processes with nothing around it: one thread posts pieces of as many
bytes as the daemon does, keeps as many under way, and waits by sleeping. Its initiator is a process of its own, as the
daemon is; the other end of both is in this one. Every bandwidth is the median of `rounds`; the ways take turns within a
round.
"""

import multiprocessing
import secrets
import statistics
import time
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from kvstore.transport.memory import address_of
from kvstore.transport.ucx import Agent, Op, Transfer, cut
from kvstore.types import IntArray
from kvstore_client import ClientOptions, KVClient
from kvstore_server.commands.measure import (
    DEADLINE_S,
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
from kvstore_server.transfers import FIRST_SLEEP_S, LONGEST_SLEEP_S, PEER_POSTS, posts

PARTS: Final = {"64k": 64 << 10, "1m": 1 << 20}


def run_ucx(*, device: str, size_bytes: int, threads: int, rounds: int) -> dict[str, float | int]:
    """Measures and returns all figures; progress goes to standard error."""
    figures: dict[str, float | int] = {}
    with ExitStack() as stack:
        bare = stack.enter_context(Bare(device, size_bytes))
        flags = ("--ucx-device", device, "--copy-threads", threads)
        daemon = stack.enter_context(running_daemon(*flags, size_bytes=size_bytes))
        for name, part_bytes in PARTS.items():
            spec = bench_spec(f"bench-{name}", part_bytes)
            options = ClientOptions(name="bench", timeout_s=DEADLINE_S, transport="ucx", ucx_device=device)
            with KVClient(daemon.address, spec, options=options) as client:
                client.wait_ready(DEADLINE_S)
                source, target = client.region(size_bytes), client.region(size_bytes)
                random_bytes(source.array)
                seconds: dict[str, list[float]] = {"store": [], "load": [], "bare_read": [], "bare_write": []}
                for number in range(rounds + 1):  # the first only warms up
                    progress(f"{part_bytes >> 10} KiB, round {number} of {rounds}")
                    hashes = bench_chain(spec, size_bytes // part_bytes, seed=number)
                    target.array[:] = 0
                    took = {
                        "store": timed(lambda: store_all(client, hashes, source)),  # noqa: B023 - called at once
                        "bare_read": bare.move(Op.READ, part_bytes),
                        "load": timed(lambda: load_all(client, hashes, target.array)),  # noqa: B023
                        "bare_write": bare.move(Op.WRITE, part_bytes),
                    }
                    assert np.array_equal(target.array, source.array), "what was loaded is not what was stored"
                    if number:
                        for way, value in took.items():
                            seconds[way].append(value)
            gbps = {way: size_bytes / statistics.median(values) / 1e9 for way, values in seconds.items()}
            figures |= {f"{way}_{name}_gbps": round(value, 2) for way, value in gbps.items()}
            figures[f"load_ratio_{name}"] = round(gbps["load"] / gbps["bare_write"], 3)
            figures[f"store_ratio_{name}"] = round(gbps["store"] / gbps["bare_read"], 3)
    return figures | {"size_bytes": size_bytes, "threads": threads, "rounds": rounds}


class Bare:
    """An agent in this process, and one in another that moves to and from its memory. A context manager."""

    def __init__(self, device: str, size_bytes: int) -> None:
        self._agent = Agent(secrets.token_hex(16), device=device)
        self._memory = aligned_memory(size_bytes)
        random_bytes(self._memory)
        address = address_of(self._memory)
        self._agent.register(address, size_bytes)
        spawn = multiprocessing.get_context("spawn")
        self._peer, theirs = spawn.Pipe()
        told = (self._agent.name, self._agent.metadata(address), address)
        self._process = spawn.Process(target=_initiate, args=(theirs, device, size_bytes, told), daemon=True)
        self._process.start()

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._peer.close()
        self._process.join(DEADLINE_S)
        self._agent.close()

    def move(self, op: Op, part_bytes: int) -> float:
        """Seconds for all of the memory, in pieces of that size."""
        self._peer.send((op, part_bytes))
        took: float = self._peer.recv()
        return took


def _initiate(peer: Any, device: str, size_bytes: int, told: tuple[str, bytes, int]) -> None:
    name, metadata, remote = told
    agent = Agent(secrets.token_hex(16), device=device, num_pollers=1)
    memory = aligned_memory(size_bytes)
    memory[:] = 1
    agent.register(address_of(memory), size_bytes)
    agent.add_peer(name, metadata, address=remote, size_bytes=size_bytes, device_id=0)
    while True:
        try:
            op, part_bytes = peer.recv()
        except EOFError:
            return
        begins = np.arange(0, size_bytes, part_bytes, dtype=np.int64)
        pieces = cut(begins + address_of(memory), begins + remote, np.full(len(begins), part_bytes))
        started = time.perf_counter()
        _move(agent, name, op, *pieces)
        peer.send(time.perf_counter() - started)


def _move(agent: Agent, name: str, op: Op, local: IntArray, remote: IntArray, sizes: IntArray) -> None:
    jobs = list(posts(sizes))[::-1]
    under_way: list[Transfer] = []
    sleep_s = FIRST_SLEEP_S
    while jobs or under_way:
        while jobs and len(under_way) < PEER_POSTS:
            job = jobs.pop()
            under_way.append(agent.begin(op, name, local=local[job], remote=remote[job], sizes=sizes[job], device_id=0))
        left = [transfer for transfer in under_way if not transfer.poll()]
        for transfer in under_way:
            if transfer.is_over:
                transfer.release()
        if len(left) == len(under_way):
            time.sleep(sleep_s)
            sleep_s = min(1.5 * sleep_s, LONGEST_SLEEP_S)
        else:
            sleep_s = FIRST_SLEEP_S
        under_way = left
