"""The circuit breaker: after so many calls in a row without an answer, calls fail at once for a while."""

import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

MAX_COOLDOWN_S: Final = 30.0


class BreakerState(Enum):
    """Whether calls go through."""

    CLOSED = "closed"  # all do
    OPEN = "open"  # none does, until the cooldown is over
    HALF_OPEN = "half-open"  # one does: what becomes of it decides


class Breaker:
    """Closed until `failures` calls in a row had no answer; then open for a cooldown, then one probe.

    A probe that succeeds closes it; one that fails opens it for twice as long, up to 30 s. A probe that
    nobody reported on for a whole cooldown is given up, and the next call is the probe. Thread-safe.
    """

    def __init__(self, *, failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = failures
        self._first_cooldown_s = cooldown_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._failures = 0  # in a row, while closed
        self._cooldown_s = cooldown_s
        self._since = 0.0  # when it opened, or when the probe went out

    def __repr__(self) -> str:
        return f"<Breaker [{self._state.value}, {self._failures} failures, cooldown {self._cooldown_s:g} s]>"

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def admits(self) -> bool:
        """Whether a call may go out now; nothing is changed by asking."""
        return self._state is BreakerState.CLOSED or self._since + self._cooldown_s <= self._clock()

    def admit(self) -> float:
        """0.0: the call may go out, and its end must be reported; else the seconds until one may."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return 0.0
            now = self._clock()
            remaining_s = self._since + self._cooldown_s - now
            if remaining_s > 0:
                return remaining_s
            self._state = BreakerState.HALF_OPEN
            self._since = now
            return 0.0

    def succeeded(self) -> None:
        """A call was answered, whatever the answer; one from before the breaker opened counts for nothing."""
        if self._failures == 0 and self._state is BreakerState.CLOSED:
            return
        with self._lock:
            if self._state is not BreakerState.OPEN:
                self._close()

    def failed(self) -> None:
        """A call had no answer."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                self._failures += 1
                if self._failures >= self._limit:
                    self._open(self._first_cooldown_s)
            elif self._state is BreakerState.HALF_OPEN:
                self._open(min(2 * self._cooldown_s, MAX_COOLDOWN_S))

    def reset(self) -> None:
        """Closed: the store has shown in another way that it answers."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._cooldown_s = self._first_cooldown_s

    def _open(self, cooldown_s: float) -> None:
        self._state = BreakerState.OPEN
        self._cooldown_s = cooldown_s
        self._since = self._clock()
