"""The answers of several members to one question about a chain, joined into one. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore_client.placing import NOBODY, Runs


class Told(NamedTuple):
    """What one member said of the blocks that it was asked for, in their order."""

    num_found: int  # leading blocks that it has
    num_worth: int  # of those, leading ones that are worth loading
    num_writing: int  # blocks right behind those found that are being written


@dataclass(frozen=True, slots=True)
class Prefix:
    """As `Match`, of the whole chain."""

    num_blocks: int
    num_writing: int
    num_found: int
    gap: int  # the run in which it ends, with those in writing; the number of runs, if it has all
    holders: Sequence[int]  # of each run, the member that has its blocks; `NOBODY` where none has any


def join(runs: Runs, answers: Iterable[tuple[int, Sequence[int], Told]]) -> Prefix:
    """The leading blocks that some member has: who, the runs that it was asked for, and what it said.

    Those that nobody spoke for are missing. Blocks in writing count where they follow right behind; so do those behind
    them that are there already.
    """
    sizes = runs.sizes()
    have = [(0, 0, 0, NOBODY)] * len(runs)  # of each run: found, found or being written, worth loading, and by whom
    for node, asked, (found, worth, num_writing) in answers:
        coming = found + num_writing
        for run in asked:
            size = sizes[run]
            if worth >= size:
                have[run] = (size, size, size, node)
                found, coming, worth = found - size, coming - size, worth - size
            elif coming > 0:
                have[run] = max(have[run], (min(found, size), min(coming, size), worth, node))
                found, coming, worth = max(0, found - size), coming - size, 0
            else:
                break
    if not have:
        return Prefix(0, 0, 0, 0, ())
    counts, with_coming, with_worth, holders = zip(*have, strict=True)
    num_found, _ = _leading(sizes, counts)
    num_worth, _ = _leading(sizes, with_worth)
    num_coming, gap = _leading(sizes, with_coming)
    return Prefix(num_worth, num_coming - num_found if num_worth == num_found else 0, num_found, gap, holders)


def _leading(sizes: Sequence[int], counts: Sequence[int]) -> tuple[int, int]:
    """Blocks before the first that does not count, where so many leading ones of each run do; and its run."""
    total = 0
    for run, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        total += count
        if count < size:
            return total, run
    return total, len(sizes)
