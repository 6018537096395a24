"""An engine as a test sees it: started with some arguments, asked, ended; and the prompts that it is asked."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from service.harness import eventually

CHILD = Path(__file__).with_name("child.py")
BLOCK_TOKENS = 32
LAYERS = 4
START_S = 180.0

TINY: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "dtype": "float32",
    "seed": 0,
    "block_size": BLOCK_TOKENS,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
}


def prompt(num_tokens: int, *, seed: int = 7) -> list[int]:
    return [(seed * index) % 500 + 3 for index in range(num_tokens)]


def transfer_config(address: str, *, role: str = "kv_both", **options: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVStoreConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, "timeout_s": 10.0, "load_timeout_s": 20.0} | options,
    }


class Engine:
    """One engine in its own process. A context manager."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        transfer: dict[str, Any] | None = None,
        *,
        prefix: tuple[str, ...] = (),  # a command that runs it elsewhere
        **arguments: Any,
    ) -> None:
        self.log = folder / "engine.log"
        command = TINY | {"model": str(model)} | arguments
        if transfer is not None:
            command["kv_transfer_config"] = transfer
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # the ranks of an engine would fight over few cores
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(CHILD), json.dumps(command)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        self._pool = ThreadPoolExecutor(1)
        self._lock = threading.Lock()
        self._ready = self._pool.submit(self._read)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def ask(self, op: str, **arguments: Any) -> Any:
        """The answer. Raises: AssertionError, with the end of the log, if the engine has ended."""
        return self.begin(op, **arguments).result(START_S)

    def begin(self, op: str, **arguments: Any) -> "Future[Any]":
        """As `ask`, without waiting."""
        self._ready.result(START_S)
        return self._pool.submit(self._ask, op, arguments)

    def generate(self, prompts: list[list[int]], **arguments: Any) -> list[list[int]]:
        """The tokens that follow each prompt; every request has ended well."""
        answer = self.ask("generate", prompts=prompts, **arguments)
        assert answer["reasons"] == ["length"] * len(prompts), answer
        tokens: list[list[int]] = answer["tokens"]
        return tokens

    def counters(self) -> dict[str, int]:
        counted: dict[str, int] = self.ask("counters")
        return counted

    def counted(self, condition: Callable[[dict[str, int]], bool], what: str = "counters") -> dict[str, int]:
        """The counters once they fulfil the condition. They come with the engine's steps, so it is made to step."""

        def look() -> dict[str, int] | None:
            self.generate([prompt(4)], max_tokens=2)
            counters = self.counters()
            return counters if condition(counters) else None

        try:
            counters: dict[str, int] = eventually(look, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; counters {self.counters()}\n{self.tail()}") from None
        return counters

    def tail(self) -> str:
        return self.log.read_text()[-3000:]

    def kill(self) -> None:
        """SIGKILL: nothing is tidied up."""
        self._process.kill()

    def close(self) -> None:
        """The engine has ended, well or not. Idempotent."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)
        self._pool.shutdown(wait=True)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def start_failure(self) -> str:
        """The log of an engine that could not start."""
        assert self._process.wait(START_S) != 0, "the engine started"
        return self.log.read_text()

    def _ask(self, op: str, arguments: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op} | arguments) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise AssertionError(f"the engine has ended\n{self.tail()}") from None
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the engine has ended\n{self.tail()}")
        return json.loads(line)
