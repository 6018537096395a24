"""The regions of one client, and the sessions in which they are registered.

Regions outlive sessions: each new session gets all of them registered before anyone can use it. A client of several
daemons has a session with each, and every region is registered with all of them.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, Unsupported
from kvstore.transport.cuda import CudaDevice, DeviceFailed
from kvstore.transport.ucx import Agent
from kvstore.types import IntArray, Memory
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.cuda_arrays import CudaRows, cuda_array, device_of
from kvstore_client.region import AnyRegion, CudaRegion, Region, check_usable, closed_meanwhile
from kvstore_client.session import Answer, Session

REGISTER_TIMEOUT_S = 2.0
REACH_TIMEOUT_S = 8.0  # the same between hosts, where the daemon first tries whether it can reach the memory


class Regions:
    """The open regions of one client. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # held while registering, so that no region is registered twice or while closing
        self._sessions: list[Session] = []  # those that were adopted, but for some that ended since
        self._open: list[AnyRegion] = []
        self._devices: dict[int, CudaDevice] = {}  # by number

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
        region = Region(next(self._numbers), size_bytes, on_close=self.remove, only=only)
        self._open_with_sessions(region, deadline)
        return region

    def create_cuda(self, value: Any, *, deadline: float) -> CudaRegion:
        """A region over this array, registered as `create` does.

        Raises: InvalidRequest, if it is no array in device memory, is empty, or has gaps; Unsupported, if CuPy or the
        device cannot be used, or as `create` does.
        """
        array = cuda_array(value, "cuda_region")
        if array is None or not array.size_bytes or array.has_gaps:
            got = f"a {type(value).__name__} in host memory"
            if array is not None:
                got = f"shape {list(array.shape)}, strides {array.strides}"
            raise InvalidRequest(
                "cuda_region: expected an array in device memory (`__cuda_array_interface__`), of at least 1 byte and "
                f"without gaps, got {got}; pass the one that it is a view of, or use region() in host memory"
            )
        number = device_of(array, "cuda_region")
        with self._lock:
            try:
                device = self._devices.get(number) or CudaDevice(number)
            except (InvalidRequest, DeviceFailed) as error:
                raise Unsupported(f"cuda_region: {error}; or copy to host memory") from None
            self._devices[number] = device
        region = CudaRegion(next(self._numbers), array, device, on_close=self.remove)
        self._open_with_sessions(region, deadline)
        return region

    def _open_with_sessions(self, region: AnyRegion, deadline: float) -> None:
        """The region is open, and in its session, or in one of those there are; else it is let go."""
        with self._lock:
            self._open.append(region)
            sessions = [region.only] if region.only else [each for each in self._sessions if each.alive]
            try:
                _register(region, sessions, deadline)
            except BaseException:
                self._open.remove(region)
                region.let_go()
                raise

    def adopt(self, session: Session) -> None:
        """All open regions are registered with this session; one that is refused says so when it is used."""
        with self._lock:
            self._sessions = [*(each for each in self._sessions if each.alive), session]
            timeout_s = REGISTER_TIMEOUT_S if session.agent is None else REACH_TIMEOUT_S
            for region in [each for each in self._open if each.only is None]:
                region.sessions = {each: found for each, found in region.sessions.items() if each.alive}
                with suppress(KVStoreError):
                    region.register(session, time.monotonic() + timeout_s)

    def remove(self, region: AnyRegion) -> None:
        """The region is closed here, and dropped by the daemon."""
        with self._lock:
            if region not in self._open:
                return
            self._open.remove(region)
            registered, held = [each for each, refusal in region.sessions.items() if refusal is None], region.held
            region.let_go()
        for session in registered:
            message = pb.ClientMessage(drop_regions=pb.DropRegions(regions=[region.number]))
            agent = session.agent
            if not session.alive:
                continue
            if agent is None:
                session.tell(message)
            else:
                session.start(message, partial(_dropped, agent, region.address, region.number, held))

    def close(self) -> None:
        """Every region is closed, and no device is used any more. Nothing may be loaded meanwhile."""
        for region in list(self._open):
            self.remove(region)
        while self._devices:
            with suppress(DeviceFailed):
                self._devices.popitem()[1].close()

    def containing(self, addresses: IntArray, row_bytes: int, *, memory: Memory) -> AnyRegion | None:
        """The region of this memory that holds all of these rows, if there is one."""
        if not len(addresses):
            return None
        first, end = int(addresses.min()), int(addresses.max()) + row_bytes
        for region in list(self._open):
            if region.memory is memory and region.address <= first and end <= region.address + region.size_bytes:
                return region
        return None

    def check_reachable(self, rows: CudaRows, session: Session) -> None:
        """Raises: why this device memory cannot be used in this session."""
        if not len(rows):
            return
        region = self.containing(rows.addresses(np.arange(len(rows))), rows.row_bytes, memory=Memory.CUDA)
        if region is None:
            raise closed_meanwhile()
        check_usable(region, session)

    def in_cuda_region(self, addresses: IntArray, row_bytes: int) -> bool:
        """Whether these rows of device memory all lie in one open region."""
        return self.containing(addresses, row_bytes, memory=Memory.CUDA) is not None


def _register(region: AnyRegion, sessions: Sequence[Session], deadline: float) -> None:
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


def _dropped(agent: Agent, address: int, number: int, held: object, answer: Answer) -> None:
    """The daemon reads and writes there no more, or its session is over: the memory, held until now, may go."""
    agent.deregister(address, device_id=number)
