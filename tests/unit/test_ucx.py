"""Agents of two ends in one process: what is moved, what is refused, how large memory is registered."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, StoreFull, StoreUnavailable, Unsupported
from kvstore.transport import ucx
from kvstore.transport.ucx import Agent, Op, Transfer, cut, device_towards
from kvstore.types import Memory

needs_nixl = pytest.mark.skipif(bool(ucx.why_unavailable()), reason=ucx.why_unavailable())
SIZE = 1 << 20
SOME = st.integers(1, 3 * ucx.MAX_PIECE_BYTES)


@given(st.lists(st.tuples(SOME, st.integers(0, 1 << 40), st.integers(0, 1 << 40)), min_size=1, max_size=5))
def test_pieces_are_cut_into_the_same_bytes_and_none_is_too_large(pieces: list[tuple[int, int, int]]) -> None:
    """Covers: E12."""
    sizes, local, remote = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    here, there, widths = cut(local, remote, sizes)
    assert (widths > 0).all()
    assert (widths <= ucx.MAX_PIECE_BYTES).all()
    place = 0
    for size, begin, end in pieces:
        moved = 0
        while moved < size:
            assert (here[place], there[place]) == (begin + moved, end + moved)
            moved += int(widths[place])
            place += 1
        assert moved == size
    assert place == len(widths)


@pytest.fixture
def agents() -> Iterator[tuple[Agent, Agent]]:
    """The one that begins transfers, and the passive one."""
    with contextlib.ExitStack() as stack:
        yield tuple(
            stack.enter_context(contextlib.closing(Agent(name, device="lo", num_pollers=n)))
            for name, n in (("a", 1), ("b", 0))
        )


def move(agent: Agent, op: Op, local: np.ndarray, remote: np.ndarray, sizes: np.ndarray) -> None:
    transfer: Transfer = agent.begin(op, "b", local=local, remote=remote, sizes=sizes, device_id=3)
    deadline = time.monotonic() + 20
    while not transfer.poll():
        assert time.monotonic() < deadline
    transfer.release()


@needs_nixl
def test_memory_larger_than_a_registration_is_moved_whole(
    agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: E12."""
    monkeypatch.setattr(ucx, "REGISTER_BYTES", 64 << 10)
    monkeypatch.setattr(ucx, "MAX_PIECE_BYTES", 16 << 10)
    ours, theirs = agents
    mine = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
    there = np.zeros(SIZE + 1, np.uint8)
    ours.register(mine.ctypes.data, SIZE)
    base = there.ctypes.data
    theirs.register(base, SIZE + 1, device_id=3)
    ours.add_peer("b", theirs.metadata(base, device_id=3), address=base, size_bytes=SIZE + 1, device_id=3)
    pieces = np.array([mine.ctypes.data]), np.array([base + 1]), np.array([SIZE])
    move(ours, Op.WRITE, *cut(*pieces))
    assert (there[1:] == mine).all()
    there[1:] = there[:0:-1].copy()
    move(ours, Op.READ, *cut(*pieces))
    assert (mine == there[1:]).all()


@needs_nixl
def test_memory_registered_again_at_the_same_place_is_moved_to_under_its_new_number(
    agents: tuple[Agent, Agent],
) -> None:
    """Covers: E13."""
    ours, theirs = agents
    mine, there = np.full(SIZE, 5, np.uint8), np.zeros(SIZE, np.uint8)
    ours.register(mine.ctypes.data, SIZE)
    ours.register(mine.ctypes.data, SIZE)  # again: nothing to do
    base = there.ctypes.data
    for number in (1, 2, 3):
        theirs.register(base, SIZE, device_id=number)
        metadata = theirs.metadata(base, device_id=number)
        ours.add_peer("b", metadata, address=base, size_bytes=SIZE, device_id=number)
        if number < 3:
            theirs.deregister(base, device_id=number)
    move(ours, Op.WRITE, np.array([mine.ctypes.data]), np.array([base]), np.array([SIZE]))
    assert (there == 5).all()
    theirs.deregister(base, device_id=3)
    theirs.deregister(base, device_id=3)


@needs_nixl
def test_memory_that_is_not_registered_is_refused_on_either_side(agents: tuple[Agent, Agent]) -> None:
    ours, theirs = agents
    mine, there = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    theirs.register(there.ctypes.data, SIZE, device_id=3)
    base = there.ctypes.data
    ours.add_peer("b", theirs.metadata(base, device_id=3), address=base, size_bytes=SIZE, device_id=3)
    one = np.array([64])
    with pytest.raises(InvalidRequest):
        move(ours, Op.READ, np.array([mine.ctypes.data]), np.array([there.ctypes.data]), one)
    ours.register(mine.ctypes.data, SIZE)
    with pytest.raises(InvalidRequest):
        move(ours, Op.READ, np.array([mine.ctypes.data]), np.array([there.ctypes.data + SIZE - 63]), one)
    move(ours, Op.READ, np.array([mine.ctypes.data]), np.array([there.ctypes.data + SIZE - 64]), one)


@needs_nixl
def test_memory_of_the_host_is_neither_registered_nor_moved_as_that_of_a_device(agents: tuple[Agent, Agent]) -> None:
    ours, theirs = agents
    mine, there = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
    base = there.ctypes.data
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"register 1048576 bytes of a CUDA device.*copy to host memory"):
            theirs.register(base, SIZE, device_id=3, memory=Memory.CUDA)
    assert repr(theirs) == "<Agent 'b' on lo [0 registered]>"
    theirs.register(base, SIZE, device_id=3)
    ours.register(mine.ctypes.data, SIZE)
    what = {"address": base, "size_bytes": SIZE, "device_id": 3}
    with pytest.raises(InvalidRequest, match=r"\(CUDA\) with the device id 3"):
        ours.add_peer("b", theirs.metadata(base, device_id=3), **what, memory=Memory.CUDA)
    one, places = np.ones(1, np.int64), {"local": np.array([mine.ctypes.data]), "remote": np.array([base])}
    with pytest.raises(InvalidRequest):
        ours.begin(Op.READ, "b", **places, sizes=one, device_id=3, memory=Memory.CUDA)
    move(ours, Op.READ, places["local"], places["remote"], one)


@needs_nixl
def test_an_agent_that_is_closed_says_so(agents: tuple[Agent, Agent]) -> None:
    ours, _ = agents
    ours.close()
    ours.close()
    assert repr(ours) == "<Agent 'a' on lo [closed]>"
    with pytest.raises(StoreUnavailable, match="closed"):
        ours.register(4096, 64)


@needs_nixl
def test_a_registration_that_fails_names_the_limits_and_leaves_nothing(
    agents: tuple[Agent, Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: E12."""
    ours, _ = agents
    real = ours._agent

    class Limited:
        """Registers two pieces, and no third."""

        left = 2
        gone = 0

        def registerMem(self, descriptors: Any, backends: Any) -> None:
            if not self.left:
                raise ours._nixl.nixlBackendError("NIXL_ERR_BACKEND")
            self.left -= 1
            real.registerMem(descriptors, backends)

        def deregisterMem(self, descriptors: Any, backends: Any) -> None:
            self.gone += 1
            real.deregisterMem(descriptors, backends)

    limited = Limited()
    memory = np.zeros(SIZE, np.uint8)
    monkeypatch.setattr(ucx, "REGISTER_BYTES", SIZE // 4)
    monkeypatch.setattr(ours, "_agent", limited)
    with pytest.raises(StoreFull, match=r"memlock limit.*huge pages.*max_mr_size"):
        ours.register(memory.ctypes.data, SIZE)
    assert limited.gone == 2
    monkeypatch.setattr(ours, "_agent", real)
    ours.register(memory.ctypes.data, SIZE)


def test_the_device_is_the_one_towards_the_daemon() -> None:
    assert device_towards("") == "lo"
    assert device_towards("127.0.0.1") == "lo"
    with pytest.raises(Unsupported):
        device_towards("no such host.invalid")


def test_without_nixl_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12._bindings", None)
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    assert "nixl-cu12" in ucx.why_unavailable()
    with pytest.raises(Unsupported, match="nixl-cu12"):
        Agent("a", device="lo")
