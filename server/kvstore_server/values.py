"""What the store keeps of each namespace and write, and the plans that it hands out."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.errors import KVStoreError
from kvstore.placement import segment_blocks
from kvstore.spec import KVSpec
from kvstore.transport.shm import SlabLayout
from kvstore.types import AnyArray, ByteArray, HashArray, IntArray, Location, Memory, Namespace, Outcome, WriteId
from kvstore_server.index import Beside, Index
from kvstore_server.writes import Pending, Writes


@dataclass(slots=True)
class Counters:
    """Since the start. `blocks_asked == blocks_hit + blocks_missed`."""

    matches: int = 0
    blocks_asked: int = 0
    blocks_hit: int = 0
    blocks_missed: int = 0
    blocks_stored: int = 0
    blocks_loaded: int = 0
    blocks_evicted: int = 0
    blocks_removed: int = 0
    blocks_lost: int = 0
    blocks_aborted: int = 0
    blocks_refused: int = 0
    bytes_stored: int = 0
    sessions_opened: int = 0
    sessions_reaped: int = 0
    blocks_written: int = 0  # to disk
    blocks_unwritten: int = 0  # not written: the queue was full, or the disk, or it failed
    blocks_risen: int = 0  # from disk into memory
    blocks_dropped: int = 0  # from disk, to make room there
    blocks_scrubbed: int = 0  # read again on disk and compared
    blocks_lifted: int = 0  # to the GPU
    blocks_lowered: int = 0  # from the GPU, to make room there


@dataclass(slots=True)
class Space:
    """One namespace: its spec, its index, and the blocks of it in writing."""

    spec: KVSpec
    layout: SlabLayout
    index: Index
    writes: Writes = field(default_factory=Writes)
    part_ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def namespace(self) -> Namespace:
        return self.spec.namespace

    @property
    def all_parts(self) -> int:
        return (1 << self.spec.num_parts) - 1


@dataclass(slots=True)
class Write:
    """One Store request: what became of each of its blocks, and those this writer still works on, by index."""

    id: WriteId
    space: Space
    hashes: HashArray
    outcomes: list[Outcome]
    pending: dict[int, Pending] = field(default_factory=dict)
    request_id: int = 0  # within its session


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """Memory of a client on another host: where it begins there."""

    number: int
    address: int
    size_bytes: int
    memory: Memory = Memory.HOST


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes that move between hosts: `sizes[i]` at `local[i]` in slots, and at `remote[i]` in a client's region."""

    local: IntArray
    remote: IntArray
    sizes: IntArray

    def __getitem__(self, job: slice) -> "Pieces":
        return Pieces(self.local[job], self.remote[job], self.sizes[job])


@dataclass(frozen=True, slots=True)
class Copies:
    """Bytes to take in: `sizes[i]` at address `sources[i]`, which is in `region`, to `targets[i]`, in slots in use."""

    targets: IntArray
    sources: IntArray
    sizes: IntArray
    region: ByteArray | RemoteRegion  # stays mapped as long as this refers to it

    @property
    def pieces(self) -> Pieces:
        """The same from another host."""
        return Pieces(self.targets, self.sources, self.sizes)


@dataclass(frozen=True, slots=True)
class Intake:
    """Copies of one StorePart: the grid blocks x parts, all parts of the first block first.

    Blocks of the request that had been given up before are left out. `mask` is the set of `parts`.
    """

    write: Write
    copies: Copies
    blocks: list[Pending]
    slots: IntArray  # of the blocks
    parts: list[int]
    mask: int
    num_left_out: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """Parts to bring to a client on another host: the grid blocks x parts, but for blocks with an error.

    The blocks are leased until that is done. `checksums` is `[n, len(parts)]`, of all blocks of the request.
    """

    space: Space
    hashes: HashArray  # of the request
    positions: IntArray  # in the request, of the blocks that go
    rows: IntArray
    slots: IntArray
    generations: IntArray
    pieces: Pieces
    checksums: AnyArray
    errors: dict[int, KVStoreError]


class Found(NamedTuple):
    """What a Match found: leading blocks that are stored, those after them in writing, and leading ones in memory."""

    num_blocks: int
    num_writing: int
    num_warm: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a Load found: rows that are leased now, where they lie, and what cannot be served."""

    rows: IntArray
    location: Location
    errors: dict[int, KVStoreError]
    writing: list[int]


@dataclass(frozen=True, slots=True)
class Rise:
    """Blocks to bring into memory: from `slots` of a tier to `addresses`. They are leased until that is done."""

    space: Space
    tier: Beside
    rows: IntArray
    pendings: list[Pending]
    hashes: HashArray
    slots: IntArray
    addresses: IntArray

    def __getitem__(self, part: slice) -> "Rise":
        columns = self.hashes[part], self.slots[part], self.addresses[part]
        return Rise(self.space, self.tier, self.rows[part], self.pendings[part], *columns)


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks that were stored or removed, for whoever watches.

    Parents, zeros for none, are given for stored ones; segments too, where there are other daemons.
    """

    namespace: Namespace
    stored: bool
    hashes: HashArray
    parents: HashArray
    block_tokens: int
    tier: str = "cpu"
    segments: AnyArray | None = None


def change_of(space: Space, rows: IntArray, *, tier: str = "cpu", placed: bool = False) -> Change:
    """What a watcher is told of these blocks, which are stored; `placed`: with their segments."""
    index = space.index
    segments = index.segments(rows, length=segment_blocks(space.spec.block_tokens)) if placed else None
    hashes, parents = index.hashes_of(rows), index.parent_hashes(rows)
    return Change(space.namespace, True, hashes, parents, space.spec.block_tokens, tier, segments)
