"""The members of the store, as this daemon tells them: what was heard last, and what stands while nothing is heard.

One epoch names one set of members, whichever daemon tells it: a view is always one that the coordinator gave out.
Nothing here knows a clock or the coordinator; who hears of it brings the time along.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvstore.types import BootId


@dataclass(frozen=True, slots=True)
class Member:
    """One daemon of the store."""

    node_id: str  # the same after a restart; empty: a store of one machine
    boot_id: BootId
    addresses: tuple[str, ...]
    capacity_bytes: int
    draining: bool


@dataclass(frozen=True, slots=True)
class View:
    """The members, by node id, and what is known of them."""

    members: tuple[Member, ...]
    epoch: int  # 0: one machine, or nothing was heard yet
    replicas: int  # with how many members each block is kept; 0: one machine
    stale: bool  # the coordinator cannot be reached: these are the members last known


@dataclass(frozen=True, slots=True)
class Heard:
    """What the coordinator says."""

    members: tuple[Member, ...]
    left: frozenset[str]  # node ids that said goodbye lately
    epoch: int


class Roster:
    """Owns the view of one daemon, which is all there is until others are heard of."""

    def __init__(self, me: Member, *, replicas: int, ttl_s: float, stale: bool) -> None:
        self.me = me
        self.view = View((me,), epoch=0, replicas=replicas, stale=stale)
        self._ttl_s = ttl_s
        self._missing_since: dict[str, float] = {}
        self._watchers: set[Callable[[], None]] = set()

    def drain(self) -> None:
        """This daemon says of itself that it drains. Others are shown it once the coordinator knows."""
        self.me = replace(self.me, draining=True)
        if self.view.epoch == 0:
            self._show(replace(self.view, members=(self.me,)))

    def hear(self, heard: Heard, *, now: float) -> None:
        """The view is what was heard; or what it was, while a member is missing that was there less than a TTL ago.

        A coordinator that forgot everything, or slept, hears of all members again within that time. Who said goodbye
        is not waited for.
        """
        there = {member.node_id for member in heard.members}
        self._missing_since = {
            node: -math.inf if node in heard.left else self._missing_since.get(node, now)
            for node in (member.node_id for member in self.view.members)
            if node not in there
        }
        if any(now - since < self._ttl_s for since in self._missing_since.values()):
            self._show(replace(self.view, stale=False))
        else:
            self._show(replace(self.view, members=heard.members, epoch=heard.epoch, stale=False))

    def lose(self) -> None:
        """The coordinator cannot be reached: the view stands as it is. No time counts as missing from here on."""
        self._missing_since = {}
        self._show(replace(self.view, stale=True))

    def watch(self, watcher: Callable[[], None]) -> None:
        """It is called after each change of the view, until `unwatch`."""
        self._watchers.add(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        self._watchers.discard(watcher)

    def _show(self, view: View) -> None:
        if view != self.view:
            self.view = view
            for watcher in list(self._watchers):
                watcher()
