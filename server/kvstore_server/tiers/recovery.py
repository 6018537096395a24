"""What a restart of the disk tier takes over, and what it gives up. Decides only; reads and writes no file."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.spec import KVSpec
from kvstore.types import AnyArray, HashArray, IntArray, SlabId
from kvstore_server.tiers import catalog
from kvstore_server.tiers.catalog import Change, Contents, SlabEntry
from kvstore_server.tiers.records import RecordLayout
from kvstore_server.tiers.slab import MAX_SLOTS, SLOT_BITS


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """The blocks of one namespace, the one written first at the front."""

    spec: KVSpec
    hashes: HashArray  # [n]
    parents: HashArray  # [n]; zeros: none
    slots: IntArray  # [n]
    stamps: IntArray  # [n]; larger: written later


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to take over, and the changes that make catalog and files agree with it: changes first, then files."""

    recovered: list[Recovered]
    slabs: dict[SlabId, SlabEntry]
    used_slots: dict[SlabId, IntArray]
    changes: list[Change]
    unwanted_files: list[str]
    lost: Counter[str]  # reason -> entries or files given up


def plan(contents: Contents, *, sizes_bytes: Mapping[str, int], capacity_bytes: int) -> Plan:
    """Takes over each block whose entry is whole and whose slab file has room for it, up to the capacity.

    `sizes_bytes` is by file name. Slabs without blocks are given up, and those whose blocks are the oldest on
    average, until the others fit. Namespaces without slabs are forgotten.
    """
    lost: Counter[str] = Counter()
    lost["garbled in the catalog"] = len(contents.garbled)
    slabs = _whole_slabs(contents, sizes_bytes, lost)
    blocks = contents.blocks
    kept = _in_slabs(blocks, slabs)
    slabs = _within_capacity(slabs, _by_slab(blocks[kept]), capacity_bytes, lost)
    kept &= np.isin(_slab_ids(blocks), list(slabs))
    lost["blocks"] = len(blocks) - int(kept.sum())

    live = {entry.namespace for entry in slabs.values()}
    gone = [(table, key) for table, key in contents.garbled]
    gone += [(catalog.BLOCKS, block["namespace"].tobytes() + block["hash"].tobytes()) for block in blocks[~kept]]
    gone += [(catalog.SLABS, catalog.slab_key(number)) for number in contents.slabs if number not in slabs]
    gone += [(catalog.SPACES, namespace) for namespace in contents.specs if namespace not in live]
    known = {_file_name(number) for number in contents.slabs}
    wanted = {_file_name(number) for number in slabs}
    unwanted = [name for name in sizes_bytes if name not in wanted]
    lost["slab files that the catalog does not know"] = len(set(unwanted) - known)

    by_slab = _by_slab(blocks[kept])
    return Plan(
        recovered=[
            _recovered(
                contents.specs[namespace],
                np.concatenate([by_slab[number] for number, entry in slabs.items() if entry.namespace == namespace]),
            )
            for namespace in sorted(live)
        ],
        slabs=slabs,
        used_slots={number: by_slab[number]["slot"].astype(np.int64) for number in slabs},
        changes=[(table, key, None) for table, key in gone],
        unwanted_files=unwanted,
        lost=+lost,
    )


def _whole_slabs(contents: Contents, sizes_bytes: Mapping[str, int], lost: Counter[str]) -> dict[SlabId, SlabEntry]:
    """The slabs whose file is there, and cut as the spec of their namespace says."""
    layouts = {namespace: RecordLayout.of(spec) for namespace, spec in contents.specs.items()}
    whole = {}
    for number, entry in contents.slabs.items():
        layout = layouts.get(entry.namespace)
        if layout is None or not _is_cut_right(entry, layout):
            lost["slabs of unknown namespace or shape"] += 1
        elif sizes_bytes.get(_file_name(number), -1) < entry.size_bytes:
            lost["slab files missing or too short"] += 1
        else:
            whole[number] = entry
    return whole


def _is_cut_right(entry: SlabEntry, layout: RecordLayout) -> bool:
    return (
        0 < entry.num_slots <= MAX_SLOTS
        and entry.size_bytes % entry.num_slots == 0
        and entry.record_bytes - layout.header_bytes in layout.rooms
    )


def _within_capacity(
    slabs: Mapping[SlabId, SlabEntry], by_slab: Mapping[SlabId, AnyArray], capacity_bytes: int, lost: Counter[str]
) -> dict[SlabId, SlabEntry]:
    """Those slabs that have blocks, the ones with the newest first, as long as they fit."""
    ages = {number: float(blocks["sequence"].mean()) for number, blocks in by_slab.items()}
    kept: dict[SlabId, SlabEntry] = {}
    for number in sorted(ages, key=ages.__getitem__, reverse=True):
        capacity_bytes -= slabs[number].size_bytes
        if capacity_bytes < 0:
            lost["slabs beyond the capacity"] = len(ages) - len(kept)
            break
        kept[number] = slabs[number]
    return kept


def _in_slabs(blocks: AnyArray, slabs: Mapping[SlabId, SlabEntry]) -> AnyArray:
    """`[n]`: whether the block's slot is one of a slab of its namespace, and no other block claims it."""
    if not slabs or not len(blocks):
        return np.zeros(len(blocks), np.bool_)
    numbers = np.array(sorted(slabs), np.int64)
    entries = [slabs[SlabId(number)] for number in numbers.tolist()]
    nearest = np.minimum(np.searchsorted(numbers, _slab_ids(blocks)), len(numbers) - 1)
    places = blocks["slot"].astype(np.int64) & (MAX_SLOTS - 1)
    namespaces = np.frombuffer(b"".join(entry.namespace for entry in entries), blocks["namespace"].dtype)
    _, claims, counts = np.unique(blocks["slot"], return_inverse=True, return_counts=True)
    is_right: AnyArray = numbers[nearest] == _slab_ids(blocks)
    is_right &= places < np.array([entry.num_slots for entry in entries])[nearest]
    is_right &= blocks["namespace"] == namespaces[nearest]
    is_right &= counts[claims] == 1
    return is_right


def _by_slab(blocks: AnyArray) -> dict[SlabId, AnyArray]:
    """The blocks of each slab that has some."""
    if not len(blocks):
        return {}
    ordered = blocks[np.argsort(blocks["slot"])]
    numbers, starts = np.unique(_slab_ids(ordered), return_index=True)
    return {SlabId(number): mine for number, mine in zip(numbers.tolist(), np.split(ordered, starts[1:]), strict=True)}


def _slab_ids(blocks: AnyArray) -> IntArray:
    return (blocks["slot"] >> np.uint64(SLOT_BITS)).astype(np.int64)


def _recovered(spec: KVSpec, blocks: AnyArray) -> Recovered:
    blocks = blocks[np.argsort(blocks["sequence"])]
    return Recovered(
        spec=spec,
        hashes=np.ascontiguousarray(blocks["hash"]),
        parents=np.ascontiguousarray(blocks["parent"]),
        slots=blocks["slot"].astype(np.int64),
        stamps=blocks["sequence"].astype(np.int64),
    )


def _file_name(slab: SlabId) -> str:
    return f"{slab}.slab"
