"""How long does the connector hold up vLLM's scheduler, for each request that it schedules?

    python benchmarks/vllm_scheduler.py [--requests N] [--blocks N] [--json]

No engine: the scheduler side is called as vLLM calls it, by requests that are stand-ins, with a real daemon. Measured
is all the time spent in it for one request: each question until it has its answer, the allocation, the step's plan.
Once with the daemon up and every block stored, once with the daemon stopped (SIGSTOP) and the circuit breaker open.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.spec import KVSpec
from kvstore.types import BlockHash
from kvstore_client.adapters.vllm.options import ConnectorOptions
from kvstore_client.adapters.vllm.scheduler import SchedulerSide
from kvstore_client.breaker import BreakerState
from kvstore_client.client import KVClient
from kvstore_client.options import ClientOptions

BLOCK_TOKENS = 32
SPEC = KVSpec.uniform(
    model="m", revision="r", dtype="uint8", block_tokens=BLOCK_TOKENS, layers=2, bytes_per_part=2048, layout="bench"
)


def hashes(name: int, count: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(b"%d/%d" % (name, index)).digest()) for index in range(count)]


def request(name: int, num_blocks: int) -> Any:
    num_tokens = num_blocks * BLOCK_TOKENS + 5
    return SimpleNamespace(
        request_id=str(name),
        num_tokens=num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_hashes=hashes(name, num_blocks),
        kv_transfer_params=None,
        lora_request=None,
        skip_reading_prefix_cache=False,
    )


def serve(side: SchedulerSide, one: Any, num_blocks: int) -> tuple[float, int]:
    """One request from its arrival to its end: (seconds in the connector, tokens that it was given)."""
    tables = (list(range(num_blocks + 1)),)
    spent = 0.0

    def timed(call: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal spent
        began = time.perf_counter()
        answer = call(*arguments, **named)
        spent += time.perf_counter() - began
        return answer

    timed(side.add, one)
    while (answer := timed(side.num_matched_tokens, one, 0))[0] is None:
        pass
    num_tokens: int = answer[0]
    timed(side.allocated, one, tables, num_tokens)
    timed(side.plan, {}, lambda request_id: tables)
    timed(side.heard, loaded={one.request_id}, failed=())
    timed(side.finished, one.request_id)
    return spent, num_tokens


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{point}_ms": round(float(np.percentile(values, point)) * 1e3, 3) for point in (50, 99)}


def measure(*, num_requests: int, num_blocks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "kvstore.sock")
        command = [sys.executable, "-m", "kvstore_server.cli", "serve", "--unix-socket", str(socket), "--tcp-port", "0"]
        daemon = subprocess.Popen([*command, "--cpu-capacity", "1GiB"], stderr=subprocess.DEVNULL)
        try:
            clients: list[KVClient] = []

            def open_client(identity: Any) -> KVClient:
                options = ClientOptions(timeout_s=0.2, breaker_cooldown_s=30.0)
                clients.append(KVClient(f"unix:{socket}", SPEC, options=options))
                return clients[-1]

            options = ConnectorOptions(address=f"unix:{socket}", timeout_s=0.2)
            side = SchedulerSide(
                options=options,
                revision="r",
                block_tokens=BLOCK_TOKENS,
                has_windows=False,
                saves=True,
                loads=True,
                open_client=open_client,
            )
            (client,) = clients
            client.wait_ready(20)
            for name in range(num_requests):
                with client.store(hashes(name, num_blocks)) as write:
                    write.put_blocks(np.zeros((num_blocks, SPEC.block_bytes), np.uint8))
            up = []
            for name in range(num_requests):
                spent, num_tokens = serve(side, request(name, num_blocks), num_blocks)
                assert num_tokens == num_blocks * BLOCK_TOKENS, "expected every block to be found"
                up.append(spent)
            os.kill(daemon.pid, signal.SIGSTOP)
            while client.statistics().breaker is not BreakerState.OPEN:
                serve(side, request(0, num_blocks), num_blocks)
            open_ = [serve(side, request(name, num_blocks), num_blocks)[0] for name in range(num_requests)]
            assert client.statistics().breaker is BreakerState.OPEN
            os.kill(daemon.pid, signal.SIGCONT)
            side.close()
        finally:
            daemon.kill()
            daemon.wait(30)
    return {"requests": num_requests, "blocks": num_blocks, "up": percentiles(up), "breaker_open": percentiles(open_)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(num_requests=arguments.requests, num_blocks=arguments.blocks)
    if arguments.json:
        print(json.dumps(result))
        return
    for name in ("up", "breaker_open"):
        print(f"{name:13} {result[name]['p50_ms']:7.3f} ms p50 {result[name]['p99_ms']:7.3f} ms p99")


if __name__ == "__main__":
    main()
