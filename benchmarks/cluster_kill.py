"""What does it cost when one of three daemons is killed under load?

    python benchmarks/cluster_kill.py [--replicas N] [--seconds N] [--json]

Three daemons, a Redis and one client, all on this machine (redis-server must be installed). The client asks for one
chain after the other, at random, as an engine does: it matches, loads what is found, compares every byte, and stores
the rest as if it had computed it. Meanwhile one daemon is killed. A request is the match and the load of one chain;
its deadline is that of both calls together.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import KVStoreError
from kvstore.hashing import chain
from kvstore.spec import KVSpec
from kvstore_client import BlockRows, ClientOptions, connect

SPEC = KVSpec.uniform(
    model="m", revision="r", dtype="uint8", block_tokens=16, layers=2, bytes_per_part=16384, layout="bench"
)
CHAINS, BLOCKS = 40, 256
TIMEOUT_S = 1.0
NODES = 3


def rows(number: int) -> np.ndarray:
    """`[BLOCKS, block_bytes]` of one chain."""
    period = np.random.default_rng(number).integers(0, 256, SPEC.block_bytes + 64, np.uint8)
    return np.resize(period, (BLOCKS, SPEC.block_bytes))


def run(*, replicas: int, seconds: float) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = folder / "redis.sock"
        binary = shutil.which("redis-server")
        assert binary is not None, "redis-server is not installed"
        command = [binary, "--port", "0", "--unixsocket", str(redis), "--save", "", "--logfile", str(folder / "log")]
        start(stack, command)
        nodes = []
        for number in range(NODES):
            flags = ["--unix-socket", str(folder / f"{number}.sock"), "--tcp-port", "0", "--cpu-capacity", "2GiB"]
            flags += ["--cluster-url", f"unix://{redis}", "--node-id", f"n{number}", "--replicas", str(replicas)]
            command = [sys.executable, "-m", "kvstore_server.cli", "serve", "--log-level", "error", "--no-prefault"]
            nodes.append(start(stack, command + flags))
        seeds = ",".join(f"unix:{folder}/{number}.sock" for number in range(NODES))
        client = connect(f"kvstore://{seeds}", SPEC, options=ClientOptions(timeout_s=TIMEOUT_S))
        stack.callback(client.close)
        client.wait_ready(30)
        time.sleep(4)  # all daemons know each other, and the client them
        tokens = np.arange(BLOCKS * SPEC.block_tokens, dtype=np.uint32)
        chains = []
        for number in range(CHAINS):
            tokens[0] = number
            chains.append(chain(SPEC.namespace, tokens, block_tokens=SPEC.block_tokens))
        data = [rows(number) for number in range(CHAINS)]
        target = np.zeros((BLOCKS, SPEC.block_bytes), np.uint8)
        done: list[tuple[float, float, float]] = []  # when it began, how long it took, share of blocks found and loaded
        wrong = 0
        killed_at = 0.0
        for number in range(CHAINS):
            with client.store(chains[number]) as write:
                write.put_blocks(data[number])
        time.sleep(2 * replicas)  # they are copied
        began = time.monotonic()
        while (now := time.monotonic()) < began + 2 * seconds:
            if not killed_at and now > began + seconds:
                nodes[1].kill()
                killed_at = now
            number = random.randrange(CHAINS)
            num_loaded = 0
            try:
                with client.match(chains[number]) as match:
                    if match.num_blocks:
                        num_loaded = client.load(match, into=BlockRows(target[: match.num_blocks])).wait().num_loaded
            except KVStoreError:
                pass  # recompute
            done.append((now, time.monotonic() - now, num_loaded / BLOCKS))
            wrong += int((target[:num_loaded] != data[number][:num_loaded]).sum())
            if num_loaded < BLOCKS:
                try:
                    with client.store(chains[number]) as write:
                        write.put_blocks(data[number])
                except KVStoreError:
                    pass  # skip this save
    return figures(done, killed_at, wrong=wrong, replicas=replicas)


def start(stack: ExitStack, command: list[str]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    stack.callback(process.wait, 30)
    stack.callback(process.kill)
    return process


def figures(done: list[tuple[float, float, float]], killed_at: float, *, wrong: int, replicas: int) -> dict[str, Any]:
    before = [found for at, _, found in done if at < killed_at]
    after = [(at - killed_at, found) for at, _, found in done if at >= killed_at]
    whole = [at for at, found in after if found < 1]
    last = [found for at, found in after if at > after[-1][0] / 2]
    return {
        "replicas": replicas,
        "requests": len(done),
        "wrong_bytes": wrong,
        "hit_rate_before": round(float(np.mean(before)), 4),
        "hit_rate_after": round(float(np.mean(last)), 4),  # in the second half of the time after the kill
        "slowest_request_s": round(max(took for _, took, _ in done), 3),
        "deadline_s": 2 * TIMEOUT_S,
        "last_miss_after_s": round(max(whole, default=0.0), 3),  # after the kill
        "last_slow_after_s": round(
            max((at - killed_at for at, took, _ in done if at >= killed_at and took > TIMEOUT_S / 2), default=0.0), 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=15, help="before the kill, and after it")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = run(replicas=arguments.replicas, seconds=arguments.seconds)
    print(json.dumps(result) if arguments.json else "\n".join(f"{key:20} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
