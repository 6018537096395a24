"""How fast blocks come up: over the time in which any do, and lately."""

import pytest

from kvstore_server.rising import MEMORY_S, Speed


def test_nothing_came_yet() -> None:
    speed = Speed()
    assert speed.bytes_per_s == 0
    speed.begin(5.0)
    assert speed.bytes_per_s == 0


def test_the_time_in_which_nothing_came_does_not_count() -> None:
    speed = Speed()
    for start in (10.0, 500.0):
        speed.begin(start)
        speed.end(start + 0.5, 100)
    assert speed.bytes_per_s == pytest.approx(200)


def test_what_comes_at_once_counts_together() -> None:
    speed = Speed()
    speed.begin(0.0)
    speed.begin(0.25)
    speed.end(0.5, 100)
    speed.end(1.0, 100)
    assert speed.bytes_per_s == pytest.approx(200)


def test_a_disk_that_became_slow_is_soon_known_for_it() -> None:
    speed = Speed()
    now = 0.0
    for pace in (1000, 10):
        for _ in range(20):
            speed.begin(now)
            now += MEMORY_S / 4
            speed.end(now, int(pace * MEMORY_S / 4))
    assert speed.bytes_per_s == pytest.approx(10, rel=0.5)
