"""The arena of a tier, without memory."""

import pytest

from kvstore.types import Namespace
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
