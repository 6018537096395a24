"""What the store does to an engine when it is away, slow, full, wrong or killed: time, and nothing else."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from service.harness import NO_UCX, DaemonProcess, eventually
from vllm_engine.engine import LAYERS, Engine, prompt, transfer_config
from vllm_engine.model import write_adapter, write_model

Reference = Callable[..., list[list[int]]]
MakeEngine = Callable[..., Engine]

PROMPTS = [prompt(100), prompt(300, seed=17)]
NUM_BLOCKS = 3 + 9
LOADS = pytest.mark.parametrize("async_load", [False, True], ids=["sync", "async"])


def fill(engine: Engine, expected: list[list[int]]) -> None:
    """The blocks of `PROMPTS` are stored."""
    assert engine.generate(PROMPTS) == expected
    engine.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS, "all blocks are saved")


def test_daemon_that_is_absent_at_start_is_used_once_it_is_there(
    engine: MakeEngine, make_daemon: Callable[..., DaemonProcess], reference: Reference
) -> None:
    """Covers: D12, D10."""
    daemon = make_daemon(start=False)
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address))
    assert one.generate(PROMPTS) == expected
    counts = one.counted(lambda counts: counts["save_failures"] == 2)
    assert (counts["lookup_failures"], counts["blocks_saved"]) == (2, 0)
    daemon.start()
    eventually(lambda: len(daemon.stats().sessions) == 2, "both sides have connected")
    fill(one, expected)
    assert one.generate(PROMPTS) == expected
    one.counted(lambda counts: counts["blocks_loaded"] == NUM_BLOCKS, "all blocks are loaded")


def test_daemon_killed_while_requests_decode_is_used_again_when_it_is_back(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference
) -> None:
    """Covers: A15, D10."""
    expected = reference(PROMPTS, max_tokens=150)
    one = engine(transfer_config(daemon.address))
    answer = one.begin("generate", prompts=PROMPTS, max_tokens=150)
    eventually(lambda: daemon.stats().blocks_committed >= NUM_BLOCKS, "prefill is over")
    daemon.kill()
    assert answer.result()["tokens"] == expected
    daemon.start()
    eventually(lambda: len(daemon.stats().sessions) == 2, "both sides have connected again")
    assert one.generate(PROMPTS, max_tokens=150) == expected
    one.counted(lambda counts: daemon.stats().blocks_committed >= NUM_BLOCKS, "blocks are stored again")


@pytest.mark.parametrize("num_blocks", [1, 25, 60])
def test_daemon_killed_at_some_moment_of_many_requests(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, num_blocks: int
) -> None:
    """Some prompts share their first blocks. Killed when so many blocks are stored. Covers: A15."""
    prompts = [[*prompt(96, seed=7 + number % 4), *prompt(60 + number, seed=31 + number)] for number in range(20)]
    expected = reference(prompts, max_tokens=40)
    one = engine(transfer_config(daemon.address))
    answer = one.begin("generate", prompts=prompts, max_tokens=40)
    eventually(lambda: daemon.stats().blocks_committed >= num_blocks, "so many blocks are stored")
    daemon.kill()
    assert answer.result()["tokens"] == expected
    assert answer.result()["reasons"] == ["length"] * 20


def test_local_prefix_is_offered_to_a_daemon_that_came_back_empty(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference
) -> None:
    """Else nothing behind the blocks that only the engine has could ever be stored."""
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address), enable_prefix_caching=True)
    fill(one, expected)
    daemon.kill()
    daemon.start()
    eventually(lambda: len(daemon.stats().sessions) == 2, "both sides have connected again")
    assert one.generate(PROMPTS) == expected
    one.counted(lambda counts: daemon.stats().blocks_committed == NUM_BLOCKS, "blocks are stored again")


@LOADS
def test_daemon_killed_in_the_middle_of_a_load(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, tmp_path: Path, async_load: bool
) -> None:
    """The load fails, or ends well from memory that outlives the daemon. Covers: A5, A15, A21, B6."""
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address, async_load=async_load))
    fill(one, expected)
    one.ask("hold_copies", folder=str(tmp_path))
    answer = one.begin("generate", prompts=PROMPTS)
    eventually((tmp_path / "begun").exists, "a load has begun")
    daemon.kill()
    (tmp_path / "go").touch()
    assert answer.result()["tokens"] == expected
    counts = one.counted(lambda counts: counts["load_failures"] > 0 or counts["blocks_loaded"] == NUM_BLOCKS)
    assert counts["lookups"] == 2 * len(PROMPTS)  # a failed load is not asked for again


def test_daemon_killed_in_the_middle_of_a_save(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, tmp_path: Path
) -> None:
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address))
    one.ask("hold_puts", folder=str(tmp_path))
    answer = one.begin("generate", prompts=PROMPTS)
    eventually((tmp_path / "begun").exists, "a save has begun")
    daemon.kill()
    (tmp_path / "go").touch()
    assert answer.result()["tokens"] == expected
    one.counted(lambda counts: counts["save_failures"] > 0)


@LOADS
def test_stopped_daemon_costs_at_most_the_deadlines(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, async_load: bool
) -> None:
    """Covers: B1, B3, F1."""
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address, async_load=async_load, timeout_s=0.5, load_timeout_s=1.0))
    fill(one, expected)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        assert one.generate(PROMPTS) == expected
        assert one.generate(PROMPTS) == expected
        counts = one.counted(lambda counts: counts["save_failures"] > 0)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert counts["lookup_failures"] + counts["load_failures"] > 0

    def loads_again(counts: dict[str, int]) -> bool:
        assert one.generate(PROMPTS) == expected
        return counts["blocks_loaded"] >= NUM_BLOCKS

    one.counted(loads_again, "the store is used again")


def test_full_store_refuses_and_the_engine_goes_on(
    engine: MakeEngine, make_daemon: Callable[..., DaemonProcess], reference: Reference
) -> None:
    """Covers: E11."""
    daemon = make_daemon(cpu_capacity="512KiB", slab_bytes="512KiB")
    prompts = [prompt(300, seed=seed) for seed in (17, 19, 23)]
    expected = reference(prompts)
    one = engine(transfer_config(daemon.address))
    for _ in range(3):
        assert one.generate(prompts) == expected
    one.counted(lambda counts: counts["blocks_refused"] > 0, "blocks were refused")


@LOADS
def test_block_that_fails_is_computed_and_nothing_is_poisoned(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, async_load: bool
) -> None:
    """The poisoning and the livelock that a prototype met. Covers: A5, A21, A25, B6."""
    expected = reference(PROMPTS)
    longer = [[*each, *prompt(40, seed=5)] for each in PROMPTS]
    expected_longer = reference(longer)
    with engine(transfer_config(daemon.address, async_load=async_load), enable_prefix_caching=True) as one:
        fill(one, expected)
        one.ask("reset")
        one.ask("fail_block", index=1, part=LAYERS - 1)
        assert one.generate(longer) == expected_longer
        counts = one.counted(lambda counts: counts["load_failures"] == 2, "both loads have failed")
        assert counts["lookups"] == 4
        assert counts["blocks_loaded"] == (2 if async_load else 0)  # those before the one that failed
    two = engine(transfer_config(daemon.address, async_load=async_load))
    assert two.generate(longer) == expected_longer
    loaded = two.counted(lambda counts: counts["loads"] == 2)
    assert loaded["load_failures"] == 0


@LOADS
def test_preempted_requests_save_and_load_the_right_blocks(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, async_load: bool
) -> None:
    """Covers: A20."""
    prompts = [prompt(200, seed=seed) for seed in (17, 19, 23, 29)]
    expected = reference(prompts, max_tokens=100)
    few = {"num_gpu_blocks_override": 30}  # each request comes to need 10
    one = engine(transfer_config(daemon.address, async_load=async_load), **few)
    assert one.generate(prompts, max_tokens=100) == expected
    assert one.generate(prompts, max_tokens=100) == expected
    assert one.ask("preemptions") > 0
    counts = one.counted(lambda counts: counts["blocks_loaded"] > 0)
    assert (counts["load_failures"], counts["save_failures"]) == (0, 0)
    assert engine(transfer_config(daemon.address, async_load=async_load)).generate(prompts, max_tokens=100) == expected


def test_other_weights_under_the_same_path_share_nothing(
    engine: MakeEngine, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """Covers: A11."""
    with engine(transfer_config(daemon.address), model=write_model(tmp_path, seed=1)) as one:
        before = one.generate(PROMPTS)
        one.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS, "all blocks are saved")
    write_model(tmp_path, seed=2)
    two = engine(transfer_config(daemon.address), model=tmp_path)
    after = two.generate(PROMPTS)
    assert two.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS)["loads"] == 0
    assert after != before
    with engine(model=tmp_path) as alone:
        assert alone.generate(PROMPTS) == after


def test_other_adapter_under_the_same_name_and_path_shares_nothing(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, tmp_path: Path
) -> None:
    """vLLM's own hashes of both are the same. Covers: A8."""
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    with engine(transfer_config(daemon.address), enable_lora=True, max_lora_rank=8) as one:
        before = one.generate(PROMPTS, adapter=str(adapter))
        one.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS, "all blocks are saved")
        assert one.generate(PROMPTS, adapter=str(adapter)) == before
        one.counted(lambda counts: counts["blocks_loaded"] == NUM_BLOCKS, "all blocks are loaded")
        assert before != reference(PROMPTS)
    write_adapter(adapter, seed=2)
    two = engine(transfer_config(daemon.address), enable_lora=True, max_lora_rank=8)
    assert two.generate(PROMPTS, adapter=str(adapter)) != before
    assert two.counted(lambda counts: counts["blocks_saved"] == NUM_BLOCKS)["loads"] == 0


def test_same_weights_in_another_place_are_shared(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, model: Path, tmp_path: Path
) -> None:
    expected = reference(PROMPTS)
    with engine(transfer_config(daemon.address)) as one:
        fill(one, expected)
    copy = shutil.copytree(model, tmp_path / "copy")
    two = engine(transfer_config(daemon.address), model=copy)
    assert two.generate(PROMPTS) == expected
    two.counted(lambda counts: counts["blocks_loaded"] == NUM_BLOCKS, "all blocks are loaded")


def test_request_aborted_while_it_loads_leaves_nothing_behind(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, tmp_path: Path
) -> None:
    """Covers: C1, C3."""
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address))
    fill(one, expected)
    one.ask("hold_copies", folder=str(tmp_path))
    assert one.ask("abort", prompt=PROMPTS[1], held=str(tmp_path))
    one.counted(lambda counts: daemon.stats().blocks_leased == 0, "no block is leased")
    assert one.generate(PROMPTS) == expected


def test_reset_of_the_connector_takes_the_engine_out_of_the_shared_namespace(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference
) -> None:
    expected = reference(PROMPTS)
    one = engine(transfer_config(daemon.address))
    fill(one, expected)
    assert one.ask("reset", connector=True)
    assert one.generate(PROMPTS) == expected
    counts = one.counted(lambda counts: counts["blocks_saved"] == 2 * NUM_BLOCKS, "all blocks are saved again")
    assert counts["loads"] == 0


def test_works_inside_multi_connector_with_another_beside_it(
    engine: MakeEngine, daemon: DaemonProcess, reference: Reference, tmp_path: Path
) -> None:
    expected = reference(PROMPTS)
    beside = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [transfer_config(daemon.address), beside]},
    }
    one = engine(several)
    assert one.generate(PROMPTS) == expected
    eventually(lambda: daemon.stats().blocks_committed == NUM_BLOCKS, "all blocks are saved")
    assert one.generate(PROMPTS) == expected
    counts = one.counters()
    assert any(tmp_path.iterdir())
    assert counts["loads"] == 2, counts


@pytest.mark.parametrize(
    ("transfer", "arguments", "says"),
    [
        ({"adress": "x"}, {}, "the nearest is 'address'"),
        pytest.param(
            {"transport": "ucx", "ucx_device": "none0"},
            {},
            "transport: ucx_device none0: expected a device of this host",
            marks=pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX),
        ),
        ({}, {"prefix_caching_hash_algo": "xxhash"}, "use sha256 or sha256_cbor"),
    ],
    ids=["unknown option", "no such device", "seeded hash"],
)
def test_configuration_that_cannot_work_is_refused_at_start(
    engine: MakeEngine, transfer: dict[str, str], arguments: dict[str, str], says: str
) -> None:
    assert says in engine(transfer_config("unix:/nowhere", **transfer), **arguments).start_failure()
