"""The CUDA device: which calls it makes, and what becomes of their errors. With a stand-in for CUDA, and with CUDA."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from devices import CudaError, StandInRuntime, cuda_device, stand_in_for_cuda

from kvstore.errors import InvalidRequest
from kvstore.transport import cuda as transport_cuda
from kvstore.transport.cuda import CudaDevice, Device, DeviceFailed, DeviceFull, hash_copies
from kvstore.transport.memory import address_of
from kvstore.types import ByteArray

SIZE = 3000
DATA = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInRuntime:
    return stand_in_for_cuda(monkeypatch)


def fail_at(cuda: StandInRuntime, step: str, *, status: int = 700, after: int = 0) -> None:
    """The call fails, not the first `after` times."""
    left = [after]

    def before(name: str) -> None:
        if name == step:
            left[0] -= 1
            if left[0] < 0:
                raise CudaError(status, "cudaErrorIllegalAddress: an illegal memory access was encountered")

    cuda.before = before


def pieces(target: int, source: int) -> dict[str, np.ndarray]:
    """The data in three pieces, back to front."""
    begins = np.array([2000, 1000, 0])
    return {"targets": target + begins, "sources": source + begins, "sizes": np.full(3, 1000)}


def there_and_back(device: Device) -> ByteArray:
    back = np.zeros(SIZE, np.uint8)
    address = device.allocate(SIZE)
    device.copy_in(**pieces(address, address_of(DATA)))
    device.copy_out(**pieces(address_of(back), address))
    device.free(address)
    return back


def test_what_was_copied_in_comes_out_and_nothing_is_left_behind(cuda: StandInRuntime) -> None:
    device = CudaDevice(1)
    assert device.name == "Second (cuda:1)"
    assert np.array_equal(there_and_back(device), DATA)
    assert sorted(cuda.num_done.values()) == [3, 3]  # a stream for each direction
    assert not any(cuda.queues.values())
    device.close()
    assert (cuda.queues, cuda.events, cuda.memories) == ({}, {}, {})
    assert set(cuda.used) == {1}


def test_every_thread_says_which_device_it_means(cuda: StandInRuntime) -> None:
    first, second = CudaDevice(0), CudaDevice(1)
    with ThreadPoolExecutor(1) as pool:
        for device in (first, second, first):
            cuda.used.clear()
            assert np.array_equal(pool.submit(there_and_back, device).result(), DATA)
            assert set(cuda.used) == {0 if device is first else 1}
            pool.submit(device.memory).result()


def test_a_thread_that_uses_another_device_goes_on_with_that(cuda: StandInRuntime) -> None:
    cuda.setDevice(0)
    device = CudaDevice(1)
    there_and_back(device)
    fail_at(cuda, "malloc")
    with pytest.raises(DeviceFailed):
        device.allocate(SIZE)
    assert cuda.getDevice() == 0
    assert set(cuda.used) == {1}


@pytest.mark.parametrize("step", ["memcpyAsync", "eventCreateWithFlags", "eventRecord", "eventSynchronize"])
@pytest.mark.parametrize("after", [0, 1])
def test_a_copy_that_fails_has_ended_when_that_is_said(cuda: StandInRuntime, step: str, after: int) -> None:
    device = CudaDevice(0)
    fail_at(cuda, step, after=after)
    with pytest.raises(DeviceFailed, match=r"First \(cuda:0\): cannot copy .*illegal memory access.*then restart"):
        there_and_back(device)
    assert not any(cuda.queues.values())
    assert not cuda.events


def test_a_lost_device_that_cannot_even_be_waited_for_is_one_error(cuda: StandInRuntime) -> None:
    device = CudaDevice(0)

    def before(step: str) -> None:
        raise CudaError(719, f"cudaErrorLaunchFailure in {step}")

    address = device.allocate(SIZE)
    cuda.before = before
    with pytest.raises(DeviceFailed, match="cannot copy to it: cudaErrorLaunchFailure in memcpyAsync"):
        device.copy_in(**pieces(address, address_of(DATA)))
    for call in (device.memory, device.close, lambda: device.free(address)):
        with pytest.raises(DeviceFailed):
            call()


def test_too_little_memory_is_an_error_of_its_own(cuda: StandInRuntime) -> None:
    """Covers: E2."""
    device = CudaDevice(0)
    fail_at(cuda, "malloc", status=2)
    with pytest.raises(DeviceFull, match=r"cannot take 3000 bytes.*give the gpu tier less"):
        device.allocate(SIZE)
    fail_at(cuda, "malloc")
    with pytest.raises(DeviceFailed) as caught:
        device.allocate(SIZE)
    assert not isinstance(caught.value, DeviceFull)


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cupy.cuda", raising=False)
    with pytest.raises(InvalidRequest, match=r"pip install 'kvstore\[gpu\]'"):
        CudaDevice(0)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_number_out_of_range_is_refused_with_what_was_found(cuda: StandInRuntime, number: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"\(0: First, 1: Second\), got {number}"):
        CudaDevice(number)


def test_without_a_device_or_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = stand_in_for_cuda(monkeypatch, names=[])
    with pytest.raises(InvalidRequest, match="expected a CUDA device, found none"):
        CudaDevice(0)
    fail_at(cuda, "getDeviceCount", status=35)
    with pytest.raises(InvalidRequest, match=r"expected a CUDA device, found none.*nvidia-smi"):
        CudaDevice(0)


@pytest.mark.parametrize(("size_bytes", "copies"), [(100, 2), (1000, 10), (4000, 10)])
def test_what_lies_on_a_device_is_hashed_in_host_memory_of_bounded_size(
    cuda: StandInRuntime, monkeypatch: pytest.MonkeyPatch, size_bytes: int, copies: int
) -> None:
    """Larger only if a single piece is."""
    monkeypatch.setattr(transport_cuda, "SCRATCH_BYTES", 500 if size_bytes == 100 else 1000)
    data = np.random.default_rng(0).integers(0, 256, (10, size_bytes), np.uint8)
    array = cuda.array(data)
    begins = array.__cuda_array_interface__["data"][0] + size_bytes * np.arange(10)[::-1]
    waits = []
    cuda.before = lambda step: waits.append(step) if step == "eventSynchronize" else None
    checksums = hash_copies(CudaDevice(0), begins, size_bytes)
    assert checksums.tolist() == [xxhash.xxh3_64_intdigest(row.data) for row in data[::-1]]
    assert len(waits) == copies


def test_what_cannot_be_copied_from_a_device_is_not_hashed(cuda: StandInRuntime) -> None:
    array = cuda.array(DATA)
    device = CudaDevice(0)
    fail_at(cuda, "eventSynchronize")
    with pytest.raises(DeviceFailed, match="cannot copy from it"):
        hash_copies(device, np.array([array.__cuda_array_interface__["data"][0]]), SIZE)


def test_the_stand_in_has_nothing_that_cupy_has_not() -> None:
    runtime = pytest.importorskip("cupy.cuda.runtime", reason="CuPy is not installed (kvstore[gpu])")
    own = ("array", "holds")
    names = [name for name in vars(StandInRuntime) if not name.startswith("_") and name not in own]
    assert [name for name in names if not hasattr(runtime, name)] == []
    for name in ("memcpyHostToDevice", "memcpyDeviceToHost"):
        assert getattr(runtime, name) == getattr(StandInRuntime, name)


@pytest.mark.gpu
def test_cuda_copies_there_and_back() -> None:
    device = cuda_device()
    before = device.memory()
    assert np.array_equal(there_and_back(device), DATA)
    with pytest.raises(DeviceFull):
        device.allocate(before.total_bytes + (1 << 30))
    assert np.array_equal(there_and_back(device), DATA)  # it goes on
    device.close()
