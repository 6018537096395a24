"""Mapped slabs: whose bytes they are, and that the daemon hears of one exactly when it is unmapped."""

import gc
import os
from typing import Any, cast

import numpy as np
import pytest
from builders import spec

from kvstore.errors import StoreUnavailable
from kvstore.transport.shm import SlabLayout, create_memfd
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.session import Session
from kvstore_client.slabs import Slab, Slabs

KV = spec(layers=2, bytes_per_part=2048)
LAYOUT = SlabLayout.of(num_slots=4, num_parts=2, block_bytes=KV.block_bytes)


class FakeSession:
    """A session whose shm socket hands out fresh slabs; keeps what it was told."""

    def __init__(self) -> None:
        self.alive = True
        self.exchange = self
        self.fetched: list[int] = []
        self.dropped: list[int] = []

    def slab(self, number: int, *, deadline: float) -> tuple[int, int]:
        self.fetched.append(number)
        return create_memfd("test", LAYOUT.size_bytes)[0], LAYOUT.num_slots

    def tell(self, message: pb.ClientMessage) -> None:
        self.dropped += message.slabs_dropped.slabs


def adopted() -> tuple[Slabs, FakeSession, Session]:
    slabs, fake = Slabs(KV), FakeSession()
    slabs.adopt(cast(Session, fake))
    return slabs, fake, cast(Session, fake)


def test_a_slab_is_fetched_once_and_its_descriptor_is_closed() -> None:
    slabs, fake, session = adopted()
    before = len(os.listdir("/proc/self/fd"))
    assert slabs.get(session, 1, deadline=1e9) is slabs.get(session, 1, deadline=1e9)
    assert fake.fetched == [1]
    assert len(os.listdir("/proc/self/fd")) == before + 1  # the fake's own mapping


def test_a_retired_slab_is_reported_only_once_its_last_view_is_gone() -> None:
    """Covers: A13, A19."""
    slabs, fake, session = adopted()
    view: Any = slabs.get(session, 1, deadline=1e9).table[2, 16:32]
    slabs.retire(session, [1])
    gc.collect()
    assert fake.dropped == []
    assert not view.any()
    del view
    gc.collect()
    assert fake.dropped == [1]


def test_a_slab_that_was_never_mapped_is_reported_at_once() -> None:
    slabs, fake, session = adopted()
    slabs.retire(session, [7])
    assert fake.dropped == [7]


def test_a_slab_that_is_unmapped_without_being_retired_is_not_reported() -> None:
    slabs, fake, session = adopted()
    slabs.get(session, 1, deadline=1e9)
    slabs.adopt(None)
    gc.collect()
    assert fake.dropped == []


def test_another_session_gets_mappings_of_its_own() -> None:
    """Covers: A3, A17."""
    slabs, first, session = adopted()
    old = slabs.get(session, 1, deadline=1e9)
    second = FakeSession()
    slabs.adopt(cast(Session, second))
    assert slabs.get(cast(Session, second), 1, deadline=1e9) is not old
    with pytest.raises(StoreUnavailable, match="the session that asks has ended"):
        slabs.get(session, 1, deadline=1e9)
    slabs.retire(session, [1])
    assert (first.dropped, second.dropped) == ([], [])


def test_a_slot_holds_a_block_only_while_generation_and_hash_agree() -> None:
    """Covers: A2, A13."""
    memory = np.zeros(LAYOUT.size_bytes, np.uint8)
    headers = LAYOUT.headers(memory)
    slab = Slab(1, LAYOUT, memory)
    hashes = np.frombuffer(bytes(range(96)), "V32")
    for slot in range(3):
        headers["generation"][slot] = slot + 10
        headers["hash"][slot] = hashes[slot].tobytes()
    slots, generations = np.arange(3), np.arange(10, 13)
    assert slab.holds(slots, generations, hashes).tolist() == [True, True, True]
    headers["generation"][0] = 20
    headers["hash"][2] = bytes(32)
    assert slab.holds(slots, generations, hashes).tolist() == [False, True, False]
