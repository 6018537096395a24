"""When a place that failed is asked again."""

import pytest

from kvstore_server.tiers.outage import FIRST_PAUSE_S, LONGEST_PAUSE_S, Outage


def test_what_does_not_fail_is_always_asked() -> None:
    outage = Outage()
    assert [outage.admit(0.0), outage.admit(0.0), outage.wait_s(0.0)] == [True, True, 0.0]
    assert not outage.succeeded()


def test_after_a_failure_one_request_is_let_through_in_each_pause_and_pauses_grow_up_to_a_minute() -> None:
    outage = Outage()
    assert outage.failed("broken", 100.0, admitted_s=99.0), "the first is told"
    now, pauses = 100.0, []
    for _ in range(10):
        pauses.append(outage.wait_s(now))
        assert not outage.admit(now + pauses[-1] / 2)
        now += pauses[-1]
        assert outage.admit(now)
        assert not outage.admit(now), "one"
        assert not outage.failed("again", now, admitted_s=now)
    assert pauses[:4] == [FIRST_PAUSE_S * factor for factor in (1, 2, 4, 8)]
    assert max(pauses) == pauses[-1] == LONGEST_PAUSE_S
    assert outage.reason == "broken"


def test_requests_that_were_under_way_when_it_began_do_not_make_the_pause_longer() -> None:
    outage = Outage()
    outage.failed("broken", 100.0, admitted_s=99.0)
    for _ in range(5):
        assert not outage.failed("broken", 100.1, admitted_s=99.5)
    assert outage.wait_s(100.0) == pytest.approx(FIRST_PAUSE_S)


def test_an_answer_ends_it_and_the_next_begins_with_a_short_pause() -> None:
    outage = Outage()
    outage.failed("broken", 100.0, admitted_s=100.0)
    assert outage.admit(101.0)
    outage.failed("broken", 101.0, admitted_s=101.0)
    assert outage.admit(103.0)
    assert outage.succeeded()
    assert not outage.succeeded()
    assert outage.admit(103.0)
    assert outage.failed("other", 104.0, admitted_s=104.0)
    assert outage.wait_s(104.0) == FIRST_PAUSE_S


def test_a_request_that_nobody_reported_on_does_not_close_it_for_ever() -> None:
    outage = Outage()
    outage.failed("broken", 100.0, admitted_s=100.0)
    assert outage.admit(101.0)
    assert outage.admit(102.0)
