"""`kvstore bench clients`: many engines that load at once over ucx, beside one, and what they cost while idle.

Every client is a process with a region of its own, into which it loads the same blocks again and again, and in which it
then compares every byte. All begin at one word, and the bandwidth is that of all of them, from the first byte to the
last. How late the daemon's loop is says the daemon itself (`kvstore_loop_gap_seconds`).
"""

import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import ClientOptions, KVClient
from kvstore_server.commands.measure import (
    DEADLINE_S,
    RunningDaemon,
    admin_of,
    bench_chain,
    bench_spec,
    load_all,
    progress,
    random_bytes,
    running_daemon,
    store_all,
)

PART_BYTES: Final = 256 << 10
IDLE_S: Final = 10.0
CLIENT_NICE: Final = 10  # they stand for other hosts, whose processors the daemon does not share
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def run_clients(*, device: str, num_clients: int, size_bytes: int, rounds: int) -> dict[str, float | int]:
    """Measures and returns all figures; progress goes to standard error."""
    spec = bench_spec("bench-clients", PART_BYTES)
    hashes = bench_chain(spec, size_bytes // PART_BYTES, seed=0)
    with ExitStack() as stack:
        daemon = stack.enter_context(running_daemon("--ucx-device", device, size_bytes=size_bytes))
        admin = stack.enter_context(admin_of(daemon))
        admin.Stats(pb.StatsRequest(), wait_for_ready=True, timeout=DEADLINE_S)
        options = ClientOptions(name="bench", timeout_s=DEADLINE_S)
        with KVClient(daemon.address, spec, options=options) as writer:
            writer.wait_ready(DEADLINE_S)
            region = writer.region(size_bytes)
            random_bytes(region.array)
            store_all(writer, hashes, region)
        clients = [stack.enter_context(Engine(daemon, device, size_bytes, rounds)) for _ in range(num_clients)]
        for number, client in enumerate(clients):
            client.hear()
            progress(f"{number + 1} of {num_clients} clients are connected")
        idle_share = _idle_share(daemon)
        alone = [_gbps(clients[:1], size_bytes, rounds) for _ in range(num_clients)]
        before = admin.Stats(pb.StatsRequest()).loop_gaps
        together = _gbps(clients, size_bytes, rounds)
        gap_s = late_by(before, admin.Stats(pb.StatsRequest()).loop_gaps, share=0.99)
        wrong = sum(client.wrong_bytes for client in clients)
    alone_gbps = sorted(alone)[len(alone) // 2]
    return {
        "clients": num_clients,
        "wrong_bytes": wrong,
        "one_gbps": round(alone_gbps, 2),
        "all_gbps": round(together, 2),
        "all_ratio": round(together / alone_gbps, 3),
        "loop_gap_p99_ms": round(gap_s * 1e3, 1),
        "idle_core_share": round(idle_share, 4),
        "size_bytes": size_bytes,
        "rounds": rounds,
    }


class Engine:
    """A client in a process of its own. A context manager."""

    def __init__(self, daemon: RunningDaemon, device: str, size_bytes: int, rounds: int) -> None:
        self.wrong_bytes = 0
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_load, args=(theirs, daemon.address, device, size_bytes, rounds))
        self._process.start()
        theirs.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._pipe.close()
        self._process.join(DEADLINE_S)

    def begin(self) -> None:
        """It loads from now on."""
        self._pipe.send("load")

    def hear(self) -> Any:
        """What it says next. Raises: EOFError, if it is gone."""
        if not self._pipe.poll(DEADLINE_S):
            raise TimeoutError(f"client {self._process.pid}: expected it to be done within {DEADLINE_S:g} s")
        return self._pipe.recv()


def _load(pipe: Connection, address: str, device: str, size_bytes: int, rounds: int) -> None:
    """In its own process: loads and compares, whenever it is told to."""
    os.nice(CLIENT_NICE)
    spec = bench_spec("bench-clients", PART_BYTES)
    hashes = bench_chain(spec, size_bytes // PART_BYTES, seed=0)
    options = ClientOptions(name="bench", timeout_s=DEADLINE_S, transport="ucx", ucx_device=device)
    with KVClient(address, spec, options=options) as client:
        client.wait_ready(DEADLINE_S)
        target = client.region(size_bytes).array
        expected = target.copy()
        random_bytes(expected)
        pipe.send("ready")
        while True:
            try:
                pipe.recv()
            except EOFError:
                return
            target[:] = 0
            began = time.monotonic()
            for _ in range(rounds):
                load_all(client, hashes, target)
            ended = time.monotonic()
            pipe.send((began, ended, int((target != expected).sum())))


def _gbps(clients: Sequence[Engine], size_bytes: int, rounds: int) -> float:
    """Of all of these together."""
    for client in clients:
        client.begin()
    told = [client.hear() for client in clients]
    for client, (_, _, wrong_bytes) in zip(clients, told, strict=True):
        client.wrong_bytes += wrong_bytes
    took: float = max(ended for _, ended, _ in told) - min(began for began, _, _ in told)
    return len(clients) * rounds * size_bytes / took / 1e9


def _idle_share(daemon: RunningDaemon) -> float:
    """The share of a core that the daemon takes while nobody asks anything."""
    progress(f"idle for {IDLE_S:g} s")
    before, began = _core_s(daemon.pid), time.monotonic()
    time.sleep(IDLE_S)
    return (_core_s(daemon.pid) - before) / (time.monotonic() - began)


def _core_s(pid: int) -> float:
    """Seconds of a core that the process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def late_by(before: pb.LoopGaps, after: pb.LoopGaps, *, share: float) -> float:
    """The least bound, in seconds, that so large a share of the gaps between two looks did not exceed."""
    counts = [new - old for old, new in zip(before.counts, after.counts, strict=True)]
    needed, seen = share * sum(counts), 0
    for bound_s, count in zip(after.bounds_s, counts[:-1], strict=True):
        seen += count
        if seen >= needed:
            return float(bound_s)
    return float("inf")
