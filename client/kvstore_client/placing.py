"""Which member of a store is asked for which blocks: members as they were told, and the shares of a request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvstore.placement import Placement
from kvstore.types import AnyArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb

NOBODY: Final = -1


@dataclass(frozen=True, slots=True)
class Share:
    """The blocks of a request that one member has to do with."""

    node: int  # in the order of `View.nodes`
    blocks: IntArray  # `[n]`, ascending: which of the request's


def shares(owners: IntArray) -> list[Share]:
    """The shares of blocks with these owners `[num_blocks]`; blocks of `NOBODY` are in none."""
    return [Share(node, np.flatnonzero(owners == node)) for node in np.unique(owners).tolist() if node != NOBODY]


@dataclass(frozen=True)
class View:
    """The members of a store at one time, and where they place blocks.

    `live` in its methods is `[num_nodes]` bool: which of the members answer.
    """

    members: Sequence[pb.Member]  # by node id, ascending
    epoch: int
    replicas: int
    nodes: tuple[str, ...] = field(init=False)
    _all: Placement | None = field(init=False)
    _up: Placement | None = field(init=False)  # without those that are draining; None: there are no others
    _up_nodes: IntArray = field(init=False)  # their places in `nodes`

    def __post_init__(self) -> None:
        weights = {member.node_id: float(max(1, member.capacity_bytes)) for member in self.members}
        draining = {member.node_id for member in self.members if member.state == pb.Member.DRAINING}
        up = {node: weight for node, weight in weights.items() if node not in draining}
        nodes = tuple(sorted(weights))
        set_field = object.__setattr__  # it is frozen from here on
        set_field(self, "nodes", nodes)
        set_field(self, "_all", Placement(weights) if weights else None)
        set_field(self, "_up", Placement(up) if up else None)
        set_field(self, "_up_nodes", np.array([nodes.index(node) for node in sorted(up)], np.int64))

    @classmethod
    def of(cls, reply: pb.MembersReply) -> "View":
        return cls(sorted(reply.members, key=lambda member: member.node_id), reply.epoch, max(1, reply.replicas))

    def readers(self, segments: AnyArray, live: AnyArray) -> tuple[IntArray, IntArray]:
        """Of each block, `[num_blocks]` each, who is asked for it, and who else.

        The first is its owner among all members. The other is the one among those that are not draining, where that is
        not the same; else `NOBODY`. Of several replicas each is the first that is live.
        """
        heads, lengths = _runs(segments)
        first = self._first(self._all, heads, live, None)
        if self._up is None or len(self._up_nodes) == len(self.nodes):
            other = np.full(len(first), NOBODY)
        else:
            other = self._first(self._up, heads, live, self._up_nodes)
            other[other == first] = NOBODY
        return np.repeat(first, lengths), np.repeat(other, lengths)

    def writers(self, segments: AnyArray, live: AnyArray) -> IntArray:
        """`[num_blocks]`: who takes each block in; `NOBODY`, if all members are draining."""
        heads, lengths = _runs(segments)
        return np.repeat(self._first(self._up, heads, live, self._up_nodes), lengths)

    def _first(
        self, placement: Placement | None, segments: AnyArray, live: AnyArray, places: IntArray | None
    ) -> IntArray:
        """The first live one of the owners of each segment; the first of all, if none is live."""
        if placement is None:
            return np.full(len(segments), NOBODY)
        owners = placement.owners(segments, count=self.replicas)
        if places is not None:
            owners = places[owners]
        chosen: IntArray = owners[np.arange(len(owners)), np.argmax(live[owners], axis=1)]
        return chosen


def _runs(segments: AnyArray) -> tuple[AnyArray, IntArray]:
    """The segments, each once for blocks in a row that are in it, and how many those are."""
    if not len(segments):
        return segments, np.zeros(0, np.int64)
    begins = np.concatenate([[0], np.flatnonzero(segments[1:] != segments[:-1]) + 1])
    return segments[begins], np.diff(begins, append=len(segments))
