"""What a courier copies, to whom, and in which order. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from kvstore.hashing import unpack
from kvstore.placement import SEGMENT_TOKENS
from kvstore.types import AnyArray, HashArray, IntArray, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.placing import View

PIECE_BLOCKS: Final = 4096
RUN_BLOCKS: Final = 64
RUN_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """`[n]` blocks of one namespace, the block before each, and the segment of each."""

    namespace: Namespace
    hashes: HashArray
    parents: HashArray
    segments: AnyArray

    @classmethod
    def of(cls, event: pb.Event) -> "Blocks":
        segments = np.frombuffer(event.segments, "<u8")
        return cls(Namespace(event.namespace), unpack(event.hashes), unpack(event.parents), segments)

    def __getitem__(self, places: IntArray | slice) -> "Blocks":
        return Blocks(self.namespace, self.hashes[places], self.parents[places], self.segments[places])


def snapshot(events: Iterator[pb.Event]) -> list[Blocks] | None:
    """What there is when a watch begins, each block once and behind the one before it; None: it broke off."""
    found: dict[Namespace, list[Blocks]] = {}
    for event in events:
        if event.kind == pb.Event.SNAPSHOT_END:
            break
        blocks = Blocks.of(event)
        found.setdefault(blocks.namespace, []).append(blocks)
    else:
        return None
    ordered = []
    for namespace, pieces in found.items():
        columns = ([getattr(piece, name) for piece in pieces] for name in ("hashes", "parents", "segments"))
        blocks = Blocks(namespace, *map(np.concatenate, columns))
        order = chains(blocks)
        ordered += [blocks[order[begin : begin + PIECE_BLOCKS]] for begin in range(0, len(order), PIECE_BLOCKS)]
    return ordered


def chains(blocks: Blocks) -> IntArray:
    """The places of these blocks, each once, segment by segment, and in each behind the block before it."""
    place_of: dict[bytes, int] = {}
    for place, hash_ in enumerate(blocks.hashes.tolist()):
        place_of.setdefault(hash_, place)
    once = np.array(list(place_of.values()), np.int64)
    above = np.array([place_of.get(parent, -1) for parent in blocks.parents.tolist()] + [-1], np.int64)
    depth = np.zeros(len(blocks.hashes), np.int64)
    higher = above[:-1]
    for _ in range(SEGMENT_TOKENS):  # a block has a token at least
        if (higher < 0).all():
            break
        depth += higher >= 0
        higher = above[higher]
    return once[np.lexsort((once, depth[once], blocks.segments[once]))]


def targets(segments: AnyArray, view: View, node: str) -> Iterator[tuple[str, IntArray]]:
    """Members, and the places of the blocks in these segments that they own beside this node, or in its place.

    Also those before this node: who stored with it may not have reached them.
    """
    placement = view.placement
    if placement is None or not set(placement.nodes) - {node}:
        return
    owners = placement.owners(segments, count=view.replicas)
    mine = owners == (placement.nodes.index(node) if node in placement.nodes else -1)
    wanted = ~mine & (segments != 0)[:, None]
    for index, target in enumerate(placement.nodes):
        places = np.flatnonzero((wanted & (owners == index)).any(axis=1))
        if len(places):
            yield target, places


def runs(hashes: HashArray, parents: HashArray, block_bytes: int) -> Iterator[slice]:
    """Runs of blocks each of which follows the one before it, bounded in number and bytes."""
    most = max(1, min(RUN_BLOCKS, RUN_BYTES // block_bytes))
    follows = np.append(False, parents[1:] == hashes[:-1])
    begins = [0] if len(hashes) else []
    for place in range(1, len(hashes)):
        if not follows[place] or place - begins[-1] >= most:
            begins.append(place)
    for begin, end in pairwise([*begins, len(hashes)]):
        yield slice(begin, end)
