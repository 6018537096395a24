"""Devices for tests: host memory that stands for a device's, a stand-in for CUDA, and CUDA itself."""

import ctypes
import itertools
import mmap
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidRequest
from kvstore.transport.cuda import CudaDevice, Device, DeviceFull, DeviceMemory
from kvstore.transport.memory import address_of
from kvstore.types import AnyArray, ByteArray, IntArray


class HostDevice:
    """Allocations lie side by side, so that a copy across two of them does not go unnoticed.

    `before(step)` is called ahead of each step, and may raise; in the middle of a copy too, as "torn".
    """

    name = "memory of the host"

    def __init__(self, total_bytes: int = 16 << 20, *, before: Callable[[str], None] = lambda step: None) -> None:
        self.before = before
        self.allocated: dict[int, int] = {}  # address -> size
        self.is_closed = False
        self.num_pieces = 0  # of all copies
        self._memory = np.frombuffer(mmap.mmap(-1, total_bytes), np.uint8)

    def memory(self) -> DeviceMemory:
        self.before("memory")
        return DeviceMemory(self._memory.size - sum(self.allocated.values()), self._memory.size)

    def allocate(self, size_bytes: int) -> int:
        self.before("allocate")
        address = address_of(self._memory)
        for taken, taken_bytes in sorted(self.allocated.items()):
            if taken - address >= size_bytes:
                break
            address = taken + taken_bytes
        if address + size_bytes > address_of(self._memory) + self._memory.size:
            raise DeviceFull(f"{self.name}: cannot take {size_bytes} bytes")
        self.allocated[address] = size_bytes
        return address

    def free(self, address: int) -> None:
        self.before("free")
        ctypes.memset(address, 0xDD, self.allocated.pop(address))

    def copy_in(self, *, targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
        self.before("copy_in")
        self._copy(targets, sources, sizes, on_device=targets)

    def copy_out(self, *, targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
        self.before("copy_out")
        self._copy(targets, sources, sizes, on_device=sources)

    def close(self) -> None:
        self.before("close")
        self.is_closed = True

    def _copy(self, targets: IntArray, sources: IntArray, sizes: IntArray, *, on_device: IntArray) -> None:
        for piece in range(len(sizes)):
            self.num_pieces += 1
            if piece == len(sizes) // 2:
                self.before("torn")
            begin, end = int(on_device[piece]), int(on_device[piece] + sizes[piece])
            is_within = [address <= begin and end <= address + size for address, size in self.allocated.items()]
            assert any(is_within), "a copy that lies in no allocation"
            ctypes.memmove(int(targets[piece]), int(sources[piece]), int(sizes[piece]))


class CudaError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class DeviceArray:
    """An array in memory of a stand-in, described as torch and CuPy describe theirs. Indexing gives views of it.

    `contents` is what lies there, for the test to look at and to change.
    """

    def __init__(self, contents: AnyArray, *, displacement: int = 0, device: int = 0, **described: Any) -> None:
        self.contents = contents
        self._displacement = displacement  # from where the contents are to the device's addresses
        self._device = device
        self._described = described

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.contents.shape,
            "typestr": self.contents.dtype.str,
            "data": (address_of(self.contents) + self._displacement, not self.contents.flags.writeable),
            "strides": None if self.contents.flags.c_contiguous else self.contents.strides,
            "version": 3,
        } | self._described

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device

    def __len__(self) -> int:
        return len(self.contents)

    def __getitem__(self, key: Any) -> "DeviceArray":
        return DeviceArray(self.contents[key], displacement=self._displacement, device=self._device)


class StandInRuntime:
    """What `CudaDevice` uses of CuPy's runtime, over host memory: copies happen when they are waited for.

    Addresses of the device are those of memory that nobody can touch, but where `is_hidden` is False.
    `before(step)` is called ahead of each call, and may raise.
    """

    CUDARuntimeError = CudaError
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2
    streamNonBlocking, eventBlockingSync, eventDisableTiming = 1, 1, 2

    def __init__(self, names: list[str] | None = None) -> None:
        self.before: Callable[[str], None] = lambda step: None
        self.names = ["First", "Second"] if names is None else names
        self.queues: dict[int, list[tuple[int, int, int, int]]] = {}  # of each stream: what is under way
        self.events: dict[int, tuple[int, int]] = {}  # stream, and how many copies of it the event comes after
        self.num_done: dict[int, int] = {}
        self.used: list[int] = []  # the device of each call
        self.memories: dict[int, tuple[ByteArray, mmap.mmap | None]] = {}  # by address: contents, and what hides them
        self.is_hidden = True
        self._current = threading.local()
        self._handles = itertools.count(1)
        self._lock = threading.RLock()

    def getDeviceCount(self) -> int:
        self.before("getDeviceCount")
        return len(self.names)

    def getDeviceProperties(self, number: int) -> dict[str, bytes]:
        return {"name": self.names[number].encode()}

    def getDevice(self) -> int:
        return getattr(self._current, "number", -1)

    def setDevice(self, number: int) -> None:
        self._current.number = number

    def memGetInfo(self) -> tuple[int, int]:
        self._step("memGetInfo")
        return (15 << 20, 16 << 20)

    def malloc(self, size: int) -> int:
        self._step("malloc")
        return self._take(size)[0]

    def free(self, ptr: int) -> None:
        self._step("free")
        del self.memories[ptr]

    def streamCreateWithFlags(self, flags: int) -> int:
        self._step("streamCreateWithFlags")
        stream = next(self._handles)
        self.queues[stream], self.num_done[stream] = [], 0
        return stream

    def streamSynchronize(self, stream: int) -> None:
        self._step("streamSynchronize")
        self._run(stream, self.num_done[stream] + len(self.queues[stream]))

    def streamDestroy(self, stream: int) -> None:
        self._step("streamDestroy")
        assert not self.queues.pop(stream), "a copy is under way"

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._step("memcpyAsync")
        with self._lock:
            self.queues[stream].append((dst, src, size, kind))

    def eventCreateWithFlags(self, flags: int) -> int:
        self._step("eventCreateWithFlags")
        event = next(self._handles)
        self.events[event] = (0, 0)
        return event

    def eventRecord(self, event: int, stream: int) -> None:
        self._step("eventRecord")
        with self._lock:
            self.events[event] = (stream, self.num_done[stream] + len(self.queues[stream]))

    def eventSynchronize(self, event: int) -> None:
        self._step("eventSynchronize")
        self._run(*self.events[event])

    def eventDestroy(self, event: int) -> None:
        del self.events[event]

    def array(self, contents: AnyArray, *, device: int = 0) -> DeviceArray:
        """In memory of the device, with a copy of the contents."""
        address, memory = self._take(contents.nbytes)
        copy = memory.view(contents.dtype).reshape(contents.shape)
        copy[:] = contents
        return DeviceArray(copy, displacement=address - address_of(memory), device=device)

    def _take(self, size: int) -> tuple[int, ByteArray]:
        contents = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        hides = mmap.mmap(-1, size, prot=0) if self.is_hidden else None
        address = address_of(contents if hides is None else np.frombuffer(hides, np.uint8))
        self.memories[address] = (contents, hides)
        return address, contents

    def holds(self, address: int) -> bool:
        return any(begin <= address < begin + len(memory) for begin, (memory, _) in self.memories.items())

    def _behind(self, address: int) -> int:
        """Where the contents of this address of the device are."""
        for begin, (memory, _) in self.memories.items():
            if begin <= address < begin + len(memory):
                return address_of(memory) + address - begin
        raise AssertionError("a copy that is not to or from memory of the device")

    def _step(self, step: str) -> None:
        assert self.getDevice() >= 0, "this thread did not say which device"
        self.used.append(self.getDevice())
        self.before(step)

    def _run(self, stream: int, up_to: int) -> None:
        with self._lock:
            while self.num_done[stream] < up_to:
                dst, src, size, kind = self.queues[stream].pop(0)
                if kind == self.memcpyHostToDevice:
                    ctypes.memmove(self._behind(dst), src, size)
                else:
                    assert not self.holds(dst)
                    ctypes.memmove(dst, self._behind(src), size)
                self.num_done[stream] += 1


def stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> StandInRuntime:
    """CuPy is there, with this runtime."""
    runtime = StandInRuntime(**fields)
    cuda = ModuleType("cupy.cuda")
    cuda.runtime = runtime  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return runtime


class Noting:
    """Another device, and what is allocated there: address -> size."""

    def __init__(self, device: Device) -> None:
        self.allocated: dict[int, int] = {}
        self.name, self.memory, self.close = device.name, device.memory, device.close
        self.copy_in, self.copy_out = device.copy_in, device.copy_out
        self._device = device

    def allocate(self, size_bytes: int) -> int:
        address = self._device.allocate(size_bytes)
        self.allocated[address] = size_bytes
        return address

    def free(self, address: int) -> None:
        del self.allocated[address]
        self._device.free(address)


def cuda_device() -> CudaDevice:
    """The first one; the test is skipped, with the reason, where there is none."""
    try:
        return CudaDevice(0)
    except InvalidRequest as error:
        pytest.skip(str(error))


def overwrite_on(device: "HostDevice | Noting", old: ByteArray, new: ByteArray) -> None:
    """Where the `old` bytes lie on the device, which is one place, the `new` ones do."""
    found = []
    for address, size_bytes in device.allocated.items():
        copy = np.empty(size_bytes, np.uint8)
        device.copy_out(**_piece(address_of(copy), address, size_bytes))
        found += [address + place for place in places_of(old, copy.tobytes())]
    (address,) = found
    device.copy_in(**_piece(address, address_of(new), new.size))


def places_of(wanted: ByteArray, contents: bytes) -> list[int]:
    """Where in the contents the wanted bytes begin."""
    places, start = [], 0
    while (start := contents.find(wanted.tobytes(), start)) >= 0:
        places.append(start)
        start += 1
    return places


def _piece(target: int, source: int, size_bytes: int) -> dict[str, IntArray]:
    return {"targets": np.array([target]), "sources": np.array([source]), "sizes": np.array([size_bytes])}
