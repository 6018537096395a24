"""Progress of a load: every pair of part and block is counted once, whatever order things come in."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import BlockMissing, WriterFailed
from kvstore_client.progress import Progress

PARTS = (1, 4)
NUM_BLOCKS = 4

pairs = st.tuples(st.sampled_from(PARTS), st.integers(0, NUM_BLOCKS - 1))
steps = st.lists(st.one_of(pairs, st.integers(0, NUM_BLOCKS - 1)), max_size=12)


@given(steps)
def test_counts_agree_with_sets_of_pairs(steps: list[tuple[int, int] | int]) -> None:
    """Covers: A5."""
    progress = Progress(PARTS, NUM_BLOCKS)
    in_place: set[tuple[int, int]] = set()
    failed: set[int] = set()
    for step in steps:
        if isinstance(step, int):
            progress.fail(step, BlockMissing("gone"))
            failed.add(step)
        elif step not in in_place:
            progress.put(step[0], np.array([step[1]]))
            if step[1] not in failed:
                in_place.add(step)
        waiting = [pair for pair in product(PARTS, range(NUM_BLOCKS)) if pair not in in_place and pair[1] not in failed]
        assert progress.left == len(waiting)
        assert set(progress.errors) == failed
        for part in PARTS:
            assert progress.part_missing(part) == sum(pair[0] == part for pair in waiting)
        loaded = 0
        while loaded < NUM_BLOCKS and loaded not in failed and all((part, loaded) in in_place for part in PARTS):
            loaded += 1
        assert progress.num_loaded() == loaded


def test_the_first_error_of_a_block_is_kept_and_blocks_that_there_are_not_are_ignored() -> None:
    progress = Progress(PARTS, NUM_BLOCKS)
    progress.fail(1, BlockMissing("first"))
    progress.fail(1, WriterFailed("second"))
    progress.fail(NUM_BLOCKS, WriterFailed("no such block"))
    assert repr(progress.errors[1]) == "BlockMissing('first')"
    assert list(progress.errors) == [1]


def test_only_followed_parts_that_were_asked_for_arrive_and_only_once() -> None:
    progress = Progress(PARTS, NUM_BLOCKS)
    progress.follow(np.array([2, 3]))
    assert progress.arrive(1, np.array([0, 2, 2, 3])).tolist() == [2, 3]
    assert progress.arrive(1, np.array([2])).tolist() == []
    assert progress.arrive(2, np.array([2])).tolist() == []
    assert progress.never_arrived() == [2, 3]
    assert progress.arrive(4, np.array([3])).tolist() == [3]
    assert progress.never_arrived() == [2]


def test_what_arrives_of_a_block_that_failed_is_not_taken() -> None:
    progress = Progress(PARTS, NUM_BLOCKS)
    progress.follow(np.array([2]))
    progress.fail(2, WriterFailed("its writer left"))
    assert progress.arrive(1, np.array([2])).tolist() == []
