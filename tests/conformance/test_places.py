"""Each place for the remote tier passes the suite."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conformance.place_suite import DATA, NAMES, PlaceSuite, ServedPlaceSuite
from remote_places import BUCKET, DictPlace, Server, redis_server, s3_server

from kvstore.errors import InvalidRequest
from kvstore_server.tiers.places import ObjectStore, Place, RemoteFailed, open_place

obstore = pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvstore[remote]'")
pytest.importorskip("redis", reason="redis is not installed: pip install 'kvstore[remote]'")


class TestDict(PlaceSuite):
    """The one that other tests spoil."""

    @pytest.fixture
    def make(self) -> Callable[[], Place]:
        place = DictPlace()
        return lambda: place


class TestDirectory(PlaceSuite):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[], Place]:
        return lambda: open_place(f"file://{tmp_path}/made/of it", at_once=3)

    def test_what_a_write_that_was_cut_off_left_is_not_listed(self, make: Callable[[], Place], tmp_path: Path) -> None:
        self.put(make, NAMES[:1])
        (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
        path.with_name(path.name + "#1").write_bytes(b"half")
        (listed,) = self.run(make, lambda place: _listed(place))
        assert listed == NAMES[0]


class TestMemory(PlaceSuite):
    @pytest.fixture
    def make(self) -> Callable[[], Place]:
        from obstore.store import MemoryStore

        store = MemoryStore()
        return lambda: ObjectStore("memory:///", store=store)


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as monkeypatch, s3_server(monkeypatch) as server:
        yield server


class TestS3(ServedPlaceSuite):
    @pytest.fixture
    def make(self, s3: Server, tmp_path: Path) -> Callable[[], Place]:
        return lambda: open_place(f"s3://{BUCKET}/some/{tmp_path.name}", at_once=3)

    @pytest.fixture
    def stop(self, s3: Server) -> Iterator[Callable[[], None]]:
        yield s3.stop
        s3.start()

    def test_a_bucket_that_is_not_there_is_a_failure_of_a_write_and_of_a_list(self, s3: Server) -> None:
        async def ask() -> None:
            place = open_place("s3://nowhere/prefix", at_once=1)
            with pytest.raises(RemoteFailed, match="404"):
                await place.put(NAMES[0], memoryview(DATA))
            with pytest.raises(RemoteFailed, match="404"):
                await _listed(place)

        asyncio.run(ask())


class TestRedis(ServedPlaceSuite):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Server]:
        with redis_server(tmp_path / "redis") as server:
            yield server

    @pytest.fixture
    def make(self, server: Server) -> Callable[[], Place]:
        return lambda: open_place(f"redis://127.0.0.1:{server.port}/3/a*b[c]", at_once=3)

    @pytest.fixture
    def stop(self, server: Server) -> Callable[[], None]:
        return server.stop

    def test_another_prefix_and_another_database_are_other_places(
        self, make: Callable[[], Place], server: Server
    ) -> None:
        self.put(make, NAMES[:1])
        for other in ("3/aXbc", "4/a*b[c]"):
            place = open_place(f"redis://127.0.0.1:{server.port}/{other}", at_once=1)
            assert self.run(lambda place=place: place, lambda place: _listed(place)) == []  # type: ignore[misc]


def test_a_redis_that_asks_for_a_password_gets_it_from_the_environment_and_tells_no_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with redis_server(tmp_path / "redis") as server:
        import redis

        admin = redis.Redis(port=server.port)
        admin.config_set("requirepass", "open-sesame")
        admin.close()

        async def put() -> None:
            place = open_place(f"redis://127.0.0.1:{server.port}/0/p", at_once=1)
            try:
                await place.put(NAMES[0], memoryview(DATA))
            finally:
                await place.close()

        for wrong in (None, "other-word"):
            if wrong is not None:
                monkeypatch.setenv("REDIS_PASSWORD", wrong)
            with pytest.raises(RemoteFailed) as caught:
                asyncio.run(put())
            assert "other-word" not in str(caught.value)
        monkeypatch.setenv("REDIS_PASSWORD", "open-sesame")
        asyncio.run(put())


@pytest.mark.parametrize("url", ["redis://host", "redis://host/0", "redis://host/x/prefix", "redis:///0/prefix"])
def test_a_redis_url_without_database_and_prefix_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="redis://host:port/database/prefix"):
        open_place(url, at_once=1)


def test_what_a_place_answers_is_told_without_the_key_in_its_url() -> None:
    class Refusing:
        def list(self, store: object, chunk_size: int) -> object:
            raise OSError("GET https://account/container?sig=secret failed\nDebug source: sig=secret")

    async def ask() -> None:
        place = ObjectStore("memory:///")
        place._obstore = Refusing()
        with pytest.raises(RemoteFailed, match=r"failed$") as caught:
            await _listed(place)
        assert "secret" not in str(caught.value)

    asyncio.run(ask())


async def _listed(place: Place) -> list[str]:
    return [one.name async for some in place.listed() for one in some]
