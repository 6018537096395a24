"""The disk tier on real files: what was written is found again, and nothing else is."""

import errno
import fcntl
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from builders import chain, records, spec
from disk_faults import SMALL, check_usage, found, open_tier, parents_of, served, store

from kvstore.errors import InvalidRequest, StoreUnavailable
from kvstore_server.tiers.disk import DiskFailed, Files
from kvstore_server.tiers.records import RecordLayout
from kvstore_server.tiers.slab import slab_of

OTHER = spec(model="other", bytes_per_part=3000)
RECORD_BYTES = RecordLayout.of(SMALL).record_bytes


def test_blocks_are_read_as_they_were_written_before_and_after_a_restart(tmp_path: Path) -> None:
    """Covers: A12, D2, D4, D5."""
    small, odd, large = (
        spec(),
        spec(layers=3, bytes_per_part=5000, model="odd"),
        spec(layers=2, bytes_per_part=300_000, model="large"),
    )
    tier = open_tier(tmp_path)
    assert tier.recover() == []
    slots = {}
    hashes = {kv.namespace: chain(5, of=small) for kv in (small, odd, large)}  # the same hashes in each
    for kv in (small, odd, large):
        slots[kv.namespace] = store(tier, kv, hashes[kv.namespace])
        assert served(tier, kv, slots[kv.namespace], records(hashes[kv.namespace])) == [True] * 5
    before = tier.statistics()
    assert before.used_bytes == 5 * (small.block_bytes + odd.block_bytes + large.block_bytes)
    tier.close()

    tier = open_tier(tmp_path)
    recovered = tier.recover()
    assert found(recovered) == hashes
    for each in recovered:
        assert each.slots.tolist() == slots[each.spec.namespace].tolist()
        assert each.parents.tobytes() == parents_of(hashes[each.spec.namespace]).tobytes()
        assert served(tier, each.spec, each.slots, each.hashes) == [True] * 5
    assert tier.statistics() == before
    tier.arena.validate()
    more = chain(30, of=small, seed=1)
    assert not set(store(tier, small, more).tolist()) & set(slots[small.namespace].tolist())
    tier.close()


def test_a_restart_finds_blocks_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    """Covers: D4."""
    tier = open_tier(tmp_path)
    hashes = chain(12)
    slots = np.random.default_rng(1).permutation((tier.open_space(SMALL), tier.allocate(SMALL, 12))[1])
    store(tier, SMALL, hashes[:8], slots=slots[:8])
    store(tier, SMALL, hashes[8:], slots=slots[8:])
    assert served(tier, SMALL, slots, records(hashes)) == [True] * 12
    tier.close()
    tier = open_tier(tmp_path)
    (recovered,) = tier.recover()
    assert [one.tobytes() for one in recovered.hashes] == hashes
    assert recovered.slots.tolist() == slots.tolist()
    assert (np.diff(recovered.stamps) > 0).all()
    last = int(recovered.stamps[-1])
    store(tier, SMALL, chain(1, seed=1))
    tier.close()
    tier = open_tier(tmp_path)
    assert tier.recover()[0].stamps[-1] > last
    tier.close()


def test_a_directory_is_one_daemons(tmp_path: Path) -> None:
    """Covers: A16."""
    tier = open_tier(tmp_path)
    with pytest.raises(StoreUnavailable, match=f"{tmp_path}.*another daemon.*stop that one"):
        open_tier(tmp_path)
    slots = store(tier, SMALL, chain(2))
    assert all(served(tier, SMALL, slots, records(chain(2))))
    tier.close()
    open_tier(tmp_path).close()


def test_a_file_that_the_catalog_does_not_know_is_removed(tmp_path: Path) -> None:
    """Covers: D6, E1."""
    tier = open_tier(tmp_path)
    store(tier, SMALL, chain(2))
    tier.close()
    (tmp_path / "slabs" / "77.slab").write_bytes(bytes(5000))
    (tmp_path / "slabs" / "notes.txt").write_text("not ours")
    tier = open_tier(tmp_path)
    (recovered,) = tier.recover()
    assert sorted(path.name for path in (tmp_path / "slabs").iterdir()) == ["1.slab", "notes.txt"]
    (tmp_path / "slabs" / "notes.txt").unlink()
    assert all(served(tier, SMALL, recovered.slots, recovered.hashes))
    check_usage(tier, [recovered])
    tier.close()


@pytest.mark.parametrize("is_missing", [True, False])
def test_blocks_whose_slab_file_is_missing_or_cut_are_given_up(tmp_path: Path, is_missing: bool) -> None:
    """Covers: A17, D2, D5."""
    tier = open_tier(tmp_path)
    slots = store(tier, SMALL, chain(3))
    store(tier, OTHER, chain(4, of=OTHER))
    tier.close()
    path = tmp_path / "slabs" / f"{slab_of(int(slots[0]))}.slab"
    if is_missing:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    for _ in range(2):
        tier = open_tier(tmp_path)
        recovered = tier.recover()
        assert found(recovered) == {OTHER.namespace: chain(4, of=OTHER)}
        check_usage(tier, recovered)
        tier.close()


def test_with_less_capacity_the_oldest_slabs_are_given_up(tmp_path: Path) -> None:
    """Covers: D5, E1."""
    tier = open_tier(tmp_path, slab_bytes=4 * RECORD_BYTES)
    hashes = chain(14)
    for start in range(0, 14, 2):
        store(tier, SMALL, hashes[start : start + 2])
    tier.close()
    capacity_bytes = 9 * RECORD_BYTES
    tier = open_tier(tmp_path, slab_bytes=4 * RECORD_BYTES, capacity_bytes=capacity_bytes)
    recovered = tier.recover()
    assert found(recovered) == {SMALL.namespace: hashes[8:]}
    check_usage(tier, recovered)
    assert len(tier.allocate(SMALL, 100)) == 2 + 1  # in the slabs that stayed, and in one for what is left
    assert tier.statistics().slab_bytes <= capacity_bytes
    tier.close()


def test_the_capacity_is_a_limit_for_all_namespaces_together(tmp_path: Path) -> None:
    """Covers: E1."""
    tier = open_tier(tmp_path, slab_bytes=4 * RECORD_BYTES, capacity_bytes=10 * RECORD_BYTES)
    tier.open_space(SMALL)
    tier.open_space(OTHER)
    assert len(tier.allocate(SMALL, 5)) == 5
    assert len(tier.allocate(OTHER, 5)) == 2
    assert len(tier.allocate(SMALL, 5)) == 3
    assert len(tier.allocate(SMALL, 1)) == 0
    tier.arena.validate()
    tier.close()


def test_a_record_larger_than_a_slab_gets_one_of_its_own(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, slab_bytes=4096)
    slots = store(tier, SMALL, chain(2))
    assert len({slab_of(slot) for slot in slots.tolist()}) == 2
    tier.close()


def test_what_was_forgotten_is_not_found_and_its_slot_holds_another_block(tmp_path: Path) -> None:
    """Covers: A2, A17."""
    tier = open_tier(tmp_path)
    old, new = chain(4), chain(2, seed=1)
    slots = store(tier, SMALL, old)
    tier.forget(SMALL, records([*old[:2], *chain(3, seed=9)]))  # and some that never were there
    tier.free(slots[:2])
    reused = store(tier, SMALL, new)
    assert {*reused.tolist()} == {*slots[:2].tolist()}
    assert served(tier, SMALL, slots, records(old)) == [False, False, True, True]
    assert served(tier, SMALL, reused, records(new)) == [True, True]
    tier.close()
    tier = open_tier(tmp_path)
    recovered = tier.recover()
    assert found(recovered) == {SMALL.namespace: [*old[2:], *new]}
    check_usage(tier, recovered)
    tier.close()


def test_a_slot_serves_no_other_namespace(tmp_path: Path) -> None:
    """Covers: A12."""
    tier = open_tier(tmp_path)
    slots = store(tier, SMALL, chain(2))
    tier.open_space(OTHER)
    assert served(tier, OTHER, slots, records(chain(2))) == [False, False]
    tier.close()


def test_a_slab_that_is_empty_makes_room_for_another_namespace(tmp_path: Path) -> None:
    """Covers: E1."""
    tier = open_tier(tmp_path, slab_bytes=4 * RECORD_BYTES, capacity_bytes=4 * RECORD_BYTES)
    hashes = chain(4)
    slots = store(tier, SMALL, hashes)
    tier.open_space(OTHER)
    assert len(tier.allocate(OTHER, 1)) == 0
    tier.forget(SMALL, records(hashes))
    tier.free(slots)
    slab = slab_of(int(slots[0]))
    tier.close_slab(slab)
    assert len(tier.allocate(OTHER, 1)) == 0  # the file is still there
    tier.delete_slab(slab)
    assert tier.catalog.load().slabs == {}
    tier.slab_deleted(slab)
    store(tier, OTHER, chain(3, of=OTHER))
    tier.close()
    tier = open_tier(tmp_path)
    recovered = tier.recover()
    assert found(recovered) == {OTHER.namespace: chain(3, of=OTHER)}
    check_usage(tier, recovered)
    tier.close()


def test_namespaces_and_slabs_without_blocks_do_not_outlive_a_restart(tmp_path: Path) -> None:
    """Covers: E1."""
    tier = open_tier(tmp_path)
    tier.open_space(OTHER)
    slots = store(tier, SMALL, chain(2))
    tier.forget(SMALL, records(chain(2)))
    tier.free(slots)
    tier.close()
    tier = open_tier(tmp_path)
    assert tier.recover() == []
    check_usage(tier, [])
    contents = tier.catalog.load()
    assert (contents.specs, contents.slabs, len(contents.blocks)) == ({}, {}, 0)
    tier.close()


def test_nothing_to_do_is_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    assert store(tier, SMALL, []).tolist() == []
    assert served(tier, SMALL, np.array([], np.int64), records([])) == []
    tier.forget(SMALL, records([]))
    tier.free(np.array([], np.int64))
    tier.close()


def test_another_format_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store(tier, SMALL, chain(2))
    tier.catalog.commit([("meta", b"format", (7).to_bytes(8, "little"))])
    tier.close()
    with pytest.raises(DiskFailed, match=r"expected format 2, got 7; run the version of kvstore that wrote it"):
        open_tier(tmp_path)
    assert (tmp_path / "slabs" / "1.slab").exists()
    with pytest.raises(DiskFailed):  # and not: another daemon has it
        open_tier(tmp_path)


def test_without_lmdb_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'kvstore\[disk\]'"):
        open_tier(tmp_path)


def test_files_and_directories_are_for_the_owner_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path / "new")
    store(tier, SMALL, chain(1))
    tier.close()
    for path in (tmp_path / "new").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


class _Flags(Files):
    """Notes with which flags of the descriptor data is written and read."""

    def __init__(self) -> None:
        self.flags: set[int] = set()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.flags.add(fcntl.fcntl(fd, fcntl.F_GETFL))
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.flags.add(fcntl.fcntl(fd, fcntl.F_GETFL))
        return super().preadv(fd, buffers, offset)


class _NoDirect(_Flags):
    def open(self, path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)


def test_files_are_read_and_written_around_the_page_cache(tmp_path: Path) -> None:
    files = _Flags()
    tier = open_tier(tmp_path, files=files)
    if tier.statistics().pages == "buffered":
        tier.close()
        pytest.skip("the file system of the temporary directory has no O_DIRECT")
    slots = store(tier, SMALL, chain(3))
    assert all(served(tier, SMALL, slots, records(chain(3))))
    assert files.flags
    assert all(flags & os.O_DIRECT for flags in files.flags)
    tier.close()


def test_a_file_system_without_direct_access_does_too(tmp_path: Path) -> None:
    files = _NoDirect()
    tier = open_tier(tmp_path, files=files)
    assert tier.statistics().pages == "buffered"
    slots = store(tier, SMALL, chain(3))
    assert all(served(tier, SMALL, slots, records(chain(3))))
    assert not any(flags & os.O_DIRECT for flags in files.flags)
    tier.close()


class _Short(Files):
    """A call writes or reads 4,096 bytes at most."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, [buffers[0][:4096]], offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, [buffers[0][:4096]], offset)


def test_calls_that_do_only_part_of_it_are_gone_on_with(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, files=_Short())
    slots = store(tier, SMALL, chain(5))
    assert served(tier, SMALL, slots, records(chain(5))) == [True] * 5
    tier.close()


class _Calls(Files):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.sizes.append(sum(map(len, buffers)))
        assert len(buffers) <= os.sysconf("SC_IOV_MAX")
        return super().pwritev(fd, buffers, offset)


def test_records_side_by_side_are_one_call_up_to_a_limit(tmp_path: Path) -> None:
    files = _Calls()
    tier = open_tier(tmp_path, files=files, capacity_bytes=64 << 20, slab_bytes=32 << 20)
    store(tier, SMALL, chain(5))
    assert files.sizes == [5 * RECORD_BYTES]
    files.sizes.clear()
    hashes = chain(1100, seed=1)
    slots = store(tier, SMALL, hashes)
    assert sorted(files.sizes) == sorted([512 * RECORD_BYTES, 512 * RECORD_BYTES, 76 * RECORD_BYTES])
    assert all(served(tier, SMALL, slots, records(hashes)))
    tier.close()
