"""What a daemon tells of the members while others come, go and fall silent. Time is a number here."""

from dataclasses import replace

import pytest

from kvstore.types import BootId
from kvstore_server.roster import Heard, Member, Roster, View

TTL_S = 3.0


def member(node_id: str, boot: int = 1, *, draining: bool = False) -> Member:
    return Member(node_id, BootId(bytes([boot]) * 16), (f"unix:/{node_id}",), 1 << 20, draining)


def members(nodes: str) -> tuple[Member, ...]:
    return tuple(member(node) for node in nodes)


def heard(nodes: str, epoch: int, *, left: str = "") -> Heard:
    return Heard(members(nodes), frozenset(left), epoch)


@pytest.fixture
def roster() -> Roster:
    """Of daemon a, which never heard of another."""
    return Roster(member("a"), replicas=2, ttl_s=TTL_S, stale=True)


@pytest.fixture
def three(roster: Roster) -> Roster:
    roster.hear(heard("abc", 7), now=0)
    return roster


def shown(roster: Roster) -> tuple[str, int]:
    return "".join(one.node_id for one in roster.view.members), roster.view.epoch


def test_before_anything_is_heard_there_is_only_this_daemon(roster: Roster) -> None:
    assert roster.view == View(members("a"), epoch=0, replicas=2, stale=True)


def test_what_is_heard_is_the_view(roster: Roster) -> None:
    """Covers: D3."""
    roster.hear(heard("abc", 7), now=0)
    assert roster.view == View(members("abc"), epoch=7, replicas=2, stale=False)
    roster.hear(heard("abcd", 8), now=1)
    assert shown(roster) == ("abcd", 8)


def test_a_member_is_dropped_once_it_was_missing_for_a_ttl(three: Roster) -> None:
    """Covers: D14. And no sooner; the epoch is that of the members shown, all the time."""
    for now in (10, 11, 12.9):
        three.hear(heard("ab", 8), now=now)
        assert shown(three) == ("abc", 7)
    three.hear(heard("ab", 8), now=13)
    assert shown(three) == ("ab", 8)


def test_each_missing_member_has_a_time_of_its_own(three: Roster) -> None:
    three.hear(heard("ab", 8), now=10)
    three.hear(heard("a", 9), now=12)
    three.hear(heard("a", 9), now=14.9)
    assert shown(three) == ("abc", 7)
    three.hear(heard("a", 9), now=15)
    assert shown(three) == ("a", 9)


def test_a_member_that_comes_and_goes_starts_its_time_again(three: Roster) -> None:
    three.hear(heard("ab", 8), now=10)
    three.hear(heard("abc", 9), now=11)
    assert shown(three) == ("abc", 9)
    three.hear(heard("ab", 10), now=12)
    three.hear(heard("ab", 10), now=14)
    assert shown(three) == ("abc", 9)
    three.hear(heard("ab", 10), now=15)
    assert shown(three) == ("ab", 10)


def test_who_said_goodbye_is_dropped_at_once(three: Roster) -> None:
    three.hear(heard("ab", 8, left="c"), now=1)
    assert shown(three) == ("ab", 8)


def test_a_goodbye_counts_also_when_it_is_no_longer_told(three: Roster) -> None:
    three.hear(heard("a", 8, left="c"), now=1)
    assert shown(three) == ("abc", 7), "b is missing, and may be back"
    three.hear(heard("ab", 9), now=2)
    assert shown(three) == ("ab", 9)


def test_a_coordinator_that_forgot_everything_takes_nobody_away(three: Roster) -> None:
    """Covers: D1, D3. Each daemon registers again by itself, one after the other."""
    three.hear(heard("a", 8), now=10)
    three.hear(heard("ab", 9), now=11)
    assert shown(three) == ("abc", 7)
    three.hear(heard("abc", 10), now=12)
    assert shown(three) == ("abc", 10)
    three.hear(heard("abc", 10), now=100)
    assert shown(three) == ("abc", 10)


def test_without_a_coordinator_the_members_last_known_stand(three: Roster) -> None:
    """Covers: A15, D14."""
    three.lose()
    assert three.view == View(members("abc"), epoch=7, replicas=2, stale=True)
    three.hear(heard("abc", 7), now=1000)
    assert three.view == View(members("abc"), epoch=7, replicas=2, stale=False)


def test_time_without_a_coordinator_does_not_count_as_missing(three: Roster) -> None:
    three.hear(heard("ab", 8), now=10)
    three.lose()
    three.hear(heard("ab", 8), now=20)
    assert shown(three) == ("abc", 7)
    three.hear(heard("ab", 8), now=23)
    assert shown(three) == ("ab", 8)


def test_a_member_with_another_boot_id_takes_the_place_of_the_old(three: Roster) -> None:
    """Covers: A3."""
    three.hear(heard("ab", 8), now=1)
    again = Heard((*members("ab"), member("c", boot=2)), frozenset(), 9)
    three.hear(again, now=2)
    assert (three.view.members, three.view.epoch) == (again.members, 9)


def test_draining_is_shown_when_it_is_heard_or_at_once_if_there_is_nobody_to_hear_of(roster: Roster) -> None:
    roster.drain()
    assert roster.me == member("a", draining=True)
    assert roster.view.members == (member("a", draining=True),)

    other = Roster(member("a"), replicas=1, ttl_s=TTL_S, stale=True)
    other.hear(heard("ab", 1), now=0)
    other.drain()
    assert shown(other) == ("ab", 1)
    assert not other.view.members[0].draining, "one epoch is one set of members"
    other.hear(Heard((other.me, member("b")), frozenset(), 2), now=1)
    assert other.view.members[0].draining


def test_watchers_are_called_once_a_change_and_never_without_one(three: Roster) -> None:
    calls: list[View] = []

    def watcher() -> None:
        calls.append(three.view)

    three.watch(watcher)
    three.hear(heard("abc", 7), now=1)
    assert calls == []
    three.lose()
    three.lose()
    three.hear(heard("abcd", 8), now=2)
    assert [(view.epoch, view.stale) for view in calls] == [(7, True), (8, False)]
    three.unwatch(watcher)
    three.lose()
    assert len(calls) == 2
    assert three.view == replace(calls[1], stale=True)
