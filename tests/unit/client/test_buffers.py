"""Callers' buffers as rows: what is taken, without a copy, and what is refused, with which words."""

import sys
import types
from typing import Any

import numpy as np
import pytest
from builders import spec

from kvstore.errors import InvalidRequest
from kvstore_client.buffers import BlockRows, as_destination, as_rows


def rows_of(value: Any, *, num_rows: int = 3, row_bytes: int = 8, writable: bool = False) -> Any:
    return as_rows(value, num_rows=num_rows, row_bytes=row_bytes, where="here", writable=writable)


def addresses_of(array: np.ndarray[Any, Any]) -> list[int]:
    return [array[index].__array_interface__["data"][0] for index in range(len(array))]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 8), np.uint8),
        np.zeros((3, 2), np.float32),
        np.zeros((3, 2, 2), np.float16),
        np.zeros((3, 4, 8), np.uint8)[:, 1],
        np.zeros((3, 1), np.uint64),
        np.zeros((6, 8), np.uint8)[::2],
    ],
    ids=["bytes", "floats", "more axes", "a layer of blocks", "one number a row", "every other row"],
)
def test_rows_of_an_array_lie_where_the_array_does(array: np.ndarray[Any, Any]) -> None:
    rows = rows_of(array, writable=True)
    assert rows.addresses(np.arange(3)).tolist() == addresses_of(array)
    rows.array[1] = 7
    assert array[1].tobytes() == b"\7" * 8
    assert not array[0].any()
    assert not array[2].any()


def test_a_list_takes_one_buffer_a_block_of_whatever_kind() -> None:
    first, second, third = bytearray(8), np.zeros((2, 2), np.uint16), memoryview(bytearray(8))
    rows = rows_of([first, second, third], writable=True)
    for index in range(3):
        rows.rows[index][:] = index + 1
    assert bytes(first) == b"\1" * 8
    assert second.tobytes() == b"\2" * 8
    assert bytes(third) == b"\3" * 8
    assert len(rows.addresses(np.array([0, 2]))) == 2


def test_a_memoryview_of_two_axes_is_an_array() -> None:
    memory = bytearray(24)
    rows = rows_of(memoryview(memory).cast("B", (3, 8)), writable=True)
    rows.array[2] = 9
    assert memory[16:] == b"\x09" * 8


class OnlyDLPack:
    """What arrays of other libraries look like."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> object:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_dlpack_is_taken_in_place() -> None:
    array = np.zeros((3, 2), np.float32)
    rows = rows_of(OnlyDLPack(array), writable=True)
    assert rows.addresses(np.arange(3)).tolist() == addresses_of(array)


class FakeTensor:
    """As much of torch.Tensor as is used: numbers that NumPy has no name for, seen as bytes."""

    def __init__(self, data: np.ndarray[Any, Any], device: str = "cpu", contiguous: bool = True) -> None:
        self.data, self.shape, self._contiguous = data, data.shape, contiguous
        self.device = types.SimpleNamespace(type=device)

    def detach(self) -> "FakeTensor":
        return self

    def stride(self) -> tuple[int, ...]:
        return self.data.strides

    def view(self, dtype: Any) -> "FakeTensor":
        if not self._contiguous:
            raise RuntimeError("self.stride(-1) must be 1 to view BFloat16 as Byte\nmore")
        return FakeTensor(self.data.view(dtype))

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.data


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=FakeTensor, uint8=np.uint8))


@pytest.mark.usefixtures("torch")
def test_a_tensor_is_taken_as_bytes_whatever_its_dtype() -> None:
    data = np.zeros((3, 4), np.float16)
    rows = rows_of(FakeTensor(data), writable=True)
    assert rows.addresses(np.arange(3)).tolist() == addresses_of(data)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (FakeTensor(np.zeros((3, 4), np.float16), device="cuda"), "expected a tensor in host memory"),
        (FakeTensor(np.zeros((3, 4), np.float16), contiguous=False), "call contiguous"),
    ],
    ids=["on a device", "not contiguous"],
)
def test_a_tensor_that_has_no_bytes_here_is_refused(tensor: FakeTensor, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        rows_of(tensor)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros((2, 8), np.uint8), "here: expected 3 rows, one per block, got 2"),
        (np.zeros((3, 4), np.uint8), r"expected rows of 8 bytes, got 4 \(shape \[3, 4\], uint8\)"),
        (np.zeros(24, np.uint8), "got 1 axes; reshape it"),
        (bytearray(24), "got 1 axes; reshape it"),
        (np.zeros((3, 8, 2), np.uint8)[:, :, 0], "expected each row contiguous"),
        (np.zeros((8, 3), np.uint8).T, "expected each row contiguous"),
        (np.full((3, 1), None), "expected numbers or bytes"),
        ([bytearray(8)] * 2, "here: expected 3 buffers, one per block, got 2"),
        ([bytearray(8), bytearray(7), bytearray(8)], r"here\[1\]: expected 8 bytes, got 7"),
        ([np.zeros(16, np.uint8)[::2]] * 3, r"here\[0\]: expected a contiguous buffer"),
        (object(), "expected an array, a tensor or a buffer, got a object"),
        ([1, 2, 3], r"here\[0\]: expected an array, a tensor or a buffer, got a int"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected_and_where(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        rows_of(value)


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros((3, 8), np.uint8)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("value", [read_only(), [bytes(8)] * 3], ids=["array", "bytes"])
def test_memory_that_cannot_be_written_is_a_source_but_no_destination(value: Any) -> None:
    assert len(rows_of(value)) == 3
    with pytest.raises(InvalidRequest, match="got a read-only buffer"):
        rows_of(value, writable=True)


def test_rows_that_overlap_are_no_destination() -> None:
    """Covers: A5."""
    shared = np.lib.stride_tricks.as_strided(np.zeros(16, np.uint8), (3, 8), (4, 1))
    with pytest.raises(InvalidRequest, match="do not overlap"):
        rows_of(shared, writable=True)


# ---- destinations ----

KV = spec(layers=2, bytes_per_part=8)


def test_a_destination_has_rows_for_each_part() -> None:
    arrays = [np.zeros((3, 8), np.uint8) for _ in range(2)]
    rows = as_destination(arrays, spec=KV, parts=[0, 1], num_blocks=3)
    assert [rows[part].addresses(np.array([0])).tolist() for part in (0, 1)] == [
        addresses_of(array)[:1] for array in arrays
    ]


def test_one_array_over_parts_is_a_sequence_of_them() -> None:
    rows = as_destination(np.zeros((2, 3, 8), np.uint8), spec=KV, parts=[0, 1], num_blocks=3)
    assert [len(rows[part]) for part in (0, 1)] == [3, 3]


def test_whole_blocks_are_cut_into_parts() -> None:
    whole = np.zeros((3, 16), np.uint8)
    rows = as_destination(BlockRows(whole), spec=KV, parts=[1], num_blocks=3)
    array = rows[1].array
    assert array is not None
    array[:] = 5
    assert whole[:, 8:].all()
    assert not whole[:, :8].any()


def test_whole_blocks_may_be_a_list_of_buffers() -> None:
    blocks = [bytearray(16) for _ in range(3)]
    rows = as_destination(BlockRows(blocks), spec=KV, parts=[1], num_blocks=3)
    rows[1].rows[2][:] = 5
    assert blocks[2] == bytes(8) + b"\5" * 8


@pytest.mark.parametrize(
    ("into", "words"),
    [
        ({0: np.zeros((3, 8), np.uint8)}, r"got none for \[1\]"),
        ([np.zeros((3, 8), np.uint8)], "expected a sequence of 2 entries, one per part"),
        ([np.zeros((3, 8), np.uint8), np.zeros((3, 4), np.uint8)], r"into\[1\]: expected rows of 8 bytes"),
        (BlockRows(np.zeros((3, 8), np.uint8)), r"into \(blocks\): expected rows of 16 bytes"),
    ],
)
def test_a_destination_that_does_not_cover_what_is_loaded_is_refused(into: Any, words: str) -> None:
    """Covers: A23."""
    with pytest.raises(InvalidRequest, match=words):
        as_destination(into, spec=KV, parts=[0, 1], num_blocks=3)
