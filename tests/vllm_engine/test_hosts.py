"""Daemon, prefill and decode on a host each: bytes go by ucx, and tokens are those of an engine without a connector."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service.harness import NO_UCX, DaemonProcess, eventually, made_hosts
from vllm_engine.engine import BLOCK_TOKENS, LAYERS, Engine, prompt, transfer_config

from kvstore_server.commands.hosts import DEVICE, Hosts

pytestmark = pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX)

Reference = Callable[..., list[list[int]]]
EngineOn = Callable[..., Engine]

PROMPT = prompt(300, seed=17)
NUM_BLOCKS = 9
PORT = 7311


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with made_hosts("store", "prefill", "decode") as hosts:
        yield hosts


@pytest.fixture
def daemon(hosts: Hosts, make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    """On the host `store`. Its unix socket is a file, which namespaces of the network do not keep apart."""
    listening = {"tcp_host": hosts.address("store"), "tcp_port": PORT, "ucx_device": DEVICE}
    return make_daemon(prefix=hosts.command("store"), **listening)


@pytest.fixture
def engine_on(hosts: Hosts, daemon: DaemonProcess, engine: Callable[..., Engine]) -> EngineOn:
    """Starts the engine of a host."""

    def start(name: str, role: str, **options: Any) -> Engine:
        address = f"{hosts.address('store')}:{PORT}"
        return engine(transfer_config(address, role=role, transport="ucx", **options), prefix=hosts.command(name))

    return start


def traffic(hosts: Hosts, name: str, way: str) -> int:
    """Bytes that the host has received (`rx`) or sent (`tx`)."""
    command = ("ip", "-n", hosts.namespace(name), "-json", "-stats", "link", "show", "dev", DEVICE)
    (shown,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    count: int = shown["stats64"][way]["bytes"]
    return count


def test_decode_loads_by_ucx_what_prefill_on_another_host_has_saved(
    hosts: Hosts, daemon: DaemonProcess, engine_on: EngineOn, reference: Reference
) -> None:
    (expected,) = reference([PROMPT])
    prefill = engine_on("prefill", "kv_producer")
    assert prefill.generate([PROMPT], max_tokens=1) == [expected[:1]]
    saved = prefill.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS)
    assert saved["save_failures"] == 0
    stored_bytes = daemon.stats().counters.bytes_stored
    assert traffic(hosts, "prefill", "tx") > stored_bytes

    decode = engine_on("decode", "kv_consumer", ucx_device=DEVICE)
    assert decode.generate([PROMPT]) == [expected]
    loaded = decode.counted(lambda counts: counts["blocks_loaded"] == NUM_BLOCKS)
    assert (loaded["lookup_failures"], loaded["load_failures"]) == (0, 0)
    assert loaded["hit_tokens"] == NUM_BLOCKS * BLOCK_TOKENS
    assert traffic(hosts, "decode", "rx") > stored_bytes


def test_decode_follows_prefill_on_another_host_layer_by_layer(
    hosts: Hosts, daemon: DaemonProcess, engine_on: EngineOn, reference: Reference, tmp_path: Path
) -> None:
    """Prefill stands still after its first layer, until decode has begun to load."""
    (expected,) = reference([PROMPT])
    prefill = engine_on("prefill", "kv_producer", granularity="layer")
    decode = engine_on("decode", "kv_consumer", async_load=False)
    prefill.ask("hold_puts", folder=str(tmp_path))
    decoded = decode.begin("generate", prompts=[PROMPT], transfer={"kvstore": "follow"})
    prefilled = prefill.begin("generate", prompts=[PROMPT], max_tokens=1)
    eventually(lambda: daemon.stats().blocks_leased == NUM_BLOCKS, "decode follows all blocks")
    assert daemon.stats().blocks_committed == 0
    (tmp_path / "go").touch()
    assert prefilled.result()["tokens"] == [expected[:1]]
    assert decoded.result()["tokens"] == [expected]
    counts = decode.counted(lambda counts: counts["blocks_loaded"] == NUM_BLOCKS)
    assert (counts["layers_waited"], counts["load_failures"]) == (LAYERS, 0)
    assert traffic(hosts, "decode", "rx") > daemon.stats().counters.bytes_stored
