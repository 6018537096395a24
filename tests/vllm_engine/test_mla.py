"""Multi-head latent attention: each rank holds the same latent vectors, so a block is stored once for all ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from service.harness import DaemonProcess
from vllm_engine.engine import Engine, prompt, transfer_config
from vllm_engine.model import MLA_LAYERS, write_mla_model

# The kernels that run on any CPU know blocks of 16 tokens only.
MLA: dict[str, Any] = {"attention_config": {"backend": "CPU_MLA"}, "block_size": 16}
PROMPTS = [prompt(100), prompt(64, seed=11), prompt(300, seed=17)]
NUM_BLOCKS = 6 + 4 + 18
ANSWERED = 1  # filled by an answer: that to the last prompt


def one_by_one(engine: Engine) -> list[list[int]]:
    """What follows each prompt. Two prompts in one step shift each other's sums enough to change a token."""
    return [engine.generate([each])[0] for each in PROMPTS]


@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_are_stored_once_for_all_ranks_and_loaded_by_each(
    engine: Callable[..., Engine], daemon: DaemonProcess, tmp_path: Path, ranks: int
) -> None:
    """Covers: E7."""
    how = MLA | {"model": write_mla_model(tmp_path), "tensor_parallel_size": ranks}
    with engine(**how) as without:
        expected = one_by_one(without)
    one = engine(transfer_config(daemon.address), **how)
    assert one_by_one(one) == expected
    cold = one.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS + ANSWERED, "all are saved, once")
    assert (cold["loads"], cold["save_failures"], cold["layers_saved"] % MLA_LAYERS) == (0, 0, 0)
    assert daemon.stats().blocks_committed == NUM_BLOCKS + ANSWERED

    one.ask("reset")
    assert one_by_one(one) == expected
    warm = one.counted(lambda counts: counts["blocks_loaded"] == ranks * NUM_BLOCKS, "all blocks are loaded")
    assert (warm["loads"], warm["load_failures"]) == (3 * ranks, 0)

    if ranks == 1:  # the negative control, which reaches into this process only
        one.ask("zero_loads")
        assert all(got != tokens for got, tokens in zip(one_by_one(one), expected, strict=True))
