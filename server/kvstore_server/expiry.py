"""Time to live: what a tenant's blocks were not used for so long is gone from all tiers, about a second later.

Blocks have no time of their own. Now and then it is noted which tick it is; blocks whose stamp is not past a note
that is old enough have expired. A match up to a second late is still served, and counts as a use.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import structlog

from kvstore_server.config import ALL_OTHERS
from kvstore_server.store import Store

log = structlog.get_logger()

PERIOD_S: Final = 1.0
# Notes of one time to live: a block goes late by at most this part of it, and a second.
_NOTES: Final = 1000


class Notes:
    """Which tick it was when, as far back as one time to live."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._notes: deque[tuple[float, int]] = deque()
        self._due = 0

    def due(self, now_s: float, tick: int) -> int:
        """It is this tick now; returns the one up to which blocks have expired, 0 for none.

        A clock that is set back makes blocks expire later, never earlier.
        """
        last_s = self._notes[-1][0] if self._notes else now_s - self._ttl_s
        if now_s - last_s >= self._ttl_s / _NOTES:
            self._notes.append((now_s, tick))
        while self._notes and self._notes[0][0] <= now_s - self._ttl_s:
            self._due = self._notes.popleft()[1]
        return self._due


class Expiry:
    """Blocks of a tenant that has a time to live, `ttl_s`, go when it is over; `*` is for all that are not named."""

    def __init__(self, store: Store, *, ttl_s: Mapping[str, float], clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._notes = {tenant: Notes(seconds) for tenant, seconds in ttl_s.items()}

    def step(self) -> int:
        """What has expired by now, and is neither held nor moving, is gone; returns how many blocks."""
        due = {tenant: notes.due(self._clock(), self._store.tick) for tenant, notes in self._notes.items()}
        num_expired = 0
        for space in list(self._store.spaces.values()):
            tick = due.get(space.spec.tenant, due.get(ALL_OTHERS, 0))
            if tick:
                num_expired += self._store.expire(space, tick)
        return num_expired

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            num_expired = self.step()
            if num_expired:
                log.info("blocks expired", blocks=num_expired)
            await asyncio.sleep(PERIOD_S)
