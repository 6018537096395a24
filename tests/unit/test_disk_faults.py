"""The disk tier when something goes wrong: at every step of it, and in every byte."""

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import disk_faults
import numpy as np
import pytest
from builders import chain, records, spec
from disk_faults import (
    FIRST,
    SMALL,
    CacheFiles,
    Countdown,
    FailingFiles,
    SteppedFiles,
    check_after_crash,
    check_usage,
    compressible,
    everything_said,
    found,
    memory,
    open_tier,
    scenario,
    served,
    store,
    store_packed,
)

from kvstore.spec import KVSpec
from kvstore.types import BlockHash, IntArray, SlabId
from kvstore_server.tiers import catalog
from kvstore_server.tiers.catalog import BLOCKS, SLABS, SPACES, SlabEntry, block_keys
from kvstore_server.tiers.codec import Codec
from kvstore_server.tiers.disk import RETRY_AFTER_S, DiskFailed, DiskFull, DiskTier, Files, Recovered
from kvstore_server.tiers.files import Transaction
from kvstore_server.tiers.records import RecordLayout
from kvstore_server.tiers.slab import place_of, slot_id


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A directory where flushing takes no time, if there is one: what a process left does not depend on it."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as directory:
        yield Path(directory)


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_process_killed_at_any_step_loses_and_garbles_nothing(quick_path: Path, codec: Codec) -> None:
    """Covers: A1, A2, A16, A17, D2, D4, D5, D6, D7."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, disk_faults.__file__, str(quick_path), codec]
    subprocess.run(command, check=True, env=environment, timeout=100)
    said = everything_said(codec)
    killed_at = []
    for directory in sorted(quick_path.iterdir(), key=lambda path: int(path.name)):
        lines = (directory / "log").read_text().splitlines()
        killed_at += [line.split()[-1] for line in lines if line.startswith("killed")]
        try:
            check_after_crash(directory / "tier", said[: sum(line.startswith("said") for line in lines)])
        except Exception as error:
            raise AssertionError(f"step {directory.name}, {lines}") from error
    assert {"open", "fallocate", "pwritev", "torn", "fdatasync", "sync_directory", "commit", "unlink"} <= {*killed_at}
    assert killed_at.count("commit") >= 10


class _PowerCut(BaseException):
    pass


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4])
def test_after_a_power_cut_at_any_step_the_catalog_names_only_what_was_flushed(quick_path: Path, codec: Codec) -> None:
    """Covers: A1, A25, D7."""

    class Files(SteppedFiles, CacheFiles):
        def __init__(self, steps: int) -> None:
            CacheFiles.__init__(self)
            SteppedFiles.__init__(self, Countdown(steps, self.stop))

        def stop(self, step: str) -> None:
            raise _PowerCut(step)

    for step in itertools.count():
        said = []
        files = Files(step)
        directory = quick_path / str(step)
        try:
            scenario(directory, files, lambda *words, said=said: said.append(words), codec)
            is_cut = False
        except _PowerCut:
            is_cut = True
        files.cut_power()
        try:
            check_after_crash(directory, said)
        except Exception as error:
            raise AssertionError(f"step {step}, after {len(said)} were said") from error
        shutil.rmtree(directory)
        if not is_cut:
            break
    assert step > 50


LAYOUT = RecordLayout.of(SMALL)
SLAB_FILE = Path("slabs", "1.slab")


@pytest.fixture
def files() -> FailingFiles:
    return FailingFiles()


@pytest.fixture
def tier(tmp_path: Path, files: FailingFiles) -> Iterator[DiskTier]:
    """With the blocks FIRST of SMALL in the first slots of slab 1."""
    opened = open_tier(tmp_path, files=files)
    assert place_of(int(store(opened, SMALL, FIRST)[0])) == 0
    yield opened
    files.errors.clear()
    opened.close()


def first_slots() -> IntArray:
    return slot_id(SlabId(1), 0) + np.arange(len(FIRST))


def reopened(tier: DiskTier) -> list[Recovered]:
    """What a restart finds; all of it is served."""
    tier.close()
    again = open_tier(tier.directory, capacity_bytes=tier.arena.capacity_bytes)
    recovered = again.recover()
    for each in recovered:
        assert all(served(again, each.spec, each.slots, each.hashes))
    check_usage(again, recovered)
    again.close()
    return recovered


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


# Every field of the header, then the first and the last byte of the parts.
@pytest.mark.parametrize(
    "offset", [0, 8, 12, 16, 47, 48, 79, 80, 111, 112, 120, 128, 136, 144, 159, 160, 167, 4096, 7096, 10095]
)
def test_a_flipped_bit_is_a_miss_of_that_block_alone(tier: DiskTier, offset: int) -> None:
    """Covers: A2, A25."""
    flip(tier.directory / SLAB_FILE, LAYOUT.record_bytes + offset)
    assert served(tier, SMALL, first_slots(), records(FIRST)) == [True, False, *[True] * (len(FIRST) - 2)]


def test_a_record_of_another_block_is_a_miss_even_if_it_is_whole(tier: DiskTier) -> None:
    """Covers: A2."""
    data = (tier.directory / SLAB_FILE).read_bytes()
    with (tier.directory / SLAB_FILE).open("r+b") as file:
        file.write(data[LAYOUT.record_bytes : 2 * LAYOUT.record_bytes])
    assert served(tier, SMALL, first_slots(), records(FIRST))[:3] == [False, True, True]


def test_data_that_was_garbled_before_it_was_written_is_a_miss(tier: DiskTier) -> None:
    """Covers: A25."""
    hashes = chain(2, seed=8)
    slots = tier.allocate(SMALL, 2)
    _, addresses = memory(SMALL, 2)  # zeros, which is not what the checksums say
    checksums = np.ones((2, SMALL.num_parts), np.uint64)
    tier.write(
        SMALL,
        slots=slots,
        hashes=records(hashes),
        parents=records(hashes),
        addresses=addresses,
        checksums=checksums,
    )
    assert served(tier, SMALL, slots, records(hashes)) == [False, False]


def test_each_byte_of_a_catalog_entry_counts(tier: DiskTier) -> None:
    """Covers: A2, A17."""
    (key,) = block_keys(SMALL.namespace, records(FIRST[1:2]))
    blocks = tier.catalog.load().blocks
    (entry,) = [block.tobytes() for block in blocks if block.tobytes().startswith(key)]
    for place in range(len(entry)):
        garbled = bytearray(entry)
        garbled[place] ^= 1
        changed = bytes(garbled[: len(key)]), bytes(garbled[len(key) :])
        tier.catalog.commit([(BLOCKS, key, None), (BLOCKS, *changed)])
        contents = tier.catalog.load()
        assert contents.garbled == [(BLOCKS, changed[0])], place
        assert len(contents.blocks) == len(FIRST) - 1
        tier.catalog.commit([(BLOCKS, changed[0], None), (BLOCKS, key, entry[len(key) :])])
    garbage = [(BLOCKS, key, b""), (BLOCKS, b"short", entry), (SLABS, b"x", b"y"), (SPACES, b"x", b"\xff\xff")]
    tier.catalog.commit(garbage)
    assert found(reopened(tier)) == {SMALL.namespace: [FIRST[0], *FIRST[2:]]}


def _claim(tier: DiskTier, hashes: list[BlockHash], slots: list[int], kv: KVSpec = SMALL) -> None:
    """The catalog says that these blocks are in these slots."""
    tier.catalog.put_blocks(
        kv.namespace,
        hashes=records(hashes),
        parents=records(hashes),
        slots=np.array(slots),
        sequences=np.arange(len(slots), dtype=np.uint64),
        slabs={},
    )


def test_an_entry_that_points_at_another_block_serves_nothing(tier: DiskTier) -> None:
    """Covers: A2, A16."""
    tier.forget(SMALL, records(FIRST[:1]))
    _claim(tier, chain(1, seed=7), [int(first_slots()[0])])
    tier.close()
    again = open_tier(tier.directory)
    (recovered,) = again.recover()
    assert served(again, SMALL, recovered.slots, recovered.hashes).count(False) == 1
    again.close()


def test_entries_that_cannot_be_right_are_given_up(tier: DiskTier) -> None:
    """Covers: A12, A16, D5."""
    other = spec(model="other")
    tier.open_space(other)
    claimed = int(first_slots()[0])
    beyond = slot_id(SlabId(1), LAYOUT.spec.num_parts + (400 << 10) // LAYOUT.record_bytes)
    _claim(tier, chain(1, seed=7), [claimed])  # two blocks in one slot
    _claim(tier, chain(3, seed=8), [beyond, slot_id(SlabId(9), 0), (1 << 63) - 1])
    _claim(tier, chain(1, seed=9), [int(first_slots()[0]) + 10], other)  # in a slab of another namespace
    assert found(reopened(tier)) == {SMALL.namespace: FIRST[1:]}


@pytest.mark.parametrize("size_bytes", [3 * 4096, 3 * LAYOUT.record_bytes + 1])
def test_a_slab_entry_of_another_shape_gives_up_its_blocks(tier: DiskTier, size_bytes: int) -> None:
    """Covers: A17."""
    store(tier, spec(model="other"), chain(2, of=spec(model="other")))
    wrong = SlabEntry(SMALL.namespace, 3, size_bytes)
    tier.catalog.put_blocks(
        SMALL.namespace,
        hashes=records([]),
        parents=records([]),
        slots=np.array([], np.int64),
        sequences=np.array([], np.uint64),
        slabs={SlabId(1): wrong},
    )
    assert [each.spec.model for each in reopened(tier)] == ["other"]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("step", ["fallocate", "pwritev", "fdatasync", "commit"])
def test_without_space_a_write_leaves_nothing_and_the_tier_goes_on(
    tier: DiskTier, files: FailingFiles, step: str, error: int
) -> None:
    """Covers: A1, E2."""
    kv = spec(model="new")
    tier.open_space(kv)
    before = tier.statistics()
    files.errors[step] = error
    slots = tier.allocate(kv, 3)
    with pytest.raises(DiskFull, match=r"cannot write: .*free some space"):
        store(tier, kv, chain(3, of=kv), slots=slots)
    tier.free(slots)
    tier.arena.validate()
    if step == "fallocate":
        assert tier.statistics() == before
        assert not (tier.directory / "slabs" / "2.slab").exists()
    files.errors.clear()
    assert served(tier, SMALL, first_slots(), records(FIRST)) == [True] * len(FIRST)
    store(tier, SMALL, chain(2, seed=5))  # into the slab that is there
    assert found(reopened(tier)) == {SMALL.namespace: [*FIRST, *chain(2, seed=5)]}


def test_no_slab_is_opened_for_a_while_after_there_was_no_space(tmp_path: Path, files: FailingFiles) -> None:
    """Covers: E2."""
    now_s = 100.0
    tier = DiskTier(
        tmp_path,
        capacity_bytes=1 << 20,
        slab_bytes=64 << 10,
        reserve_bytes=0,
        num_threads=1,
        files=files,
        clock=lambda: now_s,
    )
    tier.open_space(SMALL)
    files.errors["fallocate"] = errno.ENOSPC
    slots = tier.allocate(SMALL, 2)
    with pytest.raises(DiskFull):
        store(tier, SMALL, FIRST[:2], slots=slots)
    tier.free(slots)
    assert len(tier.allocate(SMALL, 2)) == 0
    now_s += RETRY_AFTER_S
    files.errors.clear()
    store(tier, SMALL, FIRST[:2])
    tier.close()


def test_a_reserve_of_the_file_system_stays_free(tmp_path: Path) -> None:
    """Covers: E2."""

    class Small(Files):
        def free_bytes(self, path: Path) -> int:
            return 1_000_000 - sum(file.stat().st_size for file in path.glob("*"))

    tier = open_tier(tmp_path, files=Small(), reserve_bytes=500_000, slab_bytes=100 << 10)
    hashes = chain(100)
    done = 0
    tier.open_space(SMALL)

    def fill() -> None:
        nonlocal done
        for done in range(100):
            store(tier, SMALL, hashes[done : done + 1])

    with pytest.raises(DiskFull, match="500000 are kept"):
        fill()
    taken_bytes = sum(path.stat().st_size for path in (tmp_path / "slabs").iterdir())
    assert 400_000 < taken_bytes <= 500_000
    tier.close()
    again = open_tier(tmp_path)
    assert found(again.recover()) == {SMALL.namespace: hashes[:done]}
    again.close()


@pytest.mark.parametrize("step", ["open", "fallocate", "pwritev", "fdatasync", "sync_directory", "commit"])
def test_after_an_error_of_the_disk_the_tier_is_not_written_any_more(
    tier: DiskTier, files: FailingFiles, step: str
) -> None:
    """A flush that failed may have lost what came before it, so trying again would prove nothing.  Covers: A1, D7."""
    kv = spec(model="new")
    tier.open_space(kv)
    slots = tier.allocate(kv, 2)
    files.errors[step] = errno.EIO
    with pytest.raises(DiskFailed, match=r"cannot write: .*check the disk and its mount, then restart") as caught:
        store(tier, kv, chain(2, of=kv), slots=slots)
    assert not isinstance(caught.value, DiskFull)
    files.errors.clear()
    files.calls.clear()
    for call in (
        lambda: store(tier, SMALL, chain(1, seed=5)),
        lambda: tier.forget(SMALL, records(FIRST)),
        lambda: tier.recover(),
        lambda: tier.open_space(spec(model="newer")),
    ):
        with pytest.raises(DiskFailed, match="cannot write"):
            call()
    assert files.calls == []
    assert served(tier, SMALL, first_slots(), records(FIRST)) == [True] * len(FIRST)
    assert found(reopened(tier)) == {SMALL.namespace: FIRST}


def test_an_error_while_forgetting_is_one_of_the_tier(tier: DiskTier, files: FailingFiles) -> None:
    """Covers: A17."""
    files.errors["commit"] = errno.ENOSPC
    with pytest.raises(DiskFull, match="cannot forget"):
        tier.forget(SMALL, records(FIRST[:1]))
    files.errors["commit"] = errno.EIO
    with pytest.raises(DiskFailed, match="cannot forget"):
        tier.forget(SMALL, records(FIRST[:1]))
    files.errors.clear()
    assert found(reopened(tier)) == {SMALL.namespace: FIRST}


def test_a_catalog_that_is_full_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: A1, E2."""
    monkeypatch.setattr(catalog, "MIN_MAP_BYTES", 128 << 10)
    monkeypatch.setattr(catalog, "MAP_BYTES_PER_BLOCK", 0)
    tier = open_tier(tmp_path, capacity_bytes=32 << 20)
    batches = [chain(50, seed=seed) for seed in range(40)]
    tier.open_space(SMALL)
    done = 0

    def fill() -> None:
        nonlocal done
        for done in range(40):
            store(tier, SMALL, batches[done])

    with pytest.raises(DiskFull, match=r"cannot write: .*catalog"):
        fill()
    assert done > 2
    monkeypatch.undo()
    tier.close()
    again = open_tier(tmp_path, capacity_bytes=32 << 20)
    assert found(again.recover()) == {SMALL.namespace: [one for batch in batches[:done] for one in batch]}
    again.close()


@pytest.mark.parametrize(("free_bytes", "expected"), [(4096, DiskFull), (1 << 30, DiskFailed)])
def test_a_commit_cut_short_by_a_full_file_system_is_told_from_a_broken_disk(
    tmp_path: Path, free_bytes: int, expected: type[DiskFailed]
) -> None:
    """LMDB says EIO in both cases.  Covers: E2."""
    import lmdb

    class Cut(Files):
        is_cut = False

        def free_bytes(self, path: Path) -> int:
            return free_bytes if self.is_cut else 1 << 30

        def commit(self, transaction: Transaction) -> None:
            if self.is_cut:
                raise lmdb.DiskError("mdb_txn_commit", errno.EIO)
            super().commit(transaction)

    files = Cut()
    tier = open_tier(tmp_path, files=files)
    store(tier, SMALL, FIRST)
    files.is_cut = True
    with pytest.raises(DiskFailed) as caught:
        tier.forget(SMALL, records(FIRST))
    assert type(caught.value) is expected
    assert found(reopened(tier)) == {SMALL.namespace: FIRST}


def test_when_a_write_fails_none_of_it_goes_on_in_the_callers_memory(tmp_path: Path) -> None:
    started, returned = threading.Event(), threading.Event()

    class OneFails(Files):
        def __init__(self) -> None:
            self.under_way = 0

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset == 0:
                started.wait(10)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.under_way += 1
            started.set()
            returned.wait(0.1)
            self.under_way -= 1
            return super().pwritev(fd, buffers, offset)

    files = OneFails()
    tier = open_tier(tmp_path, files=files)
    tier.open_space(SMALL)
    slots = tier.allocate(SMALL, 5)[[0, 1, 3, 4]]  # two calls
    with pytest.raises(DiskFailed):
        store(tier, SMALL, FIRST[:4], slots=slots)
    assert files.under_way == 0
    returned.set()
    tier.close()


def test_no_descriptor_stays_open_whatever_fails(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for step in ("open", "fallocate", "pwritev", "fdatasync", "sync_directory", "commit", "preadv", "free_bytes"):
        files = FailingFiles()
        tier = open_tier(tmp_path / step, files=files)
        tier.open_space(SMALL)
        files.errors[step] = errno.EIO
        slots = tier.allocate(SMALL, 2)
        with contextlib.suppress(DiskFailed):
            store(tier, SMALL, FIRST[:2], slots=slots)
        served(tier, SMALL, slots, records(FIRST[:2]))
        tier.close()
        with pytest.raises(DiskFailed) if step in ("open", "sync_directory", "commit") else contextlib.nullcontext():
            open_tier(tmp_path / f"{step} from the start", files=files).close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_block_that_cannot_be_read_does_not_take_others_with_it(tmp_path: Path) -> None:
    bad = 2 * LAYOUT.record_bytes + 4096

    class BadSector(Files):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset <= bad < offset + sum(map(len, buffers)):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().preadv(fd, buffers, offset)

    tier = open_tier(tmp_path, files=BadSector())
    slots = store(tier, SMALL, FIRST)
    assert served(tier, SMALL, slots, records(FIRST)) == [True, True, False, True, True]
    tier.close()


def test_what_is_not_readable_at_all_is_a_miss(tier: DiskTier, files: FailingFiles) -> None:
    for step in ("open", "preadv"):
        files.errors = {step: errno.EIO}
        assert served(tier, SMALL, first_slots(), records(FIRST)) == [False] * len(FIRST)
    files.errors = {}
    os.truncate(tier.directory / SLAB_FILE, LAYOUT.record_bytes + 4096)
    assert served(tier, SMALL, first_slots(), records(FIRST)) == [True, *[False] * (len(FIRST) - 1)]


def test_a_directory_that_vanished_is_all_misses_and_fails_the_next_write(tier: DiskTier) -> None:
    shutil.rmtree(tier.directory)
    assert served(tier, SMALL, first_slots(), records(FIRST)) == [False] * len(FIRST)
    with pytest.raises(DiskFailed, match=r"No such file.*check the disk and its mount"):
        store(tier, SMALL, chain(2, seed=5))


def test_a_directory_that_cannot_be_used_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskFailed, match=r"cannot open: .*Not a directory"):
        open_tier(tmp_path / "file" / "tier")
    (tmp_path / "tier" / "catalog").mkdir(parents=True)
    (tmp_path / "tier" / "catalog" / "data.mdb").write_bytes(b"no catalog" * 10_000)
    with pytest.raises(DiskFailed, match=r"cannot open: .*catalog"):
        open_tier(tmp_path / "tier")


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD, Codec.AUTO])
def test_several_threads_write_read_and_forget_at_once(tmp_path: Path, codec: Codec) -> None:
    tier = open_tier(tmp_path, capacity_bytes=16 << 20, codec=codec)
    small, other = compressible(SMALL), compressible(spec(model="other", bytes_per_part=100_000))
    chains = [(kv, chain(6, seed=seed)) for seed in range(10) for kv in (small, other)]
    for kv in (small, other):
        tier.open_space(kv)
    work = [(kv, hashes, tier.allocate(kv, len(hashes))) for kv, hashes in chains]

    def one(kv: KVSpec, hashes: list[BlockHash], slots: IntArray) -> None:
        store_packed(tier, kv, hashes, slots=slots)
        assert all(served(tier, kv, slots, records(hashes)))
        tier.forget(kv, records(hashes[4:]))
        assert all(served(tier, kv, slots[:4], records(hashes[:4])))

    with ThreadPoolExecutor(6) as pool:
        for done in [pool.submit(one, *each) for each in work]:
            done.result()
    for _, _, slots in work:
        tier.free(slots[4:])
    kept = {(kv.namespace, one) for kv, hashes in chains for one in hashes[:4]}
    recovered = reopened(tier)
    assert {(each.spec.namespace, one.tobytes()) for each in recovered for one in each.hashes} == kept
