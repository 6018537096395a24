"""The journal: events are numbered without a gap, and a watcher that falls behind is told so and dropped."""

import numpy as np
from builders import chain, spec

from kvstore.hashing import pack, unpack
from kvstore.types import BootId
from kvstore_server.admin import MAX_EVENTS_BEHIND, Journal
from kvstore_server.values import Change

KV = spec()
HASHES = unpack(pack(chain(1, of=KV)))
CHANGE = Change(
    stored=True,
    namespace=KV.namespace,
    hashes=HASHES,
    parents=np.zeros_like(HASHES),
    tier="cpu",
    block_tokens=KV.block_tokens,
)


def test_a_watcher_that_falls_behind_is_told_and_gets_no_more_and_the_others_go_on() -> None:
    journal = Journal(BootId(b"b" * 16))
    behind, awake = journal.watch(), journal.watch()
    for sequence in range(1, MAX_EVENTS_BEHIND + 3):
        journal.record(CHANGE)
        event = awake.get_nowait()
        assert event is not None
        assert event.sequence == sequence
    events = [behind.get_nowait() for _ in range(behind.qsize())]
    assert [event.sequence for event in events[:-1] if event] == list(range(1, MAX_EVENTS_BEHIND + 1))
    assert events[-1] is None


def test_changes_that_nobody_watches_are_numbered_all_the_same() -> None:
    journal = Journal(BootId(b"b" * 16))
    journal.record(CHANGE)
    queue = journal.watch()
    journal.record(CHANGE)
    event = queue.get_nowait()
    assert event is not None
    assert event.sequence == 2
    journal.unwatch(queue)
    journal.record(CHANGE)
    assert queue.empty()
