"""What callers hand in with hashes, checked before anything is sent. Pure."""

from collections.abc import Sequence

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.hashing import pack
from kvstore.spec import KVSpec
from kvstore.types import AnyArray, BlockHash
from kvstore.wire import MAX_HASHES
from kvstore_client.locate import Match


def packed(hashes: Sequence[BlockHash]) -> bytes:
    """The hashes as they are sent. Raises: InvalidRequest, if there are too many, or one is none."""
    check_count(hashes)
    return pack(hashes)


def check_count(hashes: Sequence[BlockHash]) -> None:
    if len(hashes) > MAX_HASHES:
        raise InvalidRequest(f"hashes: expected at most {MAX_HASHES}, got {len(hashes)}; ask in several calls")


def check_segments(segments: AnyArray | None, *, num_blocks: int) -> None:
    """Raises: InvalidRequest, if there are segments, and they are not one u64 for each block."""
    if segments is not None and (segments.shape != (num_blocks,) or segments.dtype != np.uint64):
        raise InvalidRequest(
            f"segments: expected [{num_blocks}] uint64, one for each block, got {list(segments.shape)} "
            f"{segments.dtype}; cut them like the hashes"
        )


def hashes_of(blocks: Match | Sequence[BlockHash], *, follow: bool) -> Sequence[BlockHash]:
    """Those that a load is to bring. Raises: InvalidRequest, if there are too many."""
    if isinstance(blocks, Match):
        blocks = blocks.hashes[: blocks.num_blocks + (blocks.num_writing if follow else 0)]
    check_count(blocks)
    return blocks


def parts_of(parts: Sequence[int] | None, spec: KVSpec) -> list[int]:
    """Ascending; None: all. Raises: InvalidRequest, if one is out of bounds or given twice, or there are none."""
    if parts is None:
        return list(range(spec.num_parts))
    chosen = sorted(parts)
    if not chosen or chosen[0] < 0 or chosen[-1] >= spec.num_parts or len(set(chosen)) != len(chosen):
        raise InvalidRequest(f"parts: expected some of 0 to {spec.num_parts - 1}, each once, got {chosen[:8]}")
    return chosen
