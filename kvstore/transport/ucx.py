"""Transfers between hosts: NIXL over UCX. The only module that knows either.

An agent registers memory, and reads from and writes to memory that a peer registered and described in its metadata.
Only the daemon does so; the agent of a client is passive, and its memory is quiet once it is closed.

A transfer that was begun cannot be taken back: until `poll` says that it is over, or its agent is closed, UCX may
still write to the memory on this side, or send from it (docs/adr/0016). So nothing here gives a transfer up.

Source: docs/spec/ucx.md.
"""

import contextlib
import fcntl
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from enum import Enum
from types import ModuleType
from typing import Any, Final

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, StoreFull, StoreUnavailable, Unsupported
from kvstore.types import AnyArray, IntArray, Memory

INSTALL: Final = "pip install --no-deps nixl-cu12==1.5.1"  # it asks for torch, which it does not need
MAX_METADATA_BYTES: Final = 64 << 10
MAX_PIECE_BYTES: Final = 4 << 20  # of one descriptor
REGISTER_BYTES: Final = 1 << 30  # from one registration to the next: some devices allow only so much at once
# At 0 the progress thread spins on a core; above, it sleeps until there is something to do, or for so long.
_PROGRESS_DELAY_US: Final = 10_000
_SIOCGIFADDR: Final = 0x8915

# Set while the library is loaded and an agent made; it reads them then.
_ENVIRONMENT: Final = {
    # No memory shared between processes, of host or device: a client could name another client's. Nor this process's.
    "UCX_TLS": "^sm,self,cuda_ipc",
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
}
_DEFAULTS: Final = {
    "UCX_HANDLE_ERRORS": "none",  # the signal handlers of this process are not the library's
    "UCX_LOG_LEVEL": "fatal",  # what fails is reported by who asked for it
    "NIXL_LOG_LEVEL": "FATAL",
}
# What NIXL calls them.
_SEGMENTS: Final = {Memory.HOST: "DRAM_SEG", Memory.CUDA: "VRAM_SEG"}
_making = threading.Lock()  # the environment belongs to one agent at a time


class Op(Enum):
    """What a transfer does, as seen from the side that begins it."""

    READ = "NIXL_READ"
    WRITE = "NIXL_WRITE"


def why_unavailable() -> str:
    """Why there are no transfers between hosts in this process; empty: there are."""
    try:
        _nixl()
    except Unsupported as error:
        return str(error)
    return ""


def device_towards(host: str) -> str:
    """The name of the network device through which `host` is reached; `lo` for an empty one.

    Raises: Unsupported, if it cannot be told.
    """
    if not host:
        return "lo"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            mine = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # a device without an address
                    found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                    if socket.inet_ntoa(found[20:24]) == mine:
                        return name
    except OSError as error:
        raise Unsupported(f"ucx: no way to {host}: {error}; name the device in ucx_device") from None
    if mine.startswith("127."):
        return "lo"
    raise Unsupported(f"ucx: expected a device with the address {mine}, got none; name it in ucx_device")


class Agent:
    """One end of transfers, bound to one network device. Thread-safe, but for `close`.

    `num_pollers` is how many threads begin transfers and poll them, which is what moves the bytes. With none, the agent
    is there to be reached: a thread of the library answers. Both at once would wait for each other's locks.

    Raises: Unsupported, if NIXL is not installed or the device cannot be used.
    """

    def __init__(self, name: str, *, device: str, num_pollers: int = 0) -> None:
        self.name = name
        self.device = device
        self._nixl = nixl = _nixl()
        self._lock = threading.RLock()  # of registrations, and of the end; finalizers may take it anywhere
        self._registered: dict[tuple[int, int], list[Any]] = {}  # by the address where it begins, and its device id
        config = nixl.nixlAgentConfig()
        config.useProgThread = not num_pollers
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_RW
        config.pthrDelay = _PROGRESS_DELAY_US
        config.captureTelemetry = False
        with _environment({**_ENVIRONMENT, "UCX_NET_DEVICES": device}):
            try:
                self._agent: Any = nixl.nixlAgent(name, config)
                self._backend = self._agent.createBackend("UCX", {"num_workers": str(max(1, num_pollers))})
            except Exception as error:
                here = ", ".join(name for _, name in socket.if_nameindex())
                raise Unsupported(
                    f"ucx_device {device}: expected a device of this host ({here}, or one of RDMA such as mlx5_0:1), "
                    f"got: {error}; name another"
                ) from None

    def __repr__(self) -> str:
        state = "closed" if self._agent is None else f"{len(self._registered)} registered"
        return f"<Agent {self.name!r} on {self.device} [{state}]>"

    # Memory of this side.

    def register(self, address: int, size_bytes: int, *, device_id: int = 0, memory: Memory = Memory.HOST) -> None:
        """Transfers may use this memory, until `deregister`. Memory that is registered already stays so.

        The device id tells apart what is registered at one address, now or one after the other; it need not be the
        number of a device. Raises: StoreFull, with the limits that may be in the way; Unsupported, if memory of a
        device cannot be registered.
        """
        with self._lock:
            if (address, device_id) in self._registered:
                return
            done = self._registered[address, device_id] = []
            try:
                for begin, size in _registrations(address, size_bytes):
                    descriptors = self._nixl.nixlRegDList(self._segment(memory), [(begin, size, device_id, "")])
                    self._alive().registerMem(descriptors, [self._backend])
                    done.append(descriptors)
            except Exception as error:
                self._deregister(address, device_id)
                if isinstance(error, KVStoreError):
                    raise
                if memory is Memory.CUDA:
                    raise Unsupported(
                        f"ucx: expected NIXL to register {size_bytes} bytes of a CUDA device, got: {error}; either its "
                        "UCX finds no CUDA here, or the device allows no more (it says which with "
                        "NIXL_LOG_LEVEL=ERROR); copy to host memory instead"
                    ) from None
                raise StoreFull(_limits(size_bytes, len(done) * REGISTER_BYTES, self.device, error)) from None

    def deregister(self, address: int, *, device_id: int = 0) -> None:
        """The memory that begins there may be used for other things. Unknown, or closed: nothing to do."""
        with self._lock:
            self._deregister(address, device_id)

    def _deregister(self, address: int, device_id: int) -> None:
        for descriptors in self._registered.pop((address, device_id), []):
            if self._agent is not None:
                self._agent.deregisterMem(descriptors, [self._backend])

    def metadata(self, address: int, *, device_id: int = 0) -> bytes:
        """What a peer must know to reach this agent, and the memory registered at this address."""
        with self._lock:
            agent = self._alive()
            pieces = self._registered[address, device_id]
            descriptors = self._nixl.nixlRegDList(pieces[0].getType())
            for piece in pieces:
                for index in range(piece.descCount()):
                    descriptors.addDesc(piece[index])
            described: bytes = agent.getLocalPartialMD(descriptors, True, [self._backend])
            return described

    # Peers, and transfers with them.

    def add_peer(
        self,
        name: str,
        metadata: bytes,
        *,
        address: int,
        size_bytes: int,
        device_id: int,
        memory: Memory = Memory.HOST,
    ) -> None:
        """Transfers with the peer of that name may use this memory of its.

        Raises: InvalidRequest, if the metadata is none, bears another name, or does not describe that memory;
        StoreUnavailable, if there is no way to that peer.
        """
        head = b"nixlSerDes|Agent" + struct.pack("<Q", len(name)) + name.encode() + b"|Conns"
        # Before it is taken in: the name of another peer would put that one out.
        if len(metadata) > MAX_METADATA_BYTES or not metadata.startswith(head):
            raise InvalidRequest(
                f"metadata: expected at most {MAX_METADATA_BYTES} bytes with the agent name {name!r}, as Welcome says, "
                f"got {len(metadata)} bytes with {metadata[24:56]!r}; name the agent so"
            )
        try:
            with self._errors("metadata"):
                self._alive().loadRemoteMD(metadata)
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"ucx on {self.device}: no way to the other end ({error}); name another ucx_device on either side"
            ) from None
        begins, sizes = np.array(list(_registrations(address, size_bytes)), np.int64).T
        wanted = self._descriptors(begins, sizes, device_id, memory)
        with self._errors("metadata"):
            found = self._alive().checkRemoteMD(name, wanted)
        if found != self._nixl.NIXL_SUCCESS:
            raise InvalidRequest(
                f"metadata: expected it to describe {size_bytes} bytes at {address:#x} ({memory.name}) with the device "
                f"id {device_id}, got metadata of other memory; send that of the region"
            )

    def remove_peer(self, name: str) -> None:
        """The peer, with which no transfer is under way, is unknown. One that was never added: nothing to do."""
        with contextlib.suppress(KVStoreError), self._errors(name):
            self._alive().invalidateRemoteMD(name)

    def begin(
        self,
        op: Op,
        peer: str,
        *,
        local: IntArray,
        remote: IntArray,
        sizes: IntArray,
        device_id: int,
        memory: Memory = Memory.HOST,
    ) -> "Transfer":
        """`sizes[i]` bytes at `local[i]`, in host memory, are on their way from or to `remote[i]` of the peer.

        `device_id` and `memory` are those of the peer's memory; all of it must be registered, on both sides. Whoever
        begins a transfer polls it until it is over.

        Raises: InvalidRequest, if it is not registered; StoreUnavailable, if the peer is gone.
        """
        agent = self._alive()
        with self._errors(f"peer {peer}"):
            here = self._descriptors(local, sizes, 0, Memory.HOST)
            there = self._descriptors(remote, sizes, device_id, memory)
            handle = agent.createXferReq(getattr(self._nixl, op.value), here, there, peer, "", [self._backend])
        transfer = Transfer(self, handle)
        try:
            with self._errors(f"peer {peer}"):
                transfer.is_over = agent.postXferReq(handle) == self._nixl.NIXL_SUCCESS
        except BaseException:
            transfer.release()
            raise
        return transfer

    def close(self) -> None:
        """Nothing is read from or written to the registered memory any more, by anyone. Idempotent."""
        with self._lock:
            self._agent = None  # waits for the library's thread; the connections are closed
            self._registered.clear()

    def _alive(self) -> Any:
        agent = self._agent
        if agent is None:
            raise StoreUnavailable(f"ucx: agent {self.name} was closed; the session has ended")
        return agent

    def _descriptors(self, addresses: IntArray, sizes: IntArray, device_id: int, memory: Memory) -> Any:
        table: AnyArray = np.empty((len(addresses), 3), np.uint64)
        table[:, 0], table[:, 1], table[:, 2] = addresses, sizes, device_id
        return self._nixl.nixlXferDList(self._segment(memory), table)

    def _segment(self, memory: Memory) -> Any:
        return getattr(self._nixl, _SEGMENTS[memory])

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """What NIXL raises becomes an error of ours."""
        nixl = self._nixl
        try:
            yield
        except (nixl.nixlNotFoundError, nixl.nixlMismatchError, nixl.nixlInvalidParamError) as error:
            raise InvalidRequest(f"{what}: expected memory that was registered, got: {error}; register it") from None
        except nixl.nixlNotAllowedError as error:
            raise InvalidRequest(f"{what}: expected the same connection as before, got another ({error})") from None
        except nixl.nixlRemoteDisconnectError as error:
            raise StoreUnavailable(f"{what}: the connection is broken ({error}); a new session makes another") from None
        except nixl.nixlNotSupportedError as error:
            raise Unsupported(f"{what}: {error}; check the device with `kvstore doctor`") from None
        except (nixl.nixlBackendError, nixl.nixlUnknownError) as error:
            raise StoreUnavailable(f"{what}: {error}; a new session makes another connection") from None


class Transfer:
    """One transfer that was begun. Whoever began it calls `poll` until it is over, then `release`."""

    def __init__(self, agent: Agent, handle: int) -> None:
        self.is_over = False
        self._agent = agent
        self._handle = handle

    def poll(self) -> bool:
        """Whether all bytes have moved. Raises: StoreUnavailable, if they never will; it is over then, too."""
        if not self.is_over:
            agent, nixl = self._agent._alive(), self._agent._nixl
            try:
                with self._agent._errors("transfer"):
                    self.is_over = agent.getXferStatus(self._handle) == nixl.NIXL_SUCCESS
            except KVStoreError:
                self.is_over = True
                raise
        return self.is_over

    def release(self) -> None:
        """What the library keeps of it is gone."""
        agent = self._agent._agent
        if agent is not None:
            agent.releaseXferReq(self._handle)


def cut(local: IntArray, remote: IntArray, sizes: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The same bytes in pieces of at most MAX_PIECE_BYTES."""
    if not (sizes > MAX_PIECE_BYTES).any():
        return local, remote, sizes
    counts = -(-sizes // MAX_PIECE_BYTES)
    owner = np.repeat(np.arange(len(sizes)), counts)
    begins = MAX_PIECE_BYTES * (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))
    return local[owner] + begins, remote[owner] + begins, np.minimum(MAX_PIECE_BYTES, sizes[owner] - begins)


def _registrations(address: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """(address, size) of each, overlapping so that every piece that is moved lies in one of them."""
    for begin in range(0, size_bytes, REGISTER_BYTES):
        yield address + begin, min(REGISTER_BYTES + MAX_PIECE_BYTES, size_bytes - begin)


def _nixl() -> ModuleType:
    """Raises: Unsupported, if it is not installed or cannot be loaded."""
    try:
        with _environment({}):
            import nixl_cu12._bindings as nixl
    except ImportError as error:
        raise Unsupported(f"ucx: expected NIXL to be installed, got: {error}; {INSTALL}") from None
    loaded: ModuleType = nixl
    return loaded


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """These are set, and the defaults where nothing is; afterwards all is as it was."""
    with _making:
        wanted = {**{name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}, **values}
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _limits(size_bytes: int, reached_bytes: int, device: str, error: Exception) -> str:
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock} bytes"
    return (
        f"ucx: expected to register {size_bytes} bytes on {device}, got no further than {reached_bytes} ({error}); "
        f"the memlock limit is {locked} (ulimit -l): raise it, use huge pages, or raise what the device allows "
        "(ibv_devinfo: max_mr_size)"
    )
