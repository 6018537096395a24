"""Regions: sealed memory of this client that the daemon copies from, and, between hosts, writes to.

Regions outlive sessions: each new session gets all of them registered before anyone can use it. A client of several
daemons has a session with each, and every region is registered with all of them.
"""

import itertools
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, StoreUnavailable
from kvstore.transport.memory import address_of
from kvstore.transport.shm import create_memfd, seal_region
from kvstore.transport.ucx import Agent
from kvstore.types import ByteArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.session import Answer, Session

REGISTER_TIMEOUT_S = 2.0
REACH_TIMEOUT_S = 8.0  # the same between hosts, where the daemon first tries whether it can reach the memory


class Region:
    """`size_bytes` of memory, `array`, that the daemon can read.

    Made by `KVClient.region`; a context manager.
    """

    def __init__(self, regions: "Regions", number: int, size_bytes: int, only: Session | None) -> None:
        self._regions = regions
        self.only = only  # no other session gets it
        self._fd, memory = create_memfd(f"kvstore-region-{number}", size_bytes)
        self.number = number
        self.size_bytes = size_bytes
        self._memory: ByteArray | None = memory
        self.address = address_of(memory)
        self.sessions: dict[Session, KVStoreError | None] = {}  # where it is registered, or else why it is not
        try:
            seal_region(self._fd)
        except BaseException:
            os.close(self._fd)
            raise

    def __repr__(self) -> str:
        registered = None in self.sessions.values()
        state = "closed" if self._memory is None else "registered" if registered else "not registered"
        return f"<Region {self.number} [{self.size_bytes} bytes, {state}]>"

    def __enter__(self) -> "Region":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def array(self) -> ByteArray:
        """`[size_bytes]`, writable; valid as long as it or a view of it is referred to.

        Raises: InvalidRequest, once closed.
        """
        if self._memory is None:
            raise InvalidRequest(f"region {self.number}: expected an open one, got one that was closed; make another")
        return self._memory

    def close(self) -> None:
        """The daemon drops the region, after copies under way; the memory goes with its last view.

        Idempotent.
        """
        self._regions.remove(self)

    def register(self, session: Session, deadline: float) -> None:
        """The daemon of this session can read it. Raises: why not, which is kept."""
        try:
            if session.agent is None:
                session.exchange.register(self.number, self._fd, size_bytes=self.size_bytes, deadline=deadline)
            else:
                self._describe(session, session.agent, deadline)
        except KVStoreError as error:
            self.sessions[session] = error
            raise
        self.sessions[session] = None

    def _describe(self, session: Session, agent: Agent, deadline: float) -> None:
        """The daemon knows where this memory is, and how to reach it."""
        agent.register(self.address, self.size_bytes, device_id=self.number)
        request = pb.RegisterRegion(
            region=self.number,
            size_bytes=self.size_bytes,
            address=self.address,
            metadata=agent.metadata(self.address),
        )
        try:
            session.call(pb.ClientMessage(register_region=request), deadline=deadline)
        except BaseException:
            agent.deregister(self.address)
            raise

    def let_go(self) -> None:
        self._memory = None
        self.sessions = {}
        os.close(self._fd)


class Regions:
    """The open regions of one client. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # held while registering, so that no region is registered twice or while closing
        self._sessions: list[Session] = []  # those that were adopted, but for some that ended since
        self._open: list[Region] = []

    def __repr__(self) -> str:
        return f"<Regions [{len(self._open)} open, {sum(region.size_bytes for region in self._open)} bytes]>"

    def create(self, size_bytes: int, *, deadline: float, only: Session | None = None) -> Region:
        """A new region, registered with every session there is, and with each that comes; or with `only` this one.

        Raises: InvalidRequest, if the size is out of bounds. What a daemon refuses it with, if there are sessions and
        none took it: StoreFull, if it allows no more; Unsupported, StoreTimeout, StoreUnavailable, as the shm socket
        does. No region is left then.
        """
        if size_bytes < 1:
            raise InvalidRequest(f"region: expected a size of at least 1 byte, got {size_bytes}; correct it")
        region = Region(self, next(self._numbers), size_bytes, only)
        with self._lock:
            self._open.append(region)
            try:
                _register(region, [only] if only else [each for each in self._sessions if each.alive], deadline)
            except BaseException:
                self._open.remove(region)
                region.let_go()
                raise
        return region

    def adopt(self, session: Session) -> None:
        """All open regions are registered with this session; one that is refused says so when it is used."""
        with self._lock:
            self._sessions = [*(each for each in self._sessions if each.alive), session]
            timeout_s = REGISTER_TIMEOUT_S if session.agent is None else REACH_TIMEOUT_S
            for region in [each for each in self._open if each.only is None]:
                region.sessions = {each: found for each, found in region.sessions.items() if each.alive}
                with suppress(KVStoreError):
                    region.register(session, time.monotonic() + timeout_s)

    def remove(self, region: Region) -> None:
        """The region is closed here, and dropped by the daemon."""
        with self._lock:
            if region not in self._open:
                return
            self._open.remove(region)
            registered, memory = [each for each, refusal in region.sessions.items() if refusal is None], region.array
            region.let_go()
        for session in registered:
            message = pb.ClientMessage(drop_regions=pb.DropRegions(regions=[region.number]))
            agent = session.agent
            if not session.alive:
                continue
            if agent is None:
                session.tell(message)
            else:
                session.start(message, partial(_dropped, agent, region.address, memory))

    def close(self) -> None:
        """Every region is closed."""
        for region in list(self._open):
            self.remove(region)

    def containing(self, addresses: IntArray, row_bytes: int) -> Region | None:
        """The region that holds all of these rows, if there is one."""
        if not len(addresses):
            return None
        first, end = int(addresses.min()), int(addresses.max()) + row_bytes
        for region in list(self._open):
            if region.address <= first and end <= region.address + region.size_bytes:
                return region
        return None


def _register(region: Region, sessions: Sequence[Session], deadline: float) -> None:
    """At least one of the sessions, if there are any, has it. Each may take its share of the time."""
    refused: list[KVStoreError] = []
    for index, session in enumerate(sessions):
        now = time.monotonic()
        try:
            region.register(session, now + (deadline - now) / (len(sessions) - index))
        except KVStoreError as error:
            refused.append(error)
    if refused and len(refused) == len(sessions):
        raise refused[0]


def _dropped(agent: Agent, address: int, memory: ByteArray, answer: Answer) -> None:
    """The daemon reads and writes there no more, or its session is over: the memory, kept until now, may go."""
    agent.deregister(address)


def check_usable(region: Region, session: Session) -> None:
    """Raises: why the region cannot be used in this session."""
    if session not in region.sessions:
        raise StoreUnavailable(
            f"region {region.number}: expected it to be registered in the session of this write, got another "
            "session; store again"
        )
    refusal = region.sessions[session]
    if refusal is not None:
        raise type(refusal)(str(refusal))


def offsets_in(region: Region, addresses: IntArray) -> IntArray:
    """Where in the region these addresses lie."""
    return np.asarray(addresses - region.address, np.int64)
