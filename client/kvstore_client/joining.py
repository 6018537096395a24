"""The answers of several members to one question about a chain, joined into one. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvstore.types import AnyArray, IntArray


@dataclass(frozen=True, slots=True)
class Found:
    """What one member said of its blocks, which are some of the chain's, in order."""

    blocks: IntArray
    num_found: int  # of these, leading ones that it has
    num_worth: int  # of those, leading ones that are worth loading
    num_writing: int  # blocks right behind those found that are being written


@dataclass(frozen=True, slots=True)
class Prefix:
    """As `Match`, of the whole chain."""

    num_blocks: int
    num_writing: int
    num_found: int


def join(answers: Iterable[Found], *, num_blocks: int) -> Prefix:
    """The leading blocks that some member has. A block that nobody spoke for is missing.

    Blocks in writing count where they follow right behind; so do those behind them that are there already.
    """
    found, worth, coming = (np.zeros(num_blocks, bool) for _ in range(3))
    for answer in answers:
        found[answer.blocks[: answer.num_found]] = True
        worth[answer.blocks[: answer.num_worth]] = True
        coming[answer.blocks[: answer.num_found + answer.num_writing]] = True
    num_found = _leading(found)
    num_worth = _leading(worth[:num_found])
    return Prefix(num_worth, _leading(coming[num_found:]) if num_worth == num_found else 0, num_found)


def _leading(flags: AnyArray) -> int:
    """How many are set before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())
