"""The records of a slab file: a header that says which block it is, then the block. Layout, checks and transfers.

Source: docs/spec/disk.md, byte by byte.
"""

import ctypes
import errno
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import HASH_BYTES, AnyArray, HashArray, IntArray
from kvstore_server.tiers.slab import SLOT_BITS

MAGIC: Final = b"kvstdisk"
FORMAT_VERSION: Final = 1
PAGE_BYTES: Final = 4096
MAX_CALL_BYTES: Final = 8 << 20
MAX_CALL_RECORDS: Final = 512  # two buffers each, and a call takes 1,024

Call = Callable[[int, Sequence[memoryview], int], int]  # pwritev or preadv


@dataclass(frozen=True, slots=True, eq=False)
class RecordLayout:
    """Where everything lies in the records of one namespace."""

    spec: KVSpec
    header: np.dtype[np.void]
    header_bytes: int  # with padding
    data_bytes: int  # with padding
    part_offsets: IntArray  # [num_parts]
    part_sizes: IntArray  # [num_parts]

    @classmethod
    def of(cls, spec: KVSpec) -> "RecordLayout":
        header_bytes = round_up(128 + 8 * spec.num_parts, PAGE_BYTES)
        fields: list[tuple[str, str | tuple[str, tuple[int]]]] = [
            ("magic", "V8"),
            ("version", "<u4"),
            ("num_parts", "<u4"),
            ("namespace", f"V{HASH_BYTES}"),
            ("hash", f"V{HASH_BYTES}"),
            ("parent", f"V{HASH_BYTES}"),
            ("sequence", "<u8"),
            ("checksums", ("<u8", (spec.num_parts,))),
            ("header_checksum", "<u8"),
        ]
        formats = [np.dtype(kind) for _, kind in fields]
        offsets = np.cumsum([0, *(kind.itemsize for kind in formats)])[:-1].tolist()
        header = np.dtype(
            {"names": [name for name, _ in fields], "formats": formats, "offsets": offsets, "itemsize": header_bytes}
        )
        sizes = np.array(spec.part_bytes, np.int64)
        return cls(
            spec=spec,
            header=header,
            header_bytes=header_bytes,
            data_bytes=round_up(spec.block_bytes, PAGE_BYTES),
            part_offsets=np.cumsum(sizes) - sizes,
            part_sizes=sizes,
        )

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + self.data_bytes

    @property
    def records_per_call(self) -> int:
        return min(MAX_CALL_RECORDS, max(1, MAX_CALL_BYTES // self.record_bytes))

    def scratch(self, count: int) -> AnyArray:
        """`[count]` headers in memory that O_DIRECT takes; all zero."""
        return np.frombuffer(mmap.mmap(-1, count * self.header_bytes), self.header)

    def headers(self, *, hashes: HashArray, parents: HashArray, sequences: AnyArray, checksums: AnyArray) -> AnyArray:
        """`[n]` headers of these blocks, `checksums` being `[n, num_parts]`; in memory that O_DIRECT takes."""
        headers = self.scratch(len(hashes))
        headers["magic"] = np.void(MAGIC)
        headers["version"] = FORMAT_VERSION
        headers["num_parts"] = self.spec.num_parts
        headers["namespace"] = np.void(self.spec.namespace)
        headers["hash"] = hashes
        headers["parent"] = parents
        headers["sequence"] = sequences
        headers["checksums"] = checksums
        headers["header_checksum"] = self._header_checksums(headers)
        return headers

    def check(self, headers: AnyArray, *, hashes: HashArray, addresses: IntArray) -> AnyArray:
        """`[n]`: what is wrong with each record, as text; "" where the data at the address is this block."""
        wrong = np.full(len(headers), "", dtype="U40")
        for problem, right in (
            ("another block", headers["hash"] == hashes),
            ("another namespace", headers["namespace"] == np.void(self.spec.namespace)),
            ("another number of parts", headers["num_parts"] == self.spec.num_parts),
            ("checksum of the header", headers["header_checksum"] == self._header_checksums(headers)),
            ("another format version", headers["version"] == FORMAT_VERSION),
            ("no record", headers["magic"] == np.void(MAGIC)),
        ):
            wrong[~right] = problem
        whole = np.flatnonzero(wrong == "")
        pieces = addresses[whole, None] + self.part_offsets
        found = hash_pieces(pieces.ravel(), np.tile(self.part_sizes, len(whole))).reshape(pieces.shape)
        wrong[whole[(found != headers["checksums"][whole]).any(axis=1)]] = "checksum of the data"
        return wrong

    def buffers(self, headers: AnyArray, addresses: IntArray) -> list[memoryview]:
        """The memory of `[n]` consecutive records: header and data of each, in turn."""
        first = address_of(headers)
        pieces = []
        for place, address in enumerate(addresses.tolist()):
            pieces.append(_memory(first + place * self.header_bytes, self.header_bytes))
            pieces.append(_memory(address, self.data_bytes))
        return pieces

    def _header_checksums(self, headers: AnyArray) -> AnyArray:
        assert headers.dtype.fields is not None
        covered = headers.dtype.fields["header_checksum"][1]
        count = len(headers)
        return hash_pieces(
            address_of(headers) + headers.strides[0] * np.arange(count), np.full(count, covered, np.int64)
        )


def chunks(slots: IntArray, *, most: int) -> list[IntArray]:
    """Which of `[n]` slots go into one call: at most `most`, of one slab, one after the other."""
    order = np.argsort(slots, kind="stable")
    sorted_slots = slots[order]
    apart = (np.diff(sorted_slots) != 1) | (np.diff(sorted_slots >> SLOT_BITS) != 0)
    runs = np.split(order, np.flatnonzero(apart) + 1)
    return [run[start : start + most] for run in runs for start in range(0, len(run), most)]


def transfer(call: Call, fd: int, buffers: list[memoryview], offset: int) -> None:
    """All bytes of the buffers were written or read, however little each call does. Raises: OSError."""
    while buffers:
        count = call(fd, buffers, offset)
        if count <= 0:
            raise OSError(errno.EIO, f"no more bytes at {offset}")
        offset += count
        buffers = _rest(buffers, count)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _rest(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What the buffers hold beyond the first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _memory(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")
