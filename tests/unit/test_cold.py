"""Which blocks are cold: the oldest of a tier that fills up, each told once."""

import numpy as np
from builders import chain, records, spec
from houses import A, B, House

from kvstore_server.cold import Told, coldest, filled_share
from kvstore_server.watermarks import Watermarks

HALF = Watermarks(high=0.5, low=0.25)


def house() -> House:
    """Of 52 blocks; 40 of two namespaces are there, the ones stored first in front."""
    built = House(memory_slabs=4)
    for seed in range(4):
        built.put(A, chain(6, of=A, seed=seed))
        built.put(B, chain(3, of=B, seed=seed))
    return built


def found(
    at: House, told: Told | None = None, *, watermarks: Watermarks = HALF, most_bytes: int = 1 << 30
) -> list[int]:
    """The stamps of cold blocks, which are noted as told."""
    told = told or Told()
    uses = [told.uses(space, "cpu") for space in at.store.spaces.values()]
    share = filled_share([at.tier.arena])
    chosen = coldest(uses, filled=share, watermarks=watermarks, most_bytes=most_bytes)
    for one, positions in chosen:
        told.note(one, positions)
    stamps = [stamp for one, positions in chosen for stamp in one.stamps[positions].tolist()]
    assert stamps == sorted(stamps), "the oldest first"
    return stamps


def test_all_but_the_newest_that_fit_below_the_mark_are_cold() -> None:
    at = house()
    stamps = found(at)
    kept_bytes = sum(
        space.spec.block_bytes * int((space.index.stamps.of(space.index.stored()) > stamps[-1]).sum())
        for space in at.store.spaces.values()
    )
    all_bytes = sum(space.spec.block_bytes * space.index.num_stored for space in at.store.spaces.values())
    assert len(stamps) > 20
    most = all_bytes * 0.25 / filled_share([at.tier.arena])
    assert most <= kept_bytes < most + B.block_bytes
    at.tier.close()


def test_a_tier_that_is_not_filled_has_none() -> None:
    at = house()
    assert found(at, watermarks=Watermarks(high=0.95, low=0.1)) == []
    assert coldest([], filled=0.0, watermarks=HALF, most_bytes=1) == []
    at.tier.close()


def test_each_is_told_once_a_few_at_a_time() -> None:
    at, told = house(), Told()
    stamps: list[int] = []
    while some := found(at, told, most_bytes=3 * A.block_bytes):
        stamps += some
        assert len(some) <= 4
    assert stamps == found(at)
    assert found(at, told) == []
    at.tier.close()


def test_a_block_that_was_in_writing_when_younger_ones_were_told_is_told_later() -> None:
    """Covers: F6. The last blocks of a chain are the oldest of it, and may be the last to be committed."""
    at, told = house(), Told()
    whole = chain(4, of=A, seed=9)
    at.put(A, whole[:2])
    session = at.session(at.store.spaces[A.namespace])
    write = session.reserve(1, parent=whole[1], hashes=records(whole[2:]), parts=[])
    everything = Watermarks(high=0.5, low=0.0)
    index = at.store.spaces[A.namespace].index
    rows = index.find(records(whole))
    last = index.stamps.of(rows).tolist()
    assert set(found(at, told, watermarks=everything)) & set(last) == set(last[:2])
    session.abort(write.id)
    at.put(A, whole[2:], parent=whole[1])
    assert set(index.stamps.of(index.find(records(whole))).tolist()) <= set(found(at, told, watermarks=everything))
    at.tier.close()


def test_what_was_used_or_lost_since_is_not_meant() -> None:
    at = house()
    first, second = (Told().uses(space, "cpu") for space in at.store.spaces.values())
    at.store.clear(second.space)
    first.space.index.touch(first.rows[:1])
    assert first.unchanged(np.arange(len(first.rows))).size == len(first.rows) - 1
    assert second.unchanged(np.arange(len(second.rows))).size == 0
    at.tier.close()


def test_a_slab_counts_as_filled_by_its_slots_in_use() -> None:
    at = House(memory_slabs=4)
    at.put(spec(model="large", layers=1, bytes_per_part=100_000), chain(3))
    assert 0.3 < filled_share([at.tier.arena]) <= 0.5
    at.tier.close()
