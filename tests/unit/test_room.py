"""How namespaces get room in memory from each other."""

from builders import chain, spec
from houses import SLAB_BYTES, House

from kvstore_server.level import State

SMALL = spec(model="small", layers=1, bytes_per_part=10_000)
LARGE = spec(model="large", layers=1, bytes_per_part=5 * SLAB_BYTES // 2)


def test_a_block_larger_than_a_slab_gets_the_room_of_as_many_as_it_takes() -> None:
    house = House(memory_slabs=8)
    small = house.put(SMALL, chain(200, of=SMALL))
    assert not house.tier.arena.fits(SLAB_BYTES)
    before = small.index.count(State.COMMITTED)
    large = house.put(LARGE, chain(2, of=LARGE))
    assert large.index.count(State.COMMITTED) == 2
    assert 0 < small.index.count(State.COMMITTED) < before, "no more than it takes"
