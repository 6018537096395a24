"""The arena of a tier, without memory."""

import numpy as np
import pytest

from kvstore.types import Namespace, SlabId
from kvstore_server.tiers.slab import MAX_SLOTS, SlabArena, place_of, slab_of, slot_id

A, B = Namespace(b"a" * 32), Namespace(b"b" * 32)


def test_a_slot_names_its_slab_and_place() -> None:
    for slab, place in ((1, 0), (7, MAX_SLOTS - 1), (4_000_000_000, 5)):
        slot = slot_id(slab, place)  # type: ignore[arg-type]
        assert (slab_of(slot), place_of(slot)) == (slab, place)


def test_slots_are_given_out_from_the_front_to_their_namespace_only() -> None:
    arena = SlabArena(1000)
    slab = arena.open(A, num_slots=4, size_bytes=600)
    assert [place_of(slot) for slot in arena.allocate(A, 3)] == [0, 1, 2]
    assert arena.allocate(B, 3).tolist() == []
    assert len(arena.allocate(A, 9)) == 1
    assert arena.num_used(slab) == 4
    arena.validate()


def test_the_capacity_is_a_limit_and_a_closed_slab_counts_until_it_is_forgotten() -> None:
    """Covers: E1."""
    arena = SlabArena(1000)
    slab = arena.open(A, num_slots=2, size_bytes=600)
    assert not arena.fits(500)
    arena.close(slab)
    assert arena.used_bytes == 600
    assert not arena.fits(500)
    assert arena.allocate(A, 1).tolist() == []
    arena.forget(slab)
    assert arena.fits(1000)
    assert not arena.fits(1001)
    arena.validate()


def test_a_slab_id_is_never_used_again() -> None:
    arena = SlabArena(1000)
    seen = set()
    for _ in range(5):
        slab = arena.open(A, num_slots=1, size_bytes=1000)
        assert slab not in seen
        seen.add(slab)
        arena.close(slab)
        arena.forget(slab)


def test_misuse_is_noticed() -> None:
    arena = SlabArena(1000)
    slab = arena.open(A, num_slots=1, size_bytes=100)
    slots = arena.allocate(A, 1)
    arena.free(slots)
    with pytest.raises(AssertionError, match="twice"):
        arena.free(slots)
    arena.allocate(A, 1)
    with pytest.raises(AssertionError, match="blocks in it"):
        arena.close(slab)


def test_a_slab_found_after_a_restart_gives_out_what_is_free_in_it_and_no_other_takes_its_id() -> None:
    """Covers: A16, D5."""
    arena = SlabArena(1000)
    used = np.array([slot_id(SlabId(7), place) for place in (3, 0)])
    arena.adopt(SlabId(7), A, num_slots=5, size_bytes=400, used=used)
    arena.adopt(SlabId(3), B, num_slots=2, size_bytes=100, used=np.array([], np.int64))
    arena.validate()
    assert (arena.used_bytes, arena.num_used(SlabId(7)), arena.num_used(SlabId(3))) == (500, 2, 0)
    assert not arena.fits(501)
    assert [place_of(slot) for slot in arena.allocate(A, 9).tolist()] == [1, 2, 4]
    arena.free(used)
    assert arena.num_used(SlabId(7)) == 3
    assert arena.open(B, num_slots=1, size_bytes=100) == 8
    arena.validate()


@pytest.mark.parametrize(
    ("slab", "num_slots", "size_bytes", "used", "message"),
    [
        (3, 2, 100, [slot_id(SlabId(4), 0)], "another slab"),
        (3, 2, 100, [slot_id(SlabId(3), 0)] * 2, "in use twice"),
        (3, 0, 100, [], None),
        (3, 2, 1001, [], None),
        (0, 2, 100, [], None),
        (1, 2, 100, [], None),  # is there already
    ],
)
def test_a_slab_that_cannot_be_right_is_not_adopted(
    slab: int, num_slots: int, size_bytes: int, used: list[int], message: str | None
) -> None:
    arena = SlabArena(1000)
    arena.open(A, num_slots=1, size_bytes=100)
    with pytest.raises(AssertionError, match=message):
        arena.adopt(SlabId(slab), A, num_slots=num_slots, size_bytes=size_bytes, used=np.array(used, np.int64))
    assert arena.used_bytes == 100
    arena.validate()


def test_slots_of_one_class_are_not_given_out_for_another() -> None:
    arena = SlabArena(1000)
    small = arena.open(A, num_slots=3, size_bytes=300, slot_class=1)
    large = arena.open(A, num_slots=2, size_bytes=400, slot_class=2)
    assert arena.allocate(A, 1).tolist() == []
    few, many = arena.allocate(A, 9, slot_class=2), arena.allocate(A, 9, slot_class=1)
    assert [slab_of(slot) for slot in few.tolist()] == [large] * 2
    assert [slab_of(slot) for slot in many.tolist()] == [small] * 3
    assert arena.slabs_of(A) == [small, large]
    assert arena.slab_bytes(A) == 700
    arena.free(np.concatenate([many[:2], few, many[2:]]))  # of both, at once
    arena.validate()
    assert arena.allocate(A, 9, slot_class=2).tolist() == few[::-1].tolist()
    arena.close(small)
    assert arena.allocate(A, 9, slot_class=1).tolist() == []
    arena.validate()


def test_a_slab_found_after_a_restart_is_of_its_class() -> None:
    """Covers: D5."""
    arena = SlabArena(1000)
    used = np.array([slot_id(SlabId(7), 0)])
    arena.adopt(SlabId(7), A, num_slots=3, size_bytes=400, used=used, slot_class=5)
    assert arena.allocate(A, 9).tolist() == []
    assert [place_of(slot) for slot in arena.allocate(A, 9, slot_class=5).tolist()] == [1, 2]
    arena.free(used)
    assert arena.allocate(A, 9, slot_class=5).tolist() == used.tolist()
    arena.validate()
