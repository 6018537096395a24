"""The example of prefill and decode apart: an OpenAI client streams through its proxy."""

import json
import os
import random
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service.harness import NO_UCX, eventually, made_hosts
from vllm_engine.engine import BLOCK_TOKENS, prompt
from vllm_engine.model import write_model, write_tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_pd" / "pd.py"
PROMPT = prompt(300, seed=17)
NUM_BLOCKS = len(PROMPT) // BLOCK_TOKENS


def free_ports() -> int:
    """The first of three ports in a row that are free now."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        try:
            for number in (port, port + 1, port + 2):
                with socket.socket() as each:
                    each.bind(("127.0.0.1", number))
        except (OSError, OverflowError):
            continue
        return port


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts the example, as these arguments say; returns the proxy's port."""
    model, folder = tmp_path / "model", tmp_path / "run"
    write_model(model)
    write_tokenizer(model)
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(EXAMPLE)]

    def up(*arguments: str) -> int:
        port = free_ports()
        how = ["--model", str(model), "--folder", str(folder), "--port", str(port), *arguments]
        how += ["--capacity", "64MiB", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
        how += ["--dtype", "float32", "--block-size", str(BLOCK_TOKENS), "--served-model-name", "tiny"]
        subprocess.run([*command, "up", *how], env=environment, check=True, timeout=400)
        return port

    yield up
    subprocess.run([*command, "down", "--folder", str(folder)], env=environment, check=True, timeout=200)
    assert not list(folder.glob("*.pid"))


def series(host: str, port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:kvstore_{name}_total"))


@pytest.fixture
def network() -> Iterator[str]:
    """Of hosts, without the last number, which are gone in the end; skips the test where there can be none."""
    with made_hosts("any"):
        name = f"198.18.{random.randrange(256)}"
    yield name
    assert not list(Path("/run/netns").glob(f"kv-{name}-*"))


def num_prefilled(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
        prefilled: int = json.load(answer)["prefilled"]
    return prefilled


def check_stream(port: int, expected: list[int]) -> None:
    """A client streams these tokens from the proxy, which has asked prefill, too."""
    import openai

    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        how: dict[str, Any] = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}
        client.completions.create(prompt=prompt(20), max_tokens=1, **how)  # no block of it; now all are connected
        stream = client.completions.create(prompt=PROMPT, max_tokens=8, stream=True, **how)
        pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces).split() == [f"w{token}" for token in expected]
    # Decode does not wait for prefill's answer, which nobody reads: it may come after decode's.
    eventually(lambda: num_prefilled(port) == 2, "prefill has answered both")


@pytest.mark.parametrize("dispatch", ["concurrent", "sequential"])
def test_client_streams_what_prefill_and_decode_computed_together(
    servers: Callable[..., int], reference: Callable[..., list[list[int]]], dispatch: str
) -> None:
    (expected,) = reference([PROMPT])
    port = servers("--dispatch", dispatch)
    check_stream(port, expected)
    assert series("127.0.0.1", port + 2, "hit_tokens") == NUM_BLOCKS * BLOCK_TOKENS


@pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)
def test_client_streams_what_prefill_and_decode_computed_on_a_host_each(
    network: str, servers: Callable[..., int], reference: Callable[..., list[list[int]]]
) -> None:
    (expected,) = reference([PROMPT])
    port = servers("--dispatch", "concurrent", "--transport", "ucx", "--network", network)
    check_stream(port, expected)
    assert series(f"{network}.3", port + 2, "hit_tokens") == NUM_BLOCKS * BLOCK_TOKENS
