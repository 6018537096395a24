"""A disk tier for tests: blocks in page-aligned memory, and file systems that fail, kill or lose power on request."""

import itertools
import mmap
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from builders import block_bytes, chain, random_bytes, records, spec

from kvstore.hashing import pack, unpack
from kvstore.spec import KVSpec
from kvstore.transport.memory import address_of, hash_pieces
from kvstore.types import AnyArray, BlockHash, ByteArray, HashArray, IntArray
from kvstore_server.table import NONE
from kvstore_server.tiers.codec import Codec, load_blosc2
from kvstore_server.tiers.disk import DiskTier, Files, Packed, Recovered
from kvstore_server.tiers.records import PAGE_BYTES, RecordLayout, round_up


def open_tier(
    directory: Path,
    *,
    files: Files | None = None,
    capacity_bytes: int = 4 << 20,
    codec: Codec = Codec.NONE,
    **fields: Any,
) -> DiskTier:
    settings = {"slab_bytes": 400 << 10, "reserve_bytes": 0, "num_threads": 2, **fields}
    return DiskTier(directory, capacity_bytes=capacity_bytes, files=files, codec=lambda _: codec, **settings)


def compressible(kv: KVSpec) -> KVSpec:
    """Another namespace, whose blocks have structure (`contents`)."""
    return replace(kv, dtype="bfloat16")


def contents(kv: KVSpec, block_hash: BlockHash) -> ByteArray:
    """`[block_bytes]`: what this block holds; the blocks in RANDOM cannot be compressed."""
    return (random_bytes if block_hash in RANDOM else block_bytes)(kv, block_hash)


def memory(kv: KVSpec, count: int) -> tuple[ByteArray, IntArray]:
    """`[count, room]` bytes and their addresses, as the disk tier wants them."""
    room = round_up(kv.block_bytes, PAGE_BYTES)
    array = np.frombuffer(mmap.mmap(-1, max(1, count) * room), np.uint8).reshape(-1, room)[:count]
    return array, address_of(array) + room * np.arange(count)


def checksums_of(kv: KVSpec, addresses: IntArray) -> AnyArray:
    layout = RecordLayout.of(kv)
    pieces = addresses[:, None] + layout.part_offsets
    return hash_pieces(pieces.ravel(), np.tile(layout.part_sizes, len(addresses))).reshape(pieces.shape)


def parents_of(hashes: list[BlockHash]) -> HashArray:
    """Each block's parent is the one before it in the list; the first has none."""
    return unpack(pack([BlockHash(bytes(32)), *hashes])[: 32 * len(hashes)])


def filled(kv: KVSpec, hashes: list[BlockHash]) -> tuple[ByteArray, IntArray]:
    """`memory` with what these blocks hold."""
    array, addresses = memory(kv, len(hashes))
    for row, block_hash in zip(array, hashes, strict=True):
        row[: kv.block_bytes] = contents(kv, block_hash)
    return array, addresses


def store(tier: DiskTier, kv: KVSpec, hashes: list[BlockHash], *, slots: IntArray | None = None) -> IntArray:
    """The blocks, with the bytes that belong to them, are written, plain; returns their slots."""
    tier.open_space(kv)
    slots = tier.allocate(kv, len(hashes)) if slots is None else slots
    assert len(slots) == len(hashes)
    _, addresses = filled(kv, hashes)
    _write(tier, kv, hashes, slots, addresses)
    return slots


def store_packed(tier: DiskTier, kv: KVSpec, hashes: list[BlockHash], *, slots: IntArray | None = None) -> IntArray:
    """As `store`, by the codec of the tier."""
    tier.open_space(kv)
    _, addresses = filled(kv, hashes)
    packed = tier.pack(kv, addresses=addresses)
    slots = tier.allocate_for(kv, packed) if slots is None else slots
    assert len(slots) == len(hashes)
    assert (slots != NONE).all()
    _write(tier, kv, hashes, slots, addresses, packed=packed)
    return slots


def _write(
    tier: DiskTier, kv: KVSpec, hashes: list[BlockHash], slots: IntArray, addresses: IntArray, **fields: Packed
) -> None:
    tier.write(
        kv,
        slots=slots,
        hashes=records(hashes),
        parents=parents_of(hashes),
        addresses=addresses,
        checksums=checksums_of(kv, addresses),
        **fields,
    )


def served(tier: DiskTier, kv: KVSpec, slots: IntArray, hashes: HashArray) -> list[bool]:
    """Which of the blocks are read; none of them is wrong."""
    array, addresses = memory(kv, len(slots))
    good, checksums = tier.read(kv, slots=slots, hashes=hashes, addresses=addresses)
    for row, block_hash, is_good in zip(array, hashes, good, strict=True):
        expected = contents(kv, BlockHash(block_hash.tobytes()))
        assert not is_good or (row[: kv.block_bytes] == expected).all(), "another block was served"
    assert (checksums[good] == checksums_of(kv, addresses)[good]).all()
    return good.tolist()


def found(recovered: list[Recovered]) -> dict[bytes, list[bytes]]:
    """namespace -> the hashes that were found in it, the oldest first."""
    return {each.spec.namespace: [one.tobytes() for one in each.hashes] for each in recovered}


STEPS = (
    "open",
    "close",
    "size_bytes",
    "free_bytes",
    "fallocate",
    "pwritev",
    "preadv",
    "fdatasync",
    "sync_directory",
    "unlink",
    "commit",
)


class SteppedFiles(Files):
    """`before(step)` is called ahead of each step, and may raise; in the middle of a write too, as "torn"."""

    def __init__(self, before: Callable[[str], None]) -> None:
        self.before = before

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.before("pwritev")
        half = max(1, len(buffers) // 2)
        written = super().pwritev(fd, buffers[:half], offset)
        self.before("torn")
        return written


def _stepped(step: str) -> Callable[..., Any]:
    def call(self: SteppedFiles, *arguments: Any) -> Any:
        self.before(step)
        return getattr(super(SteppedFiles, self), step)(*arguments)

    return call


for _step in set(STEPS) - {"pwritev"}:
    setattr(SteppedFiles, _step, _stepped(_step))


class Countdown:
    """`act` is called at the given step, counted from 0; not before, and not after."""

    def __init__(self, steps: int, act: Callable[[str], None]) -> None:
        self.left = steps
        self.act = act
        self.lock = threading.Lock()

    def __call__(self, step: str) -> None:
        with self.lock:
            self.left -= 1
            is_now = self.left == -1
        if is_now:
            self.act(step)


class FailingFiles(Files):
    """The steps named in `errors` fail with that errno, from the first call after it was set."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.calls: list[str] = []


def _failing(step: str) -> Callable[..., Any]:
    def call(self: FailingFiles, *arguments: Any) -> Any:
        self.calls.append(step)
        if step in self.errors:
            raise OSError(self.errors[step], os.strerror(self.errors[step]))
        return getattr(super(FailingFiles, self), step)(*arguments)

    return call


for _step in STEPS:
    setattr(FailingFiles, _step, _failing(_step))


class CacheFiles(Files):
    """Writes stay in a cache until they are flushed, as do names of files; `cut_power` loses what is in it."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}
        self._writes: dict[Path, list[tuple[int, bytes]]] = {}
        self._sizes: dict[Path, int] = {}
        self._new_files: set[Path] = set()
        self._lock = threading.Lock()

    def open(self, path: Path, flags: int) -> int:
        with self._lock:
            if flags & os.O_CREAT and not path.exists():
                self._new_files.add(path)
            fd = super().open(path, flags)
            self._paths[fd] = path
            return fd

    def close(self, fd: int) -> None:
        super().close(fd)
        del self._paths[fd]

    def fallocate(self, fd: int, size_bytes: int) -> None:
        self._sizes[self._paths[fd]] = size_bytes

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = b"".join(buffers)
        with self._lock:
            self._writes.setdefault(self._paths[fd], []).append((offset, data))
        return len(data)

    def fdatasync(self, fd: int) -> None:
        path = self._paths[fd]
        with path.open("r+b") as file:
            if path in self._sizes:
                file.truncate(self._sizes.pop(path))
            for offset, data in self._writes.pop(path, ()):
                file.seek(offset)
                file.write(data)

    def sync_directory(self, path: Path) -> None:
        self._new_files = {file for file in self._new_files if file.parent != path}

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._new_files.discard(path)

    def cut_power(self) -> None:
        """Files are as they are on the disk; none is open."""
        for fd in self._paths:
            super().close(fd)
        for path in self._new_files:
            path.unlink()


SMALL = spec(bytes_per_part=3000)
LARGE = spec(bytes_per_part=60_000, model="large")
FIRST, SECOND, THIRD, FOURTH = (chain(count, seed=seed) for seed, count in enumerate((5, 3, 2, 2), start=1))
RANDOM = {FIRST[4], SECOND[0]}

Say = Callable[[str, KVSpec, list[BlockHash]], None]


def scenario(directory: Path, files: Files, say: Say, codec: Codec) -> None:
    """Writes, forgets, writes over, deletes slabs, restarts, writes; says what it was told is done.

    With a codec, blocks of several sizes.
    """
    small, large = (SMALL, LARGE) if codec is Codec.NONE else (compressible(SMALL), compressible(LARGE))
    tier = open_tier(directory, files=files, codec=codec)
    try:
        tier.recover()
        slots = store_packed(tier, small, FIRST)
        say("stored", small, FIRST)
        more = store_packed(tier, large, SECOND)
        say("stored", large, SECOND)

        say("forgetting", small, FIRST[:2])
        tier.forget(small, records(FIRST[:2]))
        say("forgotten", small, FIRST[:2])
        tier.free(slots[:2])
        assert set(store_packed(tier, small, THIRD).tolist()) == set(slots[:2].tolist())
        say("stored", small, THIRD)

        say("forgetting", large, SECOND)
        tier.forget(large, records(SECOND))
        say("forgotten", large, SECOND)
        tier.free(more)
        empty = tier.empty_slabs(large)
        assert len(empty) == (1 if codec is Codec.NONE else 2)
        for slab in empty:
            tier.close_slab(slab)
            tier.delete_slab(slab)
            tier.slab_deleted(slab)
    finally:
        tier.close()

    tier = open_tier(directory, files=files, codec=codec)
    try:
        tier.recover()
        store_packed(tier, large, FOURTH)
        say("stored", large, FOURTH)
    finally:
        tier.close()


def check_after_crash(directory: Path, said: list[tuple[str, KVSpec, list[BlockHash]]]) -> None:
    """What was said to be stored is there and right, what was forgotten is not, and the tier goes on working.

    Without a codec, so that what was compressed is read by a daemon that would not have.
    """
    tier = open_tier(directory)
    try:
        recovered = tier.recover()
        there = {(each.spec.namespace, one.tobytes()) for each in recovered for one in each.hashes}
        for each in recovered:
            assert all(served(tier, each.spec, each.slots, each.hashes)), "found, but not served"
        keys = {
            word: {(kv.namespace, one) for what, kv, hashes in said if what == word for one in hashes}
            for word in ("stored", "forgetting", "forgotten")
        }
        assert keys["stored"] - keys["forgetting"] <= there, "a block was lost"
        assert not keys["forgotten"] & there, "a forgotten block came back"
        check_usage(tier, recovered)

        new = chain(9, seed=99)
        slots = store(tier, SMALL, new)
        assert all(served(tier, SMALL, slots, records(new)))
        for each in recovered:
            assert all(served(tier, each.spec, each.slots, each.hashes)), "written over"
    finally:
        tier.close()


def check_usage(tier: DiskTier, recovered: list[Recovered]) -> None:
    """What counts as used is what is there, to the byte."""
    statistics = tier.statistics()
    assert statistics.used_bytes == sum(len(each.slots) * each.spec.block_bytes for each in recovered)
    files = list((tier.directory / "slabs").iterdir())
    assert statistics.slab_bytes == sum(path.stat().st_size for path in files)
    assert statistics.num_slabs == len(files)
    tier.arena.validate()


def _kill_at(directory: Path, step: int, codec: Codec) -> None:
    """Runs the scenario in this process, and ends it by SIGKILL at that step; the log says how far it came."""
    directory.mkdir()
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    lines = iter(range(100))

    def die(name: str) -> None:
        os.write(log, f"killed at {name}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    scenario(
        directory / "tier",
        SteppedFiles(Countdown(step, die)),
        lambda *_: os.write(log, f"said {next(lines)}\n".encode()) and None,
        codec,
    )


def everything_said(codec: Codec) -> list[tuple[str, KVSpec, list[BlockHash]]]:
    """All that the scenario says, in order."""
    said: list[tuple[str, KVSpec, list[BlockHash]]] = []
    with tempfile.TemporaryDirectory() as directory:
        scenario(Path(directory), Files(), lambda *words: said.append(words), codec)
    return said


def main() -> None:
    """`<directory>/<k>` is what a process left that was killed at step k, for all k. Arguments: directory, codec."""
    base, codec = Path(sys.argv[1]), Codec(sys.argv[2])
    if codec is not Codec.NONE:
        load_blosc2()
    for step in itertools.count():
        pid = os.fork()  # imports are what takes time, and no thread is at work yet
        if pid == 0:
            _kill_at(base / str(step), step, codec)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
