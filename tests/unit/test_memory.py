"""Copying and hashing by address: memory.c and the Python that stands in for it do the same."""

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport import memory
from kvstore.types import AnyArray
from kvstore_server.mover import JOB_BYTES, cut

SIZE = 1 << 18
SOURCE = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
GUARD = 0xA5

piece = st.tuples(st.integers(0, 200), st.integers(0, SIZE - 200))  # where it begins, how long it is


@pytest.fixture(params=["memory.c", "python"])
def move(request: pytest.FixtureRequest) -> memory.Move:
    if request.param == "python":
        return memory.move_in_python
    if not memory.IS_NATIVE:
        pytest.skip("memory.c was not compiled: no C compiler when kvstore was installed")
    native = memory.load_native()
    assert native is not None
    return native


def test_memory_c_is_compiled_where_there_is_a_compiler() -> None:
    """The Python that stands in for it is right but slow, so nobody would notice."""
    import shutil

    assert memory.IS_NATIVE or shutil.which("cc") is None


@pytest.mark.parametrize("shift", [0, 1, 15, 16, 63])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 4096, 32767, 32768, 32769, 100_001, SIZE - 200])
def test_exactly_the_bytes_of_a_piece_are_copied(move: memory.Move, shift: int, size: int) -> None:
    target = np.full(SIZE + 128, GUARD, np.uint8)
    address = memory.address_of(target) + shift
    move(np.array([address]), np.array([memory.address_of(SOURCE) + 7]), np.array([size]), None)
    assert np.array_equal(target[shift : shift + size], SOURCE[7 : 7 + size])
    assert (target[:shift] == GUARD).all()
    assert (target[shift + size :] == GUARD).all()


@given(pieces=st.lists(piece, max_size=5))
def test_checksums_are_those_of_xxhash(pieces: list[tuple[int, int]]) -> None:
    begins, sizes = (np.array(column, np.int64) for column in zip(*pieces, strict=True)) if pieces else _none()
    expected = [xxhash.xxh3_64_intdigest(SOURCE[begin : begin + size].tobytes()) for begin, size in pieces]
    addresses = begins + memory.address_of(SOURCE)
    assert memory.hash_pieces(addresses, sizes).tolist() == expected
    targets = np.zeros((len(pieces), SIZE), np.uint8)
    to = memory.address_of(targets.reshape(-1)) + SIZE * np.arange(len(pieces))
    assert memory.copy_and_hash_pieces(to, addresses, sizes).tolist() == expected
    for target, begin, size in zip(targets, begins.tolist(), sizes.tolist(), strict=True):
        assert np.array_equal(target[:size], SOURCE[begin : begin + size])


def _none() -> tuple[AnyArray, AnyArray]:
    return np.zeros(0, np.int64), np.zeros(0, np.int64)


@given(st.lists(st.sampled_from([1, 4096, JOB_BYTES // 2, JOB_BYTES, 3 * JOB_BYTES]), max_size=12))
def test_jobs_cover_all_pieces_once_and_are_small(sizes: list[int]) -> None:
    jobs = list(cut(np.array(sizes, np.int64)))
    assert [number for job in jobs for number in range(job.start, job.stop)] == list(range(len(sizes)))
    for job in jobs:
        assert job.stop - job.start == 1 or sum(sizes[job]) <= JOB_BYTES
