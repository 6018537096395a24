"""The remote tier: blocks in a place that outlives the host and may be far away, slow, full, wrong or gone.

Nothing here is trusted: what comes back is a block only if its object says so, part by part, and else a miss. What
is asked has a timeout, and at most so many requests are under way. Runs on the daemon's loop; hashing in threads.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog

from kvstore.spec import KVSpec
from kvstore.types import BlockHash, Namespace
from kvstore_server.threads import in_thread
from kvstore_server.tiers.cpu import TierStatistics
from kvstore_server.tiers.ledger import Ledger
from kvstore_server.tiers.objects import Unsealed, block_key, key_of, name_of, object_bytes, unseal
from kvstore_server.tiers.outage import Outage
from kvstore_server.tiers.places import REQUEST_TIMEOUT_S, Listed, Place, RemoteFailed
from kvstore_server.tiers.records import RecordLayout

log = structlog.get_logger()

T = TypeVar("T")

DELETE_AT_ONCE: Final = 1000
SLACK: Final = 100  # where room is made, a hundredth of the capacity is: one request then deletes for many writes


class NotAsked(RemoteFailed):
    """The place failed a moment ago, so it was left alone. `until_writable` says when to try again."""


@dataclass(slots=True)
class RemoteCounters:
    """Since the start."""

    blocks_sent: int = 0
    blocks_unsent: int = 0  # were to be written, and could not be
    blocks_fetched: int = 0  # into memory
    blocks_absent: int = 0  # asked for, and not there
    blocks_wrong: int = 0  # what was under their name was not they
    objects_deleted: int = 0  # to make room
    requests_failed: int = 0


class RemoteTier:
    """Blocks as objects of one place, which other daemons may use too."""

    def __init__(
        self, place: Place, *, name: str, capacity_bytes: int, at_once: int, clock: Callable[[], float]
    ) -> None:
        self.counters = RemoteCounters()
        self._place = place
        self._name = name
        self._at_once = asyncio.Semaphore(at_once)
        self._clock = clock
        self._ledger = Ledger(capacity_bytes)
        self._reading, self._writing = Outage(), Outage()
        self._making_room = asyncio.Lock()
        self._under_way: set[bytes] = set()  # being written, so that it cannot be deleted before
        self._layouts: dict[Namespace, RecordLayout] = {}

    def __repr__(self) -> str:
        return f"<RemoteTier [{self._name}, {self._ledger!r}, reading: {self._reading!r}, writing: {self._writing!r}]>"

    @property
    def num_objects(self) -> int:
        """As far as this daemon knows."""
        return len(self._ledger)

    @property
    def is_down(self) -> bool:
        """Whether the place failed, and has not answered since."""
        return bool(self._reading.reason or self._writing.reason)

    def layout(self, spec: KVSpec) -> RecordLayout:
        found = self._layouts.get(spec.namespace)
        if found is None:
            found = self._layouts[spec.namespace] = RecordLayout.of(spec)
        return found

    def can_read(self) -> bool:
        """Whether it is worth asking for anything now."""
        return not self._reading.wait_s(self._clock())

    async def until_writable(self) -> None:
        """The place did not fail, or the pause after that is over."""
        while True:
            wait_s = self._writing.wait_s(self._clock())
            if not wait_s:
                return
            await asyncio.sleep(wait_s)

    async def list(self) -> None:
        """What is there counts from now on, and takes no more than the capacity. Before anything is written.

        Raises: RemoteFailed.
        """
        objects: list[tuple[Listed, bytes]] = []
        async with self._at_once:
            with self._told(self._writing):
                async for some in self._place.listed():
                    objects += [(one, key) for one in some if (key := key_of(one.name)) is not None]
            self._writing.succeeded()
        self._ledger = await in_thread(_ledger_of, objects, self._ledger.capacity_bytes)
        log.info("remote tier: listed", objects=len(self._ledger), size_mib=self._ledger.used_bytes >> 20)
        while self._ledger.used_bytes > self._ledger.capacity_bytes:
            await self._delete_oldest(0)

    def holds(self, namespace: Namespace, block_hash: BlockHash) -> bool:
        """Whether the block is known to have been written."""
        return block_key(namespace, block_hash) in self._ledger

    def use(self, namespace: Namespace, chain: Sequence[BlockHash]) -> None:
        """Those of a chain, from its start, that are there were just used; its end will be the first to go."""
        for block_hash in reversed(chain):
            self._ledger.use(block_key(namespace, block_hash))

    async def write(self, spec: KVSpec, block_hash: BlockHash, data: memoryview) -> bool:
        """The block's object, sealed, is there; False, and it is counted, if not. Older objects make room for it.

        A write that failed may have been done all the same, so it counts against the capacity. Raises: NotAsked.
        """
        key = block_key(spec.namespace, block_hash)
        try:
            is_sent = await self._reserve(key, len(data))
            if is_sent:
                await self._ask(self._writing, lambda: self._place.put(name_of(key), data))
        except NotAsked:
            self._ledger.remove(key)
            raise
        except RemoteFailed:
            is_sent = False
        finally:
            self._under_way.discard(key)
        self.counters.blocks_sent += is_sent
        self.counters.blocks_unsent += not is_sent
        return is_sent

    async def has(self, namespace: Namespace, block_hash: BlockHash) -> bool:
        """Whether there is an object of this name. Raises: RemoteFailed."""
        key = block_key(namespace, block_hash)
        found = await self._ask(self._reading, lambda: self._place.has(name_of(key)), means_well=bool)
        if not found:
            self._absent(key)
        return found

    async def read(self, spec: KVSpec, block_hash: BlockHash) -> Unsealed | None:
        """The block, compared; None, and it is counted, if it is not there. Raises: RemoteFailed."""
        layout, key = self.layout(spec), block_key(spec.namespace, block_hash)
        size_bytes = object_bytes(layout)
        data = await self._ask(
            self._reading,
            lambda: self._place.get(name_of(key), size_bytes=size_bytes),
            means_well=lambda data: data is not None,
        )
        if data is None:
            self._absent(key)
            return None
        found = await in_thread(unseal, layout, block_hash, data)
        if isinstance(found, str):
            self.counters.blocks_wrong += 1
            self._ledger.remove(key)  # so that it is written over when it is cold again
            log.error("remote tier: an object is not its block, and is not used", object=name_of(key), wrong=found)
            return None
        return found

    def statistics(self) -> TierStatistics:
        """`pages` says whether it is used."""
        return TierStatistics(
            tier="remote",
            capacity_bytes=self._ledger.capacity_bytes,
            slab_bytes=self._ledger.used_bytes,
            used_bytes=self._ledger.used_bytes,
            num_slabs=0,
            pages="failed: asked again later" if self.is_down else "objects",
            place=self._name,
        )

    async def close(self) -> None:
        """Nothing is under way. What was asked must have ended, or been cancelled."""
        await self._place.close()

    # Within.

    async def _reserve(self, key: bytes, size_bytes: int) -> bool:
        """The object counts, and is under way; False, if it takes more than can be deleted. Raises: RemoteFailed."""
        async with self._making_room:
            while not self._ledger.add(key, size_bytes):
                if not await self._delete_oldest(size_bytes):
                    return False
            self._under_way.add(key)
            return True

    async def _delete_oldest(self, size_bytes: int) -> bool:
        """There is, or is nearer, room for so many bytes and a bit more; False, if nothing can go."""
        room_bytes = min(size_bytes + self._ledger.capacity_bytes // SLACK, self._ledger.capacity_bytes)
        keys = self._ledger.excess(room_bytes, most=DELETE_AT_ONCE, keep=self._under_way)
        if keys:
            await self._ask(self._writing, lambda: self._place.delete([name_of(key) for key in keys]))
        for key in keys:
            self._ledger.remove(key)
        self.counters.objects_deleted += len(keys)
        return bool(keys)

    async def _ask(
        self,
        outage: Outage,
        request: Callable[[], Awaitable[T]],
        *,
        means_well: Callable[[T], bool] = lambda answer: True,
    ) -> T:
        """What the place answers. Raises: RemoteFailed, also without asking, during an outage.

        Unless the answer `means_well`, it does not end an outage: a bucket that is gone has no object either.
        """
        async with self._at_once:
            with self._told(outage):
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    answer = await request()
            if means_well(answer) and outage.succeeded():
                log.info("remote tier: answers again", place=self._name)
            return answer

    @contextmanager
    def _told(self, outage: Outage) -> Iterator[None]:
        """A failure within is one of the outage. Raises: RemoteFailed."""
        admitted_s = self._clock()
        if not outage.admit(admitted_s):
            raise NotAsked(f"not asked, as lately: {outage.reason}")
        try:
            yield
        except (RemoteFailed, TimeoutError) as error:
            reason = str(error) or f"no answer within {REQUEST_TIMEOUT_S:g} s"
            self.counters.requests_failed += 1
            if outage.failed(reason, self._clock(), admitted_s=admitted_s):
                log.error("remote tier: failed, the store goes on without it", place=self._name, error=reason)
            raise RemoteFailed(reason) from None

    def _absent(self, key: bytes) -> None:
        self.counters.blocks_absent += 1
        self._ledger.remove(key)  # another daemon deleted it, or an operator


def _ledger_of(objects: Iterable[tuple[Listed, bytes]], capacity_bytes: int) -> Ledger:
    oldest_first = sorted(objects, key=lambda one: one[0].written_s)
    return Ledger(capacity_bytes, ((key, listed.size_bytes) for listed, key in oldest_first))
