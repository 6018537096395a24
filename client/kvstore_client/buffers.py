"""Callers' buffers as rows of bytes, one row per block: checked once, then addressed without copies.

NumPy arrays, anything with the buffer protocol, torch tensors in host memory and DLPack are taken; and arrays in
device memory, if they lie in a CUDA region. torch is never imported here: a tensor can only come from a caller who did.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of
from kvstore.types import AnyArray, ByteArray, IntArray, Memory
from kvstore_client.cuda_arrays import CudaRows, as_cuda_rows

# What a caller may hand in for one part: a 2-D-or-more array whose row i is block i, or one buffer per block.
RowsLike: TypeAlias = Any
# Whether rows of so many bytes at these addresses of a device all lie in one open CUDA region.
InCudaRegion: TypeAlias = Callable[[IntArray, int], bool]


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Rows of whole blocks, `[num_blocks][block_bytes]`, where rows of one part are the default."""

    rows: RowsLike


class PerPart(Protocol):
    """Rows for each part: a dict or a sequence of them, or an array whose first axis is parts."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: int, /) -> RowsLike: ...


Destination: TypeAlias = BlockRows | PerPart


class Rows:
    """The rows of a caller's buffer in host memory, each `row_bytes` long; keeps the buffer alive.

    `array` is `[num_rows, row_bytes]` where the rows are evenly spaced, else `None`. With `order`, row i is what would
    be row `order[i]`.
    """

    memory = Memory.HOST

    __slots__ = ("array", "order", "row_bytes", "rows")

    def __init__(self, rows: ByteArray | list[ByteArray], row_bytes: int, *, order: IntArray | None = None) -> None:
        self.array: ByteArray | None = rows if isinstance(rows, np.ndarray) else None
        self.rows: ByteArray | list[ByteArray] = rows
        self.row_bytes = row_bytes
        self.order = order

    def __len__(self) -> int:
        return len(self.rows) if self.order is None else len(self.order)

    def pick(self, indices: IntArray) -> "Rows":
        """Only these rows, in this order."""
        return Rows(self.rows, self.row_bytes, order=indices if self.order is None else self.order[indices])

    def columns(self, offset: int, size_bytes: int) -> "Rows":
        """Bytes `offset` to `offset + size_bytes` of every row."""
        if self.array is not None:
            return Rows(self.array[:, offset : offset + size_bytes], size_bytes, order=self.order)
        return Rows([row[offset : offset + size_bytes] for row in self.rows], size_bytes, order=self.order)

    def addresses(self, indices: IntArray) -> IntArray:
        """Where in memory these rows begin."""
        if self.order is not None:
            indices = self.order[indices]
        if self.array is not None:
            return address_of(self.array) + indices * self.array.strides[0]
        return np.array([address_of(self.rows[index]) for index in indices.tolist()], np.int64)


def in_none(addresses: IntArray, row_bytes: int) -> bool:
    """Where there are no CUDA regions."""
    return False


def as_rows(
    rows: RowsLike,
    *,
    num_rows: int,
    row_bytes: int,
    where: str,
    writable: bool = False,
    in_cuda_region: InCudaRegion = in_none,
) -> Rows | CudaRows:
    """The caller's buffer as `num_rows` rows of `row_bytes` bytes.

    Raises: InvalidRequest, if number, size, kind, contiguity or writability do not fit, or they are in device memory
    and not in a CUDA region; it says `where`.
    """
    if isinstance(rows, list | tuple) and len(rows) != num_rows:
        raise InvalidRequest(f"{where}: expected {num_rows} buffers, one per block, got {len(rows)}; match them")
    on_device = as_cuda_rows(rows, num_rows=num_rows, row_bytes=row_bytes, where=where, writable=writable)
    if on_device is not None:
        if num_rows and not in_cuda_region(on_device.addresses(np.arange(num_rows)), row_bytes):
            raise InvalidRequest(
                f"{where}: expected memory of the host or of one open CUDA region, got device memory in none of them; "
                "copy it to the host first, or make a cuda_region of it"
            )
        return on_device
    if isinstance(rows, list | tuple):
        return Rows([_row(row, row_bytes, f"{where}[{index}]", writable) for index, row in enumerate(rows)], row_bytes)
    array = _as_array(rows, where)
    if array.ndim < 2:
        raise InvalidRequest(
            f"{where}: expected an array of 2 or more axes, the first over blocks, or a list of one buffer "
            f"per block, got {array.ndim} axes; reshape it to [{num_rows}, ...]"
        )
    if len(array) != num_rows:
        raise InvalidRequest(f"{where}: expected {num_rows} rows, one per block, got {len(array)}; slice it")
    if num_rows == 0:
        return Rows(np.empty((0, row_bytes), np.uint8), row_bytes)
    size_bytes = array[0].nbytes
    if size_bytes != row_bytes:
        raise InvalidRequest(
            f"{where}: expected rows of {row_bytes} bytes, got {size_bytes} (shape {list(array.shape)}, "
            f"{array.dtype}); check shape and dtype against the spec"
        )
    if not array[0].flags.c_contiguous:
        raise InvalidRequest(f"{where}: expected each row contiguous, got strides {array.strides}; copy it first")
    if writable:
        _check_writable(array, where)
        if num_rows > 1 and abs(array.strides[0]) < row_bytes:
            raise InvalidRequest(f"{where}: expected rows that do not overlap, got strides {array.strides}; copy it")
    return Rows(_bytes_of(array, where).reshape(num_rows, row_bytes), row_bytes)


def as_destination(
    into: Destination,
    *,
    spec: KVSpec,
    parts: Sequence[int],
    num_blocks: int,
    in_cuda_region: InCudaRegion = in_none,
) -> dict[int, Rows | CudaRows]:
    """Where each part of each block goes: rows for every part of `parts`, all of them writable.

    Raises: InvalidRequest, as `as_rows` does, or if a part has no rows.
    """
    if isinstance(into, BlockRows):
        whole = as_rows(
            into.rows,
            num_rows=num_blocks,
            row_bytes=spec.block_bytes,
            where="into (blocks)",
            writable=True,
            in_cuda_region=in_cuda_region,
        )
        return {part: whole.columns(*spec.part_range(part)) for part in parts}
    if isinstance(into, Mapping):
        missing = [part for part in parts if part not in into]
        if missing:
            raise InvalidRequest(f"into: expected rows for every part asked for, got none for {missing[:8]}; add them")
    elif not hasattr(into, "__getitem__") or len(into) != spec.num_parts:
        got = f"{len(into)} entries" if hasattr(into, "__len__") else f"a {type(into).__name__}"
        raise InvalidRequest(
            f"into: expected a sequence of {spec.num_parts} entries, one per part, a dict of part -> rows, "
            f"or BlockRows(rows), got {got}; for a single part pass [rows]"
        )
    return {
        part: as_rows(
            into[part],
            num_rows=num_blocks,
            row_bytes=spec.part_bytes[part],
            where=f"into[{part}]",
            writable=True,
            in_cuda_region=in_cuda_region,
        )
        for part in parts
    }


def _row(row: object, row_bytes: int, where: str, writable: bool) -> ByteArray:
    """One buffer as `[row_bytes]`."""
    array = _as_array(row, where)
    if array.nbytes != row_bytes:
        raise InvalidRequest(f"{where}: expected {row_bytes} bytes, got {array.nbytes}; check it against the spec")
    if not array.flags.c_contiguous:
        raise InvalidRequest(f"{where}: expected a contiguous buffer, got strides {array.strides}; copy it first")
    if writable:
        _check_writable(array, where)
    return _bytes_of(array, where).reshape(-1)


def _as_array(value: Any, where: str) -> AnyArray:
    """An array over the value's own memory."""
    if isinstance(value, np.ndarray):
        array: AnyArray = value
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        array = _tensor_as_array(torch, value, where)
    else:
        try:
            view = memoryview(value)
        except TypeError:
            array = _dlpack_as_array(value, where)
        else:
            # 2-D views keep their shape; flat ones are a row of bytes.
            array = np.asarray(view) if view.ndim > 1 else np.frombuffer(view, np.uint8)
    if array.dtype.hasobject:
        raise InvalidRequest(f"{where}: expected numbers or bytes, got dtype {array.dtype}; convert it first")
    return array


def _tensor_as_array(torch: Any, tensor: Any, where: str) -> AnyArray:
    if tensor.device.type != "cpu":
        raise InvalidRequest(
            f"{where}: expected a tensor in host memory, got one on {tensor.device}; copy it there first"
        )
    try:
        array: AnyArray = tensor.detach().view(torch.uint8).numpy()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise InvalidRequest(
            f"{where}: expected a tensor that can be viewed as bytes, got shape {list(tensor.shape)}, "
            f"strides {list(tensor.stride())} ({reason}); call contiguous() first"
        ) from None
    return array


def _dlpack_as_array(value: Any, where: str) -> AnyArray:
    if not hasattr(value, "__dlpack__"):
        raise InvalidRequest(
            f"{where}: expected an array, a tensor or a buffer, got a {type(value).__name__}; pass memory"
        )
    try:
        array: AnyArray = np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{where}: expected memory of this host in a dtype that NumPy knows, got {type(value).__name__} "
            f"({error}); pass a NumPy view of it"
        ) from None
    return array


def _bytes_of(array: AnyArray, where: str) -> ByteArray:
    """The same memory as uint8, rows (or the whole, if 1-D) flattened; rows are known to be contiguous."""
    flat = array.reshape(len(array), -1) if array.ndim > 1 else array.reshape(-1)
    if not np.may_share_memory(flat, array):
        raise InvalidRequest(f"{where}: expected memory that can be addressed in place, got strides {array.strides}")
    return flat.view(np.uint8)


def _check_writable(array: AnyArray, where: str) -> None:
    if not array.flags.writeable:
        raise InvalidRequest(f"{where}: expected memory that can be written to, got a read-only buffer; copy it")
