"""A region: memory of this client that the daemon copies from, and, between hosts, writes to.

It is sealed memory that is made here, or, between hosts only, memory of a CUDA device that the caller has.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self, TypeAlias

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, StoreUnavailable, Unsupported
from kvstore.transport.cuda import CudaDevice, DeviceFailed, hash_copies
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.transport.shm import create_memfd, seal_region
from kvstore.transport.ucx import Agent
from kvstore.types import AnyArray, ByteArray, IntArray, Memory
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.cuda_arrays import CudaArray
from kvstore_client.session import Session

OnClose: TypeAlias = Callable[["AnyRegion"], None]  # drops it, and lets it go


class AnyRegion(ABC):
    """What regions have in common: where the memory lies, and the sessions in which the daemon knows it.

    `held` keeps the memory alive. A context manager.
    """

    memory: Memory

    def __init__(
        self,
        number: int,
        *,
        address: int,
        size_bytes: int,
        held: ByteArray | CudaArray,
        on_close: OnClose,
        only: Session | None = None,
    ) -> None:
        self._on_close = on_close
        self.number = number
        self.address = address
        self.size_bytes = size_bytes
        self.held: ByteArray | CudaArray | None = held  # None: it was closed
        self.only = only  # no other session gets it
        self.sessions: dict[Session, KVStoreError | None] = {}  # where it is registered, or else why it is not

    def __repr__(self) -> str:
        registered = None in self.sessions.values()
        state = "closed" if self.held is None else "registered" if registered else "not registered"
        return f"<{type(self).__name__} {self.number} [{self.size_bytes} bytes, {state}]>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """The daemon drops the region, after copies under way; then the memory goes with its last view.

        Idempotent.
        """
        self._on_close(self)

    @abstractmethod
    def checksums(self, addresses: IntArray, size_bytes: int) -> AnyArray:
        """`[n]` u64: the xxh3-64 of so many bytes at each address. Raises: StoreUnavailable, if they cannot be read."""

    def register(self, session: Session, deadline: float) -> None:
        """The daemon of this session can read it. Raises: why not, which is kept."""
        try:
            if session.agent is None:
                self._share(session, deadline)
            else:
                self._describe(session, session.agent, deadline)
        except KVStoreError as error:
            self.sessions[session] = error
            raise
        self.sessions[session] = None

    def let_go(self) -> None:
        """The memory is not held here any more."""
        self.held = None
        self.sessions = {}

    @abstractmethod
    def _share(self, session: Session, deadline: float) -> None:
        """The daemon of this host has mapped this memory. Raises: what is in the way."""

    def _describe(self, session: Session, agent: Agent, deadline: float) -> None:
        """The daemon knows where this memory is, and how to reach it."""
        agent.register(self.address, self.size_bytes, device_id=self.number, memory=self.memory)
        request = pb.RegisterRegion(
            region=self.number,
            size_bytes=self.size_bytes,
            address=self.address,
            metadata=agent.metadata(self.address, device_id=self.number),
            memory=pb.Memory.Name(self.memory),
        )
        try:
            session.call(pb.ClientMessage(register_region=request), deadline=deadline)
        except BaseException:
            agent.deregister(self.address, device_id=self.number)
            raise


class Region(AnyRegion):
    """`size_bytes` of memory, `array`, that the daemon can read.

    Made by `KVClient.region`; a context manager.
    """

    memory = Memory.HOST

    def __init__(self, number: int, size_bytes: int, *, on_close: OnClose, only: Session | None) -> None:
        self._fd, array = create_memfd(f"kvstore-region-{number}", size_bytes)
        try:
            seal_region(self._fd)
        except BaseException:
            os.close(self._fd)
            raise
        super().__init__(
            number, address=address_of(array), size_bytes=size_bytes, held=array, on_close=on_close, only=only
        )

    @property
    def array(self) -> ByteArray:
        """`[size_bytes]`, writable; valid as long as it or a view of it is referred to.

        Raises: InvalidRequest, once closed.
        """
        if not isinstance(self.held, np.ndarray):
            raise InvalidRequest(f"region {self.number}: expected an open one, got one that was closed; make another")
        return self.held

    def checksums(self, addresses: IntArray, size_bytes: int) -> AnyArray:
        return hash_pieces(addresses, np.full(len(addresses), size_bytes))

    def let_go(self) -> None:
        super().let_go()
        os.close(self._fd)

    def _share(self, session: Session, deadline: float) -> None:
        session.exchange.register(self.number, self._fd, size_bytes=self.size_bytes, deadline=deadline)


class CudaRegion(AnyRegion):
    """Memory of a CUDA device, which is the caller's, that a daemon can read and write by ucx.

    Made by `KVClient.cuda_region`; a context manager.
    """

    memory = Memory.CUDA

    def __init__(self, number: int, array: CudaArray, device: CudaDevice, *, on_close: OnClose) -> None:
        super().__init__(number, address=array.address, size_bytes=array.size_bytes, held=array, on_close=on_close)
        self._device = device

    def checksums(self, addresses: IntArray, size_bytes: int) -> AnyArray:
        try:
            return hash_copies(self._device, addresses, size_bytes)
        except DeviceFailed as error:
            raise StoreUnavailable(
                f"region {self.number}: what arrived cannot be checked: {error}; recompute"
            ) from None

    def _share(self, session: Session, deadline: float) -> None:
        raise Unsupported(
            f"region {self.number}: expected a session over ucx for device memory, got one that is not; copy to host "
            'memory, or make the client with transport="ucx"'
        )


def check_usable(region: AnyRegion, session: Session) -> None:
    """Raises: why the region cannot be used in this session."""
    if session not in region.sessions:
        raise StoreUnavailable(
            f"region {region.number}: expected it to be registered in the session of this write or load, got another "
            "session; do it again"
        )
    refusal = region.sessions[session]
    if refusal is not None:
        raise type(refusal)(str(refusal))


def closed_meanwhile() -> InvalidRequest:
    return InvalidRequest(
        "cuda_region: expected it to be open until this is done, got one that was closed; keep it open"
    )


def offsets_in(region: AnyRegion, addresses: IntArray) -> IntArray:
    """Where in the region these addresses lie."""
    return np.asarray(addresses - region.address, np.int64)
