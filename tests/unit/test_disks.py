"""Several disks as one: blocks on all of them, and each one's failure costs its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from builders import chain, records
from disk_faults import SMALL, checksums_of, filled, open_tier, parents_of, served

from kvstore.types import BlockHash, IntArray
from kvstore_server.table import NONE
from kvstore_server.tiers.disk import DiskFailed, DiskFull
from kvstore_server.tiers.disks import DISK_BITS, Disks
from kvstore_server.tiers.sequences import Sequences

MIB = 1 << 20


@contextmanager
def opened(tmp_path: Path, *capacities: int, order: tuple[int, ...] = ()) -> Iterator[Disks]:
    """Disks of these capacities, in directories named by their place, or by `order`."""
    names = order or tuple(range(len(capacities)))
    sequences = Sequences()
    disks = Disks(
        [
            open_tier(tmp_path / str(name), capacity_bytes=size, sequences=sequences)
            for name, size in zip(names, capacities, strict=True)
        ]
    )
    try:
        yield disks
        for tier in disks.tiers:
            tier.arena.validate()
    finally:
        disks.close()


def write(disks: Disks, hashes: list[BlockHash]) -> tuple[IntArray, list[bool]]:
    """Those blocks for which there is room were to be written: all slots, and which of the blocks are there."""
    disks.open_space(SMALL)
    _array, addresses = filled(SMALL, hashes)
    packed = disks.pack(SMALL, addresses=addresses)
    slots = disks.allocate_for(SMALL, packed)
    fits = np.flatnonzero(slots != NONE)
    written = np.zeros(len(slots), np.bool_)
    written[fits] = disks.write(
        SMALL,
        slots=slots[fits],
        hashes=records(hashes)[fits],
        parents=parents_of(hashes)[fits],
        checksums=checksums_of(SMALL, addresses)[fits],
        packed=packed[fits],
    )
    return slots, written.tolist()


def test_blocks_are_dealt_out_in_proportion_to_the_capacities_and_found_again(tmp_path: Path) -> None:
    """Covers: D2, D4."""
    hashes = chain(80)
    with opened(tmp_path, 3 * MIB, MIB) as disks:
        slots, written = write(disks, hashes)
        assert all(written)
        assert served(disks, SMALL, slots, records(hashes)) == [True] * 80
        counts = np.bincount(slots >> DISK_BITS)
        assert abs(int(counts[0]) - 60) <= 2
        assert [tier.used_bytes for tier in disks.statistics()] == [int(n) * SMALL.block_bytes for n in counts]
    with opened(tmp_path, MIB, 3 * MIB, order=(1, 0)) as disks:  # named in another order
        (recovered,) = disks.recover()
        assert {one.tobytes() for one in recovered.hashes} == set(hashes)
        assert all(served(disks, SMALL, recovered.slots, recovered.hashes))
        assert (np.diff(recovered.stamps) >= 0).all()


def test_small_batches_are_dealt_out_too(tmp_path: Path) -> None:
    with opened(tmp_path, MIB, MIB, MIB) as disks:
        numbers = [int(write(disks, [one])[0][0]) >> DISK_BITS for one in chain(30)]
        assert min(np.bincount(numbers, minlength=3)) >= 8


def test_what_one_disk_has_no_room_for_goes_to_another(tmp_path: Path) -> None:
    """Covers: E1, E2."""
    with opened(tmp_path, 400 << 10, 4 * MIB) as disks:
        slots, written = write(disks, chain(200))
        assert all(written)
        small, large = disks.statistics()
        assert small.slab_bytes <= small.capacity_bytes
        assert large.used_bytes > 5 * small.used_bytes > 0
        disks.free(slots)
        assert [one.used_bytes for one in disks.statistics()] == [0, 0]


def test_a_disk_that_fails_costs_its_share_and_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: A1, D12, F2."""
    with opened(tmp_path, MIB, MIB) as disks:
        before, _ = write(disks, chain(10))

        def refuse(*_: object, **__: object) -> None:
            raise DiskFailed("broken")

        monkeypatch.setattr(disks.tiers[0], "write", refuse)
        slots, written = write(disks, chain(20, seed=1))
        assert written == ((slots >> DISK_BITS) == 1).tolist()
        assert 0 < sum(written) < 20
        assert (disks.failures, disks.failure) == ({0: "broken"}, "")
        assert served(disks, SMALL, before, records(chain(10))) == [True] * 10, "what it still reads is used"
        slots, written = write(disks, chain(20, seed=2))
        assert all(written)
        assert set((slots >> DISK_BITS).tolist()) == {1}
        assert disks.forget(SMALL, hashes=records(chain(10)), slots=before).all()

        monkeypatch.setattr(disks.tiers[1], "write", refuse)
        assert not any(write(disks, chain(5, seed=3))[1])
        assert disks.failure == "broken; broken"
        assert (write(disks, chain(5, seed=4))[0] == NONE).all()


def test_a_disk_that_is_full_forgets_later_and_the_others_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: E2."""
    with opened(tmp_path, MIB, MIB) as disks:
        slots, _ = write(disks, chain(20))

        def refuse(*_: object, **__: object) -> None:
            raise DiskFull("no room")

        monkeypatch.setattr(disks.tiers[1], "forget", refuse)
        forgotten = disks.forget(SMALL, hashes=records(chain(20)), slots=slots)
        assert forgotten.tolist() == ((slots >> DISK_BITS) == 0).tolist()
        assert not disks.failures


def test_a_block_on_two_disks_stays_where_it_was_written_last(tmp_path: Path) -> None:
    """Covers: D6."""
    hashes = chain(6)
    with opened(tmp_path, MIB) as disks:
        write(disks, hashes)
    with opened(tmp_path, MIB, order=(1,)) as disks:  # without the first directory
        write(disks, chain(1, seed=1))
        write(disks, hashes[:4])
        write(disks, chain(9, seed=2))
    for _ in range(2):  # and a restart finds no more of it
        with opened(tmp_path, MIB, MIB) as disks:
            (recovered,) = disks.recover()
            names = [BlockHash(one.tobytes()) for one in recovered.hashes]
            assert sorted(names) == sorted([*hashes, *chain(1, seed=1), *chain(9, seed=2)])
            assert all(served(disks, SMALL, recovered.slots, records(names)))
            assert [one.used_bytes for one in disks.statistics()] == [2 * SMALL.block_bytes, 14 * SMALL.block_bytes]
            more = [(write(disks, chain(2, seed=seed))[0], chain(2, seed=seed)) for seed in (7, 8)]
            for slots, each in more:
                disks.forget(SMALL, hashes=records(each), slots=slots)
                disks.free(slots)


def test_slabs_are_known_by_their_disk(tmp_path: Path) -> None:
    with opened(tmp_path, MIB, MIB) as disks:
        slots, _ = write(disks, chain(40))
        slabs = disks.slabs_of(SMALL.namespace)
        assert sum(disks.num_used(slab) for slab in slabs) == 40
        assert len({slab >> 36 for slab in slabs}) == 2
        disks.forget(SMALL, hashes=records(chain(40)), slots=slots)
        disks.free(slots)
        for slab in slabs:
            disks.close_slab(slab)
            disks.delete_slab(slab)
            disks.slab_deleted(slab)
        assert [one.slab_bytes for one in disks.statistics()] == [0, 0]
