"""What a match missed, and whether those below are told."""

from builders import chain, records
from houses import A, House

from kvstore.types import HashArray
from kvstore_server.lower import NothingBelow
from kvstore_server.values import Space


class Below(NothingBelow):
    def __init__(self) -> None:
        self.missed: list[int] = []

    def sought(self, space: Space, hashes: HashArray, num_found: int) -> None:
        self.missed.append(len(hashes) - num_found)


def test_those_below_are_told_what_a_match_missed_unless_the_daemon_drains() -> None:
    house = House(memory_slabs=2)
    below = house.store.lower.below = Below()
    hashes = chain(6, of=A)
    space = house.put(A, hashes[:4])
    house.store.match(space, records(hashes[:4]))
    house.store.match(space, records(hashes))
    assert below.missed == [2]
    house.store.lower.seeks = False
    house.store.match(space, records(hashes))
    assert below.missed == [2]
    house.tier.close()
