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

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import HASH_BYTES, AnyArray, HashArray, IntArray
from kvstore_server.tiers.codec import NUMBERS, Codec, decompress
from kvstore_server.tiers.slab import SLOT_BITS

MAGIC: Final = b"kvstdisk"
FORMAT_VERSION: Final = 2
PAGE_BYTES: Final = 4096
NUM_ROOMS: Final = 16
# What the blocks of one call take, plain. The threads of the tier are to end a batch together, so calls are as many as
# threads, or a few times as many; each costs some processor time, so they are not smaller than that needs.
MIN_CALL_BYTES: Final = 1 << 20
MAX_CALL_BYTES: Final = 8 << 20
MAX_CALL_RECORDS: Final = 512  # two buffers each, and a call takes 1,024

Call = Callable[[int, Sequence[memoryview], int], int]  # pwritev or preadv


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """`[n]` blocks as they are to lie on disk. Each of them is plain, or compressed and at least one room smaller.

    At each address, aligned to pages, are `sizes` bytes, in memory of the least room of the layout that holds them.
    """

    addresses: IntArray  # [n]
    sizes: IntArray  # [n] stored bytes
    codecs: IntArray  # [n] numbers of codecs
    checksums: AnyArray  # [n] xxh3 of the stored bytes; 0 for plain ones, whose parts have theirs
    memory: tuple[object, ...] = ()  # keeps alive what lies at the addresses, but for plain blocks

    @classmethod
    def plain(cls, spec: KVSpec, addresses: IntArray) -> "Packed":
        """The blocks at these addresses as they are."""
        count = len(addresses)
        sizes = np.full(count, spec.block_bytes, np.int64)
        return cls(addresses, sizes, np.zeros(count, np.int64), np.zeros(count, np.uint64))

    def __len__(self) -> int:
        return len(self.addresses)

    def __getitem__(self, rows: slice | AnyArray) -> "Packed":
        """Some of the blocks."""
        return Packed(self.addresses[rows], self.sizes[rows], self.codecs[rows], self.checksums[rows], self.memory)


@dataclass(frozen=True, slots=True, eq=False)
class RecordLayout:
    """Where everything lies in the records of one namespace.

    All records of a slab are equal: a header, and room for data. There are several rooms to choose from.
    """

    spec: KVSpec
    header: np.dtype[np.void]
    header_bytes: int  # with padding
    data_bytes: int  # of a plain block, with padding
    rooms: IntArray  # ascending; the last is for plain blocks
    part_offsets: IntArray  # [num_parts]
    part_sizes: IntArray  # [num_parts]

    @classmethod
    def of(cls, spec: KVSpec) -> "RecordLayout":
        header_bytes = round_up(152 + 8 * spec.num_parts, PAGE_BYTES)
        data_bytes = round_up(spec.block_bytes, PAGE_BYTES)
        fields: list[tuple[str, str | tuple[str, tuple[int]]]] = [
            ("magic", "V8"),
            ("version", "<u4"),
            ("num_parts", "<u4"),
            ("namespace", f"V{HASH_BYTES}"),
            ("hash", f"V{HASH_BYTES}"),
            ("parent", f"V{HASH_BYTES}"),
            ("sequence", "<u8"),
            ("codec", "<u8"),
            ("stored_bytes", "<u8"),
            ("stored_checksum", "<u8"),
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
            data_bytes=data_bytes,
            rooms=np.unique(-(-data_bytes * np.arange(1, NUM_ROOMS + 1) // (NUM_ROOMS * PAGE_BYTES)) * PAGE_BYTES),
            part_offsets=np.cumsum(sizes) - sizes,
            part_sizes=sizes,
        )

    @property
    def record_bytes(self) -> int:
        """Of a plain block."""
        return self.header_bytes + self.data_bytes

    def records_per_call(self, count: int, *, num_threads: int) -> int:
        """How many of `count` records one call takes at most, when as many threads share them."""
        share_bytes = -(-count // num_threads) * self.data_bytes
        call_bytes = min(MAX_CALL_BYTES, max(MIN_CALL_BYTES, share_bytes))
        return min(MAX_CALL_RECORDS, max(1, call_bytes // self.data_bytes))

    def rooms_for(self, sizes: IntArray) -> IntArray:
        """`[n]`: the least room that holds as many bytes, of which there are `data_bytes` at most."""
        return self.rooms[np.searchsorted(self.rooms, sizes)]

    def scratch(self, count: int) -> AnyArray:
        """`[count]` headers in memory that O_DIRECT takes; all zero."""
        return np.frombuffer(mmap.mmap(-1, count * self.header_bytes), self.header)

    def headers(
        self, packed: Packed, *, hashes: HashArray, parents: HashArray, sequences: AnyArray, checksums: AnyArray
    ) -> AnyArray:
        """`[n]` headers of these blocks, `checksums` being `[n, num_parts]`; in memory that O_DIRECT takes."""
        headers = self.scratch(len(hashes))
        headers["magic"] = np.void(MAGIC)
        headers["version"] = FORMAT_VERSION
        headers["num_parts"] = self.spec.num_parts
        headers["namespace"] = np.void(self.spec.namespace)
        headers["hash"] = hashes
        headers["parent"] = parents
        headers["sequence"] = sequences
        headers["codec"] = packed.codecs
        headers["stored_bytes"] = packed.sizes
        headers["stored_checksum"] = packed.checksums
        headers["checksums"] = checksums
        headers["header_checksum"] = self._header_checksums(headers)
        return headers

    def unpack(
        self, headers: AnyArray, *, hashes: HashArray, stored: IntArray, room_bytes: int, addresses: IntArray
    ) -> AnyArray:
        """`[n]`: what is wrong with each record, as text; "" where its block, unchecked, is at its address, plain.

        Next: `check_data`. `stored` is where what was read lies, `room_bytes` each; only a room for plain blocks may be
        the address itself.
        """
        wrong = self._check_headers(headers, hashes=hashes, room_bytes=room_bytes)
        packed = np.flatnonzero((wrong == "") & (headers["codec"] != NUMBERS[Codec.NONE]))
        if len(packed):  # checksums first: a decompressor is not made for garbage
            found = hash_pieces(stored[packed], headers["stored_bytes"][packed].astype(np.int64))
            wrong[packed[found != headers["stored_checksum"][packed]]] = "checksum of the stored bytes"
            for row in packed[wrong[packed] == ""].tolist():
                source: bytes | memoryview = memory_at(int(stored[row]), int(headers["stored_bytes"][row]))
                if stored[row] == addresses[row]:
                    source = bytes(source)
                try:
                    decompress(source, memory_at(int(addresses[row]), self.spec.block_bytes))
                except (ValueError, RuntimeError, InvalidRequest) as error:
                    wrong[row] = str(error)
        return wrong

    def check_data(self, headers: AnyArray, addresses: IntArray, wrong: AnyArray) -> None:
        """`wrong`, `[n]`, from `unpack`, says where the plain block at an address is not what its header says."""
        whole = np.flatnonzero(wrong == "")
        found = part_checksums(addresses[whole], offsets=self.part_offsets, sizes=self.part_sizes)
        wrong[whole[(found != headers["checksums"][whole]).any(axis=1)]] = "checksum of the data"

    def buffers(self, headers: AnyArray, addresses: IntArray, sizes: Sequence[int]) -> list[memoryview]:
        """The memory of `[n]` consecutive records: header and data of each, in turn."""
        first = address_of(headers)
        pieces = []
        for place, (address, size_bytes) in enumerate(zip(addresses.tolist(), sizes, strict=True)):
            pieces.append(memory_at(first + place * self.header_bytes, self.header_bytes))
            pieces.append(memory_at(address, size_bytes))
        return pieces

    def _check_headers(self, headers: AnyArray, *, hashes: HashArray, room_bytes: int) -> AnyArray:
        """`[n]`: what is wrong with each header, as text, or with what it says of a record with this room."""
        wrong = np.full(len(headers), "", dtype=object)
        is_plain = headers["codec"] == NUMBERS[Codec.NONE]
        sizes, block_bytes = headers["stored_bytes"], self.spec.block_bytes
        for problem, right in (
            ("another size", np.where(is_plain, sizes == block_bytes, sizes > 0) & (sizes <= room_bytes)),
            ("unknown codec", headers["codec"] <= max(NUMBERS.values())),
            ("another block", headers["hash"] == hashes),
            ("another namespace", headers["namespace"] == np.void(self.spec.namespace)),
            ("another number of parts", headers["num_parts"] == self.spec.num_parts),
            ("checksum of the header", headers["header_checksum"] == self._header_checksums(headers)),
            ("another format version", headers["version"] == FORMAT_VERSION),
            ("no record", headers["magic"] == np.void(MAGIC)),
        ):
            wrong[~right] = problem
        return wrong

    def _header_checksums(self, headers: AnyArray) -> AnyArray:
        assert headers.dtype.fields is not None
        covered = headers.dtype.fields["header_checksum"][1]
        count = len(headers)
        return hash_pieces(
            address_of(headers) + headers.strides[0] * np.arange(count), np.full(count, covered, np.int64)
        )


def part_checksums(addresses: IntArray, *, offsets: IntArray, sizes: IntArray) -> AnyArray:
    """`[n, num_parts]` u64: the xxh3 of every part of the block at each address."""
    pieces = addresses[:, None] + offsets
    return hash_pieces(pieces.ravel(), np.tile(sizes, len(addresses))).reshape(pieces.shape)


def chunks(slots: IntArray, *, most: int, ends: AnyArray | None = None) -> list[IntArray]:
    """Which of `[n]` slots go into one call: at most `most`, of one slab, one after the other.

    `ends` is `[n]` bool: after which of them a call ends in any case.
    """
    order = np.argsort(slots, kind="stable")
    sorted_slots = slots[order]
    apart = (np.diff(sorted_slots) != 1) | (np.diff(sorted_slots >> SLOT_BITS) != 0)
    if ends is not None:
        apart |= ends[order][:-1]
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


def memory_at(address: int, size_bytes: int) -> memoryview:
    """The bytes at an address. Does not keep them alive."""
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")
