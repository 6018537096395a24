"""A link to each member of a store: opened in the background as members come, closed as they leave."""

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from kvstore.errors import StoreUnavailable
from kvstore.spec import KVSpec
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.link import Link, Shared
from kvstore_client.members import Members
from kvstore_client.options import ClientOptions
from kvstore_client.placing import Cost, View
from kvstore_client.session import Session

TURN_S: Final = 0.1  # for which one of the members is waited for, where none is there


@dataclass(frozen=True, slots=True)
class Ring:
    """The members at one time, and the ways to them."""

    view: View
    links: tuple[Link, ...]  # in the order of `view.nodes`

    def live(self) -> list[bool]:
        """Which members answer, as far as is known."""
        return [link.live for link in self.links]

    def costs(self) -> list[Cost]:
        """What it costs to ask each, as far as is known."""
        sessions = [link.channel.current for link in self.links]
        return [(True, 0) if each is None else (each.agent is not None, each.num_waiting) for each in sessions]


class Links:
    """The ways to the members of a store. Thread-safe."""

    def __init__(self, seeds: Sequence[str], spec: KVSpec, options: ClientOptions, shared: Shared) -> None:
        self._spec, self._options, self._shared = spec, options, shared
        self._lock = threading.Lock()  # held while links are opened
        self._ring = Ring(View((), 0, 1), ())
        self._tried = False  # each of the first members was tried
        self._closed = False
        self.members = Members(seeds, on_view=self._adopt)

    def ring(self, deadline: float) -> Ring:
        """The members now. At the start, waits until each was tried, for half of the time at most.

        Raises: StoreUnavailable, if nobody has told of any member yet.
        """
        if not self._tried:
            self._wait_tried(deadline)
        ring = self._ring
        if self._closed or not ring.links:
            raise self.members.why_unknown()
        return ring

    def wait_ready(self, deadline: float) -> None:
        """Each member was tried, and one of them is connected. Raises: as `KVClient.wait_ready`."""
        self.members.wait_known(deadline)
        links = self._ring.links
        for link in links:
            link.channel.wait_tried(deadline)
        for link in itertools.cycle(links):
            turn = min(deadline, time.monotonic() + TURN_S)
            try:
                if not any(each.channel.current for each in links):
                    link.channel.wait_ready(turn)
                return
            except StoreUnavailable:
                if turn == deadline:
                    raise

    def refresh(self, address: str, deadline: float) -> Ring:
        """The members as the daemon at this address knows them; each was tried, if half of the time was enough."""
        now = time.monotonic()
        until = now + (deadline - now) / 2
        self.members.ask(address, deadline=until)
        ring = self._ring
        for link in ring.links:
            link.channel.wait_tried(until)
        return ring

    def current(self) -> Ring:
        return self._ring

    def close(self) -> None:
        """Every session has ended. Idempotent."""
        self.members.close()
        with self._lock:
            self._closed = True
            links = self._ring.links
        for link in links:
            link.close()

    # Inside.

    def _wait_tried(self, deadline: float) -> None:
        now = time.monotonic()
        until = now + (deadline - now) / 2
        self.members.wait_tried(until)
        links = self._ring.links
        self._tried = bool(links) and all(link.channel.wait_tried(until) for link in links)

    def _adopt(self, view: View) -> None:
        """On the thread of the members."""
        with self._lock:
            if self._closed:
                return
            former = dict(zip(self._ring.view.nodes, self._ring.links, strict=True))
            links = []
            for member in view.members:
                link = former.pop(member.node_id, None)
                addresses = addresses_of(member)
                if link is None:
                    recognise = partial(self._recognise, member.node_id)
                    link = Link(addresses, self._spec, self._options, self._shared, recognise=recognise)
                link.channel.addresses = addresses
                session = link.channel.current
                if session is not None and (mistake := _mistake(view, member.node_id, session)):
                    session.end(mistake)
                links.append(link)
            self._ring = Ring(view, tuple(links))
        for link in former.values():
            link.close()

    def _recognise(self, node: str, session: Session) -> None:
        """Raises: StoreUnavailable, if it is the session of another member."""
        with self._lock:  # so that the members are those for whom this link was opened
            mistake = _mistake(self._ring.view, node, session)
        if mistake is not None:
            raise mistake


def _mistake(view: View, node: str, session: Session) -> StoreUnavailable | None:
    """Why this session is not one of this member: it is another's.

    Members on several hosts may have the same path, and the one of this host is reached by it. A boot id that nobody
    has is that of a member which was started again.
    """
    for member in view.members:
        if member.boot_id and member.boot_id == session.boot_id and member.node_id != node:
            return StoreUnavailable(f"member {node}: expected it at this address, got member {member.node_id}")
    return None


def addresses_of(member: pb.Member) -> tuple[str, ...]:
    """In the order in which they are tried: sockets of this host first."""
    sockets = [address for address in member.addresses if address.startswith("unix:")]
    here = [address for address in sockets if Path(address.removeprefix("unix:")).is_socket()]
    remote = [address for address in member.addresses if address not in sockets]
    return tuple([*here, *remote] or sockets or ["unix:"])
