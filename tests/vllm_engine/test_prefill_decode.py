"""Prefill and decode on two engines at the same time: decode follows what prefill is still writing."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from service.harness import DaemonProcess, eventually
from vllm_engine.engine import BLOCK_TOKENS, LAYERS, Engine, prompt, transfer_config

Reference = Callable[..., list[list[int]]]
MakeEngine = Callable[..., Engine]

PROMPT = prompt(300, seed=17)
NUM_BLOCKS = 9
FOLLOW = {"kvstore": "follow"}


def begin_both(
    engine: MakeEngine, daemon: DaemonProcess, folder: Path, **options: Any
) -> tuple[Engine, Engine, "Future[Any]", "Future[Any]"]:
    """Prefill, decode, and what each was asked: decode first, and prefill holds its puts until there is `folder`/go."""
    prefill = engine(transfer_config(daemon.address, role="kv_producer", granularity="layer"))
    decode = engine(transfer_config(daemon.address, role="kv_consumer", **options))
    prefill.ask("hold_puts", folder=str(folder))
    decoded = decode.begin("generate", prompts=[PROMPT], transfer=FOLLOW)
    prefilled = prefill.begin("generate", prompts=[PROMPT], max_tokens=1)
    return prefill, decode, prefilled, decoded


def test_prefill_keeps_nothing_for_decode_which_computes_less_than_a_block(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference
) -> None:
    """Covers: C6, F7."""
    (expected,) = reference([PROMPT])
    prefill = engine(transfer_config(daemon.address, role="kv_producer"))
    num_free = prefill.ask("free_blocks")
    assert prefill.generate([PROMPT], max_tokens=1) == [expected[:1]]
    prefill.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS)
    assert prefill.ask("free_blocks") == num_free
    decode = engine(transfer_config(daemon.address, role="kv_consumer"))
    assert decode.generate([PROMPT]) == [expected]
    counts = decode.counted(lambda counts: counts["blocks_loaded"] == NUM_BLOCKS)
    assert 0 < len(PROMPT) - counts["hit_tokens"] < BLOCK_TOKENS


def test_decode_that_is_asked_first_waits_for_prefill_and_follows_it(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, tmp_path: Path
) -> None:
    """Prefill stands still after its first layer, until decode has begun to load."""
    (expected,) = reference([PROMPT])
    _, decode, prefilled, decoded = begin_both(engine, daemon, tmp_path)
    eventually((tmp_path / "begun").exists, "prefill has computed a layer")
    eventually(lambda: daemon.stats().blocks_leased == NUM_BLOCKS, "decode follows all blocks")
    assert daemon.stats().blocks_committed == 0
    (tmp_path / "go").touch()
    assert prefilled.result()["tokens"] == [expected[:1]]
    assert decoded.result()["tokens"] == [expected]
    counts = decode.counted(lambda counts: counts["blocks_loaded"] == NUM_BLOCKS)
    assert counts["load_failures"] == 0


def test_decode_follows_layer_by_layer_within_its_forward_pass(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, tmp_path: Path
) -> None:
    (expected,) = reference([PROMPT])
    _, decode, prefilled, decoded = begin_both(engine, daemon, tmp_path, async_load=False)
    eventually(lambda: daemon.stats().blocks_leased == NUM_BLOCKS, "decode follows all blocks")
    (tmp_path / "go").touch()
    assert prefilled.result()["tokens"] == [expected[:1]]
    assert decoded.result()["tokens"] == [expected]
    counts = decode.counted(lambda counts: counts["blocks_loaded"] == NUM_BLOCKS)
    assert counts["layers_waited"] == LAYERS


def test_decode_computes_by_itself_when_no_prefill_comes(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference
) -> None:
    """Covers: B7."""
    (expected,) = reference([PROMPT])
    decode = engine(transfer_config(daemon.address, role="kv_consumer", follow_timeout_s=0.5))
    assert decode.generate([PROMPT], transfer=FOLLOW) == [expected]
    assert decode.counted(lambda counts: counts["lookups"] > 1)["loads"] == 0


def test_decode_computes_by_itself_when_prefill_dies_while_it_is_followed(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, tmp_path: Path
) -> None:
    """Covers: B7, C5."""
    (expected,) = reference([PROMPT])
    prefill, decode, _, decoded = begin_both(engine, daemon, tmp_path)
    eventually(lambda: daemon.stats().blocks_leased == NUM_BLOCKS, "decode follows all blocks")
    prefill.kill()
    assert decoded.result()["tokens"] == [expected]
    decode.counted(lambda counts: counts["load_failures"] == 1)
