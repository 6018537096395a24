"""What one session may hold: limits, and that a refusal leaves nothing behind."""

import pytest
from builders import chain, records, spec

from kvstore.errors import InvalidRequest, StoreFull
from kvstore.types import SessionId
from kvstore_server import session as session_module
from kvstore_server.session import Session
from kvstore_server.store import Store
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.pinning import PageLock

KV = spec()
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


def test_a_part_that_there_is_not_is_refused(session: Session) -> None:
    for parts in ([2], [0, 0]):
        with pytest.raises(InvalidRequest, match="expected different ones from 0 to 1"):
            session.reserve(1, parent=None, hashes=HASHES, parts=parts)
