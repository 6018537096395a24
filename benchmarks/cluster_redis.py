"""Are matches, stores and loads as fast with Redis down as with it? In turns, in the same run.

    python benchmarks/cluster_redis.py [--phases 10] [--rounds 60] [--blocks 1000] [--part-bytes 65536] [--json]

Three daemons, a Redis and one client, all on this machine (redis-server must be installed). In a phase Redis is there,
in the next it has been killed and every daemon has noticed, and so on. In each, `--rounds` times, the client stores a
chain from a region, matches it, and loads it into memory of its own, where every byte is compared. Times are in ms, and
`ratio` is that without Redis over that with it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore_client import Client, ClientOptions, connect
from kvstore_server.commands.measure import (
    DEADLINE_S,
    bench_chain,
    bench_spec,
    compared,
    load_all,
    random_bytes,
    running_daemon,
    store_all,
    timed,
)

NUM_DAEMONS = 3
TTL_S = 3.0
PAUSE_S = 0.05
STEPS = ("store", "match", "load")
Seconds = dict[str, dict[str, list[float]]]  # by step and by whether Redis was there


class Redis:
    """On a unix socket, without persistence: each time it starts it knows nothing."""

    def __init__(self, folder: Path) -> None:
        binary = shutil.which("redis-server")
        assert binary is not None, "redis-server is not installed"
        path = folder / "redis.sock"
        self.url = f"unix://{path}"
        self._command = [binary, "--port", "0", "--unixsocket", str(path), "--save", "", "--logfile", os.devnull]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Phases:
    """Rounds of a client, in phases with Redis and without it."""

    def __init__(self, client: Client, admins: list[AdminStub], redis: Redis, *, num_blocks: int) -> None:
        self._client, self._admins, self._redis = client, admins, redis
        self._hashes = bench_chain(client.spec, num_blocks, seed=0)
        self._region = client.region(num_blocks * client.spec.block_bytes)
        random_bytes(self._region.array)
        self._target = np.zeros(self._region.array.size, np.uint8)
        self.seconds: Seconds = {step: {"with": [], "without": []} for step in STEPS}
        self.wrong_bytes = 0

    def run(self, name: str, *, rounds: int) -> None:
        self._clear()
        if name == "with":
            self._redis.start()
        else:
            self._redis.kill()
        for admin in self._admins:
            _await(lambda admin=admin: _is_settled(admin, stale=name == "without"))
        for number in range(rounds + 1):
            took = self._round()
            if number:  # the first comes behind a pause, and maps memory
                for step, seconds in took.items():
                    self.seconds[step][name].append(seconds)

    def _round(self) -> dict[str, float]:
        """Seconds of each step; what is stored is different from what was before."""
        self._clear()
        self._region.array[:] += 1
        self._target[:] = 0
        steps: dict[str, Callable[[], None]] = {
            "store": lambda: store_all(self._client, self._hashes, self._region),
            "match": self._match,
            "load": lambda: load_all(self._client, self._hashes, self._target),
        }
        took = {step: timed(work) for step, work in steps.items()}
        self.wrong_bytes += int(np.count_nonzero(self._target != self._region.array))
        return took

    def _match(self) -> None:
        with self._client.match(self._hashes) as match:
            assert match.num_found == len(self._hashes), f"found {match.num_found} of {len(self._hashes)} blocks"

    def _clear(self) -> None:
        for admin in self._admins:
            admin.Clear(pb.ClearRequest())


def measure(*, phases: int, rounds: int, num_blocks: int, part_bytes: int) -> dict[str, Any]:
    with ExitStack() as stack:
        redis = Redis(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        redis.start()
        stack.callback(redis.kill)
        addresses = []
        for number in range(NUM_DAEMONS):
            flags = ("--cluster-url", redis.url, "--cluster-ttl-s", TTL_S, "--node-id", f"n{number}")
            daemon = running_daemon(*flags, "--log-level", "error", size_bytes=2 * num_blocks * part_bytes)
            addresses.append(stack.enter_context(daemon).address)
        admins = [AdminStub(stack.enter_context(grpc.insecure_channel(address))) for address in addresses]
        for admin in admins:
            admin.Stats(pb.StatsRequest(), wait_for_ready=True, timeout=DEADLINE_S)
            _await(lambda admin=admin: _is_settled(admin, stale=False))
        options = ClientOptions(name="bench", timeout_s=DEADLINE_S)
        spec = bench_spec("cluster", part_bytes)
        client = stack.enter_context(connect("kvstore://" + ",".join(addresses), spec, options=options))
        client.wait_ready(DEADLINE_S)
        redis.kill()
        turns = Phases(client, admins, redis, num_blocks=num_blocks)
        for number in range(phases):
            name = ("with", "without")[number % 2]
            turns.run(name, rounds=rounds)
            if sys.stderr.isatty():
                print(f"phase {number + 1} of {phases}, {name} Redis", file=sys.stderr)
    return {
        "daemons": NUM_DAEMONS,
        "phases": phases,
        "rounds": rounds,
        "blocks": num_blocks,
        "part_bytes": part_bytes,
        "wrong_bytes": turns.wrong_bytes,
        **{step: compared(seconds, limit="with") for step, seconds in turns.seconds.items()},
    }


def _is_settled(admin: AdminStub, *, stale: bool) -> bool:
    """Whether this daemon knows all members, and that Redis is there or not."""
    reply = next(admin.Members(pb.MembersRequest(), timeout=DEADLINE_S))
    return len(reply.members) == NUM_DAEMONS and reply.stale == stale


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the daemons do not agree on who they are"
        time.sleep(PAUSE_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", type=int, default=10, help="at least 2: half of them with Redis")
    parser.add_argument("--rounds", type=int, default=60, help="of each phase")
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--part-bytes", type=int, default=65536)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = {"num_blocks": arguments.blocks, "part_bytes": arguments.part_bytes}
    result = measure(phases=max(2, arguments.phases), rounds=arguments.rounds, **sizes)
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:12}{value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
