"""Blocks in writing: who owes what, and what followers are told."""

import pytest

from kvstore.types import WriteId
from kvstore_server.writes import Follow, Pending, Writes, mask_of, parts_of

ONE, TWO = WriteId(1), WriteId(2)


@pytest.fixture
def writes() -> Writes:
    return Writes()


def begin(writes: Writes, parts: int = 0b11) -> Pending:
    return writes.begin(row=5, slot=9, all_parts=0b11, writer=ONE, parts=parts)


def test_masks_and_parts_are_two_ways_to_say_one_thing() -> None:
    assert mask_of([0, 3, 70]) == 1 | 8 | 1 << 70
    assert parts_of(mask_of([70, 3])) == [3, 70]
    assert parts_of(0) == []


def test_a_block_is_complete_when_every_part_has_arrived(writes: Writes) -> None:
    pending = begin(writes)
    for part in (0b10, 0b01):
        assert not writes.is_complete(pending)
        writes.take(pending, writer=ONE, parts=part)
        assert not writes.is_complete(pending)
        writes.arrive(pending, part)
    assert writes.is_complete(pending)
    assert pending.copying == 0
    writes.finish(pending)
    assert len(writes) == 0


def test_two_writers_share_a_block_only_with_different_parts(writes: Writes) -> None:
    """Covers: E7."""
    pending = begin(writes, parts=0b01)
    assert not writes.join(pending, writer=TWO, parts=0b11)
    assert writes.join(pending, writer=TWO, parts=0b10)
    assert pending.owed == {ONE: 0b01, TWO: 0b10}


def test_a_part_under_way_or_arrived_cannot_be_claimed_again(writes: Writes) -> None:
    """Covers: A20."""
    pending = begin(writes, parts=0b01)
    writes.take(pending, writer=ONE, parts=0b01)
    assert not writes.join(pending, writer=TWO, parts=0b01)
    writes.arrive(pending, 0b01)
    assert not writes.join(pending, writer=TWO, parts=0b01)


def test_a_follower_is_told_of_parts_before_and_after_it_came(writes: Writes) -> None:
    pending = begin(writes)
    writes.take(pending, writer=ONE, parts=0b01)
    writes.arrive(pending, 0b01)
    woken: list[int] = []
    follow = Follow(1, lambda: woken.append(1))
    writes.follow(pending, follow, 3)
    assert follow.arrived == [(3, 0)]
    writes.take(pending, writer=ONE, parts=0b10)
    writes.arrive(pending, 0b10)
    assert follow.arrived == [(3, 0), (3, 1)]
    assert follow.open_indices == {3}
    writes.finish(pending)
    assert not follow.open_indices
    assert not follow.failed
    assert woken


def test_a_follower_of_a_block_given_up_is_told_so_and_nothing_after(writes: Writes) -> None:
    """Covers: A5, B7."""
    pending = begin(writes)
    follow = Follow(1, lambda: None)
    writes.follow(pending, follow, 0)
    writes.take(pending, writer=ONE, parts=0b01)
    writes.give_up(pending)
    assert follow.failed == [(0, False)]
    writes.arrive(pending, 0b01)
    assert follow.arrived == []
    assert not writes.is_complete(pending)


def test_who_stopped_following_is_told_nothing(writes: Writes) -> None:
    pending = begin(writes)
    follow = Follow(1, lambda: None)
    writes.follow(pending, follow, 0)
    writes.unfollow(follow)
    writes.give_up(pending)
    assert not follow.failed
    assert not follow.open_indices
