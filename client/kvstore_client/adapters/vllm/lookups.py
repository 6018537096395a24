"""Asking the store without making the scheduler wait for it.

A lookup runs on a thread of its own; the scheduler looks whether it is over, for at most a millisecond, and is told to
ask later otherwise. One that is not over at its deadline counts as a miss.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from kvstore.types import AnyArray, BlockHash
from kvstore_client.locate import Match
from kvstore_client.opening import Client

GLANCE_S: Final = 0.001  # the longest that the scheduler is held up by one question
NUM_THREADS: Final = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """What the store said of a run of blocks."""

    num_stored: int
    num_writing: int  # right behind those; somebody is computing them
    failed: bool = False  # nobody answered


class Lookup:
    """One question under way, or its answer. It holds a lease on what was found, until `release`."""

    def __init__(
        self,
        client: Client,
        hashes: Sequence[BlockHash],
        segments: AnyArray,
        pool: ThreadPoolExecutor,
        *,
        timeout_s: float,
    ) -> None:
        self.num_asked = len(hashes)
        self._deadline = time.monotonic() + timeout_s
        self._future: Future[Match] = pool.submit(self._ask, client, hashes, segments)

    def glance(self) -> Answer | None:
        """The answer; None: ask later."""
        try:
            match = self._future.result(GLANCE_S)
        except TimeoutError:  # also StoreTimeout
            over = self._future.done() or time.monotonic() >= self._deadline
            return Answer(0, 0, failed=True) if over else None
        except Exception:
            return Answer(0, 0, failed=True)
        return Answer(match.num_blocks, match.num_writing)

    def release(self) -> None:
        """What was found, or will be, is not held any more. Never waits; idempotent."""
        self._future.add_done_callback(_give_back)

    def _ask(self, client: Client, hashes: Sequence[BlockHash], segments: AnyArray) -> Match:
        return client.match(hashes, segments=segments, timeout_s=max(0.001, self._deadline - time.monotonic()))


def _give_back(found: "Future[Match]") -> None:
    if found.exception() is None:
        found.result().release()


class Waits:
    """How long requests have waited for blocks that another engine is to write. Pure but for the clock it is given."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._since: dict[str, float] = {}

    def go_on(self, request_id: str) -> bool:
        """Whether the request may wait longer; the first question starts its time."""
        now = self._clock()
        return now - self._since.setdefault(request_id, now) < self._timeout_s

    def forget(self, request_id: str) -> None:
        self._since.pop(request_id, None)


def lookup_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvstore-lookup")
