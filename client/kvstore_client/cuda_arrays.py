"""A caller's arrays in device memory: where they lie. What lies there cannot be read or written from here.

They are taken by the CUDA array interface, which those of torch, CuPy and others have; none of these is imported.

Source: CUDA array interface, version 3; DLPack, DLDeviceType.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.types import IntArray, Memory

_DLPACK_CUDA: Final = 2  # kDLCUDA. Memory that CUDA moves about by itself, and memory of the host, have other numbers.


@dataclass(frozen=True, slots=True)
class CudaArray:
    """From `address` on, elements of `item_bytes` that lie `strides` bytes apart; keeps the caller's `array` alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    writable: bool
    array: Any

    @property
    def size_bytes(self) -> int:
        return _size_bytes(self.shape, self.item_bytes)

    @property
    def has_gaps(self) -> bool:
        """Whether other bytes lie between its own, or some of its own are those of several elements."""
        outer_first = sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis])
        shape, strides = [self.shape[axis] for axis in outer_first], [self.strides[axis] for axis in outer_first]
        return not _is_contiguous(shape, strides, self.item_bytes)


class CudaRows:
    """Rows of `row_bytes` in device memory, by where they begin; keeps the caller's `arrays` alive."""

    memory = Memory.CUDA

    __slots__ = ("_arrays", "_begins", "row_bytes")

    def __init__(self, begins: IntArray, row_bytes: int, *, arrays: Sequence[CudaArray]) -> None:
        self.row_bytes = row_bytes
        self._begins = begins
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._begins)

    def pick(self, indices: IntArray) -> "CudaRows":
        """Only these rows, in this order."""
        return CudaRows(self._begins[indices], self.row_bytes, arrays=self._arrays)

    def columns(self, offset: int, size_bytes: int) -> "CudaRows":
        """Bytes `offset` to `offset + size_bytes` of every row."""
        return CudaRows(self._begins + offset, size_bytes, arrays=self._arrays)

    def addresses(self, indices: IntArray) -> IntArray:
        """Where in device memory these rows begin."""
        return self._begins[indices]


def cuda_array(value: Any, where: str) -> CudaArray | None:
    """Where this array lies; None: not in device memory. Raises: InvalidRequest, if that cannot be told."""
    try:
        interface = value.__cuda_array_interface__
        shape, (address, read_only) = tuple(interface["shape"]), interface["data"]
        item_bytes = np.dtype(interface["typestr"]).itemsize
        strides = interface.get("strides") or _packed_strides(shape, item_bytes)
    except AttributeError:
        return None
    except Exception as error:  # torch: a tensor with a gradient, or of a dtype that NumPy has no name for
        raise InvalidRequest(
            f"{where}: expected an array that can tell where it lies, got: {error!r}; pass it detached, as bytes "
            "(`tensor.detach().view(torch.uint8)`)"
        ) from None
    if interface.get("mask") is not None:
        raise InvalidRequest(f"{where}: expected an array without a mask, got one with; pass its data")
    return CudaArray(int(address), shape, tuple(strides), item_bytes, not read_only, value)


def device_of(array: CudaArray, where: str) -> int:
    """The number of the device whose memory it is, in this process. Raises: InvalidRequest, if it cannot be told."""
    try:
        kind, number = array.array.__dlpack_device__()
    except AttributeError:
        raise InvalidRequest(
            f"{where}: expected an array that tells its device (`__dlpack_device__`), got a "
            f"{type(array.array).__name__}; pass it as an array of torch or CuPy"
        ) from None
    if kind != _DLPACK_CUDA:
        raise InvalidRequest(
            f"{where}: expected memory of a CUDA device (DLPack device {_DLPACK_CUDA}), got DLPack device {int(kind)}; "
            "allocate it on one"
        )
    return int(number)


def as_cuda_rows(rows: Any, *, num_rows: int, row_bytes: int, where: str, writable: bool) -> CudaRows | None:
    """An array, or a list of one for each row, as `num_rows` rows of `row_bytes`; None: nothing of it is on a device.

    Raises: InvalidRequest, if number, size, contiguity or writability do not fit, or some of a list is not on a device.
    """
    if not isinstance(rows, list | tuple):
        array = cuda_array(rows, where)
        return None if array is None else _rows_of_one(array, num_rows, row_bytes, where, writable)
    found = [cuda_array(row, f"{where}[{index}]") for index, row in enumerate(rows)]
    arrays = [array for array in found if array is not None]
    if arrays and len(arrays) != len(found):
        raise InvalidRequest(
            f"{where}: expected buffers that are all in device memory, or all in host memory, got {len(arrays)} of "
            f"{len(found)} in device memory; copy these first"
        )
    return _rows_of_many(arrays, row_bytes, where, writable) if arrays else None


def _rows_of_one(array: CudaArray, num_rows: int, row_bytes: int, where: str, writable: bool) -> CudaRows:
    shape, strides = array.shape, array.strides
    if len(shape) < 2 or shape[0] != num_rows:
        raise InvalidRequest(
            f"{where}: expected an array of 2 or more axes, the first over {num_rows} blocks, or a list of one array "
            f"per block, got shape {list(shape)}; slice or reshape it"
        )
    size_bytes = _size_bytes(shape[1:], array.item_bytes)
    if num_rows and size_bytes != row_bytes:
        raise InvalidRequest(
            f"{where}: expected rows of {row_bytes} bytes, got {size_bytes} (shape {list(shape)}, items of "
            f"{array.item_bytes} bytes); check shape and dtype against the spec"
        )
    if not _is_contiguous(shape[1:], strides[1:], array.item_bytes):
        raise InvalidRequest(f"{where}: expected each row contiguous, got strides {strides}; copy it first")
    if writable:
        _check_writable(array, where)
        if num_rows > 1 and abs(strides[0]) < row_bytes:
            raise InvalidRequest(f"{where}: expected rows that do not overlap, got strides {strides}; copy it")
    return CudaRows(array.address + strides[0] * np.arange(num_rows, dtype=np.int64), row_bytes, arrays=[array])


def _rows_of_many(arrays: Sequence[CudaArray], row_bytes: int, where: str, writable: bool) -> CudaRows:
    for index, array in enumerate(arrays):
        if array.size_bytes != row_bytes or not _is_contiguous(array.shape, array.strides, array.item_bytes):
            raise InvalidRequest(
                f"{where}[{index}]: expected {row_bytes} contiguous bytes, got {array.size_bytes} (shape "
                f"{list(array.shape)}, strides {array.strides}); check it against the spec, or copy it first"
            )
        if writable:
            _check_writable(array, f"{where}[{index}]")
    return CudaRows(np.array([array.address for array in arrays], np.int64), row_bytes, arrays=arrays)


def _size_bytes(shape: Sequence[int], item_bytes: int) -> int:
    return int(np.prod(shape, dtype=np.int64)) * item_bytes


def _packed_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    return tuple(_size_bytes(shape[axis + 1 :], item_bytes) for axis in range(len(shape)))


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> bool:
    """Whether the elements lie side by side, the last axis first."""
    packed = _packed_strides(shape, item_bytes)
    return all(length == 1 or stride == own for length, stride, own in zip(shape, strides, packed, strict=True))


def _check_writable(array: CudaArray, where: str) -> None:
    if not array.writable:
        raise InvalidRequest(f"{where}: expected memory that can be written to, got a read-only array; copy it")
