"""The answers of several members to one question about a chain, joined into one. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvstore_client.placing import Run


@dataclass(frozen=True, slots=True)
class Found:
    """What one member said of the blocks of these runs, in this order."""

    runs: Sequence[Run]
    num_found: int  # leading blocks that it has
    num_worth: int  # of those, leading ones that are worth loading
    num_writing: int  # blocks right behind those found that are being written


@dataclass(frozen=True, slots=True)
class Prefix:
    """As `Match`, of the whole chain."""

    num_blocks: int
    num_writing: int
    num_found: int


def join(runs: Sequence[Run], answers: Iterable[Found]) -> Prefix:
    """The leading blocks that some member has. Those that nobody spoke for are missing.

    Blocks in writing count where they follow right behind; so do those behind them that are there already.
    """
    told = list(answers)
    num_found = num_worth = num_coming = _leading(runs, told, [answer.num_found for answer in told])
    if any(answer.num_worth < answer.num_found for answer in told):
        num_worth = _leading(runs, told, [answer.num_worth for answer in told])
    if num_worth == num_found and any(answer.num_writing for answer in told):
        num_coming = _leading(runs, told, [answer.num_found + answer.num_writing for answer in told])
    return Prefix(num_worth, num_coming - num_found, num_found)


def _leading(runs: Sequence[Run], answers: Sequence[Found], counts: Sequence[int]) -> int:
    """Blocks before the first that does not count. So many of each answer do; of a run in two, what either has."""
    have: dict[Run, int] = {}
    for answer, left in zip(answers, counts, strict=True):
        for run in answer.runs:
            if left <= 0:
                break
            mine = min(left, run.end - run.begin)
            have[run] = max(mine, have.get(run, 0))
            left -= mine
    total = 0
    for run in runs:
        count = have.get(run, 0)
        total += count
        if count < run.end - run.begin:
            break
    return total
