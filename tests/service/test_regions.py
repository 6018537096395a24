"""Staging memory that a client offers: what could hurt the daemon is refused, and the daemon lives."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import Child, DaemonProcess, RawStream, ShmPeer, eventually, memfd

from kvstore.errors import InvalidRequest, NotAllowed, NotAuthenticated, StoreFull, StoreUnavailable
from kvstore.hashing import pack
from kvstore.transport.shm import Op, Request
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import pack_u32, pack_u64

KV = spec(layers=2, bytes_per_part=8192)
HASHES = chain(2, of=KV)
DATA = rows(KV, HASHES)
SIZE = DATA.size

Raw = Callable[..., RawStream]
Shm = Callable[..., ShmPeer]


@pytest.fixture
def stream(shared: DaemonProcess, raw: Raw) -> RawStream:
    return raw(shared, KV)


@pytest.fixture
def peer(shared: DaemonProcess, stream: RawStream, shm: Shm) -> ShmPeer:
    return shm(shared, stream.welcome.shm.ticket)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def descriptors_stay_flat(shared: DaemonProcess) -> Iterator[None]:
    """Those of slabs stay open, of everything else that came in nothing does."""

    before = shared.num_fds()
    yield
    eventually(lambda: shared.num_fds() <= before, "descriptors that came with requests are closed")


def store_from(stream: RawStream, region: int, data_at: int = 0) -> pb.ServerMessage:
    """Stores HASHES from the region."""
    write = stream.ask(store=pb.Store_(hashes=pack(HASHES))).reserved.write_id
    offsets = [data_at + block * KV.block_bytes + part * 8192 for block in range(2) for part in range(2)]
    return stream.ask(
        store_part=pb.StorePart(
            write_id=write,
            blocks=pack_u32([0, 1]),
            parts=pack_u32([0, 1]),
            region=region,
            offsets=pack_u64(offsets),
        )
    )


def test_a_sealed_region_is_accepted_and_read(stream: RawStream, peer: ShmPeer) -> None:
    with memfd(SIZE) as (fd, memory):
        assert peer.register(1, fd, SIZE).code == 0
        memory[:] = DATA.reshape(-1)
        assert store_from(stream, 1).part_stored.num_committed == 2
    assert stream.ask(match=pb.Match(hashes=pack(HASHES))).matched.num_blocks == 2


def test_an_unsealed_region_is_refused(peer: ShmPeer) -> None:
    """A client could shrink it and have the daemon killed by SIGBUS."""
    with memfd(SIZE, sealed=False) as (fd, _):
        reply = peer.register(1, fd, SIZE)
    assert reply.code == InvalidRequest.code
    assert "seal" in reply.message


@pytest.mark.parametrize("announced", [SIZE + 1, 1 << 32, 0])
def test_a_region_announced_larger_than_it_is_is_refused(peer: ShmPeer, announced: int) -> None:
    with memfd(SIZE) as (fd, _):
        assert peer.register(1, fd, announced).code == InvalidRequest.code


def test_a_region_larger_than_a_session_may_have_is_refused(peer: ShmPeer) -> None:
    with memfd(SIZE) as (fd, _):
        assert peer.register(1, fd, (1 << 64) - 1).code == StoreFull.code


@pytest.mark.parametrize("kind", ["file", "directory", "null", "pipe", "socket", "path only"])
def test_a_descriptor_that_is_no_memfd_is_refused(peer: ShmPeer, kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * SIZE)
    opened = {
        "file": lambda: os.open(tmp_path / "file", os.O_RDWR),
        "directory": lambda: os.open(tmp_path, os.O_RDONLY),
        "null": lambda: os.open("/dev/null", os.O_RDWR),
        "pipe": lambda: os.pipe()[0],
        "socket": lambda: socket.socket().detach(),
        "path only": lambda: os.open(tmp_path / "file", os.O_PATH),
    }[kind]()
    try:
        assert peer.register(1, opened, SIZE).code == InvalidRequest.code
    finally:
        os.close(opened)


def test_a_memfd_that_cannot_be_read_is_refused(peer: ShmPeer) -> None:
    """Sealed and large enough, but opened for writing only: mapping it fails."""
    with memfd(SIZE) as (fd, _):
        write_only = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            assert peer.register(1, write_only, SIZE).code == InvalidRequest.code
        finally:
            os.close(write_only)


@pytest.mark.parametrize("num_fds", [0, 2, 4, 8])
def test_a_request_without_exactly_one_descriptor_is_refused(peer: ShmPeer, num_fds: int) -> None:
    with memfd(SIZE) as (fd, _):
        reply, received = peer.ask(Request(Op.REGION, 1, SIZE), [fd] * num_fds)
    assert reply.code == InvalidRequest.code
    assert not received


def test_a_region_id_in_use_is_refused_and_the_region_stays(stream: RawStream, peer: ShmPeer) -> None:
    with memfd(SIZE) as (fd, memory), memfd(SIZE) as (other, _):
        memory[:] = DATA.reshape(-1)
        assert peer.register(1, fd, SIZE).code == 0
        assert peer.register(1, other, SIZE).code == InvalidRequest.code
        assert store_from(stream, 1).part_stored.num_committed == 2


def test_a_dropped_region_id_can_be_used_again(stream: RawStream, peer: ShmPeer) -> None:
    with memfd(SIZE) as (fd, _), memfd(SIZE) as (other, memory):
        assert peer.register(1, fd, SIZE).code == 0
        stream.ask(drop_regions=pb.DropRegions(regions=[1, 7]))
        assert peer.register(1, other, SIZE).code == 0
        memory[:] = DATA.reshape(-1)
        assert store_from(stream, 1).part_stored.num_committed == 2


def test_a_region_dropped_while_it_is_copied_from_is_copied_to_the_end(
    shared: DaemonProcess, stream: RawStream, peer: ShmPeer
) -> None:
    """The requests are sent together, so that the region is dropped while its copies are queued or under way."""
    hashes = chain(64, of=KV, seed=3)
    data = rows(KV, hashes)
    with memfd(data.size) as (fd, memory):
        memory[:] = data.reshape(-1)
        assert peer.register(1, fd, data.size).code == 0
        write = stream.ask(store=pb.Store_(hashes=pack(hashes))).reserved.write_id
        asked = [
            stream.start(
                store_part=pb.StorePart(
                    write_id=write,
                    blocks=pack_u32(np.arange(64)),
                    parts=pack_u32([part]),
                    region=1,
                    offsets=pack_u64(np.arange(64) * KV.block_bytes + part * 8192),
                )
            )
            for part in range(2)
        ]
        dropped = stream.start(drop_regions=pb.DropRegions(regions=[1]))
        answers = {}
        while len(answers) < 3:
            answer = stream.next()
            answers[answer.request_id] = answer
    assert not any(answer.HasField("status") for answer in answers.values())
    assert answers[dropped].HasField("regions_dropped")
    assert sum(answers[number].part_stored.num_committed for number in asked) == 64
    assert shared.stats().sessions[0].region_bytes == 0
    assert not stream.ask(verify=pb.Verify(hashes=pack(hashes))).verified.errors


def test_a_store_from_a_dropped_region_is_refused(stream: RawStream, peer: ShmPeer) -> None:
    with memfd(SIZE) as (fd, _):
        assert peer.register(1, fd, SIZE).code == 0
    stream.ask(drop_regions=pb.DropRegions(regions=[1]))
    answer = store_from(stream, 1)
    assert answer.status.code == 5
    assert "region 1" in answer.status.message


@pytest.mark.parametrize("ticket", [b"\0" * 16, b"x" * 16])
def test_a_wrong_ticket_is_refused(shared: DaemonProcess, shm: Shm, ticket: bytes) -> None:
    """Covers: H2."""
    peer = shm(shared)
    assert peer.ask(Request(Op.ATTACH, ticket=ticket))[0].code == NotAuthenticated.code
    with memfd(SIZE) as (fd, _):
        assert peer.register(1, fd, SIZE).code == NotAuthenticated.code
    assert peer.ask(Request(Op.SLAB, 1))[0].code == NotAuthenticated.code


def test_a_ticket_is_worth_nothing_once_its_session_has_ended(shared: DaemonProcess, raw: Raw, shm: Shm) -> None:
    stream = raw(shared, KV)
    ticket = stream.welcome.shm.ticket  # type: ignore[attr-defined]
    attached = shm(shared, ticket)
    stream.close()
    eventually(lambda: not shared.stats().sessions)
    with memfd(SIZE) as (fd, _):
        assert attached.register(1, fd, SIZE).code == StoreUnavailable.code
    assert shm(shared).ask(Request(Op.ATTACH, ticket=ticket))[0].code == NotAuthenticated.code
    attached.close()


def test_a_region_made_by_another_user_is_refused(
    shared: DaemonProcess, stream: RawStream, child: Callable[..., Child]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a region as another user")
    other = child(
        "register_as",
        shm_path=str(shared.shm_path),
        ticket=stream.welcome.shm.ticket.hex(),  # type: ignore[attr-defined]
        uid=65534,
        register_uid=0,
    )
    code, message = other.step().split(" ", 1)
    assert int(code) == NotAllowed.code
    assert "65534" in message


def test_regions_of_a_session_are_bounded(make_daemon, raw: Raw, shm: Shm, tmp_path: Path) -> None:
    """Covers: C7."""
    (tmp_path / "kvstore.toml").write_text('max_region_bytes = "64KiB"\n')
    daemon = make_daemon(config=tmp_path / "kvstore.toml")
    stream = raw(daemon, KV)
    peer = shm(daemon, stream.welcome.shm.ticket)  # type: ignore[attr-defined]
    with memfd(1 << 16) as (fd, _):
        assert peer.register(1, fd, 1 << 16).code == 0
        assert peer.register(2, fd, 1).code == StoreFull.code
        stream.ask(drop_regions=pb.DropRegions(regions=[1]))
        assert peer.register(2, fd, 1 << 16).code == 0
    stream.close()
