"""What does the store do to vLLM's time to first token? Cold, cold while saving, and in a second process.

    .venv-vllm/bin/python benchmarks/vllm_ttft.py MODEL [--rounds N] [--tokens N] [--json]

Three engines on this machine: without a connector, with kvstore, and with vLLM's own ExampleConnector (files in
/dev/shm). In each round each of them computes one prompt that nobody has seen, in turn, another first each time. Then
two new engines, one with kvstore and one with the files, are asked the same prompts. Figures are medians, also of the
ratio to the engine without a connector in the same round; each engine computes another prompt first, to warm up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

CHILD = """
import json, os, sys, time
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
arguments = json.loads(sys.argv[1])
if config := arguments.pop("kv_transfer_config", None):
    arguments["kv_transfer_config"] = KVTransferConfig(**config)
engine = LLM(**arguments)
one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
for line in sys.stdin:
    began = time.perf_counter()
    output = engine.generate([{"prompt_token_ids": json.loads(line)}], one, use_tqdm=False)[0]
    seconds = time.perf_counter() - began
    print(json.dumps([seconds, output.num_cached_tokens, list(output.outputs[0].token_ids)]), file=answers, flush=True)
"""


def prompt(num_tokens: int, *, seed: int) -> list[int]:
    return [1000 + (seed * 7919 + index * (31 + seed)) % 40_000 for index in range(num_tokens)]


class Engine:
    """One engine in a process of its own."""

    def __init__(self, model: str, log: Path, transfer: dict[str, Any] | None) -> None:
        arguments: dict[str, Any] = {
            "model": model,
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 2,
            "dtype": "float32",
            "block_size": 32,
            "enable_prefix_caching": False,
        }
        if transfer is not None:
            arguments["kv_transfer_config"] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"} | transfer
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [sys.executable, "-c", CHILD, json.dumps(arguments)]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True
            )

    def first_token(self, tokens: list[int]) -> tuple[float, int, list[int]]:
        """(seconds, prompt tokens that were not computed, the token)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(tokens) + "\n")
        self._process.stdin.flush()
        seconds, cached, token = json.loads(self._process.stdout.readline())
        return seconds, cached, token

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextmanager
def daemon(folder: Path) -> Iterator[str]:
    socket = folder / "kvstore.sock"
    command = [sys.executable, "-m", "kvstore_server.cli", "serve", "--unix-socket", str(socket), "--tcp-port", "0"]
    with (folder / "daemon.log").open("wb") as log:
        process = subprocess.Popen([*command, "--cpu-capacity", "2GiB"], stderr=log)
    try:
        while not socket.exists():
            if process.poll() is not None:
                sys.exit((folder / "daemon.log").read_text())
            time.sleep(0.05)
        yield f"unix:{socket}"
    finally:
        process.terminate()
        process.wait(30)


def measure(model: str, *, rounds: int, num_tokens: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        address = stack.enter_context(daemon(folder))
        transfers: dict[str, dict[str, Any] | None] = {
            "none": None,
            "kvstore": {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"address": address}},
            "example": {
                "kv_connector": "ExampleConnector",
                "kv_connector_extra_config": {"shared_storage_path": str(folder / "files")},
            },
        }
        (folder / "files").mkdir()
        cold: dict[str, list[float]] = {name: [] for name in transfers}
        warm: dict[str, list[float]] = {"kvstore": [], "example": []}
        tokens: list[list[int]] = []
        engines = {name: Engine(model, folder / f"{name}.log", transfer) for name, transfer in transfers.items()}
        for number, engine in enumerate(engines.values()):
            engine.first_token(prompt(num_tokens, seed=900 + number))
        names = list(engines)
        for turn in range(rounds):
            said = {}
            for name in [*names[turn % 3 :], *names[: turn % 3]]:
                seconds, cached, said[name] = engines[name].first_token(prompt(num_tokens, seed=turn))
                assert cached == 0, f"{name}: expected a cold prompt, got {cached} cached tokens"
                cold[name].append(seconds)
            tokens.append(said["none"])
            assert said == dict.fromkeys(names, tokens[turn]), f"another token: {said}"
        for engine in engines.values():
            engine.close()
        second = {name: Engine(model, folder / f"{name}-2.log", transfers[name]) for name in warm}
        for number, engine in enumerate(second.values()):
            engine.first_token(prompt(num_tokens, seed=950 + number))
        for turn in range(rounds):
            for name, engine in second.items():
                seconds, cached, token = engine.first_token(prompt(num_tokens, seed=turn))
                assert cached > 0, f"{name}: nothing was loaded"
                assert token == tokens[turn], f"{name}: another token"
                warm[name].append(seconds)
        for engine in second.values():
            engine.close()
    return {
        "model": model,
        "prompt_tokens": num_tokens,
        "rounds": rounds,
        "cold_s": {name: round(statistics.median(values), 3) for name, values in cold.items()},
        "cold_ratio": {
            name: round(statistics.median(a / b for a, b in zip(values, cold["none"], strict=True)), 3)
            for name, values in cold.items()
        },
        "second_process_s": {name: round(statistics.median(values), 3) for name, values in warm.items()},
        "all": {"cold": cold, "second_process": warm},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1566)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(arguments.model, rounds=arguments.rounds, num_tokens=arguments.tokens)
    if arguments.json:
        print(json.dumps(result))
        return
    cold, warm = result["cold_s"], result["second_process_s"]
    print(f"{arguments.tokens} tokens, median of {arguments.rounds}, seconds to the first token")
    for name, seconds in cold.items():
        line = f"  {name:8}  cold {seconds:6.3f} (x {result['cold_ratio'][name]:.3f})"
        print(
            line + (f"   second process {warm[name]:6.3f} (1/{cold['none'] / warm[name]:.1f})" if name in warm else "")
        )


if __name__ == "__main__":
    main()
