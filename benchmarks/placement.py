"""How evenly does placement spread the blocks of a trace over daemons, and how many move when one joins?

    python benchmarks/placement.py --trace TRACE [--nodes 8] [--block-tokens 16] [--json]
    python benchmarks/placement.py --trace mooncake/conversation_trace.jsonl

TRACE is as for hit_rate.py. Its blocks are cut into blocks of `--block-tokens`, as an engine makes them, each of which
is placed once, however often it is asked for, by the placement that clients and daemons use. `busiest` is the blocks of
the daemon that has most, over the mean; `busiest_asked` the same of the blocks that requests ask for, which is traffic.
`moved` is the share of the blocks that has another owner once one more daemon is there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from hit_rate import Request, hashes_of, read

from kvstore.errors import InvalidRequest
from kvstore.placement import Placement, segment_blocks
from kvstore.types import AnyArray, IntArray


@dataclass(frozen=True, slots=True)
class Balance:
    """Of one trace over so many daemons of one size."""

    nodes: int
    block_tokens: int
    blocks: int
    segments: int
    busiest: float
    busiest_asked: float
    moved: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        requests = read(arguments.trace)
        result = asdict(balance(requests, num_nodes=arguments.nodes, block_tokens=arguments.block_tokens))
    except InvalidRequest as error:
        sys.exit(str(error))
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:18}{value}" for name, value in result.items()))


def balance(requests: Sequence[Request], *, num_nodes: int, block_tokens: int) -> Balance:
    """All blocks of the trace were placed. Raises: InvalidRequest, if its blocks cannot be cut to that size."""
    cut, length = requests[0].block_tokens // block_tokens, segment_blocks(block_tokens)
    if requests[0].block_tokens % block_tokens or length % cut:
        raise InvalidRequest(
            f"block-tokens: expected a part of {requests[0].block_tokens}, the blocks of the trace, whole ones of "
            f"which make a segment, got {block_tokens}"
        )
    # A block of the trace stands for all before it, too, so that it has one place in its chain, and one segment.
    numbers = np.concatenate([request.blocks for request in requests])
    heads = np.concatenate([_heads(request.blocks, length // cut) for request in requests])
    _, firsts, asked = np.unique(numbers, return_index=True, return_counts=True)
    segments = _segments(heads[firsts] * cut)
    before = _owners(segments, num_nodes)
    after = _owners(segments, num_nodes + 1)
    return Balance(
        nodes=num_nodes,
        block_tokens=block_tokens,
        blocks=len(segments) * cut,
        segments=len(np.unique(segments)),
        busiest=_busiest(np.bincount(before, minlength=num_nodes)),
        busiest_asked=_busiest(np.bincount(before, weights=asked, minlength=num_nodes)),
        moved=round(float((before != after).mean()), 4),
    )


def _heads(blocks: IntArray, length: int) -> IntArray:
    """Of each block the first one in its segment of so many."""
    heads: IntArray = blocks[np.arange(len(blocks)) // length * length]
    return heads


def _segments(numbers: IntArray) -> AnyArray:
    """The names of the segments that begin with these blocks."""
    words: AnyArray = hashes_of(numbers).view("<u8").reshape(len(numbers), -1)[:, 0]
    return words


def _owners(segments: AnyArray, num_nodes: int) -> IntArray:
    return Placement({f"node-{number}": 1.0 for number in range(num_nodes)}).owners(segments)[:, 0]


def _busiest(counts: AnyArray) -> float:
    return round(float(counts.max() / counts.mean()), 3)


if __name__ == "__main__":
    main()
