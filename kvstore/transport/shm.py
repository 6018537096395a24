"""Shared memory on one host: what a slab looks like, how regions are sealed, how descriptors are exchanged.

A slab is one memfd holding `num_slots` equal slots of one namespace: a header for each slot, then, from the
next page on, their bytes. The daemon writes it; clients get a read-only descriptor of a memfd that is sealed
against new writable mappings. A region is one memfd of a client, sealed against changes of size, from which the
daemon copies.

Descriptors travel over a unix socket of type SOCK_SEQPACKET: one `Request` datagram, with a descriptor where
one is sent, is answered by one `Reply` datagram, with a descriptor where one was asked for. Requests of the session
that are answered at once may travel there too, because a round trip is several times faster than on the stream.

Source: docs/spec/shm.md, docs/adr/0003.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from kvstore.errors import InvalidRequest, NotAllowed, StoreUnavailable
from kvstore.types import AnyArray, ByteArray

PAGE_BYTES: Final = 4096
SLOT_ALIGN_BYTES: Final = 4096  # what O_DIRECT and device copies ask for
HEADER_ALIGN_BYTES: Final = 64  # one cache line: the header of one slot is never split over two readers' lines
TICKET_BYTES: Final = 16
MAX_CALL_COPY_BYTES: Final = 1 << 20  # of a StorePart on the socket: copied there and then, while others wait

# From linux/fcntl.h; Python 3.11 names all but the last.
F_SEAL_FUTURE_WRITE: Final = 0x0010
SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
SLAB_SEALS: Final = SIZE_SEALS | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Where things lie in a slab. All in bytes, but for `num_slots`.

    The header of slot i is at `i * header_bytes`, its bytes at `data_offset + i * slot_bytes`.
    """

    num_slots: int
    num_parts: int
    header_bytes: int
    data_offset: int
    slot_bytes: int
    size_bytes: int

    @classmethod
    def of(cls, *, num_slots: int, num_parts: int, block_bytes: int) -> "SlabLayout":
        header_bytes = _round_up(48 + 8 * num_parts, HEADER_ALIGN_BYTES)
        data_offset = _round_up(num_slots * header_bytes, PAGE_BYTES)
        slot_bytes = _round_up(block_bytes, SLOT_ALIGN_BYTES)
        size_bytes = data_offset + num_slots * slot_bytes
        return cls(num_slots, num_parts, header_bytes, data_offset, slot_bytes, size_bytes)

    @classmethod
    def fitting(cls, *, size_bytes: int, num_parts: int, block_bytes: int) -> "SlabLayout":
        """The layout with the most slots that takes at most `size_bytes`; at least one slot, even if larger."""
        one = cls.of(num_slots=1, num_parts=num_parts, block_bytes=block_bytes)
        num_slots = max(1, (size_bytes - PAGE_BYTES) // (one.header_bytes + one.slot_bytes))
        return cls.of(num_slots=num_slots, num_parts=num_parts, block_bytes=block_bytes)

    def headers(self, memory: ByteArray) -> AnyArray:
        """`[num_slots]` records over the slab's memory: generation, hash, checksums `[num_parts]`.

        `generation` is 0 while the slot holds nothing, and differs for each block that it ever held.
        """
        record = np.dtype(
            {
                "names": ["generation", "hash", "checksums"],
                "formats": ["<u8", "V32", ("<u8", (self.num_parts,))],
                "offsets": [0, 8, 48],
                "itemsize": self.header_bytes,
            }
        )
        return memory[: self.num_slots * self.header_bytes].view(record)

    def slots(self, memory: ByteArray) -> ByteArray:
        """`[num_slots, slot_bytes]` over the slab's memory."""
        return memory[self.data_offset : self.size_bytes].reshape(self.num_slots, self.slot_bytes)


def create_memfd(name: str, size_bytes: int) -> tuple[int, ByteArray]:
    """A new memfd, mapped for reading and writing; the caller owns the descriptor, the array the mapping."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        return fd, map_memfd(fd, size_bytes, writable=True)
    except BaseException:
        os.close(fd)
        raise


def map_memfd(fd: int, size_bytes: int, *, writable: bool) -> ByteArray:
    """`[size_bytes]` mapped from the descriptor, huge pages asked for; unmapped when the last view is gone."""
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED, prot=access)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: small ones work as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def seal_slab(fd: int) -> None:
    """No one can map the slab writable, write to it or change its size from now on; existing mappings stay."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SLAB_SEALS)


def seal_region(fd: int) -> None:
    """The region cannot shrink or grow any more."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)


def check_region(fd: int, *, size_bytes: int, owner_uid: int) -> None:
    """The descriptor is a region that the daemon can map without being killed by its owner.

    Raises: InvalidRequest, if it is no memfd, not sealed, or smaller than said; NotAllowed, if another user made it.
    """
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise InvalidRequest("region: expected a memfd, got another kind of file; use memfd_create") from None
    if seals & SIZE_SEALS != SIZE_SEALS:
        raise InvalidRequest(
            "region: expected the seals F_SEAL_SHRINK and F_SEAL_GROW, got a region that can change its size; "
            "seal it before registering"
        )
    if status.st_size < size_bytes or size_bytes < 1:
        raise InvalidRequest(
            f"region: expected at least the {size_bytes} bytes announced (1 or more), got a memfd of "
            f"{status.st_size}; announce its real size"
        )
    if status.st_uid != owner_uid:
        raise NotAllowed(
            f"region: expected a memfd made by user {owner_uid}, who registers it, got one of user {status.st_uid}"
        )


def populate(memory: ByteArray) -> bool:
    """All pages of the mapping are there, without the GIL held; False where the kernel cannot (before 5.14)."""
    madv_populate_write = 23
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.size)
    return bool(libc.madvise(address, size, madv_populate_write) == 0)


class Op(IntEnum):
    """What a datagram on the shm socket asks for."""

    ATTACH = 1  # first on each connection: ticket
    SLAB = 2  # id of the slab; the reply carries its descriptor
    REGION = 3  # id (chosen by the client, unused) and size of the region; the request carries its descriptor
    CALL = 4  # a ClientMessage follows; a ServerMessage follows the reply
    TELL = 5  # a ClientMessage follows; there is no reply


@dataclass(frozen=True, slots=True)
class Request:
    """One datagram to the daemon: `op` u32, `id` u32, `size_bytes` u64, ticket 16 bytes, body; little-endian."""

    op: Op
    id: int = 0
    size_bytes: int = 0
    ticket: bytes = b"\0" * TICKET_BYTES
    body: bytes = b""  # of a CALL or TELL

    _FORMAT = struct.Struct("<IIQ16s")
    SIZE = _FORMAT.size
    MAX_BYTES = 1 << 19

    def encode(self) -> bytes:
        return self._FORMAT.pack(self.op, self.id, self.size_bytes, self.ticket) + self.body

    @classmethod
    def decode(cls, data: bytes) -> "Request":
        """Raises: InvalidRequest, if it is not one."""
        if not cls.SIZE <= len(data) <= cls.MAX_BYTES:
            raise InvalidRequest(f"shm request: expected {cls.SIZE} bytes, got {len(data)}")
        op, number, size_bytes, ticket = cls._FORMAT.unpack_from(data)
        try:
            request = cls(Op(op), number, size_bytes, ticket, data[cls.SIZE :])
        except ValueError:
            raise InvalidRequest(f"shm request: expected an op from 1 to 5, got {op}") from None
        if request.body and request.op not in (Op.CALL, Op.TELL):
            raise InvalidRequest(f"shm request: expected {cls.SIZE} bytes, got {len(data)}")
        return request


@dataclass(frozen=True, slots=True)
class Reply:
    """One datagram from the daemon: `code` u32 (a status code; 0: success), `num_slots` u32, text or body.

    `num_slots` is that of the slab handed out; with the spec, it tells the slab's whole layout.
    """

    code: int = 0
    num_slots: int = 0
    message: str = ""  # why it failed
    body: bytes = b""  # the answer to a CALL

    _FORMAT = struct.Struct("<II")
    MAX_BYTES = Request.MAX_BYTES
    MAX_TEXT_BYTES = 4096

    def encode(self) -> bytes:
        rest = self.message.encode()[: self.MAX_TEXT_BYTES] if self.code else self.body
        return self._FORMAT.pack(self.code, self.num_slots) + rest

    @classmethod
    def decode(cls, data: bytes) -> "Reply":
        """Raises: StoreUnavailable, if the daemon closed the connection or sent something else."""
        if len(data) < cls._FORMAT.size:
            raise StoreUnavailable(f"shm socket: expected a reply, got {len(data)} bytes; reconnect")
        code, num_slots = cls._FORMAT.unpack_from(data)
        rest = data[cls._FORMAT.size :]
        return cls(code, num_slots, rest.decode(errors="replace")) if code else cls(0, num_slots, body=rest)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
