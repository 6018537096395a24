"""The layout of a slab, and the datagrams of the shm socket."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest, NotAllowed, StoreUnavailable
from kvstore.transport import shm
from kvstore.transport.shm import Op, Reply, Request, SlabLayout

num_parts_ = st.integers(1, 300)
block_bytes_ = st.integers(1, 100_000)


@given(num_slots=st.integers(1, 500), num_parts=num_parts_, block_bytes=block_bytes_)
def test_headers_and_slots_do_not_overlap_and_are_aligned(num_slots: int, num_parts: int, block_bytes: int) -> None:
    layout = SlabLayout.of(num_slots=num_slots, num_parts=num_parts, block_bytes=block_bytes)
    assert layout.header_bytes >= 48 + 8 * num_parts
    assert layout.header_bytes % shm.HEADER_ALIGN_BYTES == 0
    assert layout.num_slots * layout.header_bytes <= layout.data_offset
    assert layout.data_offset % shm.PAGE_BYTES == 0
    assert layout.slot_bytes >= block_bytes
    assert layout.slot_bytes % shm.SLOT_ALIGN_BYTES == 0
    assert layout.size_bytes == layout.data_offset + num_slots * layout.slot_bytes


@given(size_bytes=st.integers(1, 4 << 20), num_parts=num_parts_, block_bytes=block_bytes_)
def test_a_fitting_layout_fits_and_leaves_less_than_a_slot_and_two_pages(
    size_bytes: int, num_parts: int, block_bytes: int
) -> None:
    layout = SlabLayout.fitting(size_bytes=size_bytes, num_parts=num_parts, block_bytes=block_bytes)
    assert layout.num_slots == 1 or layout.size_bytes <= size_bytes
    left = size_bytes - layout.size_bytes
    assert left < layout.slot_bytes + layout.header_bytes + 2 * shm.PAGE_BYTES


def test_views_of_headers_and_slots_reach_the_whole_memory_and_nothing_twice() -> None:
    layout = SlabLayout.of(num_slots=5, num_parts=3, block_bytes=5000)
    memory = np.zeros(layout.size_bytes, np.uint8)
    headers, slots = layout.headers(memory), layout.slots(memory)
    assert headers.shape == (5,)
    assert slots.shape == (5, layout.slot_bytes)
    headers["generation"][:] = 2**64 - 1
    headers["hash"][:] = b"\xff" * 32
    headers["checksums"][:] = 2**64 - 1
    assert not slots.any()
    slots[:] = 255
    assert memory[layout.data_offset :].all()
    headers["generation"][:] = headers["checksums"][:] = 0
    headers["hash"][:] = b"\0" * 32
    assert not memory[: layout.data_offset].any()


@given(
    op=st.sampled_from(Op),
    number=st.integers(0, 2**32 - 1),
    size=st.integers(0, 2**64 - 1),
    ticket=st.binary(min_size=16, max_size=16),
)
def test_requests_round_trip(op: Op, number: int, size: int, ticket: bytes) -> None:
    request = Request(op, number, size, ticket)
    assert len(request.encode()) == Request.SIZE
    assert Request.decode(request.encode()) == request


@given(st.binary(max_size=64))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    try:
        request = Request.decode(data)
    except InvalidRequest:
        return
    assert request.encode() == data


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.text(max_size=100))
def test_replies_round_trip(code: int, num_slots: int, message: str) -> None:
    reply = Reply(code, num_slots, message) if code else Reply(0, num_slots, body=message.encode())
    assert Reply.decode(reply.encode()) == reply


def test_a_reply_is_bounded_and_a_cut_one_is_refused() -> None:
    assert len(Reply(3, 0, "é" * 10_000).encode()) == 8 + Reply.MAX_TEXT_BYTES
    with pytest.raises(StoreUnavailable):
        Reply.decode(b"")


def test_a_region_is_checked() -> None:
    fd, memory = shm.create_memfd("test", 4096)
    try:
        assert memory.size == 4096
        with pytest.raises(InvalidRequest, match="seals"):
            shm.check_region(fd, size_bytes=4096, owner_uid=os.geteuid())
        shm.seal_region(fd)
        shm.check_region(fd, size_bytes=4096, owner_uid=os.geteuid())
        with pytest.raises(InvalidRequest, match="4097"):
            shm.check_region(fd, size_bytes=4097, owner_uid=os.geteuid())
        with pytest.raises(NotAllowed):
            shm.check_region(fd, size_bytes=4096, owner_uid=os.geteuid() + 1)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1)
    finally:
        os.close(fd)


def test_a_sealed_slab_can_be_written_through_its_first_mapping_only() -> None:
    fd, memory = shm.create_memfd("test", 4096)
    try:
        shm.seal_slab(fd)
        memory[:] = 7
        assert (shm.map_memfd(fd, 4096, writable=False) == 7).all()
        with pytest.raises(PermissionError):
            shm.map_memfd(fd, 4096, writable=True)
    finally:
        os.close(fd)
