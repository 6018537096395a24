"""A model of full attention and windows, under vLLM's hybrid KV cache manager: several groups, tables with gaps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service.harness import DaemonProcess, eventually
from vllm_engine.engine import BLOCK_TOKENS, Engine, prompt, transfer_config
from vllm_engine.model import write_chunked_model

Reference = Callable[..., list[list[int]]]
MakeEngine = Callable[..., Engine]

WINDOW = 65
SLIDING, FULL = [0, 1, 3, 4], [2, 5]  # layers, which are parts where there is one rank
LAYERS = len(SLIDING + FULL)

# Nearly five windows; blocks that are all full, twice; less than a window; less than a block.
PROMPTS = [prompt(300, seed=17), prompt(256, seed=19), prompt(128, seed=23), prompt(50), prompt(20, seed=13)]
NUM_BLOCKS = 9 + 8 + 4 + 1 + 0
NUM_LOADABLE = 9 + 7 + 3 + 1 + 0  # one token is left to compute


@pytest.fixture
def hybrid(engine: MakeEngine, hybrid_model: Path) -> MakeEngine:
    """Starts an engine of the hybrid model, which has several KV cache groups."""

    def make(transfer: dict[str, Any], **arguments: Any) -> Engine:
        made = engine(transfer, model=hybrid_model, **arguments)
        assert made.ask("groups") == [
            ["SlidingWindowSpec", WINDOW, ["model.layers.0.self_attn.attn", "model.layers.3.self_attn.attn"]],
            ["SlidingWindowSpec", WINDOW, ["model.layers.1.self_attn.attn", "model.layers.4.self_attn.attn"]],
            ["FullAttentionSpec", None, ["model.layers.2.self_attn.attn", "model.layers.5.self_attn.attn"]],
        ]
        return made

    return make


def fill(engine: Engine, expected: list[list[int]], *, ranks: int = 1) -> None:
    """The blocks of `PROMPTS` are stored."""
    assert engine.generate(PROMPTS) == expected
    counts = engine.counted(lambda counts: counts["blocks_saved"] == ranks * NUM_BLOCKS, "all blocks are saved")
    assert (counts["loads"], counts["save_failures"], counts["blocks_refused"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("chunked", "prefix_cache", "ranks"),
    [(False, False, 1), (True, False, 1), (False, True, 1), (True, True, 1), (True, False, 2)],
    ids=["whole", "chunked", "whole-prefix-cache", "chunked-prefix-cache", "chunked-2-ranks"],
)
def test_second_process_loads_what_the_first_computed_and_gives_the_same_tokens(
    hybrid: MakeEngine,
    daemon: DaemonProcess,
    hybrid_reference: Reference,
    chunked: bool,
    prefix_cache: bool,
    ranks: int,
) -> None:
    """Covers: E7."""
    expected = hybrid_reference(PROMPTS)
    how = {
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": 64 if chunked else 1024,
        "enable_prefix_caching": prefix_cache,
        "tensor_parallel_size": ranks,
    }
    with hybrid(transfer_config(daemon.address), **how) as one:
        fill(one, expected, ranks=ranks)
        assert daemon.stats().blocks_committed == NUM_BLOCKS
    two = hybrid(transfer_config(daemon.address), **how)
    assert two.generate(PROMPTS) == expected
    warm = two.counted(lambda counts: counts["blocks_loaded"] == ranks * NUM_LOADABLE, "all blocks are loaded")
    assert warm["hit_tokens"] == NUM_LOADABLE * BLOCK_TOKENS
    assert (warm["loads"], warm["load_failures"], warm["lookup_failures"]) == (4 * ranks, 0, 0)
    assert (warm["blocks_saved"], warm["save_failures"], warm["blocks_refused"]) == (0, 0, 0)


@pytest.mark.parametrize("parts", [None, SLIDING, FULL], ids=["all", "windows", "full attention"])
def test_loading_zeros_into_either_kind_of_layer_changes_the_tokens(
    hybrid: MakeEngine, daemon: DaemonProcess, hybrid_reference: Reference, parts: list[int] | None
) -> None:
    """The negative control: what is loaded of each group is what the engine attends to."""
    expected = hybrid_reference(PROMPTS)
    one = hybrid(transfer_config(daemon.address))
    fill(one, expected)
    one.ask("zero_loads", parts=parts)
    wrong = one.generate(PROMPTS)
    changed = [got != tokens for got, tokens in zip(wrong, expected, strict=True)]
    assert changed == [True, True, True, True, False]  # the last prompt has no block


def test_tokens_of_a_long_decode_are_stored_and_loaded_across_windows(
    hybrid: MakeEngine, daemon: DaemonProcess, hybrid_reference: Reference
) -> None:
    """Decode fills blocks, too, while the windows move on a token at a time."""
    (short,) = hybrid_reference([PROMPTS[0]], max_tokens=150)
    longer = [[*PROMPTS[0], *short]]
    expected = hybrid_reference(longer)
    with hybrid(transfer_config(daemon.address), max_num_batched_tokens=64) as one:
        assert one.generate([PROMPTS[0]], max_tokens=150) == [short]
        one.counted(lambda counts: counts["blocks_saved"] == 449 // BLOCK_TOKENS, "all blocks are saved")
    two = hybrid(transfer_config(daemon.address))
    assert two.generate(longer) == expected
    assert two.counted(lambda counts: counts["blocks_loaded"] == 449 // BLOCK_TOKENS)["load_failures"] == 0


@pytest.mark.parametrize("part", [SLIDING[1], FULL[1]], ids=["windows", "full attention"])
def test_load_that_fails_is_computed_and_nothing_is_poisoned(
    hybrid: MakeEngine, daemon: DaemonProcess, hybrid_reference: Reference, part: int
) -> None:
    """What a spoiled load leaves behind does not reach the requests that get its blocks next. Covers: A5, A21, B6."""
    expected = hybrid_reference(PROMPTS)
    longer = [[*each, *prompt(40, seed=5)] for each in PROMPTS]
    expected_longer = hybrid_reference(longer)
    with hybrid(transfer_config(daemon.address), enable_prefix_caching=True) as one:
        fill(one, expected)
        one.ask("reset")
        one.ask("fail_block", index=0, part=part)
        assert one.generate(longer) == expected_longer
        counts = one.counted(lambda counts: counts["load_failures"] == 4, "all loads have failed")
        assert (counts["blocks_loaded"], counts["lookups"]) == (0, 9)
    two = hybrid(transfer_config(daemon.address))
    assert two.generate(longer) == expected_longer
    assert two.counted(lambda counts: counts["loads"] == 5)["load_failures"] == 0


def test_local_prefix_is_continued_from_the_store(
    hybrid: MakeEngine, daemon: DaemonProcess, hybrid_reference: Reference
) -> None:
    """Of the local blocks, the windows have left all but the last ones."""
    expected = hybrid_reference(PROMPTS)
    begun = [PROMPTS[0][:200]]
    expected_begun = hybrid_reference(begun)
    with hybrid(transfer_config(daemon.address)) as one:
        fill(one, expected)
    two = hybrid(transfer_config(daemon.address, role="kv_consumer"), enable_prefix_caching=True)
    assert two.generate(begun) == expected_begun
    assert two.generate(PROMPTS) == expected
    counts = two.counted(lambda counts: counts["blocks_loaded"] >= NUM_LOADABLE, "all blocks are loaded")
    assert (counts["blocks_loaded"], counts["load_failures"]) == (NUM_LOADABLE, 0)  # none twice


def test_preempted_requests_save_and_load_the_right_blocks(
    hybrid: MakeEngine, daemon: DaemonProcess, hybrid_reference: Reference
) -> None:
    """Covers: A20."""
    prompts = [prompt(200, seed=seed) for seed in (17, 19, 23, 29)]
    expected = hybrid_reference(prompts, max_tokens=100)
    few = {"num_gpu_blocks_override": 60, "max_num_batched_tokens": 64}
    one = hybrid(transfer_config(daemon.address), **few)
    assert one.generate(prompts, max_tokens=100) == expected
    assert one.generate(prompts, max_tokens=100) == expected
    assert one.ask("preemptions") > 0
    counts = one.counted(lambda counts: counts["blocks_loaded"] > 0)
    assert (counts["load_failures"], counts["save_failures"]) == (0, 0)
    assert hybrid(transfer_config(daemon.address)).generate(prompts, max_tokens=100) == expected


def test_decode_follows_a_prefill_layer_by_layer(
    hybrid: MakeEngine, daemon: DaemonProcess, hybrid_reference: Reference, tmp_path: Path
) -> None:
    """Prefill stands still after its first layer, until decode has begun to load."""
    (expected,) = hybrid_reference(PROMPTS[:1])
    prefill = hybrid(transfer_config(daemon.address, role="kv_producer", granularity="layer"))
    decode = hybrid(transfer_config(daemon.address, role="kv_consumer"))
    prefill.ask("hold_puts", folder=str(tmp_path))
    decoded = decode.begin("generate", prompts=PROMPTS[:1], transfer={"kvstore": "follow"})
    prefilled = prefill.begin("generate", prompts=PROMPTS[:1], max_tokens=1)
    eventually((tmp_path / "begun").exists, "prefill has computed a layer")
    eventually(lambda: daemon.stats().blocks_leased == 9, "decode follows all blocks")
    assert daemon.stats().blocks_committed == 0
    (tmp_path / "go").touch()
    assert prefilled.result()["tokens"] == [expected[:1]]
    assert decoded.result()["tokens"] == [expected]
    assert decode.counted(lambda counts: counts["blocks_loaded"] == 9)["load_failures"] == 0
    assert prefill.counted(lambda counts: counts["layers_saved"] > 0)["layers_saved"] == LAYERS


def test_chunks_of_local_attention_are_saved_and_loaded(
    engine: MakeEngine, daemon: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last prompt, what is loaded ends with a chunk: only full attention needs it."""
    monkeypatch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")
    model = write_chunked_model(tmp_path)
    prompts = [*PROMPTS, prompt(140, seed=29)]
    with engine(model=model) as alone:
        expected = alone.generate(prompts)
    with engine(transfer_config(daemon.address), model=model, max_num_batched_tokens=64) as one:
        assert [kind for kind, _, _ in one.ask("groups")] == 3 * ["ChunkedLocalAttentionSpec"] + ["FullAttentionSpec"]
        assert one.generate(prompts) == expected
        one.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS + 4, "all blocks are saved")
    two = engine(transfer_config(daemon.address), model=model)
    assert two.generate(prompts) == expected
    two.counted(lambda counts: counts["blocks_loaded"] == NUM_LOADABLE + 4, "all blocks are loaded")
    two.ask("zero_loads")
    changed = [got != tokens for got, tokens in zip(two.generate(prompts), expected, strict=True)]
    assert changed == [True, True, True, True, False, True]


@pytest.mark.parametrize(
    ("options", "says"),
    [({"async_load": False}, "async_load: expected true"), ({"granularity": "request"}, "granularity: expected layer")],
    ids=["async_load", "granularity"],
)
def test_options_that_windows_rule_out_are_refused_at_start(
    engine: MakeEngine, hybrid_model: Path, options: dict[str, Any], says: str
) -> None:
    assert says in engine(transfer_config("unix:/nowhere", **options), model=hybrid_model).start_failure()


@pytest.mark.parametrize("async_load", [False, True], ids=["sync", "async"])
def test_one_group_that_keeps_all_tokens_shares_nothing_with_several(
    engine: MakeEngine,
    hybrid: MakeEngine,
    daemon: DaemonProcess,
    hybrid_reference: Reference,
    hybrid_model: Path,
    async_load: bool,
) -> None:
    """Without the hybrid manager, loads within a forward pass are there, too."""
    expected = hybrid_reference(PROMPTS)
    with hybrid(transfer_config(daemon.address)) as several:
        fill(several, expected)
    how = {"model": hybrid_model, "disable_hybrid_kv_cache_manager": True}
    one = engine(transfer_config(daemon.address, async_load=async_load), **how)
    assert len(one.ask("groups")) == 1
    fill(one, expected)
    assert one.generate(PROMPTS) == expected
    num_blocks = NUM_BLOCKS if async_load else NUM_LOADABLE
    assert one.counted(lambda counts: counts["blocks_loaded"] == num_blocks)["load_failures"] == 0
