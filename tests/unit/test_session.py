"""What one session may hold: limits, and that a refusal leaves nothing behind."""

import numpy as np
import pytest
from builders import chain, records, spec
from houses import House

from kvstore.errors import InvalidRequest, StoreFull
from kvstore.types import Outcome, SessionId
from kvstore_server import session as session_module
from kvstore_server.session import Session
from kvstore_server.store import Store
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.pinning import PageLock

KV = spec()
KV_LARGE = spec(layers=1, bytes_per_part=60_000)  # a slab of `House` has room for four blocks
HASHES = records(chain(4, of=KV))


@pytest.fixture
def session() -> Session:
    store = Store(CpuTier(capacity_bytes=1 << 20, slab_bytes=1 << 20, page_lock=PageLock(wanted=False)))
    return Session(
        number=SessionId(1),
        name="test",
        space=store.open_space(KV),
        store=store,
        wake=lambda: None,
        max_region_bytes=1 << 20,
    )


def committed(session: Session) -> None:
    write = session.reserve(1, parent=None, hashes=HASHES, parts=[])
    for pending in write.pending.values():
        session.space.writes.take(pending, writer=write.id, parts=pending.all_parts)
        session.space.writes.arrive(pending, pending.all_parts)
    session._store._commit(session.space, list(write.pending.values()))
    session.commit(write.id)


def test_a_lease_too_many_is_refused_and_holds_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(session)
    monkeypatch.setattr(session_module, "MAX_LEASES", 2)
    for name in ("a", "b"):
        assert session.match(HASHES, name) == (4, 0, 4)
    with pytest.raises(StoreFull, match="at most 2 in a session"):
        session.match(HASHES, "c")
    with pytest.raises(StoreFull, match="at most 2 in a session"):
        session.load(1, HASHES, lease="c")
    assert session.match(HASHES, "a") == (4, 0, 4), "one that is there already is replaced"
    assert session.num_leases == 2
    session.end()
    assert session.space.index.num_leased == 0


def test_a_write_too_many_is_refused_and_reserves_nothing(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_WRITES", 1)
    session.reserve(1, parent=None, hashes=HASHES[:1], parts=[])
    with pytest.raises(StoreFull, match="at most 1 open"):
        session.reserve(1, parent=None, hashes=HASHES[1:], parts=[])
    assert len(session.space.writes) == 1
    session.end()
    assert len(session.space.writes) == 0


def test_several_runs_are_one_write(session: Session) -> None:
    """The last block goes first, also where each run begins a chain."""
    write = session.reserve(1, parent=None, hashes=HASHES, parts=[], heads=[1, 2])
    assert write.outcomes == [Outcome.NEW] * 4
    index = session.space.index
    rows = index.find(HASHES)
    assert index.parent_hashes(rows).tolist() == [bytes(32)] * 3 + HASHES[2:3].tolist()
    assert (np.diff(index.stamps.of(rows)) < 0).all()
    again = session.reserve(2, parent=None, hashes=HASHES[[0, 3]], parts=[], heads=[1])
    assert again.outcomes == [Outcome.WRITING] * 2


def test_without_its_parent_the_first_run_is_refused_and_no_other(session: Session) -> None:
    unknown = chain(1, of=KV, seed=1)[0]
    write = session.reserve(1, parent=unknown, hashes=HASHES, parts=[], heads=[2, 3])
    assert write.outcomes == [Outcome.ORPHAN, Outcome.ORPHAN, Outcome.NEW, Outcome.NEW]
    assert sorted(write.pending) == [2, 3]
    session.abort(write.id)
    assert session.reserve(1, parent=unknown, hashes=HASHES, parts=[]).outcomes == [Outcome.ORPHAN] * 4
    assert len(session.space.index) == 0


def test_where_room_runs_out_the_last_blocks_are_refused_whichever_run_they_are_in() -> None:
    house = House(memory_slabs=1)
    session = house.session(house.store.open_space(KV_LARGE))
    hashes = records(chain(8, of=KV_LARGE))
    unknown = chain(1, of=KV_LARGE, seed=1)[0]
    for heads in ([2, 5], [1, 6], [1, 2, 3, 4, 5, 6, 7]):
        num_orphans = heads[0]
        write = session.reserve(1, parent=unknown, hashes=hashes, parts=[], heads=heads)
        expected = [Outcome.ORPHAN] * num_orphans + [Outcome.NEW] * 4
        assert write.outcomes == expected + [Outcome.FULL] * (8 - len(expected))
        house.store.validate()
        session.abort(write.id)


@pytest.mark.parametrize("heads", [[0], [4], [2, 2], [3, 1], [1, 4]])
def test_heads_that_are_none_are_refused_and_nothing_is_reserved(session: Session, heads: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="heads: expected ascending ones from 1 to 3"):
        session.reserve(1, parent=None, hashes=HASHES, parts=[], heads=heads)
    assert len(session.space.index) == session.num_writes == 0


def test_a_part_that_there_is_not_is_refused(session: Session) -> None:
    for parts in ([2], [0, 0]):
        with pytest.raises(InvalidRequest, match="expected different ones from 0 to 1"):
            session.reserve(1, parent=None, hashes=HASHES, parts=parts)
