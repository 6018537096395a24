"""Loads from slabs that the tests write: what counts as loaded, and who touches the buffers when."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import xxhash
from builders import chain, rows, spec

from kvstore.errors import (
    BlockCorrupt,
    BlockMissing,
    InvalidRequest,
    KVStoreError,
    StoreTimeout,
    StoreUnavailable,
    WriterFailed,
)
from kvstore.transport.shm import SlabLayout
from kvstore.types import ByteArray, Location
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import pack_u32
from kvstore_client import source as source_module
from kvstore_client.buffers import as_destination
from kvstore_client.filling import LoadPlan
from kvstore_client.load import Load
from kvstore_client.options import Counters
from kvstore_client.session import Session
from kvstore_client.slabs import Slab
from kvstore_client.source import Source

KV = spec(layers=2, bytes_per_part=64)
NUM_BLOCKS = 6
HASHES = chain(NUM_BLOCKS, of=KV)
BYTES = rows(KV, HASHES)
LAYOUT = SlabLayout.of(num_slots=NUM_BLOCKS, num_parts=2, block_bytes=KV.block_bytes)
SLOTS = np.array([3, 4, 5, 0, 2, 1])  # a run, and some out of order


class FakeSession:
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.alive = True
        self.told: list[pb.ClientMessage] = []

    def tell(self, message: pb.ClientMessage) -> None:
        self.told.append(message)

    def forget(self, request_id: int) -> None:
        pass


class Shelf:
    """Two slabs with the six blocks in them, and loads from there."""

    def __init__(self) -> None:
        self.session = FakeSession()
        self.counters = Counters()
        self.pool = ThreadPoolExecutor(2)
        self.memory = [np.zeros(LAYOUT.size_bytes, np.uint8) for _ in range(2)]
        self.slabs = np.array([1, 1, 1, 2, 2, 1])
        for block in range(NUM_BLOCKS):
            memory = self.memory[int(self.slabs[block]) - 1]
            slot = int(SLOTS[block])
            header = LAYOUT.headers(memory)[slot]
            header["generation"], header["hash"] = block + 1, HASHES[block]
            LAYOUT.slots(memory)[slot, : KV.block_bytes] = BYTES[block]
            for part in range(2):
                header["checksums"][part] = xxhash.xxh3_64_intdigest(BYTES[block, part * 64 : part * 64 + 64].data)

    def header(self, block: int) -> Any:
        return LAYOUT.headers(self.memory[int(self.slabs[block]) - 1])[int(SLOTS[block])]

    def load(
        self,
        into: ByteArray | None,
        *,
        writing: list[int] | None = None,
        errors: dict[int, KVStoreError] | None = None,
        checksums: bool = False,
        timeout_s: float = 5.0,
        parts: tuple[int, ...] = (0, 1),
    ) -> Load:
        destination = None
        if into is not None:
            destination = as_destination(into, spec=KV, parts=parts, num_blocks=NUM_BLOCKS)
        plan = LoadPlan(
            hashes=HASHES,
            parts=parts,
            part_bytes=KV.part_bytes,
            into=destination,
            lease="lease",
            owns_lease=True,
            checksums=checksums,
            timeout_s=timeout_s,
        )
        session = cast(Session, self.session)
        load = Load(session, plan, pool=self.pool, num_workers=2, counters=self.counters)
        located = Location(self.slabs, SLOTS, np.arange(1, NUM_BLOCKS + 1))
        slabs = {number: Slab(number, LAYOUT, self.memory[number - 1]) for number in (1, 2)}
        source = Source(KV, HASHES, b"".join(HASHES), located, slabs, parts)
        load.begin(source, 9, errors=errors or {}, writing=np.array(writing or [], np.int64))
        return load

    def bodies(self) -> list[str | None]:
        return [message.WhichOneof("body") for message in self.session.told]


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    yield shelf
    shelf.pool.shutdown()


def buffers() -> ByteArray:
    """`[parts, blocks, part_bytes]`."""
    return np.zeros((2, NUM_BLOCKS, 64), np.uint8)


def in_place(into: ByteArray, block: int) -> bool:
    return bool((into[:, block].reshape(-1) == BYTES[block]).all())


def arrived(
    blocks: list[int], parts: list[int], *, failed: dict[int, str] | None = None, last: bool = False
) -> pb.ServerMessage:
    errors = [
        pb.BlockError(index=block, status=pb.Status(code=WriterFailed.code, message=text))
        for block, text in (failed or {}).items()
    ]
    return pb.ServerMessage(
        arrived=pb.Arrived(blocks=pack_u32(blocks), parts=pack_u32(parts), errors=errors, last=last)
    )


def test_every_part_of_every_block_lands_in_its_row_and_the_lease_goes_back(shelf: Shelf) -> None:
    """Covers: A2."""
    into = buffers()
    result = shelf.load(into).wait()
    assert (result.num_loaded, result.errors) == (NUM_BLOCKS, {})
    assert all(in_place(into, block) for block in range(NUM_BLOCKS))
    assert shelf.bodies() == ["release"]


def test_only_the_parts_asked_for_are_written(shelf: Shelf) -> None:
    """Covers: A6."""
    into = buffers()
    load = shelf.load(into, parts=(1,))
    load.wait_part(1)
    assert (into[1] == BYTES[:, 64:]).all()
    assert not into[0].any()
    with pytest.raises(InvalidRequest, match="expected a part that the load was asked for, got 0"):
        load.wait_part(0)


@pytest.mark.parametrize("field", ["generation", "hash"])
def test_a_slot_that_holds_something_else_by_now_is_a_miss(shelf: Shelf, field: str) -> None:
    """Covers: A2, A13, A17."""
    shelf.header(2)[field] = 99 if field == "generation" else bytes(32)
    into = buffers()
    result = shelf.load(into).wait()
    assert result.num_loaded == 2
    assert not into[:, 2].any()
    assert [(block, type(error)) for block, error in result.errors.items()] == [(2, BlockMissing)]
    assert shelf.counters.snapshot(cast(Any, None)).generation_misses >= 1


def test_a_slot_that_changes_while_it_is_copied_is_a_miss(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: A13, A16."""
    copy = Source._copy

    def copy_then_change(self: Source, slab: Slab, part: int, *rest: Any) -> None:
        copy(self, slab, part, *rest)
        if slab.number == 2:
            shelf.header(4)["generation"] = 77

    monkeypatch.setattr(Source, "_copy", copy_then_change)
    result = shelf.load(buffers(), parts=(1,)).wait()
    assert (result.num_loaded, list(result.errors)) == (4, [4])


def test_a_wrong_byte_is_found_where_checksums_are_asked_for_and_the_store_is_told(shelf: Shelf) -> None:
    """Covers: A25."""
    LAYOUT.slots(shelf.memory[0])[int(SLOTS[1]), 70] ^= 1
    result = shelf.load(buffers(), checksums=True).wait()
    assert result.num_loaded == 1
    assert [(block, type(error)) for block, error in result.errors.items()] == [(1, BlockCorrupt)]
    verify = next(message.verify for message in shelf.session.told if message.HasField("verify"))
    assert verify.hashes == HASHES[1]
    assert shelf.counters.snapshot(cast(Any, None)).checksum_failures == 1


def test_views_are_checked_against_checksums_too(shelf: Shelf) -> None:
    """Covers: A25."""
    LAYOUT.slots(shelf.memory[0])[int(SLOTS[1]), 70] ^= 1
    load = shelf.load(None, checksums=True)
    assert load.wait().num_loaded == 1
    with pytest.raises(BlockCorrupt):
        load.view(1, 1)


def test_parts_of_followed_blocks_are_taken_as_they_arrive(shelf: Shelf) -> None:
    """Covers: B7, G5."""
    into = buffers()
    load = shelf.load(into, writing=[4, 5])
    with pytest.raises(InvalidRequest, match="cannot be read yet"):
        load.view(4, 0)
    load.hear(arrived([4, 5], [0, 0]))
    load.wait_part(0)
    assert (into[0] == BYTES[:, :64]).all()
    assert not into[1, 4:].any()
    load.hear(arrived([4, 5], [1, 1], last=True))
    assert load.wait().num_loaded == NUM_BLOCKS
    assert all(in_place(into, block) for block in range(NUM_BLOCKS))


@pytest.mark.parametrize("to_view", [False, True])
def test_parts_that_a_follower_did_not_ask_for_are_passed_over(shelf: Shelf, to_view: bool) -> None:
    """Those of another rank, or of layers that another load brings."""
    load = shelf.load(None if to_view else buffers(), writing=[4, 5], parts=(1,))
    for block in (4, 5, 4):
        load.hear(arrived([block], [0]))
    load.hear(arrived([4, 5], [1, 1], last=True))
    assert load.wait().num_loaded == NUM_BLOCKS


def test_a_writer_that_fails_takes_its_blocks_along_and_leaves_the_prefix(shelf: Shelf) -> None:
    """Covers: A1, B7."""
    load = shelf.load(buffers(), writing=[4, 5])
    load.hear(arrived([4, 5], [0, 0], failed={4: "its writer left", 5: "its writer left"}, last=True))
    result = load.wait()
    assert result.num_loaded == 4
    assert {type(error) for error in result.errors.values()} == {WriterFailed}
    with pytest.raises(WriterFailed, match="its writer left"):
        load.wait_part(1)


def test_parts_that_never_came_are_not_loaded_even_if_the_store_says_it_is_done(shelf: Shelf) -> None:
    """Covers: A5."""
    load = shelf.load(buffers(), writing=[5])
    load.hear(arrived([5], [0], last=True))
    assert load.wait().num_loaded == 5
    assert "not all parts arrived" in str(load.errors[5])


def test_arrivals_that_make_no_sense_fail_the_load(shelf: Shelf) -> None:
    load = shelf.load(buffers(), writing=[5])
    load.hear(arrived([NUM_BLOCKS], [0]))
    with pytest.raises(KVStoreError, match="report it"):
        load.wait()


def test_blocks_that_cannot_be_served_are_errors_of_the_load(shelf: Shelf) -> None:
    """Covers: A5."""
    into = buffers()
    load = shelf.load(into, errors={1: BlockMissing("not stored")})
    result = load.wait()
    assert (result.num_loaded, list(result.errors)) == (1, [1])
    assert not into[:, 1].any()
    with pytest.raises(BlockMissing, match="not stored"):
        load.wait_part(0)


def test_a_load_whose_writer_is_slow_ends_at_its_deadline_and_takes_nothing_after(shelf: Shelf) -> None:
    """Covers: B1, B3, A19."""
    into = buffers()
    load = shelf.load(into, writing=[5])
    with pytest.raises(StoreTimeout, match="2 of 12 parts of blocks left"):
        load.wait(0.05)
    load.hear(arrived([5, 5], [0, 1], last=True))
    shelf.pool.submit(int).result()
    assert not into[:, 5].any()
    with pytest.raises(StoreTimeout):
        load.wait()
    assert shelf.bodies() == ["release"]


def test_a_lost_session_fails_the_load(shelf: Shelf) -> None:
    """Covers: A15, A22."""
    load = shelf.load(buffers(), writing=[5])
    load.hear(StoreUnavailable("session: it has ended"))
    with pytest.raises(StoreUnavailable, match="it has ended"):
        load.wait()
    with pytest.raises(StoreUnavailable):
        load.wait_part(0)


def test_cancel_waits_for_the_piece_in_flight(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: A19."""
    copying, go_on = threading.Event(), threading.Event()
    copy_pieces = source_module.copy_pieces

    def slow_copy(*pieces: Any) -> None:
        copying.set()
        assert go_on.wait(5)
        copy_pieces(*pieces)

    monkeypatch.setattr(source_module, "copy_pieces", slow_copy)
    into = buffers()
    load = shelf.load(into)
    assert copying.wait(5)
    canceller = threading.Thread(target=load.cancel)
    canceller.start()
    canceller.join(0.05)
    assert canceller.is_alive()
    go_on.set()
    canceller.join(5)
    assert not canceller.is_alive()
    before = into.copy()
    shelf.pool.submit(int).result()
    assert (into == before).all()
    assert load.wait().num_loaded == 0


def test_views_show_the_bytes_in_place_and_cannot_be_written(shelf: Shelf) -> None:
    for memory in shelf.memory:
        memory.flags.writeable = False
    load = shelf.load(None)
    for block in range(NUM_BLOCKS):
        assert (load.view(block, 1) == BYTES[block, 64:]).all()
    assert not load.view(0, 0).flags.writeable
    load.check()
    assert shelf.bodies() == []
    load.release()
    load.release()
    assert shelf.bodies() == ["release"]
    with pytest.raises(InvalidRequest, match="got one that was released"):
        load.view(0, 0)


def test_check_tells_that_what_was_viewed_has_changed(shelf: Shelf) -> None:
    """Covers: A13."""
    load = shelf.load(None)
    shelf.header(3)["generation"] = 0
    with pytest.raises(BlockMissing, match="block 3"):
        load.check()


@pytest.mark.parametrize(("block", "part"), [(-1, 0), (NUM_BLOCKS, 0), (0, 2), (0, -1)])
def test_a_view_of_what_there_is_not_is_refused(shelf: Shelf, block: int, part: int) -> None:
    load = shelf.load(None)
    with pytest.raises(InvalidRequest, match="expected a block below 6"):
        load.view(block, part)


def test_a_huge_part_is_copied_in_columns(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "CALL_BYTES", 24)
    into = buffers()
    assert shelf.load(into).wait().num_loaded == NUM_BLOCKS
    assert all(in_place(into, block) for block in range(NUM_BLOCKS))
