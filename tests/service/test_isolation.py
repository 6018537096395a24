"""Namespaces cannot read each other's memory, nor anyone write it; and they share one capacity."""

import contextlib
import ctypes
import gc
import mmap
import os
from collections.abc import Callable

import pytest
from builders import chain, rows, spec
from service.harness import DaemonProcess, RawStream, ShmPeer, eventually, store

from kvstore.hashing import pack
from kvstore.transport.shm import Op, Request
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import unpack_u32
from kvstore_client import KVClient, Outcome

KV = spec(layers=2, bytes_per_part=16384)
OTHER = spec(layers=2, bytes_per_part=16384, model="other")
HASHES = chain(4, of=KV)

Connect = Callable[..., KVClient]
Raw = Callable[..., RawStream]
Shm = Callable[..., ShmPeer]


def slab_of(stream: RawStream) -> int:
    located = stream.ask(load=pb.Load(hashes=pack(HASHES), lease="l")).located
    return int(unpack_u32(located.slabs, name="slabs")[0])


def test_a_slab_is_handed_out_to_sessions_of_its_namespace_only(
    shared: DaemonProcess, connect: Connect, raw: Raw, shm: Shm
) -> None:
    """Covers: H2, H3."""
    store(connect(shared, KV), HASHES)
    mine, theirs = raw(shared, KV), raw(shared, OTHER)
    slab = slab_of(mine)
    reply, fds = shm(shared, mine.welcome.shm.ticket).ask(Request(Op.SLAB, slab))  # type: ignore[attr-defined]
    assert reply.code == 0
    os.close(fds[0])
    for number in (slab, 0, 999, 4294967295):
        reply, fds = shm(shared, theirs.welcome.shm.ticket).ask(  # type: ignore[attr-defined]
            Request(Op.SLAB, number)
        )
        assert reply.code == 5
        assert not fds


def test_a_slab_cannot_be_written_by_who_reads_it(shared: DaemonProcess, connect: Connect, raw: Raw, shm: Shm) -> None:
    """Covers: H2."""
    client = connect(shared, KV)
    store(client, HASHES)
    stream = raw(shared, KV)
    _, fds = shm(shared, stream.welcome.shm.ticket).ask(  # type: ignore[attr-defined]
        Request(Op.SLAB, slab_of(stream))
    )
    opened = [fds[0]]
    try:
        size = os.fstat(fds[0]).st_size
        mmap.mmap(fds[0], size, prot=mmap.PROT_READ).close()
        # Root may open it for writing again; the seals refuse what such a descriptor is for.
        with contextlib.suppress(PermissionError):
            opened.append(os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR))
        for fd in opened:
            with pytest.raises(OSError):  # noqa: PT011
                mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError):  # noqa: PT011
                os.pwrite(fd, b"x", 0)
            for length in (0, size // 2, 2 * size):
                with pytest.raises(OSError):  # noqa: PT011
                    os.ftruncate(fd, length)
            punch_hole_and_keep_size = 3
            libc = ctypes.CDLL(None, use_errno=True)
            place, length_of = ctypes.c_long(0), ctypes.c_long(4096)
            assert libc.fallocate(fd, punch_hole_and_keep_size, place, length_of) == -1
    finally:
        for fd in opened:
            os.close(fd)
    assert not client.verify(HASHES)


def test_sockets_are_for_their_user_only(shared: DaemonProcess) -> None:
    """Covers: H1, H2."""
    for path in (shared.socket_path, shared.shm_path):
        assert path.stat().st_mode & 0o077 == 0


def test_a_namespace_gets_the_room_of_a_colder_one_once_its_readers_have_unmapped_it(
    make_daemon: Callable[..., DaemonProcess], connect: Connect
) -> None:
    """Covers: E1, E3. The limit holds meanwhile, too."""
    daemon = make_daemon(cpu_capacity="2MiB")
    cold = connect(daemon, KV)
    every = chain(100, of=KV)
    num_stored = store(cold, every).count(Outcome.STORED)
    assert 40 < num_stored < 100
    load = cold.load(every[:num_stored], view=True)
    load.wait()
    view = load.view(0, 0)
    expected = rows(KV, every[:1])[0][: len(view)]
    hashes = chain(8, of=OTHER)

    def within_the_limit() -> bool:
        tier = daemon.stats().tiers[0]
        return tier.slab_bytes <= tier.capacity_bytes

    warm = connect(daemon, OTHER)
    assert store(warm, hashes) == [Outcome.FULL] * 8, "all is leased"
    assert (view == expected).all()
    load.check()
    load.release()
    eventually(lambda: daemon.stats().blocks_leased == 0)

    # The slabs are retired, but one of them is mapped as long as somebody has a view.
    store(warm, hashes)
    assert within_the_limit()
    del view, load
    gc.collect()

    def room() -> bool:
        assert within_the_limit()
        return store(warm, hashes) == [Outcome.STORED] * 8

    eventually(room)
    assert within_the_limit()
    assert warm.match(hashes, lease="").num_blocks == 8
    assert cold.match(every, lease="").num_blocks < num_stored
    assert not warm.verify(hashes)


def test_a_load_that_was_released_and_dropped_holds_no_slab(
    make_daemon: Callable[..., DaemonProcess], connect: Connect
) -> None:
    """Covers: E1. The room must not wait for the reader's garbage collector to come by."""
    daemon = make_daemon(cpu_capacity="1MiB")
    cold = connect(daemon, KV)
    store(cold, HASHES)
    gc.collect()
    gc.disable()
    try:
        load = cold.load(HASHES, view=True)
        load.wait()
        load.release()
        del load
        eventually(lambda: daemon.stats().blocks_leased == 0)
        warm = connect(daemon, OTHER)
        hashes = chain(8, of=OTHER)
        eventually(lambda: store(warm, hashes) == [Outcome.STORED] * 8, timeout_s=3)
    finally:
        gc.enable()
