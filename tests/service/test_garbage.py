"""What no client would send: it is refused, the stream goes on where the contract says so, the daemon always."""

import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, DaemonProcess, RawStream, ShmPeer, eventually, memfd

from kvstore.hashing import pack
from kvstore.transport.shm import Op, Request
from kvstore.types import BlockHash
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import StoreStub
from kvstore.wire import MAX_HASHES, MAX_MESSAGE_BYTES, pack_u32, pack_u64, spec_to_proto
from kvstore_client import InvalidRequest, KVClient, Outcome

KV = spec(layers=2, bytes_per_part=8192)
HASHES = chain(4, of=KV)
SIZE = 4 * KV.block_bytes
INVALID, NOT_FOUND = 3, 5

Connect = Callable[..., KVClient]
Raw = Callable[..., RawStream]
Shm = Callable[..., ShmPeer]


@pytest.fixture
def stream(shared: DaemonProcess, raw: Raw) -> RawStream:
    return raw(shared, KV)


@pytest.fixture(autouse=True)
def the_daemon_still_serves(shared: DaemonProcess, connect: Connect) -> Iterator[None]:
    """Whatever was sent, another client notices nothing."""
    client = connect(shared, spec(layers=2, bytes_per_part=8192, model="bystander"))
    yield
    hashes = chain(2, of=client.spec)
    with client.store(hashes) as write:
        write.put_blocks(rows(client.spec, hashes))
    assert write.outcomes == [Outcome.STORED] * 2
    assert client.match(hashes, lease="").num_blocks == 2


# The stream.


@pytest.mark.parametrize("body", [{}, {"ping": pb.Ping()}, {"match": pb.Match(hashes=pack(HASHES), lease="x")}])
def test_a_first_message_that_is_not_hello_ends_the_stream(shared: DaemonProcess, raw: Raw, body: dict) -> None:
    stream = raw(shared)
    stream.start(**body)
    error = stream.end()
    assert error.code().name == "INVALID_ARGUMENT"
    assert "Hello" in error.details()


def test_a_stream_without_any_message_is_refused(shared: DaemonProcess, raw: Raw) -> None:
    stream = raw(shared)
    stream.finish_sending()
    assert stream.end().code().name == "INVALID_ARGUMENT"


@pytest.mark.parametrize("welcomed", [False, True])
def test_a_message_that_cannot_be_decoded_ends_the_stream(shared: DaemonProcess, raw: Raw, welcomed: bool) -> None:
    stream = raw(
        shared, serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString()
    )
    if welcomed:
        stream.hello(KV)
    stream.send(b"\xff" * 100)
    assert stream.end().code().name == "INVALID_ARGUMENT"
    eventually(lambda: len(shared.stats().sessions) == 1)


def test_an_oversized_message_ends_the_stream(shared: DaemonProcess, raw: Raw) -> None:
    stream = raw(shared, KV)
    stream.start(match=pb.Match(hashes=bytes(MAX_MESSAGE_BYTES + 1)))
    assert stream.end().code().name == "RESOURCE_EXHAUSTED"
    eventually(lambda: len(shared.stats().sessions) == 1)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"hello": pb.Hello(protocol_version=1, spec=spec_to_proto(KV))},
        {"match": pb.Match(hashes=b"x" * 33)},
        {"match": pb.Match(hashes=b"x" * 32, lease="l" * 257)},
        {"match": pb.Match(hashes=bytes(32 * (MAX_HASHES + 1)))},
        {"prefetch": pb.Prefetch(hashes=b"x")},
        {"load": pb.Load(hashes=b"x" * 31, lease="l")},
        {"load": pb.Load(hashes=b"x" * 32, lease="")},
        {"store": pb.Store_(hashes=b"x" * 63)},
        {"store": pb.Store_(hashes=b"x" * 32, parent=b"x")},
        {"store": pb.Store_(hashes=b"x" * 32, parent=b"x" * 64)},
        {"store": pb.Store_(hashes=b"x" * 32, heads=b"abc")},
        {"store": pb.Store_(hashes=b"x" * 32, heads=pack_u32([0]))},
        {"store": pb.Store_(hashes=b"x" * 32, heads=pack_u32([4294967295]))},
        {"store": pb.Store_(hashes=b"x" * 32, heads=pack_u32(np.arange(1 << 20)))},
        {"store": pb.Store_(hashes=b"x" * 32, parts=b"abc")},
        {"store": pb.Store_(hashes=b"x" * 32, parts=pack_u32([2]))},
        {"store": pb.Store_(hashes=b"x" * 32, parts=pack_u32([0, 0]))},
        {"store": pb.Store_(hashes=b"x" * 32, parts=pack_u32([4294967295]))},
        {"store": pb.Store_(hashes=b"x" * 32, parts=pack_u32(np.arange(1 << 20)))},
        {"verify": pb.Verify(hashes=b"x" * 5)},
        {"release": pb.Release(lease="l" * 257)},
    ],
    ids=lambda body: " ".join(body),
)
def test_a_bad_request_is_answered_and_the_stream_goes_on(stream: RawStream, body: dict[str, Any]) -> None:
    answer = stream.ask(**body)
    assert answer.status.code == INVALID
    assert "expected" in answer.status.message
    assert answer.WhichOneof("body") is None
    assert stream.ask(ping=pb.Ping()).HasField("pong")


@pytest.mark.parametrize(
    "body",
    [
        {"commit": pb.Commit(write_id=77)},
        {"abort": pb.Abort(write_id=(1 << 64) - 1)},
        {"store_part": pb.StorePart(write_id=1, blocks=pack_u32([0]), parts=pack_u32([0]), region=9, offsets=bytes(8))},
    ],
    ids=lambda body: " ".join(body),
)
def test_what_is_unknown_is_not_found(stream: RawStream, body: dict[str, Any]) -> None:
    assert stream.code(**body) == NOT_FOUND
    assert stream.ask(ping=pb.Ping()).HasField("pong")


def test_unknown_leases_regions_and_slabs_are_ignored(stream: RawStream) -> None:
    assert stream.ask(release=pb.Release(lease="nobody")).released.num_blocks == 0
    assert stream.ask(drop_regions=pb.DropRegions(regions=[1, 2, 4294967295])).HasField("regions_dropped")
    stream.start(slabs_dropped=pb.SlabsDropped(slabs=[0, 1, 1, 4294967295]))
    assert stream.ask(ping=pb.Ping()).HasField("pong")


def test_a_message_with_many_ids_of_one_request_is_answered_each_time(stream: RawStream) -> None:
    for _ in range(3):
        stream.send(pb.ClientMessage(request_id=5, ping=pb.Ping()))
    assert [stream.next().request_id for _ in range(3)] == [5, 5, 5]


@pytest.mark.parametrize(
    ("part", "code"),
    [
        ({"blocks": [9]}, INVALID),
        ({"blocks": [0, 0]}, INVALID),
        ({"blocks": [4294967295]}, INVALID),
        ({"blocks": []}, INVALID),
        ({"parts": [0, 0]}, INVALID),
        ({"parts": [2]}, INVALID),
        ({"parts": [4294967295]}, INVALID),
        ({"parts": []}, INVALID),
        ({"parts": list(range(100_000))}, INVALID),
        ({"offsets": [SIZE - 8191]}, INVALID),
        ({"offsets": [SIZE]}, INVALID),
        ({"offsets": [(1 << 63) - 1]}, INVALID),
        ({"offsets": [(1 << 64) - 1]}, INVALID),
        ({"offsets": []}, INVALID),
        ({"offsets": [0, 0]}, INVALID),
        ({"region": 2}, NOT_FOUND),
        ({"write_id": 999_999}, NOT_FOUND),
    ],
    ids=lambda part: str(part)[:40],
)
def test_a_bad_store_part_takes_nothing_in_and_the_write_can_go_on(
    shared: DaemonProcess, stream: RawStream, shm: Shm, part: dict[str, Any], code: int
) -> None:
    hashes = HASHES[:2]
    data = rows(KV, hashes)
    with memfd(SIZE) as (fd, memory):
        memory[: data.size] = data.reshape(-1)
        assert shm(shared, stream.welcome.shm.ticket).register(1, fd, SIZE).code == 0  # type: ignore[attr-defined]
        write = stream.ask(store=pb.Store_(hashes=pack(hashes))).reserved.write_id

        def store_part(**fields: Any) -> pb.ServerMessage:
            values = {"write_id": write, "blocks": [0], "parts": [0], "region": 1, "offsets": None} | fields
            offsets = values["offsets"]
            if offsets is None:
                offsets = [0] * (len(values["blocks"]) * len(values["parts"]))
            return stream.ask(
                store_part=pb.StorePart(
                    write_id=values["write_id"],
                    blocks=pack_u32(values["blocks"]),
                    parts=pack_u32(values["parts"]),
                    region=values["region"],
                    offsets=np.array(offsets, np.uint64).tobytes(),
                )
            )

        answer = store_part(**part)
        assert answer.status.code == code, answer
        offsets = [block * KV.block_bytes + number * 8192 for block in range(2) for number in range(2)]
        whole = store_part(blocks=[0, 1], parts=[0, 1], offsets=offsets)
        assert whole.part_stored.num_committed == 2, whole
        again = store_part(blocks=[0], parts=[0])
        assert again.status.code == INVALID, "a part is taken in once"
    assert list(stream.ask(commit=pb.Commit(write_id=write)).committed.outcomes) == [Outcome.STORED] * 2
    assert not stream.ask(verify=pb.Verify(hashes=pack(hashes))).verified.errors


@pytest.mark.parametrize("field", ["blocks", "parts", "offsets"])
def test_a_packed_field_that_was_cut_is_refused(shared: DaemonProcess, stream: RawStream, shm: Shm, field: str) -> None:
    with memfd(SIZE) as (fd, _):
        assert shm(shared, stream.welcome.shm.ticket).register(1, fd, SIZE).code == 0  # type: ignore[attr-defined]
    write = stream.ask(store=pb.Store_(hashes=pack(HASHES))).reserved.write_id
    good = {"blocks": pack_u32([0]), "parts": pack_u32([0]), "offsets": pack_u64([0])}
    answer = stream.ask(store_part=pb.StorePart(write_id=write, region=1, **(good | {field: good[field][:-1]})))
    assert answer.status.code == INVALID
    assert field in answer.status.message


def test_a_chain_with_one_block_twice_is_refused_and_nothing_is_reserved(stream: RawStream) -> None:
    answer = stream.ask(store=pb.Store_(hashes=pack([HASHES[0], HASHES[1], HASHES[0]])))
    assert answer.status.code == INVALID
    assert "each block once" in answer.status.message
    outcomes = list(stream.ask(store=pb.Store_(hashes=pack(HASHES))).reserved.outcomes)
    assert outcomes == [Outcome.NEW] * len(HASHES)


def test_a_write_of_another_session_cannot_be_used(shared: DaemonProcess, stream: RawStream, raw: Raw) -> None:
    """Covers: H2."""
    write = stream.ask(store=pb.Store_(hashes=pack(HASHES))).reserved.write_id
    other = raw(shared, KV)
    assert other.code(commit=pb.Commit(write_id=write)) == NOT_FOUND
    assert other.code(abort=pb.Abort(write_id=write)) == NOT_FOUND
    assert shared.stats().blocks_writing == 4


def test_requests_sent_without_reading_answers_hurt_nobody(shared: DaemonProcess, stream: RawStream) -> None:
    """A client that stops reading is held back by flow control, not by the daemon's memory for ever."""
    last = 0
    for _ in range(2000):
        last = stream.start(match=pb.Match(hashes=pack(HASHES), lease="one"))
    assert stream.answer(last).matched.num_blocks == 0
    assert shared.stats().sessions[0].num_leases == 0


# Sizes.


@pytest.mark.parametrize("length", [0, 1, 100_000])
def test_hash_lists_of_any_length_are_matched_stored_and_loaded(shared: DaemonProcess, raw: Raw, length: int) -> None:
    """Covers: E5, E11. Blocks are accepted from the left until room runs out."""
    kv = spec(layers=1, bytes_per_part=64, model="small")
    stream = raw(shared, kv)
    packed = pack([BlockHash(number.to_bytes(32, "big")) for number in range(length)])
    assert stream.ask(match=pb.Match(hashes=packed, lease="a")).matched.num_blocks == 0
    reserved = stream.ask(store=pb.Store_(hashes=packed)).reserved
    outcomes = list(reserved.outcomes)
    assert len(outcomes) == length
    num_new = outcomes.count(Outcome.NEW)
    assert outcomes == [Outcome.NEW] * num_new + [Outcome.FULL] * (length - num_new)
    assert num_new == length if length < 10 else 10_000 < num_new < length
    matched = stream.ask(match=pb.Match(hashes=packed, lease="a")).matched
    assert (matched.num_blocks, matched.num_writing) == (0, num_new)
    located = stream.ask(load=pb.Load(hashes=packed, lease="a")).located
    assert len(located.slabs) == len(located.slots) == 4 * length
    assert len(located.generations) == 8 * length
    assert len(located.errors) == length
    committed = list(stream.ask(commit=pb.Commit(write_id=reserved.write_id)).committed.outcomes)
    assert committed.count(Outcome.FAILED) == num_new
    assert stream.ask(verify=pb.Verify(hashes=packed)).verified.errors[length - 1 :] or not length


def test_the_client_refuses_hashes_that_are_no_hashes(shared: DaemonProcess, connect: Connect) -> None:
    client = connect(shared, KV)
    with pytest.raises(InvalidRequest, match=r"hashes\[1\]"):
        client.match([HASHES[0], b"short"])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="at most"):
        client.match([HASHES[0]] * (MAX_HASHES + 1))


# Bytes that are no messages at all.


@pytest.mark.parametrize(
    "datagram",
    [
        b"x",
        b"\0" * (Request.SIZE - 1),
        b"\0" * Request.SIZE,
        b"\xff" * Request.SIZE,
        b"x" * 4000,
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_a_garbage_datagram_on_the_shm_socket_is_refused(
    shared: DaemonProcess, stream: RawStream, shm: Shm, datagram: bytes
) -> None:
    peer = shm(shared)
    assert peer.ask(datagram)[0].code == INVALID
    attach = Request(Op.ATTACH, ticket=stream.welcome.shm.ticket)  # type: ignore[attr-defined]
    assert peer.ask(attach)[0].code == 0, "the connection goes on"


def test_a_shm_peer_that_never_reads_is_dropped_and_its_descriptors_with_it(
    shared: DaemonProcess, stream: RawStream, shm: Shm
) -> None:
    write = stream.ask(store=pb.Store_(hashes=pack(HASHES))).reserved
    located = stream.ask(load=pb.Load(hashes=pack(HASHES), lease="f", follow=True)).located
    slab = int(np.frombuffer(located.slabs, "<u4")[0])
    before = shared.num_fds()
    peer = shm(shared, stream.welcome.shm.ticket)  # type: ignore[attr-defined]
    with pytest.raises(OSError):  # noqa: PT011, PT012
        for _ in range(100_000):
            peer.socket.send(Request(Op.SLAB, slab).encode())
    peer.close()
    eventually(lambda: shared.num_fds() <= before)
    stream.ask(abort=pb.Abort(write_id=write.write_id))


def test_connections_without_a_word_are_accepted_and_forgotten(shared: DaemonProcess, shm: Shm) -> None:
    before = shared.num_fds()
    peers = [shm(shared) for _ in range(100)]
    eventually(lambda: shared.num_fds() >= before + 100)
    for peer in peers:
        peer.close()
    eventually(lambda: shared.num_fds() <= before)


def test_random_bytes_on_the_grpc_port_hurt_nobody(shared: DaemonProcess) -> None:
    for seed in range(5):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.settimeout(DEADLINE_S)
            peer.connect(str(shared.socket_path))
            peer.sendall(np.random.default_rng(seed).bytes(1000))
            with open(os.devnull, "wb") as nowhere:
                try:
                    while data := peer.recv(4096):
                        nowhere.write(data)
                except ConnectionResetError:
                    pass


def test_an_unknown_method_is_unimplemented(shared: DaemonProcess) -> None:
    """Covers: H1."""
    call = shared.channel.unary_unary("/kvstore.v1.Admin/Run", lambda code: code, lambda reply: reply)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"print(1)", timeout=DEADLINE_S)
    assert caught.value.code().name == "UNIMPLEMENTED"


def test_many_sessions_over_one_channel_do_not_mix(shared: DaemonProcess, stream: RawStream) -> None:
    stub = StoreStub(stream.channel)
    for _ in range(20):
        hello = pb.ClientMessage(request_id=1, hello=pb.Hello(protocol_version=1, spec=spec_to_proto(KV)))
        answers = list(stub.Session(iter([hello]), timeout=DEADLINE_S))
        assert [answer.WhichOneof("body") for answer in answers] == ["welcome"]
