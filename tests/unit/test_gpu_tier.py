"""The gpu tier over host memory that stands for a device's: failures, and what is copied. More in tests/conformance."""

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from builders import block_bytes, chain, records, spec
from devices import HostDevice, stand_in_for_cuda
from disk_faults import Countdown, checksums_of, memory, served, store
from structlog.testing import capture_logs

from kvstore.errors import InvalidRequest
from kvstore.transport.cuda import DeviceFailed
from kvstore_server.tiers.gpu import GpuTier
from kvstore_server.tiers.slab import slab_of

PAGE = spec(bytes_per_part=2048)  # side by side in host memory too
ODD = spec(bytes_per_part=1500, model="odd")
SLAB_BYTES = 8 * 4096


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def tier_on(device: HostDevice, *, capacity_bytes: int = 8 * SLAB_BYTES, clock: Clock | None = None) -> GpuTier:
    return GpuTier(device, capacity_bytes=capacity_bytes, slab_bytes=SLAB_BYTES, clock=clock or Clock())


def failing(step: str) -> Callable[[str], None]:
    """Every such step fails."""

    def before(name: str) -> None:
        if name == step:
            raise DeviceFailed("the device fell off the bus; restart")

    return before


def test_a_device_without_memory_gives_fewer_slots_and_is_asked_again_a_minute_later() -> None:
    """Covers: E1, E2."""
    device, clock, asked = HostDevice(3 * SLAB_BYTES), Clock(), []
    device.before = lambda step: asked.append(step) if step == "allocate" else None
    tier = tier_on(device, capacity_bytes=3 * SLAB_BYTES, clock=clock)
    others = device.allocate(SLAB_BYTES)
    asked.clear()
    with capture_logs() as logs:
        slots = tier.allocate(PAGE, 24)
    assert (len(slots), len(asked)) == (16, 3)
    assert [line["log_level"] for line in logs] == ["warning"]
    assert tier.statistics().slab_bytes == 2 * SLAB_BYTES
    clock.now_s += 59.9
    device.free(others)
    assert len(tier.allocate(PAGE, 1)) == 0
    assert len(asked) == 3
    clock.now_s += 0.1
    assert len(tier.allocate(PAGE, 24)) == 8
    tier.write(PAGE, **empty_batch())  # the tier can be used
    tier.arena.validate()


def empty_batch() -> dict[str, np.ndarray]:
    _, addresses = memory(PAGE, 0)
    none = records([])
    checksums = checksums_of(PAGE, addresses)
    return {"slots": addresses, "hashes": none, "parents": none, "addresses": addresses, "checksums": checksums}


@pytest.mark.parametrize("step", ["copy_in", "torn"])
def test_a_write_that_fails_serves_nothing_and_disables_the_tier(step: str) -> None:
    """Covers: D7."""
    device = HostDevice()
    tier = tier_on(device)
    before = store(tier, PAGE, chain(2))
    device.before = failing(step)
    slots = tier.allocate(PAGE, 6)
    with pytest.raises(DeviceFailed, match="fell off the bus"):
        store(tier, PAGE, chain(6, seed=1), slots=slots)
    device.before = lambda step: None  # what failed once is not trusted again
    assert not any(served(tier, PAGE, slots, records(chain(6, seed=1))))
    assert not any(served(tier, PAGE, before, records(chain(2))))
    with pytest.raises(DeviceFailed, match="fell off the bus"):
        tier.write(PAGE, **empty_batch())
    for call in (lambda: tier.open_space(ODD), lambda: tier.forget(PAGE, records(chain(2)))):
        with pytest.raises(DeviceFailed, match="fell off the bus"):
            call()
    assert tier.statistics().used_bytes == 8 * PAGE.block_bytes
    tier.close()
    assert device.is_closed
    assert not device.allocated


@pytest.mark.parametrize("step", ["copy_out", "torn"])
def test_a_read_that_fails_serves_nothing_says_so_once_and_raises_nothing(step: str) -> None:
    device = HostDevice()
    tier = tier_on(device)
    slots = store(tier, PAGE, chain(5))
    device.before = failing(step)
    with capture_logs() as logs:
        assert served(tier, PAGE, slots, records(chain(5))) == [False] * 5
    assert [(line["event"], line["blocks"]) for line in logs] == [("gpu.read", 5)]
    with pytest.raises(DeviceFailed):
        tier.write(PAGE, **empty_batch())


def test_a_device_that_fails_when_a_slab_is_opened_is_found_out_by_the_next_write() -> None:
    device = HostDevice()
    tier = tier_on(device)
    device.before = failing("allocate")
    assert len(tier.allocate(PAGE, 1)) == 0
    device.before = lambda step: None
    assert len(tier.allocate(PAGE, 1)) == 0
    with pytest.raises(DeviceFailed, match="fell off the bus"):
        tier.write(PAGE, **empty_batch())


def test_a_slab_whose_memory_is_not_taken_back_is_not_offered_twice() -> None:
    device = HostDevice()
    tier = tier_on(device)
    slots = store(tier, PAGE, chain(8))
    tier.free(slots)
    slab = slab_of(int(slots[0]))
    tier.close_slab(slab)
    device.before = failing("free")
    with pytest.raises(DeviceFailed):
        tier.delete_slab(slab)
    device.before = lambda step: None
    tier.close()
    assert len(device.allocated) == 1


def test_a_device_that_is_lost_can_be_closed() -> None:
    device = HostDevice()
    tier = tier_on(device)
    store(tier, PAGE, chain(9))
    device.before = failing("free")
    tier.close()


@pytest.mark.parametrize("step", range(15))
def test_whichever_step_fails_no_wrong_block_is_served(step: int) -> None:
    """Covers: A25, D7."""
    device = HostDevice()
    tier = tier_on(device)

    def fail(name: str) -> None:
        raise DeviceFailed(name)

    device.before = Countdown(step, fail)
    slots: list[int] = []
    try:
        for seed in range(3):
            slots += (found := tier.allocate(ODD, 9)).tolist()
            store(tier, ODD, chain(len(found), seed=seed), slots=found)
            assert all(served(tier, ODD, found, records(chain(len(found), seed=seed)))) or device.before.left < 0
    except DeviceFailed:
        pass
    assert device.before.left < 0, "there are fewer steps than that"
    for seed in range(3):
        asked = np.array(slots[9 * seed : 9 * seed + 9], np.int64)
        assert not any(served(tier, ODD, asked, records(chain(len(asked), seed=seed))))
    tier.arena.validate()


def test_what_is_wrong_is_logged_for_each_block_and_where() -> None:
    tier = tier_on(HostDevice())
    slots = store(tier, PAGE, chain(3))
    with capture_logs() as logs:
        served(tier, PAGE, np.append(slots, 99 << 20), records([*chain(2), *chain(2, seed=1)]))
    assert [(line["slab"], line["slot"], line["problem"]) for line in logs] == [
        (1, 2, "another block"),
        (99, 0, "no such slab"),
    ]


def test_blocks_side_by_side_are_one_copy_but_not_across_slabs() -> None:
    device = HostDevice()
    tier = tier_on(device)
    slots = store(tier, PAGE, chain(20))
    assert len({slab_of(slot) for slot in slots.tolist()}) == 3
    assert device.num_pieces == 3
    device.num_pieces = 0
    assert all(served(tier, PAGE, slots, records(chain(20))))
    assert device.num_pieces == 3
    device.num_pieces = 0
    _, addresses = memory(PAGE, 20)
    order = np.random.default_rng(0).permutation(20)
    tier.read(PAGE, slots=slots[order], hashes=records(chain(20))[order], addresses=addresses[order])
    assert device.num_pieces == 3
    device.num_pieces = 0
    assert all(served(tier, PAGE, slots[[0, 1, 4, 5, 6]], records(chain(20))[[0, 1, 4, 5, 6]]))
    assert device.num_pieces == 2
    device.num_pieces = 0
    assert all(served(tier, PAGE, slots[7::-1], records(chain(20))[7::-1]))
    assert device.num_pieces == 8  # on the host they lie the other way round


def test_a_read_writes_no_byte_beside_the_blocks() -> None:
    tier = tier_on(HostDevice())
    slots = store(tier, ODD, chain(4))
    array, addresses = memory(ODD, 4)
    array[:] = 0xA5
    good, _ = tier.read(ODD, slots=slots[1:3], hashes=records(chain(4))[1:3], addresses=addresses[1:3])
    assert good.all()
    assert (array[1, : ODD.block_bytes] == block_bytes(ODD, chain(4)[1])).all()
    assert (array[1:3, ODD.block_bytes :] == 0xA5).all()
    assert (array[[0, 3]] == 0xA5).all()


def test_slots_begin_at_multiples_of_512_bytes() -> None:
    device = HostDevice()
    tier = tier_on(device)
    assert len(tier.allocate(ODD, 100)) == 8 * SLAB_BYTES // 3072
    assert {size_bytes % 3072 for size_bytes in device.allocated.values()} == {0}


def test_more_than_the_device_has_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"at most the 4096 bytes of memory of the host, got 4097"):
        GpuTier(HostDevice(4096), capacity_bytes=4097, slab_bytes=512)


def test_the_benchmark_measures_every_size_both_ways() -> None:
    benchmark = load_benchmark()
    copy = benchmark.Plain(ctypes.memmove, ctypes.memmove)
    device = HostDevice(17 << 20)
    figures = benchmark.measure(device, copy, size_bytes=8 << 20, rounds=1, block_kib=(64, 4096))
    assert [name for name in figures if name.endswith("_gb_s")] == [
        f"{kib}_kib_{order}_{work}_gb_s"
        for kib in (64, 4096)
        for order in ("side_by_side", "scattered")
        for work in ("plain_in", "in", "plain_out", "out")
    ]
    assert device.is_closed
    assert not device.allocated


def test_the_benchmark_refuses_to_run_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    stand_in_for_cuda(monkeypatch, names=[])
    with pytest.raises(SystemExit, match="nothing was measured: gpu: expected a CUDA device, found none"):
        load_benchmark().main()


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    found = importlib.util.spec_from_file_location("benchmarks_gpu", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # where dataclasses look for it
    found.loader.exec_module(module)
    return module
