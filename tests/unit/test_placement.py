import hashlib
import math

import numpy as np
import pytest
from builders import chain, spec

from kvstore.errors import InvalidRequest
from kvstore.placement import Placement, segment_blocks, segments

KV = spec()
SEGMENTS = np.random.default_rng(7).integers(0, 1 << 63, 20_000).astype(np.uint64) * np.uint64(2)
THREE = {"a": 1.0, "b": 1.0, "c": 1.0}


def firsts(weights: dict[str, float]) -> list[str]:
    """The first owner of each of SEGMENTS."""
    placement = Placement(weights)
    return [placement.nodes[index] for index in placement.owners(SEGMENTS)[:, 0].tolist()]


def share(of: str, owners: list[str]) -> float:
    return owners.count(of) / len(owners)


def test_a_segment_is_named_by_its_first_block() -> None:
    hashes = chain(150, of=KV)
    for block_tokens, length in ((16, 32), (48, 10), (4, 128), (512, 1), (1000, 1)):
        assert segment_blocks(block_tokens) == length
        names = segments(hashes, block_tokens=block_tokens)
        for index in range(150):
            head = hashes[index - index % length]
            assert names[index] == int.from_bytes(head[:8], "little")
        assert len(segments([], block_tokens=block_tokens)) == 0


def test_chains_that_share_a_beginning_share_its_segments() -> None:
    one, other = chain(200, of=KV), chain(100, of=KV)
    assert (segments(one, block_tokens=4)[:100] == segments(other, block_tokens=4)).all()


def test_owners_are_as_the_page_defines_them() -> None:
    placement = Placement({"kv-0": 1.0, "kv-1": 2.0, "kv-2": 4.0})
    names = np.array([0, 1, 2**64 - 1, 0x0123456789ABCDEF], np.uint64)
    assert placement.owners(names, count=3).tolist() == [by_hand(int(name)) for name in names]


def by_hand(segment: int) -> list[int]:
    """From docs/spec/placement.md, in Python's integers."""
    scores = []
    for index in range(3):
        seed = hashlib.sha256(b"kvstore/member/v1\0" + b"kv-%d" % index).digest()[:8]
        x = segment ^ int.from_bytes(seed, "little")
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        x ^= x >> 31
        scores.append((math.log(((x >> 11) + 0.5) / 2**53) / 2**index, index))
    return [index for _, index in sorted(scores, reverse=True)]


def test_each_takes_a_share_by_its_weight() -> None:
    owners = firsts({"a": 1.0, "b": 2.0, "c": 5.0})
    assert share("a", owners) == pytest.approx(1 / 8, abs=0.01)
    assert share("b", owners) == pytest.approx(2 / 8, abs=0.01)
    assert share("c", owners) == pytest.approx(5 / 8, abs=0.01)


def test_one_that_joins_takes_its_share_and_nothing_else_moves() -> None:
    before, after = firsts(THREE), firsts(THREE | {"d": 1.0})
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"d"}
    assert len(moved) / len(before) == pytest.approx(1 / 4, abs=0.01)


def test_what_one_that_leaves_had_goes_to_the_next_owner() -> None:
    """Covers: D14. So that with replicas the blocks are there already."""
    whole, left = Placement(THREE), Placement({"a": 1.0, "c": 1.0})
    ranked = whole.owners(SEGMENTS, count=2)
    for (first, second), after in zip(ranked.tolist(), left.owners(SEGMENTS)[:, 0].tolist(), strict=True):
        stays = whole.nodes[second] if whole.nodes[first] == "b" else whole.nodes[first]
        assert left.nodes[after] == stays


def test_owners_are_distinct_and_no_more_than_there_are() -> None:
    owners = Placement(THREE).owners(SEGMENTS, count=5)
    assert owners.shape == (len(SEGMENTS), 3)
    assert (np.sort(owners, axis=1) == np.arange(3)).all()


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": 1.0, "b": -1.0}])
def test_no_members_and_no_weight_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest, match="placement"):
        Placement(weights)
