"""Memory of accelerators: taken, given back, copied to and from, and hashed, for the gpu tier and for CUDA regions.

`CudaDevice` is CuPy's runtime calls with the errors made ours; CuPy is imported when the first one is made. Every call
here may be made from any thread. Not run on a GPU yet.

Source: CUDA runtime API, sections memory, stream and event management.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import AnyArray, IntArray

OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation
SCRATCH_BYTES: Final = 8 << 20  # of host memory, through which bytes go to be hashed; more only for a larger piece


class DeviceFailed(Exception):
    """The device cannot be used any more; the message says which, what happened, and what to do."""


class DeviceFull(DeviceFailed):
    """The device has no memory for this; nothing else is wrong."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Of the whole device, whoever uses it."""

    free_bytes: int
    total_bytes: int


class Device(Protocol):
    """What is asked of an accelerator. All of it raises DeviceFailed, and all of it may block."""

    @property
    def name(self) -> str:
        """For people, with its number."""
        ...

    def memory(self) -> DeviceMemory: ...

    def allocate(self, size_bytes: int) -> int:
        """Where the new memory begins, aligned to 256 bytes at least. Raises: DeviceFull, if there is not enough."""
        ...

    def free(self, address: int) -> None:
        """What `allocate` returned here is given back; no copy may be under way there."""
        ...

    def copy_in(self, *, targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
        """`sizes[i]` bytes at host address `sources[i]` are at device address `targets[i]` too, for all i.

        Each piece lies within one allocation of the device and one of the host. Once this returns or raises, no
        copy of it is under way.
        """
        ...

    def copy_out(self, *, targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
        """As `copy_in`, from the device to the host."""
        ...

    def close(self) -> None:
        """Nothing is held there any more but the memory that was not freed."""
        ...


class CudaDevice:
    """One CUDA device: a stream for each direction, so that copies in and copies out do not wait for one another.

    A copy from or to memory that is page-locked (`pinning`) runs at the speed of the bus; other memory is slower.
    """

    def __init__(self, number: int) -> None:
        """Raises: InvalidRequest, if CuPy is not installed, or there is no such device; DeviceFailed."""
        self._cuda = _runtime()
        names = _device_names(self._cuda)
        if not 0 <= number < len(names):
            found = ", ".join(f"{place}: {name}" for place, name in enumerate(names))
            raise InvalidRequest(f"gpu: expected the number of a device that is there ({found}), got {number}")
        self.name = f"{names[number]} (cuda:{number})"
        self._number = number
        with self._calling("open"):
            self._inward = self._cuda.streamCreateWithFlags(self._cuda.streamNonBlocking)
            self._outward = self._cuda.streamCreateWithFlags(self._cuda.streamNonBlocking)

    def memory(self) -> DeviceMemory:
        with self._calling("ask for its memory"):
            return DeviceMemory(*self._cuda.memGetInfo())

    def allocate(self, size_bytes: int) -> int:
        with self._calling(f"take {size_bytes} bytes"):
            return int(self._cuda.malloc(size_bytes))

    def free(self, address: int) -> None:
        with self._calling("give back memory"):
            self._cuda.free(address)

    def copy_in(self, *, targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
        with self._calling("copy to it"):
            self._copy(targets, sources, sizes, kind=self._cuda.memcpyHostToDevice, stream=self._inward)

    def copy_out(self, *, targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
        with self._calling("copy from it"):
            self._copy(targets, sources, sizes, kind=self._cuda.memcpyDeviceToHost, stream=self._outward)

    def close(self) -> None:
        with self._calling("close"):
            self._cuda.streamDestroy(self._inward)
            self._cuda.streamDestroy(self._outward)

    def _copy(self, targets: IntArray, sources: IntArray, sizes: IntArray, *, kind: int, stream: int) -> None:
        cuda = self._cuda
        try:
            for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                cuda.memcpyAsync(target, source, size, kind, stream)
            self._wait(stream)
        except cuda.CUDARuntimeError:
            with contextlib.suppress(cuda.CUDARuntimeError):  # then the device is lost, and copies nothing any more
                cuda.streamSynchronize(stream)
            raise

    def _wait(self, stream: int) -> None:
        """What was begun on the stream until now has ended; what other threads begin after that is not waited for."""
        cuda = self._cuda
        event = cuda.eventCreateWithFlags(cuda.eventBlockingSync | cuda.eventDisableTiming)  # sleeps, does not spin
        try:
            cuda.eventRecord(event, stream)
            cuda.eventSynchronize(event)
        finally:
            cuda.eventDestroy(event)

    @contextlib.contextmanager
    def _calling(self, action: str) -> Iterator[None]:
        """This thread's calls go to this device until the end, and an error of them becomes ours.

        The thread may be an engine's, which uses another device.
        """
        cuda = self._cuda
        try:
            before = cuda.getDevice()
            cuda.setDevice(self._number)
            try:
                yield
            finally:
                cuda.setDevice(before)
        except cuda.CUDARuntimeError as error:
            message = f"{self.name}: cannot {action}: {error}"
            if error.status == OUT_OF_MEMORY:
                raise DeviceFull(f"{message}; give the gpu tier less, or the others on this device") from error
            raise DeviceFailed(f"{message}; look for it in nvidia-smi and dmesg, then restart") from error


def hash_copies(device: Device, addresses: IntArray, size_bytes: int) -> AnyArray:
    """`[n]` u64: the xxh3-64 of so many bytes at each address of the device. Raises: DeviceFailed."""
    step = max(1, SCRATCH_BYTES // size_bytes)
    scratch = np.empty((min(step, len(addresses)), size_bytes), np.uint8)
    places, sizes = address_of(scratch) + size_bytes * np.arange(len(scratch)), np.full(len(scratch), size_bytes)
    checksums = np.empty(len(addresses), np.uint64)
    for first in range(0, len(addresses), step):
        sources = addresses[first : first + step]
        device.copy_out(targets=places[: len(sources)], sources=sources, sizes=sizes[: len(sources)])
        checksums[first : first + step] = hash_pieces(places[: len(sources)], sizes[: len(sources)])
    return checksums


def _runtime() -> Any:
    """CuPy's CUDA runtime, which is not typed."""
    try:
        from cupy.cuda import runtime
    except ImportError as error:
        raise InvalidRequest(f"gpu: CuPy cannot be imported ({error}); pip install 'kvstore[gpu]'") from error
    return runtime


def _device_names(cuda: Any) -> list[str]:
    """Of every device that this process may use, by number. Raises: InvalidRequest, if there is none."""
    try:
        names = [cuda.getDeviceProperties(number)["name"].decode() for number in range(cuda.getDeviceCount())]
    except cuda.CUDARuntimeError as error:
        raise InvalidRequest(f"gpu: expected a CUDA device, found none ({error}); see that nvidia-smi does") from error
    if not names:
        raise InvalidRequest(
            "gpu: expected a CUDA device, found none; see that nvidia-smi does, and that it may be used"
        )
    return names
