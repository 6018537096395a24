"""Pieces of blocks from another host: memory that may still be written to is used for nothing else."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from builders import chain, rows, spec
from devices import StandInRuntime, stand_in_for_cuda

from kvstore.errors import BlockCorrupt, BlockMissing, InvalidRequest, KVStoreError, StoreUnavailable
from kvstore.transport.cuda import DeviceFailed
from kvstore.transport.memory import hash_pieces
from kvstore.types import AnyArray, ByteArray, IntArray, Memory
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import pack_u64, unpack_u64
from kvstore_client import fetching
from kvstore_client.buffers import as_rows
from kvstore_client.fetching import RemoteSource
from kvstore_client.filling import LoadPlan
from kvstore_client.regions import Regions
from kvstore_client.session import OnAnswer, Session
from kvstore_client.staging import Staging, Stagings

KV = spec(layers=2, bytes_per_part=64)
HASHES = chain(4, of=KV)
DATA = rows(KV, HASHES)[:, :64]
BLOCKS = np.arange(4)
SUMS = [xxhash.xxh3_64_intdigest(row.data) for row in np.ascontiguousarray(DATA)]


class FakeRegion:
    """Memory that counts as registered in this session."""

    number = 5
    memory = Memory.HOST

    def __init__(self, session: "FakeSession", memory: ByteArray) -> None:
        self.sessions = {session: None}
        self.array = memory
        self.address = memory.ctypes.data
        self.size_bytes = memory.size

    def checksums(self, addresses: IntArray, size_bytes: int) -> AnyArray:
        return hash_pieces(addresses, np.full(len(addresses), size_bytes))


class FakeSession:
    """Keeps what was asked for; the test answers."""

    agent = None

    def __init__(self) -> None:
        self.alive = True
        self.ended: KVStoreError | None = None
        self.asked: SimpleQueue[tuple[pb.Fetch, OnAnswer]] = SimpleQueue()
        self._open: list[OnAnswer] = []

    def start(self, message: pb.ClientMessage, then: OnAnswer) -> None:
        self._open.append(then)
        self.asked.put((message.fetch, then))

    def tell(self, message: pb.ClientMessage) -> None:
        pass

    def end(self, error: KVStoreError) -> None:
        self.ended = error
        for then in self._open:
            then(StoreUnavailable(str(error)))


class Shelf:
    """A source whose staging has room for four blocks of one part, and a thread that fetches them."""

    def __init__(self) -> None:
        self.session = FakeSession()
        self.regions = Regions()
        region = FakeRegion(self.session, np.zeros(256, np.uint8))
        self.staging = Staging(cast(Any, region), cast(Session, self.session))
        stagings = Stagings(self.regions, size_bytes=256)
        stagings._current = self.staging
        plan = LoadPlan(
            hashes=HASHES,
            parts=[0],
            part_bytes=KV.part_bytes,
            into=None,
            lease="a",
            owns_lease=True,
            checksums=False,
            timeout_s=5.0,
        )
        self.source = RemoteSource(
            KV,
            plan,
            np.arange(1, 5),
            session=cast(Session, self.session),
            regions=self.regions,
            stagings=stagings,
        )
        self.is_stopped = False
        self.target = np.zeros((4, 64), np.uint8)
        self.pool = ThreadPoolExecutor(1)

    def copy(self) -> Any:
        into = as_rows(self.target, num_rows=4, row_bytes=64, where="into")
        return self.pool.submit(self.source.copy, 0, BLOCKS, into, checksums=False, stopped=lambda: self.is_stopped)

    def asked(self) -> tuple[pb.Fetch, OnAnswer]:
        """What the thread asked for, as soon as it did."""
        return self.session.asked.get(timeout=5)

    def stop(self) -> None:
        self.is_stopped = True
        self.source.interrupt()

    def write(self, fetch: pb.Fetch, memory: ByteArray) -> None:
        for offset, row in zip(unpack_u64(fetch.offsets, name="offsets").tolist(), DATA, strict=True):
            memory[offset : offset + 64] = row


@pytest.fixture
def shelf() -> Any:
    shelf = Shelf()
    yield shelf
    shelf.stop()
    shelf.pool.shutdown()


def answer(sums: list[int] = SUMS, **fields: Any) -> pb.ServerMessage:
    return pb.ServerMessage(fetched=pb.Fetched(checksums=pack_u64(np.array(sums, np.uint64)), **fields))


def is_free(staging: Staging) -> bool:
    offset = staging._ranges.take(256)
    if offset is not None:
        staging._ranges.give(offset, 256)
    return offset is not None


def test_a_piece_is_copied_from_staging_when_the_daemon_has_answered(shelf: Shelf) -> None:
    copying = shelf.copy()
    fetch, then = shelf.asked()
    shelf.write(fetch, shelf.staging.region.array)
    then(answer())
    assert copying.result() == {}
    assert (shelf.target == DATA).all()
    assert is_free(shelf.staging)


def test_staging_of_a_piece_that_was_stopped_is_free_when_the_daemon_has_answered_and_not_before(
    shelf: Shelf,
) -> None:
    """Covers: A19."""
    copying = shelf.copy()
    fetch, then = shelf.asked()
    shelf.stop()
    copying.result()
    assert not is_free(shelf.staging)
    shelf.write(fetch, shelf.staging.region.array)
    then(answer())
    assert is_free(shelf.staging)
    assert not shelf.target.any()


def test_a_stopped_piece_that_goes_straight_to_its_place_ends_the_session_if_no_answer_comes(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: A19. Only a closed agent is known to be quiet."""
    monkeypatch.setattr(fetching, "QUIET_S", 0.01)
    shelf.regions._open.append(cast(Any, FakeRegion(shelf.session, shelf.target.reshape(-1))))
    copying = shelf.copy()
    shelf.asked()
    assert shelf.session.ended is None
    shelf.stop()
    copying.result()
    assert shelf.session.ended is not None


def test_a_stopped_piece_that_goes_straight_to_its_place_waits_for_its_answer(shelf: Shelf) -> None:
    shelf.regions._open.append(cast(Any, FakeRegion(shelf.session, shelf.target.reshape(-1))))
    copying = shelf.copy()
    fetch, then = shelf.asked()
    assert fetch.region == 5
    shelf.stop()
    assert not copying.done()
    then(answer())
    copying.result()
    assert shelf.session.ended is None


@pytest.mark.parametrize("straight", [False, True])
def test_a_block_that_arrived_with_another_byte_is_an_error(shelf: Shelf, straight: bool) -> None:
    """Covers: A22."""
    if straight:
        shelf.regions._open.append(cast(Any, FakeRegion(shelf.session, shelf.target.reshape(-1))))
    copying = shelf.copy()
    fetch, then = shelf.asked()
    shelf.write(fetch, shelf.target.reshape(-1) if straight else shelf.staging.region.array)
    then(answer([SUMS[0], SUMS[1] ^ 1, *SUMS[2:]]))
    errors = copying.result()
    assert list(errors) == [1]
    assert isinstance(errors[1], BlockCorrupt)


def test_an_error_of_one_block_is_of_that_block_and_one_of_the_whole_is_raised(shelf: Shelf) -> None:
    copying = shelf.copy()
    fetch, then = shelf.asked()
    shelf.write(fetch, shelf.staging.region.array)
    gone = pb.BlockError(index=2, status=pb.Status(code=BlockMissing.code, message="gone"))
    then(answer(errors=[gone]))
    errors = copying.result()
    assert {block: type(error) for block, error in errors.items()} == {2: BlockMissing}
    copying = shelf.copy()
    _, then = shelf.asked()
    then(StoreUnavailable("the session has ended"))
    with pytest.raises(StoreUnavailable):
        copying.result()
    assert is_free(shelf.staging)


class OnDevice:
    """Rows on a device that cannot be touched from here, in an open region, and a load of the shelf's blocks there."""

    def __init__(self, shelf: Shelf, cuda: StandInRuntime) -> None:
        self.array = cuda.array(np.zeros((4, 64), np.uint8))
        self.region = shelf.regions.create_cuda(self.array, deadline=time.monotonic() + 5)
        self.region.sessions[cast(Session, shelf.session)] = None
        self._shelf = shelf
        self._into = as_rows(
            self.array, num_rows=4, row_bytes=64, where="into", in_cuda_region=shelf.regions.in_cuda_region
        )

    def copy(self) -> Any:
        source, is_stopped = self._shelf.source, lambda: self._shelf.is_stopped
        return self._shelf.pool.submit(source.copy, 0, BLOCKS, self._into, checksums=False, stopped=is_stopped)


@pytest.fixture
def on_device(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnDevice]:
    yield OnDevice(shelf, stand_in_for_cuda(monkeypatch))
    shelf.regions.close()


def test_a_piece_goes_straight_to_a_device_and_is_checked_there(shelf: Shelf, on_device: OnDevice) -> None:
    copying = on_device.copy()
    fetch, then = shelf.asked()
    assert fetch.region == on_device.region.number
    assert unpack_u64(fetch.offsets, name="offsets").tolist() == [0, 64, 128, 192]
    shelf.write(fetch, on_device.array.contents.reshape(-1))
    then(answer())
    assert copying.result() == {}


def test_a_block_that_arrived_on_a_device_with_another_byte_is_an_error(shelf: Shelf, on_device: OnDevice) -> None:
    """Covers: A22."""
    copying = on_device.copy()
    fetch, then = shelf.asked()
    shelf.write(fetch, on_device.array.contents.reshape(-1))
    on_device.array.contents[2, 5] ^= 1
    then(answer())
    errors = copying.result()
    assert list(errors) == [2]
    assert isinstance(errors[2], BlockCorrupt)


def test_rows_on_a_device_whose_region_was_closed_are_asked_for_no_more(shelf: Shelf, on_device: OnDevice) -> None:
    on_device.region.close()
    with pytest.raises(InvalidRequest, match="one that was closed"):
        on_device.copy().result(timeout=5)
    assert shelf.session.asked.empty()
    assert is_free(shelf.staging)


def test_what_arrived_on_a_device_that_fails_is_not_used(
    shelf: Shelf, on_device: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any, **named: Any) -> None:
        raise DeviceFailed("First (cuda:0): cannot copy from it")

    monkeypatch.setattr(on_device.region._device, "copy_out", failing)
    copying = on_device.copy()
    fetch, then = shelf.asked()
    shelf.write(fetch, on_device.array.contents.reshape(-1))
    then(answer())
    with pytest.raises(StoreUnavailable, match="what arrived cannot be checked"):
        copying.result()
