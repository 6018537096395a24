"""The circuit breaker, with a clock that the tests move."""

from kvstore_client.breaker import MAX_COOLDOWN_S, Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock, *, failures: int = 2) -> Breaker:
    breaker = Breaker(failures=failures, cooldown_s=1.0, clock=clock)
    for _ in range(failures):
        assert breaker.admit() == 0.0
        breaker.failed()
    return breaker


def test_failures_in_a_row_open_it_and_calls_are_told_how_long_to_wait() -> None:
    """Covers: B1, D12."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += 0.25
    assert breaker.admit() == 0.75
    assert repr(breaker) == "<Breaker [open, 2 failures, cooldown 1 s]>"


def test_an_answer_between_failures_starts_the_count_again() -> None:
    breaker = Breaker(failures=2, cooldown_s=1.0, clock=Clock())
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.state is BreakerState.CLOSED


def test_after_the_cooldown_one_probe_goes_out_and_the_others_wait_for_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1.0
    assert breaker.admit() == 0.0
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admit() > 0


def test_a_probe_that_is_answered_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1.0
    breaker.admit()
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admit() == breaker.admit() == 0.0


def test_each_probe_that_fails_doubles_the_cooldown_up_to_the_bound() -> None:
    clock = Clock()
    breaker = opened(clock)
    cooldowns = []
    for _ in range(7):
        cooldowns.append(breaker.admit())
        clock.now += cooldowns[-1]
        assert breaker.admit() == 0.0
        breaker.failed()
    assert cooldowns == [1.0, 2.0, 4.0, 8.0, 16.0, MAX_COOLDOWN_S, MAX_COOLDOWN_S]


def test_after_it_closed_the_cooldown_is_the_first_again() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1.0
    breaker.admit()
    breaker.failed()
    clock.now += 2.0
    breaker.admit()
    breaker.succeeded()
    breaker.failed()
    breaker.failed()
    assert breaker.admit() == 1.0


def test_a_probe_that_nobody_reported_on_is_given_up() -> None:
    """Covers: B6."""
    clock = Clock()
    breaker = opened(clock)
    clock.now += 1.0
    assert breaker.admit() == 0.0
    clock.now += 1.0
    assert breaker.admit() == 0.0


def test_a_late_answer_to_a_call_from_before_it_opened_does_not_close_it() -> None:
    breaker = opened(Clock())
    breaker.succeeded()
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    assert breaker.admit() == 1.0


def test_a_new_session_closes_it() -> None:
    """Covers: D10."""
    breaker = opened(Clock())
    breaker.reset()
    assert breaker.admit() == 0.0
