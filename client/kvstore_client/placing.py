"""Which member of a store is asked for which blocks: members as they were told, and the shares of a request. Pure.

A request is seen as runs of blocks that are in one segment, each of which is placed as a whole. There are few of them,
so that a match takes no array of all its blocks in hand.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from kvstore.placement import Placement, segment_blocks
from kvstore.types import AnyArray, BlockHash, IntArray
from kvstore.v1 import kvstore_pb2 as pb

NOBODY: Final = -1
SPARES: Final = 2  # asked where no owner is live: who owns a segment once they are known to be gone
MOST_RANKED: Final = 1 << 16  # segments whose owners are remembered


class Run(NamedTuple):
    """Blocks `begin` to `end` of a request, which are in one segment."""

    begin: int
    end: int
    segment: int


def runs_of(hashes: Sequence[BlockHash], segments: AnyArray | None, *, block_tokens: int) -> list[Run]:
    """The runs of blocks in these segments; None: of blocks of so many tokens that begin a chain."""
    count = len(hashes)
    if not count:
        return []
    if segments is None:
        begins = list(range(0, count, segment_blocks(block_tokens)))
        names = [int.from_bytes(hashes[begin][:8], "little") for begin in begins]
    else:
        begins = [0, *(np.flatnonzero(segments[1:] != segments[:-1]) + 1).tolist()]
        names = segments[begins].tolist()
    return [Run(*each) for each in zip(begins, [*begins[1:], count], names, strict=True)]


def indices_of(runs: Iterable[Run]) -> IntArray:
    """`[n]`: their blocks."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(run.begin, run.end) for run in runs)])


def shares(runs: Sequence[Run], owners: Sequence[int]) -> dict[int, list[Run]]:
    """By owner, the runs that it owns, in order. Those of `NOBODY` are left out."""
    found: dict[int, list[Run]] = {}
    for run, owner in zip(runs, owners, strict=True):
        if owner != NOBODY:
            found.setdefault(owner, []).append(run)
    return found


@dataclass(frozen=True)
class View:
    """The members of a store at one time, and where they place runs of blocks.

    Members are named by their places in `nodes`. `live`, by node: which of them answer.
    """

    members: Sequence[pb.Member]  # by node id, ascending, each once
    epoch: int
    replicas: int
    nodes: tuple[str, ...] = field(init=False)
    placement: Placement | None = field(init=False)  # over those that are not draining; None: all are
    _everybody: "_Ranking" = field(init=False)
    _up: "_Ranking" = field(init=False)  # without those that are draining

    def __post_init__(self) -> None:
        up = [member for member in self.members if member.state != pb.Member.DRAINING]
        nodes = tuple(member.node_id for member in self.members)
        everybody = _Ranking(self.members, nodes, self.replicas)
        staying = everybody if len(up) == len(nodes) else _Ranking(up, nodes, self.replicas)
        set_field = object.__setattr__  # it is frozen from here on
        set_field(self, "nodes", nodes)
        set_field(self, "placement", staying.placement)
        set_field(self, "_everybody", everybody)
        set_field(self, "_up", staying)

    @classmethod
    def of(cls, reply: pb.MembersReply) -> "View":
        """As a daemon told it; of members of one name, the last counts."""
        members = {member.node_id: member for member in reply.members}
        return cls([members[node] for node in sorted(members)], reply.epoch, max(1, reply.replicas))

    def state_of(self, node: str) -> int:
        """UP or DRAINING, as in `Member.State`; 0, if it is no member."""
        return next((member.state for member in self.members if member.node_id == node), 0)

    def member(self, node: str) -> pb.Member:
        """The member of that name, which there is."""
        return next(member for member in self.members if member.node_id == node)

    def readers(self, runs: Sequence[Run], live: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Of each run, who is asked for it, and who else.

        The first is its owner among all members. The other is the one among those that are not draining, where that is
        not the same; else `NOBODY`. Of several replicas each is the first that is live.
        """
        first = self._everybody.first(runs, live)
        if self._up is self._everybody:
            return first, [NOBODY] * len(runs)
        others = self._up.first(runs, live)
        return first, [NOBODY if other == one else other for one, other in zip(first, others, strict=True)]

    def writers(self, runs: Sequence[Run], live: Sequence[bool]) -> list[int]:
        """Of each run, who takes it in; `NOBODY`, if all members are draining."""
        return self._up.first(runs, live)


class _Ranking:
    """The owners of segments among some of the members. Thread-safe: what is remembered never changes."""

    def __init__(self, members: Sequence[pb.Member], nodes: tuple[str, ...], replicas: int) -> None:
        weights = {member.node_id: float(max(1, member.capacity_bytes)) for member in members}
        self.placement = Placement(weights) if weights else None
        self._places = [nodes.index(node) for node in sorted(weights)]
        self._replicas = replicas
        self._owners: dict[int, list[int]] = {}  # by segment

    def first(self, runs: Sequence[Run], live: Sequence[bool]) -> list[int]:
        """The first live one of the owners of each run, and of who is next; the first of all, if none is live."""
        if self.placement is None:
            return [NOBODY] * len(runs)
        known = self._owners
        names = [run.segment for run in runs]
        if not known.keys() >= set(names):
            known = self._rank(names)
        chosen = []
        for name in names:
            owners = known[name]
            first = owners[0]
            chosen.append(first if live[first] else next((owner for owner in owners if live[owner]), first))
        return chosen

    def _rank(self, segments: list[int]) -> dict[int, list[int]]:
        assert self.placement is not None
        ranked = self.placement.owners(np.array(segments, np.uint64), count=self._replicas + SPARES).tolist()
        fresh = {name: [self._places[at] for at in row] for name, row in zip(segments, ranked, strict=True)}
        self._owners = fresh if len(self._owners) > MOST_RANKED else self._owners | fresh
        return self._owners | fresh
