"""What is known of a remote place: names and sizes, and which go first."""

from kvstore_server.tiers.ledger import Ledger


def test_the_limit_is_a_limit() -> None:
    """Covers: E1."""
    ledger = Ledger(10)
    assert ledger.add(b"a", 6)
    assert not ledger.add(b"b", 5)
    assert (ledger.used_bytes, len(ledger), b"b" in ledger) == (6, 1, False)
    assert ledger.add(b"b", 4)
    assert ledger.used_bytes == 10


def test_an_object_written_again_counts_once_and_is_the_newest() -> None:
    ledger = Ledger(10, [(b"a", 5), (b"b", 5)])
    assert ledger.add(b"a", 4)
    assert ledger.used_bytes == 9
    assert ledger.excess(2, most=9) == [b"b"]


def test_the_oldest_go_first_as_few_as_make_room_and_none_that_are_kept() -> None:
    ledger = Ledger(10, [(one, 2) for one in (b"a", b"b", b"c", b"d", b"e")])
    assert ledger.excess(0, most=9) == []
    assert ledger.excess(3, most=9) == [b"a", b"b"]
    assert ledger.excess(3, most=1) == [b"a"]
    assert ledger.excess(3, most=9, keep={b"a"}) == [b"b", b"c"]
    ledger.use(b"a")
    ledger.use(b"unknown")
    assert ledger.excess(3, most=9) == [b"b", b"c"]


def test_what_was_listed_beyond_the_limit_shows_until_it_is_deleted() -> None:
    """Covers: D5."""
    ledger = Ledger(3, [(one, 2) for one in (b"a", b"b", b"c")])
    assert ledger.used_bytes == 6
    assert ledger.excess(0, most=9) == [b"a", b"b"]
    for name in (b"a", b"b", b"b"):
        ledger.remove(name)
    assert (ledger.used_bytes, len(ledger)) == (2, 1)
