"""A load from several daemons: one `Load` with each, seen as one."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, StoreTimeout, StoreUnavailable
from kvstore.types import BlockHash, ByteArray, IntArray
from kvstore_client.fanout import each, half_way
from kvstore_client.links import Ring
from kvstore_client.load import Load, LoadResult
from kvstore_client.placing import NOBODY, Runs


@dataclass(frozen=True, slots=True)
class Leg:
    """What one daemon has to bring: its block i is block `blocks[i]` of the whole."""

    load: Load
    blocks: IntArray


class ClusterLoad:
    """Blocks on their way from the daemons that keep them. Made by `ClusterClient.load`; used like `Load`.

    A daemon that is away, slow or gone costs its blocks, which have their `errors` then, and no others.
    """

    def __init__(
        self,
        hashes: Sequence[BlockHash],
        legs: Sequence[Leg],
        failed: dict[int, KVStoreError],  # blocks that are in no leg, by index
        *,
        lease: str,
        timeout_s: float,
    ) -> None:
        self.hashes = hashes
        self.lease = lease
        self._legs = legs
        self._failed = failed
        self._timeout_s = timeout_s
        leg_of, place_of = np.zeros((2, len(hashes)), np.int64)
        for number, leg in enumerate(legs):
            leg_of[leg.blocks] = number
            place_of[leg.blocks] = np.arange(len(leg.blocks))
        self._leg_of: list[int] = leg_of.tolist()  # by block: its leg, and its place there
        self._place_of: list[int] = place_of.tolist()

    def __repr__(self) -> str:
        return f"<ClusterLoad [{self.num_blocks} blocks from {len(self._legs)} daemons, {len(self._failed)} errors]>"

    def __enter__(self) -> "ClusterLoad":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cancel()
        self.release()

    @property
    def num_blocks(self) -> int:
        return len(self.hashes)

    @property
    def errors(self) -> dict[int, KVStoreError]:
        """By index of the block. It grows while blocks fail, and is final after `wait`."""
        found = dict(self._failed)
        for leg in self._legs:
            for place, error in list(leg.load.errors.items()):
                found.setdefault(int(leg.blocks[place]), error)
        return found

    def wait_part(self, part: int, timeout_s: float | None = None) -> None:
        """As `Load.wait_part`, of the blocks of all daemons."""
        deadline = self._deadline(timeout_s)
        try:
            if self._failed:
                raise self._failed[min(self._failed)]
            for leg in self._legs:
                leg.load.wait_part(part, max(0.0, deadline - time.monotonic()))
        except KVStoreError:
            self._on_all(Load.cancel)
            raise

    def wait(self, timeout_s: float | None = None) -> LoadResult:
        """As `Load.wait`. Raises: StoreTimeout, StoreUnavailable, if that is so of every daemon."""
        deadline = self._deadline(timeout_s)
        lost: list[KVStoreError] = []
        loaded = np.zeros(self.num_blocks, bool)
        for leg in self._legs:
            try:
                leg.load.wait(max(0.0, deadline - time.monotonic()))
            except (StoreTimeout, StoreUnavailable) as error:
                lost.append(error)
                for block in leg.blocks.tolist():
                    self._failed.setdefault(block, error)
                continue
            loaded[leg.blocks] = leg.load.in_place()
        if lost and len(lost) == len(self._legs):
            raise lost[0]
        num_loaded = self.num_blocks if loaded.all() else int(loaded.argmin())
        return LoadResult(num_loaded, self.errors)

    def view(self, block: int, part: int) -> ByteArray:
        """As `Load.view`."""
        if not 0 <= block < self.num_blocks:
            raise InvalidRequest(f"view: expected a block below {self.num_blocks}, got {block}; correct it")
        if block in self._failed:
            raise self._failed[block]
        return self._legs[self._leg_of[block]].load.view(self._place_of[block], part)

    def check(self) -> None:
        """As `Load.check`."""
        self._on_all(Load.check)

    def cancel(self) -> None:
        """Nothing is copied any more; what is in place stays so. Idempotent."""
        self._on_all(Load.cancel)

    def release(self) -> None:
        """The leases are given back, without waiting for the daemons; views must not be used any more.

        Idempotent.
        """
        self._on_all(Load.release)

    def _on_all(self, act: Callable[[Load], None]) -> None:
        for leg in self._legs:
            act(leg.load)

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)


def begin_legs(
    ring: Ring,
    runs: Runs,
    nodes: IntArray,
    begin: Callable[[int, IntArray, float], Load],
    *,
    pool: Executor,
    deadline: float,
) -> tuple[list[Leg], dict[int, KVStoreError]]:
    """A load from each member of its blocks, and by block what went wrong with those that are in none.

    `nodes`, `[num_blocks]`: by block, its member. `begin` gets a member, its blocks and a deadline. What fails goes to
    the next member that may have it. Raises: the first failure, if there is no load; InvalidRequest, if one did, and no
    load goes on.
    """
    loads: list[Load] = []

    def begin_one(node: int, blocks: IntArray, until: float) -> Load:
        load = begin(node, blocks, until)
        loads.append(load)
        return load

    legs: list[Leg] = []
    failed: dict[int, KVStoreError] = {}
    away: set[int] = set()
    wanted = np.arange(len(nodes))
    while len(wanted):
        mine = {node: wanted[nodes[wanted] == node] for node in np.unique(nodes[wanted]).tolist()}
        until = half_way(deadline) if ring.view.has_others else deadline
        try:
            begun = each(pool, [partial(begin_one, node, blocks, until) for node, blocks in mine.items()])
        except InvalidRequest:
            for load in loads:
                load.cancel()
                load.release()
            raise
        for (node, blocks), result in zip(mine.items(), begun, strict=True):
            if isinstance(result, KVStoreError):
                failed.update(dict.fromkeys(blocks.tolist(), result))
                away.add(node)
            else:
                legs.append(Leg(result, blocks))
                for block in blocks.tolist():
                    failed.pop(block, None)
        if not failed:
            break
        live, costs = ring.live(), ring.costs()
        others = runs.by_block([ring.view.next_reader(segment, live, costs, away) for segment in runs.segments])
        left = np.array(sorted(failed), np.int64)
        wanted = left[others[left] != NOBODY]
        nodes[wanted] = others[wanted]
    if failed and not legs:
        raise failed[min(failed)]
    return legs, failed
