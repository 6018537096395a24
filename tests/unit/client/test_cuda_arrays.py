"""Arrays in device memory as rows: where they lie, and what is refused. No byte of them can be touched here."""

from typing import Any

import numpy as np
import pytest
from builders import spec
from devices import DeviceArray, StandInRuntime

from kvstore.errors import InvalidRequest
from kvstore.types import IntArray, Memory
from kvstore_client.buffers import BlockRows, as_destination, as_rows
from kvstore_client.cuda_arrays import CudaArray, cuda_array, device_of

RUNTIME = StandInRuntime()


def rows_of(value: Any, *, num_rows: int = 3, writable: bool = False, in_region: bool = True) -> Any:
    return as_rows(
        value,
        num_rows=num_rows,
        row_bytes=8,
        where="here",
        writable=writable,
        in_cuda_region=lambda addresses, row_bytes: in_region,
    )


def address_of(array: DeviceArray) -> int:
    address: int = array.__cuda_array_interface__["data"][0]
    return address


def described(contents: np.ndarray[Any, Any], **fields: Any) -> DeviceArray:
    """At an address where nothing is."""
    return DeviceArray(contents, displacement=1 << 60, **fields)


def taken(array: DeviceArray) -> CudaArray:
    found = cuda_array(array, "here")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("array", "begins"),
    [
        (RUNTIME.array(np.zeros((3, 8), np.uint8)), [0, 8, 16]),
        (RUNTIME.array(np.zeros((3, 2, 2), np.float16)), [0, 8, 16]),
        (RUNTIME.array(np.zeros((3, 4, 8), np.uint8))[:, 1], [0, 32, 64]),
        (RUNTIME.array(np.zeros((6, 1), np.uint64))[::2], [0, 16, 32]),
        (RUNTIME.array(np.zeros((3, 8), np.uint8))[::-1], [0, -8, -16]),
        (RUNTIME.array(np.zeros((3, 4), "V2")), [0, 8, 16]),
    ],
    ids=["bytes", "more axes", "a layer of blocks", "every other row", "backwards", "a dtype without a name"],
)
def test_rows_of_an_array_lie_where_the_array_does(array: DeviceArray, begins: list[int]) -> None:
    rows = rows_of(array, writable=True)
    assert rows.memory is Memory.CUDA
    assert (rows.addresses(np.arange(3)) - address_of(array)).tolist() == begins
    assert (rows.pick(np.array([2, 0])).addresses(np.array([1])) - address_of(array)).tolist() == [0]
    assert len(rows.pick(np.array([2, 0]))) == 2


def test_a_list_takes_one_array_a_block() -> None:
    arrays = [RUNTIME.array(np.zeros(shape, np.uint8)) for shape in ((8,), (2, 4), (8, 1))]
    rows = rows_of(arrays, writable=True)
    assert rows.addresses(np.arange(3)).tolist() == [address_of(array) for array in arrays]


def test_whole_blocks_are_cut_into_parts() -> None:
    kv = spec(layers=2, bytes_per_part=8)
    array = RUNTIME.array(np.zeros((3, 16), np.uint8))
    asked: list[tuple[IntArray, int]] = []

    def in_region(addresses: IntArray, row_bytes: int) -> bool:
        asked.append((addresses - address_of(array), row_bytes))
        return True

    into = as_destination(BlockRows(array), spec=kv, parts=[0, 1], num_blocks=3, in_cuda_region=in_region)
    assert [(places.tolist(), row_bytes) for places, row_bytes in asked] == [([0, 16, 32], 16)]
    for part in (0, 1):
        places = into[part].addresses(np.arange(3)) - address_of(array)
        assert (into[part].row_bytes, places.tolist()) == (8, [8 * part, 16 + 8 * part, 32 + 8 * part])


def test_rows_keep_the_arrays_alive_that_they_are_of() -> None:
    array = RUNTIME.array(np.zeros((3, 8), np.uint8))
    rows = rows_of(array).pick(np.array([1])).columns(0, 4)
    assert rows._arrays[0].array is array


@pytest.mark.parametrize(
    "value", [RUNTIME.array(np.zeros((3, 8), np.uint8)), [RUNTIME.array(np.zeros(8, np.uint8))] * 3]
)
def test_memory_in_no_region_is_refused_with_what_to_do(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"here: expected memory of the host.*copy it.*or make a cuda_region"):
        rows_of(value, in_region=False)
    with pytest.raises(InvalidRequest, match="make a cuda_region"):
        as_rows(value, num_rows=3, row_bytes=8, where="here")


class WithGradient:
    """What a tensor of torch does that needs a gradient, or has a dtype without a name."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise RuntimeError("Can't get __cuda_array_interface__ on Variable that requires grad.")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (described(np.zeros((2, 8), np.uint8)), r"first over 3 blocks.*got shape \[2, 8\]"),
        (described(np.zeros(24, np.uint8)), r"2 or more axes.*got shape \[24\]"),
        (described(np.zeros((3, 4), np.uint8)), "expected rows of 8 bytes, got 4"),
        (described(np.zeros((3, 8, 2), np.uint8)[:, :, 0]), "expected each row contiguous"),
        (described(np.zeros((3, 8), np.uint8), mask=object()), "without a mask"),
        (WithGradient(), r"requires grad.*detach\(\)"),
        (described(np.zeros((3, 8), np.uint8), typestr="no dtype"), "can tell where it lies, got: TypeError"),
        ([described(np.zeros(8, np.uint8))] * 2, "expected 3 buffers, one per block, got 2"),
        ([described(np.zeros(size, np.uint8)) for size in (8, 7, 8)], r"here\[1\]: expected 8 contiguous bytes, got 7"),
        ([described(np.zeros(16, np.uint8)[::2])] * 3, r"here\[0\]: expected 8 contiguous bytes"),
        ([np.zeros(8, np.uint8), *[described(np.zeros(8, np.uint8))] * 2], "got 2 of 3 in device memory"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_expected_and_where(value: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        rows_of(value)


@pytest.mark.parametrize("as_list", [False, True])
def test_read_only_memory_is_a_source_but_no_destination(as_list: bool) -> None:
    contents = np.zeros((3, 8), np.uint8)
    contents.flags.writeable = False
    value = [described(row) for row in contents] if as_list else described(contents)
    rows_of(value)
    with pytest.raises(InvalidRequest, match="read-only"):
        rows_of(value, writable=True)


def test_rows_that_overlap_are_no_destination() -> None:
    overlapping = described(np.lib.stride_tricks.sliding_window_view(np.zeros(10, np.uint8), 8, writeable=True))
    rows_of(overlapping)
    with pytest.raises(InvalidRequest, match="do not overlap"):
        rows_of(overlapping, writable=True)


@pytest.mark.parametrize(
    ("contents", "has_gaps"),
    [
        (np.zeros((2, 3, 4), np.float16), False),
        (np.zeros((2, 3, 4), np.float16).transpose(2, 0, 1), False),
        (np.zeros((2, 1, 4), np.float16)[:, ::-1], False),
        (np.zeros((2, 3, 4), np.float16)[:, :2], True),
        (np.zeros((2, 3, 4), np.float16)[..., ::-1], True),
        (np.broadcast_to(np.zeros(4, np.float16), (2, 4)), True),
    ],
    ids=["as it was made", "axes in another order", "a single row backwards", "a slice", "backwards", "repeated"],
)
def test_an_array_without_gaps_is_told_from_one_with_some(contents: np.ndarray[Any, Any], has_gaps: bool) -> None:
    assert taken(described(contents)).has_gaps == has_gaps


def test_arrays_in_host_memory_are_none() -> None:
    for value in (np.zeros(4), bytearray(4), object(), None):
        assert cuda_array(value, "here") is None


def test_the_device_is_the_one_that_the_array_names() -> None:
    array = described(np.zeros(4, np.uint8), device=3)
    assert device_of(taken(array), "here") == 3


class Managed(DeviceArray):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 13, 0


class WithoutDevice:
    def __init__(self, array: DeviceArray) -> None:
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def test_memory_that_is_not_of_one_device_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"here: expected memory of a CUDA device.*got DLPack device 13"):
        device_of(taken(Managed(np.zeros(4, np.uint8))), "here")
    found = cuda_array(WithoutDevice(described(np.zeros(4, np.uint8))), "here")
    assert found is not None
    with pytest.raises(InvalidRequest, match="got a WithoutDevice; pass it as an array of torch or CuPy"):
        device_of(found, "here")
