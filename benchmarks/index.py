"""What does the index cost? Bytes of RSS a block at a million blocks; time to evict 10,000, and to match 1,000.

    python benchmarks/index.py [--blocks 1000000] [--policy lru|lfu] [--json]

Limits (docs/benchmarks/local.md): at most 400 bytes a block, and 50 ms for 10,000 evictions. Slots are real
(slabs of 64 MiB); the blocks have 64 bytes each, so that memory for their contents does not count.
"""

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np

from kvstore.hashing import unpack
from kvstore.types import HASH_BYTES, HashArray
from kvstore_server.config import EVICTION_POLICIES
from kvstore_server.eviction import Ticks
from kvstore_server.index import Index
from kvstore_server.table import NONE

CHAIN = 64
EVICTIONS = 10_000
MATCHES = 300
MATCHED = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--policy", choices=EVICTION_POLICIES, default="lru")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    index = Index(Ticks(), policy=arguments.policy)
    gc.collect()
    before = rss_bytes()
    started = time.perf_counter()
    fill(index, arguments.blocks)
    insert_s = time.perf_counter() - started
    gc.collect()
    bytes_per_block = (rss_bytes() - before) / arguments.blocks
    started = time.perf_counter()
    hashes, _ = index.evict(EVICTIONS)
    evict_ms = (time.perf_counter() - started) * 1e3
    assert len(hashes) == EVICTIONS
    firsts = range(arguments.blocks, arguments.blocks + MATCHES * MATCHED, MATCHED)
    match_us = [timed_match(index, add_chain(index, MATCHED, first=first)) * 1e6 for first in firsts]
    figures = {
        "blocks": arguments.blocks,
        "rss_bytes_per_block": round(bytes_per_block, 1),
        "insert_us_per_block": round(insert_s / arguments.blocks * 1e6, 2),
        "evict_10000_ms": round(evict_ms, 1),
        "match_1000_us": round(statistics.median(match_us)),
    }
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:24}{value}" for name, value in figures.items()))


def fill(index: Index, num_blocks: int) -> None:
    """Chains of 64 blocks, committed."""
    for first in range(0, num_blocks // CHAIN * CHAIN, CHAIN):
        add_chain(index, CHAIN, first=first)


def add_chain(index: Index, length: int, *, first: int) -> HashArray:
    """A chain of new blocks is committed, in slots from `first` on; their hashes."""
    hashes = unpack(os.urandom(HASH_BYTES * length))
    numbers = np.arange(first, first + length)
    rows, _ = index.insert(hashes, parent=NONE, slots=numbers, generations=numbers + 1)
    index.touch(rows)
    index.commit(rows)
    return hashes


def timed_match(index: Index, hashes: HashArray) -> float:
    """How long it takes to find this chain, and to note that it was used."""
    started = time.perf_counter()
    rows, _ = index.prefix(hashes)
    index.touch(rows)
    assert len(rows) == len(hashes)
    return time.perf_counter() - started


def rss_bytes() -> int:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
