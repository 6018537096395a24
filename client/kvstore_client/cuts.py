"""How a write is cut into messages, and what of it can be copied at once. Pure."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

# Bytes of one StorePart from a region: what a follower waits for is told no more finely.
MESSAGE_BYTES: Final = 128 << 20
# The same from staging: small enough that copying the next into it overlaps with the daemon's copying.
STAGED_BYTES: Final = 32 << 20
MESSAGE_OFFSETS: Final = 1 << 20  # of 8 bytes each, in one message


def grids(num_blocks: int, sizes: Sequence[int], *, most_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Cuts blocks x parts into (blocks, parts) of about `most_bytes`: whole blocks, or parts of one."""
    per_block = sum(sizes)
    if per_block <= most_bytes:
        step = max(1, min(most_bytes // per_block, MESSAGE_OFFSETS // len(sizes)))
        for first in range(0, num_blocks, step):
            yield slice(first, min(first + step, num_blocks)), slice(0, len(sizes))
        return
    cuts = [0]
    filled = 0
    for index, size in enumerate(sizes):
        if filled and filled + size > most_bytes:
            cuts.append(index)
            filled = 0
        filled += size
    cuts.append(len(sizes))
    for block in range(num_blocks):
        for first, end in pairwise(cuts):
            yield slice(block, block + 1), slice(first, end)


def spans(begins: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, size) of the same bytes, with neighbours joined."""
    joined: list[tuple[int, int]] = []
    for begin, size in zip(begins, sizes, strict=True):
        if joined and sum(joined[-1]) == begin:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((begin, size))
    return joined
