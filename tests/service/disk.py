"""A daemon with a directory below its memory, who watches it, and what lies there, read without the code under test."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from builders import rows
from service.harness import DEADLINE_S, DaemonProcess, eventually

from kvstore.errors import KVStoreError
from kvstore.hashing import unpack
from kvstore.spec import KVSpec
from kvstore.types import BlockHash
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockRows, KVClient, Outcome

PAGE_BYTES = 4096
HEADER_HASH_AT = 48  # after magic, version, number of parts and namespace
PIECE = 12  # blocks of one store or load: a few times as many fit into memory
# Memory for about 60 blocks of 16 KiB, and a disk for 800. Nobody but the test reads what is there.
SMALL: dict[str, object] = {
    "cpu_capacity": "1MiB",
    "slab_bytes": "256KiB",
    "disk_capacity": "16MiB",
    "disk_reserve": 0,
    "disk_scrub_bytes_s": 0,
}

MakeDaemon = Callable[..., DaemonProcess]
Connect = Callable[..., KVClient]


def pieces(hashes: Sequence[BlockHash], size: int = PIECE) -> Iterator[list[BlockHash]]:
    """The hashes, `size` at a time."""
    for start in range(0, len(hashes), size):
        yield list(hashes[start : start + size])


def disk_stats(daemon: DaemonProcess) -> pb.TierStats:
    (shown,) = (tier for tier in daemon.stats().tiers if tier.tier == "disk")
    return shown


def store_chain(daemon: DaemonProcess, client: KVClient, hashes: Sequence[BlockHash]) -> None:
    """The blocks of a chain, or its beginning, however long, are on disk: each piece before the next is stored."""
    before = None
    for piece in pieces(hashes):
        written = daemon.stats().counters.blocks_written
        with client.store(piece, parent=before) as write:
            num_new = write.outcomes.count(Outcome.NEW)
            write.put_blocks(rows(client.spec, piece))
        assert set(write.outcomes) == {Outcome.STORED}, write.outcomes
        wait_written(daemon, written + num_new)
        before = piece[-1]


def wait_written(daemon: DaemonProcess, count: int) -> None:
    """As many blocks as that were written to disk since the daemon started."""
    eventually(lambda: daemon.stats().counters.blocks_written >= count, f"{count} blocks are on disk")


def offer_chain(daemon: DaemonProcess, client: KVClient, hashes: Sequence[BlockHash]) -> None:
    """As `store_chain`, but the disk may have left some out."""
    counters = daemon.stats().counters
    seen = counters.blocks_written + counters.blocks_unwritten
    before = None
    for piece in pieces(hashes):
        with client.store(piece, parent=before) as write:
            seen += write.outcomes.count(Outcome.NEW)
            write.put_blocks(rows(client.spec, piece))
        assert set(write.outcomes) == {Outcome.STORED}, write.outcomes

        def settled(count: int = seen) -> bool:
            counters = daemon.stats().counters
            return counters.blocks_written + counters.blocks_unwritten >= count

        eventually(settled, "the blocks are on disk, or counted as left out")
        before = piece[-1]


def load(client: KVClient, hashes: Sequence[BlockHash]) -> dict[int, KVStoreError]:
    """Every block was loaded bit-exact, a piece at a time, or has its error, by index."""
    errors: dict[int, KVStoreError] = {}
    for number, piece in enumerate(pieces(hashes)):
        target = np.zeros((len(piece), client.spec.block_bytes), np.uint8)
        found = client.load(piece, into=BlockRows(target)).wait().errors
        wrong = (target != rows(client.spec, piece)).any(axis=1)
        assert set(np.flatnonzero(wrong).tolist()) <= set(found), "wrong bytes"
        errors |= {number * PIECE + index: error for index, error in found.items()}
    return errors


def used_bytes(daemon: DaemonProcess) -> int:
    """What the blocks of all namespaces take. Just after a start that is what the disk must say that it uses."""
    return sum(
        shown.blocks_committed * sum(shown.spec.part_bytes)
        for shown in daemon.admin.Namespaces(pb.NamespacesRequest()).namespaces
    )


class Watcher:
    """All events of one daemon since this was made, until it ends; `durable` are the blocks that are on its disk."""

    def __init__(self, daemon: DaemonProcess, durable: set[tuple[bytes, bytes]] | None = None) -> None:
        self.durable: set[tuple[bytes, bytes]] = set() if durable is None else durable  # (namespace, hash)
        self.num_written = 0  # how often blocks were said to be on disk
        self._changed = threading.Condition()
        self._stream = daemon.admin.Watch(pb.WatchRequest(snapshot=True))
        while next(self._stream).kind != pb.Event.SNAPSHOT_END:
            pass
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def wait(self, num_written: int) -> None:
        """It was said so often that blocks are on disk now, or for a second it was not."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_written >= num_written, 1.0)

    def close(self) -> None:
        """All that the daemon ever said was heard, if it has ended."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()

    def cancel(self) -> None:
        self._stream.cancel()
        self.close()

    def _listen(self) -> None:
        try:
            for event in self._stream:
                blocks = {(event.namespace, block_hash) for block_hash in unpack(event.hashes).tolist()}
                with self._changed:
                    if event.kind == pb.Event.REMOVED:
                        self.durable -= blocks
                    elif event.tier == "disk":
                        self.durable |= blocks
                        self.num_written += 1
                    self._changed.notify_all()
        except grpc.RpcError:
            pass  # the daemon was killed
        with self._changed:
            self._changed.notify_all()


# What is in the directory.


def slab_files(directory: Path) -> list[Path]:
    return sorted((directory / "slabs").glob("*.slab"))


def file_bytes(directory: Path) -> int:
    """What the slab files take on the device, not what they say of themselves."""
    return sum(path.stat().st_blocks * 512 for path in slab_files(directory))


def record_of(directory: Path, kv: KVSpec, block_hash: BlockHash) -> tuple[Path, int]:
    """The one record that says it is this block: its file, and where its header begins there."""
    wanted = kv.namespace + block_hash
    found = []
    for path in slab_files(directory):
        data = path.read_bytes()
        for offset in range(0, len(data), PAGE_BYTES):
            begin = offset + HEADER_HASH_AT - len(kv.namespace)
            if data[begin : begin + len(wanted)] == wanted:
                found.append((path, offset))
    (record,) = found
    return record


def flip(path: Path, offset: int) -> None:
    """One bit of the file differs, on the disk itself."""
    fd = os.open(path, os.O_RDWR)
    try:
        (old,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([old ^ 1]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Meanwhile whoever opens the file waits; then it gets an error, and finds the file if it tries again."""
    away, pipe = path.with_suffix(".away"), path.with_suffix(".pipe")
    os.mkfifo(pipe)
    path.rename(away)
    os.link(pipe, path)
    try:
        yield
    finally:
        away.rename(path)
        os.close(os.open(pipe, os.O_RDWR))  # those that wait go on when someone writes
        pipe.unlink()


@contextmanager
def tmpfs(directory: Path, options: str) -> Iterator[None]:
    """A file system of its own lies there, or the test is skipped."""
    directory.mkdir(exist_ok=True)
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", directory], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a tmpfs needs root and the right to mount: {error}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@contextmanager
def moved_away(directory: Path) -> Iterator[None]:
    """Meanwhile there is no such directory."""
    elsewhere = directory.with_name(f"{directory.name}-away")
    directory.rename(elsewhere)
    try:
        yield
    finally:
        elsewhere.rename(directory)
