"""One block as one object: its name, and its bytes, which say what they are. Moves nothing.

Source: docs/spec/remote.md, byte by byte. An object is a record of the disk tier whose block is plain.
"""

import mmap
from dataclasses import dataclass

import numpy as np

from kvstore.transport.memory import address_of, copy_pieces
from kvstore.types import HASH_BYTES, AnyArray, BlockHash, ByteArray, HashArray, Namespace
from kvstore_server.tiers.codec import NUMBERS, Codec
from kvstore_server.tiers.records import Packed, RecordLayout, part_checksums


class Parcel:
    """Memory for one object, aligned to pages. The block is put at `address`, then `seal` makes the object of it."""

    def __init__(self, layout: RecordLayout) -> None:
        self._layout = layout
        self._memory: ByteArray = np.frombuffer(mmap.mmap(-1, layout.record_bytes), np.uint8)

    @property
    def address(self) -> int:
        """Where the block goes; there is room for `block_bytes` rounded up to a page."""
        return address_of(self._memory) + self._layout.header_bytes

    def take(self, address: int) -> AnyArray:
        """The block at this address is here too; returns the `[num_parts]` checksums of what is here now."""
        layout = self._layout
        target = np.array([self.address])
        copy_pieces(target, np.array([address]), np.array([layout.spec.block_bytes]))
        checksums: AnyArray = part_checksums(target, offsets=layout.part_offsets, sizes=layout.part_sizes)[0]
        return checksums

    def seal(self, block_hash: HashArray, *, parent: HashArray, checksums: AnyArray) -> memoryview:
        """The object, in this memory. The hashes are `[1]`, `checksums` the `[num_parts]` of the block here."""
        layout = self._layout
        header = layout.headers(
            Packed.plain(layout.spec, np.array([self.address])),
            hashes=block_hash,
            parents=parent,
            sequences=np.zeros(1, np.uint64),
            checksums=checksums[None],
        )
        self._memory[: layout.header_bytes] = header.view(np.uint8)
        return self._memory[: object_bytes(layout)].data


@dataclass(frozen=True, slots=True, eq=False)
class Unsealed:
    """A block that is what its object says: `[block_bytes]` bytes and `[num_parts]` checksums."""

    data: ByteArray
    checksums: AnyArray


def unseal(layout: RecordLayout, block_hash: BlockHash, data: memoryview) -> Unsealed | str:
    """The block, compared with name and checksums; or what is wrong with the object."""
    if len(data) != object_bytes(layout):
        return f"expected an object of {object_bytes(layout)} bytes, got another size"
    held = np.frombuffer(data, np.uint8)
    header = held[: layout.header_bytes].view(layout.header)
    if header["codec"][0] != NUMBERS[Codec.NONE]:
        return "expected a plain block, got a compressed one"
    block = held[layout.header_bytes :]
    hashes = np.frombuffer(block_hash, f"V{HASH_BYTES}")
    address = np.array([address_of(block)])
    wrong = layout.unpack(header, hashes=hashes, stored=address, room_bytes=layout.data_bytes, addresses=address)
    layout.check_data(header, address, wrong)
    return str(wrong[0]) or Unsealed(block, header["checksums"][0])


def object_bytes(layout: RecordLayout) -> int:
    """The size of every object of a namespace."""
    return layout.header_bytes + layout.spec.block_bytes


def name_of(key: bytes) -> str:
    """What the object of a block is called, whose key is its namespace and its hash: 64 bytes."""
    return f"{key[:HASH_BYTES].hex()}/{key[HASH_BYTES:].hex()}"


def key_of(name: str) -> bytes | None:
    """The key of the block whose object is called so; None, if no object of ours is."""
    namespace, _, block_hash = name.partition("/")
    try:
        key = bytes.fromhex(namespace) + bytes.fromhex(block_hash)
    except ValueError:
        return None
    return key if len(key) == 2 * HASH_BYTES and name_of(key) == name else None


def block_key(namespace: Namespace, block_hash: BlockHash) -> bytes:
    """Namespace and hash."""
    return namespace + block_hash
