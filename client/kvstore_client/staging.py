"""Staging: the client's own region, through which bytes go that lie elsewhere.

Its size bounds what is in flight.

A staging region lives as long as one session. The daemon of a session that was lost may still be reading from
it, so its memory is never used for the next one.
"""

import threading
import time
from collections.abc import Callable

from kvstore.errors import InvalidRequest, StoreTimeout, StoreUnavailable
from kvstore.types import ByteArray
from kvstore_client.region import Region
from kvstore_client.regions import Regions
from kvstore_client.session import Session

ALIGN_BYTES = 64


class FreeRanges:
    """Which ranges of `size_bytes` are free: first fit, from the lowest address, neighbours joined. Pure."""

    def __init__(self, size_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, size_bytes)]  # (begin, end), ascending, never adjacent

    def __repr__(self) -> str:
        return f"<FreeRanges {self._free}>"

    def take(self, size_bytes: int) -> int | None:
        """Where a range of that size begins, which is not free any more; None: no room in one piece."""
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= size_bytes:
                rest = (begin + size_bytes, end)
                self._free[index : index + 1] = [rest] if rest[0] < end else []
                return begin
        return None

    def give(self, begin: int, size_bytes: int) -> None:
        """The range is free again."""
        end = begin + size_bytes
        index = sum(1 for other, _ in self._free if other < begin)
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            index -= 1
            begin = self._free.pop(index)[0]
        self._free.insert(index, (begin, end))


class Staging:
    """Ranges of one session's staging region. Thread-safe."""

    def __init__(self, region: Region, session: Session) -> None:
        self.region = region
        self.session = session
        self._memory = region.array
        self._ranges = FreeRanges(region.size_bytes)
        self._room = threading.Condition()

    def __repr__(self) -> str:
        return f"<Staging [{self.region.size_bytes} bytes, free {self._ranges!r}]>"

    @property
    def size_bytes(self) -> int:
        return self.region.size_bytes

    def take(
        self, size_bytes: int, *, deadline: float, stopped: Callable[[], bool] = lambda: False
    ) -> tuple[int, ByteArray]:
        """(offset, memory) of a range; the caller gives it back once the daemon touches it no more.

        Raises: InvalidRequest, if it can never fit; StoreTimeout, if no room came in time, or once `stopped` says so
        after `wake`; StoreUnavailable, if the session ended.
        """
        rounded = _round_up(size_bytes)
        if rounded > self.size_bytes:
            raise InvalidRequest(
                f"staging: expected at most {self.size_bytes} bytes at a time, got a part of {size_bytes}; "
                "raise options.staging_bytes (or max_region_bytes of the daemon), or store from a region"
            )
        with self._room:
            while (offset := self._ranges.take(rounded)) is None:
                if not self.session.alive:
                    raise StoreUnavailable("staging: the session has ended; recompute, the client reconnects")
                if stopped() or not self._room.wait(max(0.0, deadline - time.monotonic())):
                    raise StoreTimeout(
                        f"staging: no room for {size_bytes} bytes within the deadline, because the store has "
                        "not acknowledged what was sent; skip this save"
                    )
        return offset, self._memory[offset : offset + size_bytes]

    def wake(self) -> None:
        """Whoever waits for room looks again whether it was stopped."""
        with self._room:
            self._room.notify_all()

    def give(self, offset: int, size_bytes: int) -> None:
        """The range may be used again. Called for each range when its session ends, too."""
        with self._room:
            self._ranges.give(offset, _round_up(size_bytes))
            self._room.notify_all()


class Stagings:
    """The staging of the current session, made when it is first needed. Thread-safe."""

    def __init__(self, regions: Regions, *, size_bytes: int) -> None:
        self.size_bytes = size_bytes  # of each, if the daemon allows it
        self._regions = regions
        self._lock = threading.Lock()
        self._current: Staging | None = None

    def of(self, session: Session, *, deadline: float) -> Staging:
        """The staging of this session.

        Raises: StoreFull, if the daemon allows no region of that size; StoreUnavailable, if the session has
        ended; Unsupported, StoreTimeout, as the shm socket does.
        """
        with self._lock:
            staging = self._current
            if staging is not None and staging.session is session:
                return staging
            size_bytes = min(self.size_bytes, session.max_region_bytes or self.size_bytes)
            if not session.alive:
                raise StoreUnavailable("staging: the session has ended; recompute, the client reconnects")
            region = self._regions.create(size_bytes, deadline=deadline, only=session)
            self._current = Staging(region, session)
            return self._current

    def drop(self) -> None:
        """The staging of a session that has ended is gone."""
        with self._lock:
            staging, self._current = self._current, None
        if staging is not None:
            staging.region.close()


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
