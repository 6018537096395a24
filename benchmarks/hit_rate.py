"""How much of a trace's input does a store of so many blocks spare? Replays it through the daemon's own index.

    python benchmarks/hit_rate.py TRACE [--policy lru|lfu] [--capacity-blocks N] [--json]
    python benchmarks/hit_rate.py mooncake/conversation_trace.jsonl --policy lfu --capacity-blocks 4000

TRACE is a file of Mooncake (one request a line) or a folder of Claude Code sessions (`trace_*.json`), which are
taken to start together. Blocks have no bytes: a request is matched, and what is missing of it is stored, as the
store does it. The hit rate is the share of all input tokens that were in the blocks matched.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.types import HASH_BYTES, HashArray, IntArray
from kvstore_server.config import EVICTION_POLICIES
from kvstore_server.eviction import Ticks
from kvstore_server.index import Index
from kvstore_server.level import State
from kvstore_server.table import NONE

MOONCAKE_BLOCK_TOKENS = 512
PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Request:
    """Numbers of the blocks of one request, each of which stands for all that comes before it too, and their size."""

    blocks: IntArray
    block_tokens: int
    num_tokens: int

    def tokens_in(self, num_blocks: int) -> int:
        return min(num_blocks * self.block_tokens, self.num_tokens)


@dataclass(frozen=True, slots=True)
class Result:
    """`hit_rate` is in percent of the tokens asked for."""

    policy: str
    capacity_blocks: int
    hit_rate: float
    requests: int
    blocks: int
    unique_blocks: int


class Cache:
    """A memory tier of so many slots, without its bytes."""

    def __init__(self, *, policy: str, capacity_blocks: int) -> None:
        self.index = Index(Ticks(), policy=policy)
        self._free = np.arange(capacity_blocks)
        self._last_generation = 0

    def match(self, hashes: HashArray) -> int:
        """As `Store.match`."""
        rows, _ = self.index.prefix(hashes)
        if len(rows):
            self.index.touch(rows)
        return len(rows)

    def store(self, hashes: HashArray) -> None:
        """As `Store.reserve`, and all its parts arrive at once."""
        index = self.index
        known = index.find(hashes)
        held = known[known != NONE]
        index.lease(held)
        missing = np.flatnonzero(index.states(known) == State.HOLE)
        if len(missing) > len(self._free):
            self._free = np.concatenate([self._free, index.evict(len(missing) - len(self._free))[1]])
        slots, self._free = np.split(self._free, [len(missing)])
        count = len(hashes) if len(slots) == len(missing) else int(missing[len(slots)])
        if count:
            generations = self._last_generation + 1 + np.arange(len(slots))
            self._last_generation += len(slots)
            rows, begun = index.insert(hashes[:count], parent=NONE, slots=slots, generations=generations)
            index.touch(rows)
            index.commit(rows[begun])
        index.unlease(held)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--policy", choices=EVICTION_POLICIES, default="lru")
    parser.add_argument("--capacity-blocks", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = asdict(replay(read(arguments.trace), policy=arguments.policy, capacity_blocks=arguments.capacity_blocks))
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:18}{value}" for name, value in result.items()))


def replay(requests: Sequence[Request], *, policy: str, capacity_blocks: int) -> Result:
    """All requests were matched and stored, one after the other, in an empty cache."""
    cache = Cache(policy=policy, capacity_blocks=capacity_blocks)
    hit = 0
    for request in with_progress(requests):
        hashes = hashes_of(request.blocks)
        hit += request.tokens_in(cache.match(hashes))
        cache.store(hashes)
    blocks = np.concatenate([request.blocks for request in requests])
    asked = sum(request.num_tokens for request in requests)
    hit_rate = round(100 * hit / asked, 2)
    return Result(policy, capacity_blocks, hit_rate, len(requests), len(blocks), len(np.unique(blocks)))


def read(trace: Path) -> list[Request]:
    """The requests of a trace, in order of time."""
    return list(_mooncake(trace)) if trace.is_file() else _claude_code(trace)


def hashes_of(blocks: IntArray) -> HashArray:
    """`[n]`: a hash for each number, as well mixed as a real one."""
    words = blocks.astype(np.uint64)[:, None] + np.arange(1, HASH_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(1 << 40)
    for shift in (30, 27, 31):  # the finaliser of SplitMix64
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes: HashArray = np.ascontiguousarray(words).view(f"V{HASH_BYTES}").reshape(-1)
    return hashes


def with_progress(requests: Sequence[Request]) -> Iterator[Request]:
    """The requests; a terminal is shown now and then how many are done."""
    shown = time.monotonic()
    for number, request in enumerate(requests):
        if sys.stderr.isatty() and time.monotonic() - shown > PROGRESS_EVERY_S:
            shown = time.monotonic()
            print(f"{number} of {len(requests)} requests", file=sys.stderr)
        yield request


def _mooncake(trace: Path) -> Iterator[Request]:
    for line in trace.read_text().splitlines():
        entry = json.loads(line)
        yield Request(np.array(entry["hash_ids"], np.int64), MOONCAKE_BLOCK_TOKENS, entry["input_length"])


def _claude_code(folder: Path) -> list[Request]:
    """Block numbers mean something within one session and model only, so they get others here."""
    timed: list[tuple[float, Request]] = []
    numbers: dict[tuple[str, str, int], int] = {}
    for file in sorted(folder.glob("trace_*.json")):
        session = json.loads(file.read_text())
        for at, entry in _flat(session["requests"], begin=0.0):
            keys = [(session["id"], entry["model"], number) for number in entry["hash_ids"]]
            blocks = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
            timed.append((at, Request(blocks, session["block_size"], entry["in"])))
    return [request for _, request in sorted(timed, key=lambda pair: pair[0])]


def _flat(entries: list[dict[str, Any]], *, begin: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """The requests and when each was sent; those of a subagent count from its start."""
    for entry in entries:
        if entry["type"] == "subagent":
            yield from _flat(entry["requests"], begin=begin + entry["t"])
        else:
            yield begin + entry["t"], entry


if __name__ == "__main__":
    main()
