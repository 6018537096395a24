"""Which daemon of a store keeps a block: rendezvous hashing of the segment of the chain that the block is in.

A segment is 512 tokens in a row: enough that what is asked for together lies together, and few enough that a prefix
which many ask for is spread over several members. Every segment ranks the members by a score of its own; the first
`replicas` of them own it. A member that leaves gives up its segments and no others; one that joins takes its share and
nothing else moves.

Source: docs/spec/placement.md, which defines segment and score bit by bit; Schindelhauer and Schomaker, "Weighted
Distributed Hash Tables" (2005), for the weights.
"""

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.types import AnyArray, BlockHash, IntArray

SEGMENT_TOKENS: Final = 512

_TAG: Final = b"kvstore/member/v1\0"
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def segment_blocks(block_tokens: int) -> int:
    """How many blocks of so many tokens are a segment."""
    return max(1, SEGMENT_TOKENS // block_tokens)


def segments(chain: Sequence[BlockHash], *, block_tokens: int) -> AnyArray:
    """`[n]` u64: of each block of a chain, from its first on, the segment that it is in."""
    heads = chain[:: segment_blocks(block_tokens)]
    return segments_from(heads, block_tokens=block_tokens)[: len(chain)]


def segments_from(heads: Sequence[BlockHash], *, block_tokens: int) -> AnyArray:
    """`[segment_blocks * n]` u64: as `segments`, of whole segments whose first blocks these are."""
    return np.repeat(np.frombuffer(b"".join([head[:8] for head in heads]), "<u8"), segment_blocks(block_tokens))


class Placement:
    """Members of a store by their node ids, and their weights."""

    def __init__(self, weights: dict[str, float]) -> None:
        """Raises: InvalidRequest, if there are no members, or a weight is not more than 0."""
        if not weights or min(weights.values()) <= 0:
            raise InvalidRequest(f"placement: expected members with weights of more than 0, got {weights!r:.200}")
        self.nodes = tuple(sorted(weights))
        self._weights = np.array([weights[node] for node in self.nodes], np.float64)
        self._seeds = np.array([_seed(node) for node in self.nodes], np.uint64)

    def __repr__(self) -> str:
        return f"<Placement over {', '.join(self.nodes)}>"

    def owners(self, segments: AnyArray, *, count: int = 1) -> IntArray:
        """`[n, min(count, members)]`: of each segment, which of `nodes` own it, the first before the others."""
        count = min(count, len(self.nodes))
        distinct, places = np.unique(segments, return_inverse=True)
        mixed = _mix(distinct[:, None] ^ self._seeds[None, :])
        share = (np.right_shift(mixed, np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        ranked = np.argsort(np.log(share) / self._weights, axis=1, kind="stable")[:, ::-1]
        return np.asarray(ranked[places, :count], np.int64)


def _seed(node: str) -> int:
    return int.from_bytes(hashlib.sha256(_TAG + node.encode()).digest()[:8], "little")


def _mix(values: AnyArray) -> AnyArray:
    """The finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: AnyArray = values ^ (values >> np.uint64(31))
    return mixed
