"""Staging ranges against a set of bytes, and how a write is cut into messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_client.cuts import grids, spans
from kvstore_client.staging import FreeRanges


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=30))
def test_ranges_never_overlap_and_everything_comes_back(steps: list[tuple[bool, int]]) -> None:
    """Covers: C7."""
    ranges = FreeRanges(32)
    taken: list[tuple[int, int]] = []
    for take, number in steps:
        used = {byte for begin, size in taken for byte in range(begin, begin + size)}
        if take:
            begin = ranges.take(number)
            fits = [first for first in range(33 - number) if not used & set(range(first, first + number))]
            assert begin == (fits[0] if fits else None)
            if begin is not None:
                taken.append((begin, number))
        elif taken:
            ranges.give(*taken.pop(number % len(taken)))
    for begin, size in taken:
        ranges.give(begin, size)
    assert repr(ranges) == "<FreeRanges [(0, 32)]>"


@given(st.integers(0, 9), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 100))
def test_grids_cover_each_part_of_each_block_once(num_blocks: int, sizes: list[int], most_bytes: int) -> None:
    seen = np.zeros((num_blocks, len(sizes)), int)
    for blocks, parts in grids(num_blocks, sizes, most_bytes=most_bytes):
        seen[blocks, parts] += 1
        moved = sum(sizes[parts]) * (blocks.stop - blocks.start)
        assert moved <= most_bytes or (blocks.stop - blocks.start, parts.stop - parts.start) == (1, 1)
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("begins", "sizes", "expected"),
    [
        ([0, 4, 8], [4, 4, 4], [(0, 12)]),
        ([0, 8], [4, 4], [(0, 4), (8, 4)]),
        ([4, 8, 20], [4, 2, 1], [(4, 6), (20, 1)]),
    ],
)
def test_neighbouring_parts_are_copied_at_once(
    begins: list[int], sizes: list[int], expected: list[tuple[int, int]]
) -> None:
    assert spans(begins, sizes) == expected
