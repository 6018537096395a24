"""What both sides count. Names are those of the Prometheus series, without prefix and suffix."""

import threading
from typing import Final

# name -> what it says; a rank counts what it does itself.
SERIES: Final[dict[str, str]] = {
    "lookups": "Questions to the store, each about the blocks of one request.",
    "lookup_failures": "Lookups without an answer: the store was away, slow or refused.",
    "lookup_hits": "Lookups that found at least one block.",
    "hit_tokens": "Tokens that requests were given from the store, before they were loaded.",
    "loads": "Loads begun by this rank.",
    "load_failures": "Loads of which at least one block did not arrive; its tokens are recomputed.",
    "blocks_loaded": "Blocks of which this rank's parts are in place.",
    "layers_waited": "Layers that were waited for within a forward pass.",
    "saves": "Saves begun by this rank, each of the blocks of one request.",
    "save_failures": "Saves given up: the store was away, slow or refused.",
    "blocks_saved": "Blocks of which the store took this rank's parts.",
    "blocks_known": "Blocks offered that the store had, or was getting from another engine.",
    "blocks_refused": "Blocks that the store had no room for, or whose parent it did not have.",
    "layers_saved": "Layers handed over as they were computed.",
}


class Tally:
    """Counts since they were last taken; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        assert name in SERIES, name
        if amount:
            with self._lock:
                self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, int]:
        """The counts, which begin at zero again; empty if nothing was counted."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts


def sum_of(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """The sums by name."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in one.keys() | other.keys()}
