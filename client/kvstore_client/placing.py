"""Which member of a store is asked for which blocks: members as they were told, and the shares of a request. Pure.

A request is seen as runs of blocks that are in one segment, each of which is placed as a whole. There are few of them,
so that a match takes no array of all its blocks in hand.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np

from kvstore.placement import Placement, segment_blocks
from kvstore.types import HASH_BYTES, AnyArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb

NOBODY: Final = -1
SPARES: Final = 2  # asked where no owner is live: who owns a segment once they are known to be gone
MOST_RANKED: Final = 1 << 16  # segments whose owners are remembered

Cost: TypeAlias = tuple[bool, int]  # of asking a member: whether it is on another host, and what it has to do already


@dataclass(frozen=True, slots=True)
class Runs:
    """Run i is blocks `begins[i]` to `begins[i + 1]` of a request, which are in segment `segments[i]`."""

    begins: list[int]
    segments: list[int]

    def __len__(self) -> int:
        return len(self.segments)

    def sizes(self) -> list[int]:
        """Of each, how many blocks it has."""
        return [end - begin for begin, end in pairwise(self.begins)]

    def by_block(self, values: Sequence[int]) -> IntArray:
        """Of each block of the request, what its run has."""
        return np.repeat(np.array(values, np.int64), self.sizes())

    def cut(self, data: bytes, chosen: Iterable[int]) -> bytes:
        """Of the hashes of the request, those of these runs."""
        begins = self.begins
        return b"".join([data[begins[run] * HASH_BYTES : begins[run + 1] * HASH_BYTES] for run in chosen])


def runs_of(data: bytes, segments: AnyArray | None, *, block_tokens: int) -> Runs:
    """The runs of the blocks with these hashes, in these segments; None: of a chain from its beginning on."""
    count = len(data) // HASH_BYTES
    if not count:
        return Runs([0], [])
    if segments is None:
        step = segment_blocks(block_tokens)
        names = np.frombuffer(data, "<u8")[:: step * HASH_BYTES // 8].tolist()
        return Runs([*range(0, count, step), count], names)
    begins = [0, *(np.flatnonzero(segments[1:] != segments[:-1]) + 1).tolist()]
    return Runs([*begins, count], segments[begins].tolist())


def shares(owners: Sequence[int]) -> dict[int, list[int]]:
    """By owner, the runs that it owns, in order. Those of `NOBODY` are left out."""
    found: dict[int, list[int]] = {}
    for run, owner in enumerate(owners):
        if owner in found:
            found[owner].append(run)
        elif owner != NOBODY:
            found[owner] = [run]
    return found


@dataclass(frozen=True)
class View:
    """The members of a store at one time, and where they place runs of blocks.

    Members are named by their places in `nodes`. `live` and `costs`, by node: which of them answer, and at what cost.
    """

    members: Sequence[pb.Member]  # by node id, ascending, each once
    epoch: int
    replicas: int
    nodes: tuple[str, ...] = field(init=False)
    placement: Placement | None = field(init=False)  # over those that are not draining; None: all are
    has_others: bool = field(init=False)  # whether what one member does not have may be with another
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
        set_field(self, "has_others", self.replicas > 1 or staying is not everybody)
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

    def readers(self, runs: Runs, live: Sequence[bool], costs: Sequence[Cost]) -> list[int]:
        """Of each run, who is asked for it: of its owners that are live, the one that costs least."""
        return self._everybody.cheapest(runs, live, costs)

    def next_reader(self, segment: int, live: Sequence[bool], costs: Sequence[Cost], tried: Container[int]) -> int:
        """Who else may have the blocks of this segment; `NOBODY`, if all such have been tried.

        Those are its owners among all members, and among those that are not draining.
        """
        for ranking in (self._everybody, self._up) if self.has_others else ():
            left = [owner for owner in ranking.owners(segment, live) if owner not in tried]
            if left:
                return min(left, key=costs.__getitem__)
        return NOBODY

    def writers(self, runs: Runs, live: Sequence[bool]) -> list[int]:
        """Of each run, who takes it in: its first owner that is live; `NOBODY`, if all members are draining."""
        return self._up.first(runs, live)


class _Ranking:
    """The owners of segments among some of the members. Thread-safe: what is remembered of a segment stays so."""

    def __init__(self, members: Sequence[pb.Member], nodes: tuple[str, ...], replicas: int) -> None:
        weights = {member.node_id: float(max(1, member.capacity_bytes)) for member in members}
        self.placement = Placement(weights) if weights else None
        self._places = [nodes.index(node) for node in sorted(weights)]
        self._replicas = replicas
        self._ranked: dict[int, list[int]] = {}  # by segment: its owners, and who is next

    def owners(self, segment: int, live: Sequence[bool]) -> list[int]:
        """Those that are live; if none is, the first live one of who is next; if none is, the first of all."""
        return [] if self.placement is None else self._live_of(self._known([segment])[segment], live)

    def first(self, runs: Runs, live: Sequence[bool]) -> list[int]:
        """Of each run, the first of `owners`; `NOBODY` where there are no members."""
        if self.placement is None:
            return [NOBODY] * len(runs)
        known = self._known(runs.segments)
        chosen = [known[segment][0] for segment in runs.segments]
        if all(live):
            return chosen
        return [
            first if live[first] else self._live_of(known[segment], live)[0]
            for first, segment in zip(chosen, runs.segments, strict=True)
        ]

    def cheapest(self, runs: Runs, live: Sequence[bool], costs: Sequence[Cost]) -> list[int]:
        """Of each run, the one of `owners` that costs least; of those that cost the same, the first."""
        if self._replicas == 1:
            return self.first(runs, live)
        known = self._known(runs.segments)
        return [min(self._live_of(known[segment], live), key=costs.__getitem__) for segment in runs.segments]

    def _live_of(self, ranked: list[int], live: Sequence[bool]) -> list[int]:
        owners = [owner for owner in ranked[: self._replicas] if live[owner]]
        return owners or [owner for owner in ranked if live[owner]][:1] or ranked[:1]

    def _known(self, segments: list[int]) -> dict[int, list[int]]:
        """By segment, these among them, its owners and who is next."""
        known = self._ranked
        if not known.keys() >= set(segments):
            if len(known) > MOST_RANKED:
                known = self._ranked = {}
            known.update(self._rank([segment for segment in segments if segment not in known]))
        return known

    def _rank(self, segments: list[int]) -> dict[int, list[int]]:
        assert self.placement is not None
        ranked = self.placement.owners(np.array(segments, np.uint64), count=self._replicas + SPARES).tolist()
        return {name: [self._places[at] for at in row] for name, row in zip(segments, ranked, strict=True)}
