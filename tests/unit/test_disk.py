"""The disk tier on real files: what was written is found again, and nothing else is."""

from pathlib import Path

from builders import chain, records, spec
from disk_faults import found, open_tier, parents_of, served, store


def test_blocks_are_read_as_they_were_written_before_and_after_a_restart(tmp_path: Path) -> None:
    """Covers: A12, D2, D4, D5."""
    small, odd, large = (
        spec(),
        spec(layers=3, bytes_per_part=5000, model="odd"),
        spec(layers=2, bytes_per_part=300_000, model="large"),
    )
    tier = open_tier(tmp_path)
    assert tier.recover() == []
    slots = {}
    hashes = {kv.namespace: chain(5, of=small) for kv in (small, odd, large)}  # the same hashes in each
    for kv in (small, odd, large):
        slots[kv.namespace] = store(tier, kv, hashes[kv.namespace])
        assert served(tier, kv, slots[kv.namespace], records(hashes[kv.namespace])) == [True] * 5
    before = tier.statistics()
    assert before.used_bytes == 5 * (small.block_bytes + odd.block_bytes + large.block_bytes)
    tier.close()

    tier = open_tier(tmp_path)
    recovered = tier.recover()
    assert found(recovered) == hashes
    for each in recovered:
        assert each.slots.tolist() == slots[each.spec.namespace].tolist()
        assert each.parents.tobytes() == parents_of(hashes[each.spec.namespace]).tobytes()
        assert served(tier, each.spec, each.slots, each.hashes) == [True] * 5
    assert tier.statistics() == before
    tier.arena.validate()
    more = chain(30, of=small, seed=1)
    assert not set(store(tier, small, more).tolist()) & set(slots[small.namespace].tolist())
    tier.close()
