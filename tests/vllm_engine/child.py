"""One vLLM engine in a process of its own. Reads a request a line from stdin, answers a line on stdout, both JSON.

argv: the engine's arguments as JSON; `kv_transfer_config` among them is a dict.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.errors import BlockCorrupt


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints goes to the log
    arguments = json.loads(sys.argv[1])
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if config := arguments.pop("kv_transfer_config", None):
        arguments["kv_transfer_config"] = KVTransferConfig(**config)
    engine = LLM(**arguments)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = OPERATIONS[request.pop("op")](engine, **request)
        print(json.dumps(answer), file=answers, flush=True)
    engine.llm_engine.engine_core.shutdown()


def generate(
    engine: Any,
    prompts: list[list[int]],
    max_tokens: int = 8,
    transfer: dict[str, Any] | None = None,
    adapter: str | None = None,
) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    extra = {"kv_transfer_params": transfer} if transfer else None
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra)
    began = time.perf_counter()
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = engine.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "reasons": [output.outputs[0].finish_reason for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "seconds": time.perf_counter() - began,
    }


def counters(engine: Any) -> dict[str, int]:
    """The connector's Prometheus series, without prefix."""
    metrics = engine.get_metrics()
    prefix = "vllm:kvstore_"
    return {m.name.removeprefix(prefix): int(m.value) for m in metrics if m.name.startswith(prefix)}


def preemptions(engine: Any) -> int:
    return sum(int(m.value) for m in engine.get_metrics() if m.name == "vllm:num_preemptions")


def groups(engine: Any) -> list[tuple[str, int | None, list[str]]]:
    """(kind of attention, window, layers) of each KV cache group."""
    config = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    return [
        (type(group.kv_cache_spec).__name__, getattr(group.kv_cache_spec, "sliding_window", None), group.layer_names)
        for group in config.kv_cache_groups
    ]


def free_blocks(engine: Any) -> int:
    return int(engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def reset(engine: Any, connector: bool = False) -> bool:
    """The engine's own prefix cache is empty."""
    return bool(engine.reset_prefix_cache(reset_connector=connector))


def abort(engine: Any, prompt: list[int], held: str) -> bool:
    """A request was given up while it was held at `held` (see `hold_copies`); whether the engine has forgotten it."""
    from vllm import SamplingParams

    inner = engine.llm_engine
    inner.add_request("doomed", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, detokenize=False))
    while not Path(held, "begun").exists():
        inner.step()
    inner.abort_request(["doomed"])
    inner.step()
    Path(held, "go").touch()
    while inner.has_unfinished_requests():
        inner.step()
    return True


# Faults, put where the bytes pass.


def _around_copies(wrapped: Callable[..., Any]) -> None:
    from kvstore_client.source import Source

    original = Source.copy

    def copy(self: Any, part: int, blocks: Any, into: Any, **how: Any) -> Any:
        return wrapped(original, self, part, blocks, into, **how)

    Source.copy = copy


def zero_loads(engine: Any, parts: list[int] | None = None) -> None:
    """From now on every load brings zeros, of these parts or of all, and says that all is well."""

    def zeros(original: Any, self: Any, part: int, blocks: Any, into: Any, **how: Any) -> Any:
        errors = original(self, part, blocks, into, **how)
        for block in blocks.tolist() if parts is None or part in parts else ():
            into.rows[block][:] = 0
        return errors

    _around_copies(zeros)


def fail_block(engine: Any, index: int, part: int) -> None:
    """From now on this part of block `index` of every load is found corrupt, its bytes spoiled."""

    def fails(original: Any, self: Any, number: int, blocks: Any, into: Any, **how: Any) -> Any:
        errors = original(self, number, blocks, into, **how)
        if number == part and index in blocks.tolist():
            into.rows[index][:] = 255
            errors[index] = BlockCorrupt(f"block {index}: spoiled by the test")
        return errors

    _around_copies(fails)


def hold_copies(engine: Any, folder: str) -> None:
    """From now on a load says `begun` before it copies, and waits for `go`; both are files in this folder."""

    def held(original: Any, *arguments: Any, **how: Any) -> Any:
        _rendezvous(folder)
        return original(*arguments, **how)

    _around_copies(held)


def hold_puts(engine: Any, folder: str) -> None:
    """As `hold_copies`, for saves, at each layer but the first."""
    from kvstore_client.write import Write

    original = Write.put

    def put(self: Any, part: int, *arguments: Any, **how: Any) -> None:
        if part:
            _rendezvous(folder)
        original(self, part, *arguments, **how)

    Write.put = put  # type: ignore[method-assign]


def _rendezvous(folder: str) -> None:
    Path(folder, "begun").touch()
    deadline = time.monotonic() + 60
    while not Path(folder, "go").exists() and time.monotonic() < deadline:
        time.sleep(0.002)


OPERATIONS: dict[str, Callable[..., Any]] = {
    operation.__name__: operation
    for operation in (
        generate,
        counters,
        preemptions,
        groups,
        free_blocks,
        reset,
        abort,
        zero_loads,
        fail_block,
        hold_copies,
        hold_puts,
    )
}

if __name__ == "__main__":
    main()
