"""The catalog of the disk tier: which block lies in which slot. LMDB, every commit durable.

Values have a fixed size and a checksum over key and value, so that a restart reads them as one array and a garbled
one is a block that is not there. What LMDB raises leaves here as OSError. Any thread; LMDB lets one write at a time.

Source: docs/spec/disk.md, byte by byte.
"""

import errno
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NewType

import numpy as np
import xxhash
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import HASH_BYTES, AnyArray, HashArray, IntArray, Namespace, SlabId
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import spec_from_proto, spec_to_proto
from kvstore_server.tiers.files import Files
from kvstore_server.tiers.records import FORMAT_VERSION

# A block takes about 130 bytes in a full page of the catalog; 450 were measured, with half empty pages and those that
# large transactions replaced. The map is address space, which is cheap: the file grows as it is used.
MAP_BYTES_PER_BLOCK: Final = 1024
_READ_BYTES: Final = 4 << 20
MIN_MAP_BYTES: Final = 64 << 20

SPARE_BYTES: Final = 1 << 20  # a file system with less than this is full, to a transaction of many pages

Table = NewType("Table", str)
META, SPACES, SLABS, BLOCKS = Table("meta"), Table("spaces"), Table("slabs"), Table("blocks")
Change = tuple[Table, bytes, bytes | None]  # key and value; None deletes

_FORMAT_KEY: Final = b"format"
_SLAB: Final = struct.Struct(f"<{HASH_BYTES}sQQQ")
_BLOCK: Final = np.dtype(
    [
        ("namespace", f"V{HASH_BYTES}"),
        ("hash", f"V{HASH_BYTES}"),
        ("slot", "<u8"),
        ("sequence", "<u8"),
        ("parent", f"V{HASH_BYTES}"),
        ("checksum", "<u8"),
    ]
)
_KEY_BYTES: Final = 2 * HASH_BYTES
_COVERED_BYTES: Final = _BLOCK.itemsize - 8


class WrongFormat(Exception):
    """The directory was written by another version; the message says which."""


@dataclass(frozen=True, slots=True)
class SlabEntry:
    """One slab file: whose it is, and how it is cut."""

    namespace: Namespace
    num_slots: int
    size_bytes: int

    @property
    def record_bytes(self) -> int:
        return self.size_bytes // self.num_slots


@dataclass(frozen=True, slots=True)
class Contents:
    """All that the catalog holds and that is not garbled, and the keys of what is."""

    specs: dict[Namespace, KVSpec]
    slabs: dict[SlabId, SlabEntry]
    blocks: AnyArray  # [n] records of `_BLOCK`: namespace, hash, slot, sequence, parent
    garbled: list[tuple[Table, bytes]]


class Catalog:
    """Four tables in one LMDB environment."""

    def __init__(self, directory: Path, *, max_blocks: int, files: Files) -> None:
        """The catalog in this directory is open, made if there was none.

        Raises: InvalidRequest, if LMDB is not installed; WrongFormat; OSError.
        """
        self._lmdb = _lmdb()
        self._files = files
        self._directory = directory
        with self._errors():
            self._environment = self._lmdb.open(
                str(directory),
                map_size=MIN_MAP_BYTES + max_blocks * MAP_BYTES_PER_BLOCK,
                max_dbs=4,
                mode=0o600,
                readahead=False,
            )
            try:
                names = (META, SPACES, SLABS, BLOCKS)
                self._tables = {name: self._environment.open_db(name.encode()) for name in names}
                self._check_format(directory)
            except BaseException:
                self._environment.close()
                raise

    def load(self) -> Contents:
        """What is there. Raises: OSError."""
        # Read in one go: LMDB would fetch it page by page, at a quarter of the speed from a disk at rest.
        with self._errors(), (self._directory / "data.mdb").open("rb", buffering=0) as file:
            while file.read(_READ_BYTES):
                pass
        with self._errors(), self._environment.begin() as transaction:
            tables = {name: list(transaction.cursor(self._tables[name])) for name in (SPACES, SLABS, BLOCKS)}
        garbled: list[tuple[Table, bytes]] = []
        specs, slabs = {}, {}
        for key, value in tables[SPACES]:
            spec = _parse_spec(key, value)
            if spec is None:
                garbled.append((SPACES, key))
            else:
                specs[spec.namespace] = spec
        for key, value in tables[SLABS]:
            entry = _parse_slab(key, value)
            if entry is None:
                garbled.append((SLABS, key))
            else:
                slabs[SlabId(int.from_bytes(key, "big"))] = entry
        fitting = [len(key) + len(value) == _BLOCK.itemsize and len(key) == _KEY_BYTES for key, value in tables[BLOCKS]]
        garbled += [(BLOCKS, key) for (key, _), fits in zip(tables[BLOCKS], fitting, strict=True) if not fits]
        pairs = [key + value for (key, value), fits in zip(tables[BLOCKS], fitting, strict=True) if fits]
        blocks = np.frombuffer(b"".join(pairs), _BLOCK)
        right = blocks["checksum"] == _block_checksums(blocks)
        garbled += [(BLOCKS, pairs[row][:_KEY_BYTES]) for row in np.flatnonzero(~right).tolist()]
        return Contents(specs, slabs, blocks[right], garbled)

    def put_spec(self, spec: KVSpec) -> None:
        """The spec is found again under its namespace. Raises: OSError."""
        self.commit([(SPACES, spec.namespace, spec_to_proto(spec).SerializeToString(deterministic=True))])

    def put_blocks(
        self,
        namespace: Namespace,
        *,
        hashes: HashArray,
        parents: HashArray,
        slots: IntArray,
        sequences: AnyArray,
        slabs: Mapping[SlabId, SlabEntry],
    ) -> None:
        """These `[n]` blocks, and the slabs that are new, are found again: all of them, or none.

        Raises: OSError, and then none.
        """
        blocks = np.zeros(len(hashes), _BLOCK)
        blocks["namespace"] = np.void(namespace)
        blocks["hash"] = hashes
        blocks["slot"] = slots
        blocks["sequence"] = sequences
        blocks["parent"] = parents
        blocks["checksum"] = _block_checksums(blocks)
        changes: list[Change] = [(SLABS, slab_key(slab), _slab_value(slab, entry)) for slab, entry in slabs.items()]
        data = blocks.tobytes()
        changes += [
            (BLOCKS, data[start : start + _KEY_BYTES], data[start + _KEY_BYTES : start + _BLOCK.itemsize])
            for start in range(0, len(data), _BLOCK.itemsize)
        ]
        self.commit(changes)

    def commit(self, changes: Iterable[Change]) -> None:
        """All of the changes are durable; deleting what is not there is none. Raises: OSError, and then none is."""
        with self._errors():
            transaction = self._environment.begin(write=True)
            try:
                for table, key, value in changes:
                    if value is None:
                        transaction.delete(key, db=self._tables[table])
                    else:
                        transaction.put(key, value, db=self._tables[table])
                self._files.commit(transaction)
            except BaseException:
                transaction.abort()
                raise

    def close(self) -> None:
        self._environment.close()

    def _check_format(self, directory: Path) -> None:
        with self._environment.begin() as transaction:
            found = transaction.get(_FORMAT_KEY, db=self._tables[META])
        if found is None:
            self.commit([(META, _FORMAT_KEY, FORMAT_VERSION.to_bytes(8, "little"))])
        elif found != FORMAT_VERSION.to_bytes(8, "little"):
            raise WrongFormat(
                f"{directory}: expected format {FORMAT_VERSION}, got {int.from_bytes(found, 'little')}; run the "
                "version of kvstore that wrote it, or give the disk tier another directory"
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._lmdb.MapFullError as error:
            raise OSError(errno.ENOSPC, f"catalog: {error}") from error
        except self._lmdb.Error as error:
            # Codes of the system are positive, those of LMDB are not.
            code = max(0, getattr(error, "code", 0)) or errno.EIO
            # What it calls an I/O error may be a write that was cut short, as a full file system does.
            if code == errno.EIO and self._files.free_bytes(self._directory) < SPARE_BYTES:
                code = errno.ENOSPC
            raise OSError(code, f"catalog: {error}") from error


def block_keys(namespace: Namespace, hashes: HashArray) -> list[bytes]:
    """The keys of `[n]` blocks in the table BLOCKS."""
    return [namespace + block_hash.tobytes() for block_hash in hashes]


def slab_key(slab: SlabId) -> bytes:
    """The key of a slab in the table SLABS."""
    return slab.to_bytes(8, "big")  # so that they are in order


def _slab_value(slab: SlabId, entry: SlabEntry) -> bytes:
    fixed = _SLAB.pack(entry.namespace, entry.num_slots, entry.size_bytes, 0)[:-8]
    return fixed + xxhash.xxh3_64_intdigest(slab_key(slab) + fixed).to_bytes(8, "little")


def _parse_slab(key: bytes, value: bytes) -> SlabEntry | None:
    if len(key) != 8 or len(value) != _SLAB.size:
        return None
    namespace, num_slots, size_bytes, checksum = _SLAB.unpack(value)
    if checksum != xxhash.xxh3_64_intdigest(key + value[:-8]):
        return None
    return SlabEntry(Namespace(namespace), num_slots, size_bytes)


def _parse_spec(key: bytes, value: bytes) -> KVSpec | None:
    try:
        spec = spec_from_proto(pb.Spec.FromString(value))
    except (DecodeError, InvalidRequest):
        return None
    return spec if spec.namespace == key else None  # the namespace is the digest of the spec


def _block_checksums(blocks: AnyArray) -> AnyArray:
    count = len(blocks)
    return hash_pieces(
        address_of(blocks) + _BLOCK.itemsize * np.arange(count), np.full(count, _COVERED_BYTES, np.int64)
    )


def _lmdb() -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise InvalidRequest("disk: LMDB is not installed; pip install 'kvstore[disk]'") from error
    return lmdb
