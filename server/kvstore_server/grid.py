"""The grid blocks x parts of one request: which parts, where they begin in a block, where in a region. Pure."""

from collections.abc import Sequence

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.transport.memory import address_of
from kvstore.types import ByteArray, IntArray
from kvstore_server.values import RemoteRegion, Space
from kvstore_server.writes import mask_of


def set_of(parts: Sequence[int], space: Space) -> int:
    """The parts as a set. Raises: InvalidRequest, if one does not exist or comes twice."""
    num_parts = space.spec.num_parts
    if len(set(parts)) != len(parts) or not all(part < num_parts for part in parts):
        raise InvalidRequest(f"parts: expected different ones from 0 to {num_parts - 1}, got {parts[:8]}")
    return mask_of(parts)


def ranges_of(parts: Sequence[int], space: Space) -> tuple[IntArray, IntArray]:
    """Where each of these parts, which exist, begins in a block, and its size."""
    begins, sizes = np.array([space.part_ranges[part] for part in parts], np.int64).reshape(-1, 2).T
    return begins, sizes


def within(region: ByteArray | RemoteRegion, offsets: IntArray, *, num_blocks: int, sizes: IntArray) -> IntArray:
    """`[num_blocks, len(sizes)]`: the addresses of these offsets in a region, where parts of these sizes begin.

    Raises: InvalidRequest, if one is not in there, or there are none, or more or fewer.
    """
    if isinstance(region, RemoteRegion):
        base, size_bytes = region.address, region.size_bytes
    else:
        base, size_bytes = address_of(region), region.size
    if len(offsets) != num_blocks * len(sizes) or not len(offsets):
        raise InvalidRequest(
            f"offsets: expected {num_blocks} blocks x {len(sizes)} parts, at least one, got {len(offsets)}"
        )
    grid = offsets.reshape(num_blocks, len(sizes))
    # Compared so that no sum can overflow: an offset may be anything below 2**63.
    if (grid > size_bytes - sizes).any():
        raise InvalidRequest(
            f"offsets: expected parts within the region of {size_bytes} bytes, got offsets up to {offsets.max()}"
        )
    addresses: IntArray = grid + base
    return addresses
