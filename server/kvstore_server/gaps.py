"""How late the daemon's loop is: the time in which it answers nobody, which every request may have to wait."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable
from typing import Final

INTERVAL_S: Final = 0.05
BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class LoopGaps:
    """A clock that ought to strike every `INTERVAL_S`, and by how much it is late."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # of strikes that were late by up to each bound, and by more
        self.total_s = 0.0
        self._clock = clock

    def record(self, late_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, late_s)] += 1
        self.total_s += late_s

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            began = self._clock()
            await asyncio.sleep(INTERVAL_S)
            self.record(max(0.0, self._clock() - began - INTERVAL_S))
