"""Bytes that changed in the store are noticed, and the block is gone."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
from builders import chain, records, rows, spec
from service.harness import DEADLINE_S, eventually

from kvstore_client import BlockCorrupt, BlockMissing, BlockRows, ClientOptions, KVClient, Outcome
from kvstore_server.embedded import EmbeddedDaemon

KV = spec(layers=3, bytes_per_part=8192)
HASHES = chain(5, of=KV)
DATA = rows(KV, HASHES)

Flip = Callable[[int, int], None]


@pytest.fixture
def embedded() -> Iterator[EmbeddedDaemon]:
    with closing(EmbeddedDaemon(capacity_bytes=4 << 20, slab_bytes=1 << 20)) as daemon:
        yield daemon


@pytest.fixture
def client(embedded: EmbeddedDaemon) -> Iterator[KVClient]:
    options = ClientOptions(timeout_s=DEADLINE_S, integrity="always")
    with KVClient(embedded.address, KV, options=options) as client:
        client.wait_ready(DEADLINE_S)
        with client.store(HASHES) as write:
            write.put_blocks(DATA)
        yield client


@pytest.fixture
def flip(embedded: EmbeddedDaemon, client: KVClient) -> Flip:
    """Changes one bit of a block, in the tier's memory."""

    def flip(block: int, offset: int) -> None:
        store = embedded.daemon.store
        index = store.spaces[KV.namespace].index
        (address,) = store.tier.addresses(index.memory.slots(index.find(records([HASHES[block]]))))
        ctypes.c_uint8.from_address(int(address) + offset).value ^= 1

    return flip


@pytest.mark.parametrize("offset", [0, 8192, KV.block_bytes - 1])
def test_a_flipped_bit_is_noticed_by_a_load_and_the_block_is_dropped(
    embedded: EmbeddedDaemon, client: KVClient, flip: Flip, offset: int
) -> None:
    """Covers: A1, A2, A25."""
    flip(2, offset)
    target = np.zeros_like(DATA)

    result = client.load(HASHES, into=BlockRows(target)).wait()

    assert result.num_loaded == 2
    assert list(result.errors) == [2]
    assert isinstance(result.errors[2], BlockCorrupt)
    good = [0, 1, 3, 4]
    assert (target[good] == DATA[good]).all()
    assert client.statistics().checksum_failures == 1
    eventually(lambda: embedded.daemon.store.counters.blocks_lost == 1, "the client had it verified")
    assert client.match(HASHES, lease="").num_blocks == 2
    missing = client.load(HASHES, view=True).wait()
    assert isinstance(missing.errors[2], BlockMissing)


def test_a_lost_block_can_be_stored_again_and_what_follows_is_a_hit_again(client: KVClient, flip: Flip) -> None:
    """Covers: A25, B6."""
    flip(2, 100)
    assert isinstance(client.verify(HASHES)[2], BlockCorrupt)
    with client.store(HASHES) as write:
        assert write.outcomes == [Outcome.STORED, Outcome.STORED, Outcome.NEW, Outcome.STORED, Outcome.STORED]
        write.put_blocks(DATA)
    target = np.zeros_like(DATA)
    assert client.match(HASHES, lease="").num_blocks == 5
    assert client.load(HASHES, into=BlockRows(target)).wait().num_loaded == 5
    assert (target == DATA).all()


def test_verify_drops_what_differs_and_keeps_the_rest(embedded: EmbeddedDaemon, client: KVClient, flip: Flip) -> None:
    """Covers: A25."""
    assert client.verify(HASHES) == {}
    flip(1, 5)
    flip(4, 9000)
    errors = client.verify([*HASHES, b"x" * 32])  # type: ignore[list-item]
    assert {index: type(error) for index, error in errors.items()} == {
        1: BlockCorrupt,
        4: BlockCorrupt,
        5: BlockMissing,
    }
    assert embedded.daemon.store.counters.blocks_lost == 2
    embedded.daemon.store.validate()


def test_a_corrupt_block_that_others_view_is_dropped_and_they_can_tell(
    embedded: EmbeddedDaemon, client: KVClient, flip: Flip
) -> None:
    """Covers: A13, A25."""
    load = client.load(HASHES, view=True)
    load.wait()
    load.check()
    flip(0, 0)
    assert list(client.verify(HASHES)) == [0]
    with pytest.raises(BlockMissing):
        load.check()
    load.release()
    eventually(lambda: not embedded.daemon.store.spaces[KV.namespace].index.num_leased)
    embedded.daemon.store.validate()
