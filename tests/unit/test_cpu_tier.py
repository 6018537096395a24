"""The cpu tier alone: spare slabs, the limit, headers of slots in several slabs."""

import numpy as np
import pytest
from builders import chain, records, spec

from kvstore.types import SessionId, SlabId
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.pinning import PageLock

KV = spec(bytes_per_part=30_000)
SLAB_BYTES = 1 << 18


def tier_of(num_slabs: int) -> CpuTier:
    return CpuTier(capacity_bytes=num_slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES, page_lock=PageLock(wanted=False))


def test_spares_are_made_up_to_the_capacity_and_used_for_slabs() -> None:
    tier = tier_of(3)
    assert [tier.add_spare() for _ in range(4)] == [True, True, True, False]
    layout = tier.layout(KV)
    assert [tier.open_slab(KV, layout) for _ in range(4)] == [True, True, True, False]
    assert tier.statistics().slab_bytes == 3 * SLAB_BYTES
    tier.close()


def test_a_spare_of_another_size_gives_way_to_a_slab() -> None:
    """Covers: E1."""
    tier = tier_of(3)
    while tier.add_spare():
        pass
    large = spec(bytes_per_part=SLAB_BYTES)  # its one block takes more than two slabs
    assert tier.open_slab(large, tier.layout(large))
    assert tier.statistics().slab_bytes <= 3 * SLAB_BYTES
    assert not tier.add_spare()
    tier.close()


def test_headers_of_slots_in_several_slabs_are_kept_apart() -> None:
    tier = tier_of(2)
    layout = tier.layout(KV)
    while tier.open_slab(KV, layout):
        pass
    slots = tier.arena.allocate(KV.namespace, 2 * layout.num_slots)[::-1]
    count = len(slots)
    hashes = records(chain(count, of=KV))
    tier.publish(slots, generations=np.arange(count) + 1, hashes=hashes, used_bytes=KV.block_bytes)
    checksums = np.arange(2 * count, dtype=np.uint64).reshape(count, 2)
    tier.set_checksums(slots, [1, 0], checksums)
    assert np.array_equal(tier.checksums(slots, num_parts=2), checksums[:, ::-1])
    assert len(set(tier.addresses(slots).tolist())) == count
    assert tier.statistics().used_bytes == count * KV.block_bytes
    tier.retract(slots[: count // 2], used_bytes=KV.block_bytes)
    assert tier.statistics().used_bytes == (count - count // 2) * KV.block_bytes
    tier.close()


def test_a_descriptor_cannot_be_mapped_writable() -> None:
    import mmap
    import os

    tier = tier_of(1)
    tier.open_slab(KV, tier.layout(KV))
    fd = tier.descriptor(SlabId(1), SessionId(1))
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SLAB_BYTES, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    tier.close()
