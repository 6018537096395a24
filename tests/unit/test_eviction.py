"""LRU over random histories, against an oracle that looks at everything each time."""

import random

import numpy as np
import pytest
from builders import records

from kvstore.types import BlockHash
from kvstore_server import eviction
from kvstore_server.eviction import Ticks
from kvstore_server.index import Index
from kvstore_server.table import NONE


class Oracle:
    """When each block was last used, and what holds it."""

    def __init__(self) -> None:
        self.now = 0
        self.used: dict[BlockHash, int] = {}
        self.parent: dict[BlockHash, BlockHash | None] = {}
        self.leases: dict[BlockHash, int] = {}

    def touch(self, block: BlockHash) -> None:
        path: list[BlockHash] = []
        at: BlockHash | None = block
        while at is not None:
            path.append(at)
            at = self.parent[at]
        for each in path:  # leaf first, so that a parent is younger
            self.now += 1
            self.used[each] = self.now

    def evict(self, count: int) -> list[BlockHash]:
        gone = []
        while len(gone) < count:
            parents = {parent for parent in self.parent.values() if parent is not None}
            free = [block for block in self.parent if block not in parents and not self.leases.get(block)]
            if not free:
                break
            oldest = min(free, key=self.used.__getitem__)
            del self.parent[oldest]
            gone.append(oldest)
        return gone


@pytest.mark.parametrize("scan", [1, 3, 10_000])
@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_last_use_from_the_leaves(seed: int, scan: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: E6."""
    monkeypatch.setattr(eviction, "SCAN_VICTIMS", scan)
    monkeypatch.setattr(eviction, "SCAN_ROWS", 50)
    random_ = random.Random(seed)
    index, oracle = Index(Ticks()), Oracle()
    held: list[np.ndarray] = []
    for number in range(300):
        action = random_.random()
        blocks = list(oracle.parent)
        if action < 0.45 or not blocks:
            block = BlockHash(number.to_bytes(32, "big"))
            parent = random_.choice([None, *blocks])
            row_of_parent = NONE if parent is None else int(index.find(records([parent]))[0])
            row, _ = index.insert(
                records([block]), parent=row_of_parent, slots=np.array([number]), generations=np.array([number + 1])
            )
            oracle.parent[block] = parent
            oracle.touch(block)
            index.touch(row)
            index.commit(row)
        elif action < 0.65:
            block = random_.choice(blocks)
            oracle.touch(block)
            index.touch(index.find(records([block])))
        elif action < 0.75:
            block = random_.choice(blocks)
            oracle.leases[block] = oracle.leases.get(block, 0) + 1
            held.append(index.find(records([block])))
            index.lease(held[-1])
        elif action < 0.85 and held:
            rows = held.pop(random_.randrange(len(held)))
            oracle.leases[BlockHash(index.hashes_of(rows)[0].tobytes())] -= 1
            index.unlease(rows)
        else:
            count = random_.randrange(1, 5)
            assert index.evict(count)[0].tolist() == oracle.evict(count)
        index.validate()
