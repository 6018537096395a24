"""Pins of blocks that are gone: they can be taken back, and leave nothing behind."""

from builders import chain, records, spec
from houses import House

KV = spec(layers=1, bytes_per_part=16384)


def test_a_block_that_was_lost_while_it_was_pinned_can_be_unpinned() -> None:
    at = House(memory_slabs=4)
    store, hashes = at.store, chain(5, of=KV)
    space = at.put(KV, hashes)
    assert store.set_pinned(space, records(hashes), True) == 5
    store.lose(space, hashes[2])
    assert space.index.num_pinned == 5
    assert store.set_pinned(space, records(hashes), False) == 4
    assert space.index.num_pinned == 0
    assert store.clear(space) == (4, 0)
    assert len(space.index) == 0, "its row stayed"
    store.validate()
