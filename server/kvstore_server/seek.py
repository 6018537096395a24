"""Blocks that a match missed are sought in the remote tier, in the background, and stored here as a writer's are.

No match waits for it: the next one finds them. What is known to be little is not asked for, nor what was asked for a
moment ago. A block is in writing only while it is copied, after it has come and was compared.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from kvstore.placement import segment_blocks
from kvstore.transport.memory import copy_pieces
from kvstore.types import BlockHash, HashArray, Namespace, Outcome
from kvstore_server.index import leading
from kvstore_server.level import State
from kvstore_server.store import Store
from kvstore_server.threads import in_thread
from kvstore_server.tiers.objects import Unsealed
from kvstore_server.tiers.places import RemoteFailed
from kvstore_server.tiers.remote import RemoteTier
from kvstore_server.values import Space

log = structlog.get_logger()

ASKS: Final = 64  # that wait; more are not taken
REPEAT_S: Final = 30.0  # until the same is asked for again
REMEMBERED: Final = 65_536
MEMORY_SHARE: Final = 4  # one ask brings no more than a quarter of memory


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A chain, or segments of one, that a match did not find whole."""

    space: Space
    hashes: HashArray


class Seeker:
    """What comes back from the remote tier of one store. All methods run on the daemon's loop."""

    def __init__(
        self, store: Store, tier: RemoteTier, *, at_once: int, min_blocks: int, clock: Callable[[], float]
    ) -> None:
        """At least `min_blocks` must be there to be gained, or nothing is fetched."""
        self._store = store
        self._tier = tier
        self._at_once = at_once
        self._min_blocks = min_blocks
        self._clock = clock
        self._asks: asyncio.Queue[Ask] = asyncio.Queue(ASKS)
        self._asked: OrderedDict[tuple[Namespace, bytes], float] = OrderedDict()

    def sought(self, space: Space, hashes: HashArray, num_found: int) -> None:
        """What follows the first `num_found` of these is fetched later, if that is worth it."""
        if len(hashes) - num_found < self._min_blocks or self._asks.full() or not self._tier.can_read():
            return
        name, now_s = (space.namespace, hashes[num_found + self._min_blocks - 1].tobytes()), self._clock()
        if now_s - self._asked.get(name, -REPEAT_S) < REPEAT_S:
            return
        self._asked[name] = now_s
        self._asked.move_to_end(name)
        if len(self._asked) > REMEMBERED:
            self._asked.popitem(last=False)
        self._asks.put_nowait(Ask(space, hashes))

    async def run(self) -> None:
        """Fetches, until cancelled."""
        while True:
            ask = await self._asks.get()
            try:
                await self._seek(ask)
            except RemoteFailed:
                pass  # the tier has told
            except Exception:  # or nothing would ever be fetched again
                log.exception("fetch failed: this is a bug of the store")
            self._asks.task_done()

    async def settle(self) -> None:
        """Nothing waits to be fetched."""
        await self._asks.join()

    async def _seek(self, ask: Ask) -> None:
        """Raises: RemoteFailed."""
        space, index = ask.space, ask.space.index
        rows, num_writing = index.prefix(ask.hashes)
        first = len(rows)
        missing = leading(index.states(index.find(ask.hashes[first:])) == State.HOLE)
        if num_writing or not missing:
            return
        last = first + min(missing, self._min_blocks) - 1
        if not await self._tier.has(space.namespace, _hash(ask.hashes, last)):
            return  # fewer than are worth it, since chains are written as a whole
        most = self._store.tier.arena.capacity_bytes // MEMORY_SHARE // space.spec.block_bytes
        end = min(first + missing, first + max(1, most))
        self._tier.use(space.namespace, ask.hashes[:end].tolist())
        for begin in range(first, end, self._at_once):
            positions = range(begin, min(end, begin + self._at_once))
            reads = [self._tier.read(space.spec, _hash(ask.hashes, position)) for position in positions]
            blocks = await asyncio.gather(*reads, return_exceptions=True)
            for position, block in zip(positions, blocks, strict=True):
                if isinstance(block, BaseException):
                    raise block
                parent = None if self._begins_chain(space, position) else _hash(ask.hashes, position - 1)
                one = ask.hashes[position : position + 1]
                if block is None or not await self._store_here(space, parent, one, block):
                    return

    def _begins_chain(self, space: Space, position: int) -> bool:
        """Whether nothing comes before this block of an ask, as its writer would have it.

        Of several daemons, each is asked for the segments that it owns, one after the other, and they need not follow
        each other. Source: docs/spec/placement.md.
        """
        return position % segment_blocks(space.spec.block_tokens) == 0 if self._store.placed else position == 0

    async def _store_here(self, space: Space, parent: BlockHash | None, block_hash: HashArray, block: Unsealed) -> bool:
        """The block, `[1]` hash, is stored; False, if it cannot be: no room, or what it follows is not here."""
        store, spec = self._store, space.spec
        if store.spaces.get(space.namespace) is not space:
            return False
        write = store.reserve(space, parent=parent, hashes=block_hash, parts=[])
        if not write.pending:
            store.finish_write(write)
            return write.outcomes == [Outcome.STORED]
        intake = store.plan_intake(
            write,
            blocks=np.zeros(1, np.int64),
            parts=np.arange(spec.num_parts),
            region=block.data,
            offsets=np.array([begin for begin, _ in space.part_ranges]),
        )
        copies = intake.copies
        try:
            await in_thread(copy_pieces, copies.targets, copies.sources, copies.sizes)
        except BaseException:
            store.parts_lost(intake)
            raise
        store.parts_arrived(intake, block.checksums)
        self._tier.counters.blocks_fetched += 1
        store.finish_write(write)
        return True


def _hash(hashes: HashArray, position: int) -> BlockHash:
    return BlockHash(hashes[position].tobytes())
