"""Every way to run the connector gives the tokens of an engine without it, and loads what it should."""

from collections.abc import Callable
from typing import Any

import pytest
from service.harness import DaemonProcess
from vllm_engine.engine import BLOCK_TOKENS, LAYERS, Engine, prompt, transfer_config

Reference = Callable[..., list[list[int]]]

# Blocks of each prompt: 3 and some, exactly 2, none, 9 and some.
PROMPTS = [prompt(100), prompt(64, seed=11), prompt(20, seed=13), prompt(300, seed=17)]
NUM_BLOCKS = 3 + 2 + 0 + 9


def loadable_blocks(*, async_load: bool) -> int:
    """In the background, all full blocks; within a forward pass, at least one token is left to compute."""
    return sum((len(each) - (0 if async_load else 1)) // BLOCK_TOKENS for each in PROMPTS)


def arguments(*, chunked: bool, prefix_cache: bool, ranks: int) -> dict[str, Any]:
    return {
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": 64 if chunked else 512,
        "enable_prefix_caching": prefix_cache,
        "tensor_parallel_size": ranks,
    }


def each_way(test: Callable[..., None]) -> Callable[..., None]:
    """The test, for each combination of what the engine may be told."""
    for name, values, ids in (
        ("async_load", [False, True], ["sync", "async"]),
        ("chunked", [False, True], ["whole", "chunked"]),
        ("prefix_cache", [False, True], ["no-prefix-cache", "prefix-cache"]),
        ("ranks", [1, 2], ["1", "2"]),
    ):
        test = pytest.mark.parametrize(name, values, ids=ids)(test)
    return test


@each_way
def test_tokens_are_those_without_the_connector(
    engine: Callable[..., Engine],
    daemon: DaemonProcess,
    reference: Reference,
    async_load: bool,
    chunked: bool,
    prefix_cache: bool,
    ranks: int,
) -> None:
    """Covers: E7."""
    expected = reference(PROMPTS)
    how = arguments(chunked=chunked, prefix_cache=prefix_cache, ranks=ranks)
    one = engine(transfer_config(daemon.address, async_load=async_load), **how)
    assert one.generate(PROMPTS) == expected
    cold = one.counted(lambda counts: counts["blocks_saved"] == ranks * NUM_BLOCKS, "all blocks are saved")
    assert (cold["loads"], cold["hit_tokens"], cold["save_failures"], cold["blocks_refused"]) == (0, 0, 0, 0)
    assert daemon.stats().blocks_committed == NUM_BLOCKS

    one.ask("reset")
    assert one.generate(PROMPTS) == expected
    num_blocks = loadable_blocks(async_load=async_load)
    warm = one.counted(lambda counts: counts["blocks_loaded"] == ranks * num_blocks, "all blocks are loaded")
    assert warm["hit_tokens"] == num_blocks * BLOCK_TOKENS
    assert (warm["loads"], warm["load_failures"], warm["lookup_failures"]) == (3 * ranks, 0, 0)
    assert warm["layers_waited"] == (0 if async_load else 3 * LAYERS * ranks)
    assert daemon.stats().blocks_committed == NUM_BLOCKS


@each_way
def test_decode_instance_gives_the_same_tokens_from_what_a_prefill_instance_saved(
    engine: Callable[..., Engine],
    daemon: DaemonProcess,
    reference: Reference,
    async_load: bool,
    chunked: bool,
    prefix_cache: bool,
    ranks: int,
) -> None:
    """Covers: E7."""
    expected = reference(PROMPTS)
    how = arguments(chunked=chunked, prefix_cache=prefix_cache, ranks=ranks)
    with engine(transfer_config(daemon.address, role="kv_producer"), **how) as prefill:
        assert prefill.generate(PROMPTS, max_tokens=1) == [tokens[:1] for tokens in expected]
        saved = prefill.counted(lambda counts: counts["blocks_saved"] == ranks * NUM_BLOCKS, "all blocks are saved")
        assert (saved["lookups"], saved["loads"]) == (0, 0)
    decode = engine(transfer_config(daemon.address, role="kv_consumer", async_load=async_load), **how)
    assert decode.generate(PROMPTS) == expected
    num_blocks = loadable_blocks(async_load=async_load)
    loaded = decode.counted(lambda counts: counts["blocks_loaded"] == ranks * num_blocks, "all blocks are loaded")
    assert (loaded["saves"], loaded["load_failures"]) == (0, 0)


@pytest.mark.parametrize("async_load", [False, True], ids=["sync", "async"])
def test_loading_zeros_changes_the_tokens(
    engine: Callable[..., Engine], daemon: DaemonProcess, reference: Reference, async_load: bool
) -> None:
    """The negative control: what is loaded is what the engine attends to."""
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address, async_load=async_load))
    assert one.generate(PROMPTS) == expected
    one.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS, "all blocks are saved")
    one.ask("zero_loads")
    wrong = one.generate(PROMPTS)
    changed = [got != tokens for got, tokens in zip(wrong, expected, strict=True)]
    assert changed == [True, True, False, True]  # the third prompt has no block


@pytest.mark.parametrize("granularity", ["request", "layer", "chunk"])
def test_each_granularity_saves_all_blocks(
    engine: Callable[..., Engine], daemon: DaemonProcess, reference: Reference, granularity: str
) -> None:
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address, granularity=granularity), max_num_batched_tokens=64)
    assert one.generate(PROMPTS) == expected
    counts = one.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS, "all blocks are saved")
    if granularity == "request":
        assert counts["saves"] == 3  # one for each prompt that has a block
    else:
        assert counts["saves"] > 3
    assert counts["layers_saved"] == (LAYERS * counts["saves"] if granularity == "layer" else 0)
    assert one.generate(PROMPTS) == expected
