"""What every place for the remote tier promises. Subclass the suite and give it the fixture `place`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pytest

from kvstore_server.tiers.places import Listed, Place, RemoteFailed

T = TypeVar("T")

DATA = bytes(range(256)) * 300
NAMES = [f"{letter * 64}/{number:064x}" for letter in "ab" for number in range(3)]


async def listed(place: Place) -> list[Listed]:
    return [one async for some in place.listed() for one in some]


class PlaceSuite:
    """Promises of all places."""

    @pytest.fixture
    def make(self) -> Callable[[], Place]:
        """Opens the place, which is empty at first. It is closed by the test."""
        raise NotImplementedError

    def run(self, make: Callable[[], Place], test: Callable[[Place], Awaitable[T]]) -> T:
        async def with_place() -> T:
            place = make()
            try:
                return await test(place)
            finally:
                await place.close()

        return asyncio.run(with_place())

    def put(self, make: Callable[[], Place], names: Sequence[str], data: bytes = DATA) -> None:
        async def put(place: Place) -> None:
            for name in names:
                await place.put(name, memoryview(data))

        self.run(make, put)

    def test_an_object_is_read_as_it_was_written_by_whoever_opens_the_place_next(
        self, make: Callable[[], Place]
    ) -> None:
        self.put(make, NAMES[:1])

        async def read(place: Place) -> None:
            found = await place.get(NAMES[0], size_bytes=len(DATA))
            assert found is not None
            assert bytes(found) == DATA
            assert await place.has(NAMES[0])

        self.run(make, read)

    def test_what_is_not_there_is_none_and_no_failure(self, make: Callable[[], Place]) -> None:
        async def ask(place: Place) -> None:
            assert await place.get(NAMES[0], size_bytes=10) is None
            assert not await place.has(NAMES[0])
            assert await listed(place) == []
            await place.delete(NAMES[:2])

        self.run(make, ask)

    def test_an_object_written_again_is_the_later_one(self, make: Callable[[], Place]) -> None:
        self.put(make, NAMES[:1])
        self.put(make, NAMES[:1], DATA[:1000])

        async def read(place: Place) -> None:
            assert bytes(await place.get(NAMES[0], size_bytes=1000) or b"") == DATA[:1000]
            assert [(one.name, one.size_bytes) for one in await listed(place)] == [(NAMES[0], 1000)]

        self.run(make, read)

    @pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1, 10])
    def test_an_object_of_another_size_is_not_handed_out_whole(self, make: Callable[[], Place], size: int) -> None:
        """Covers: C7."""
        self.put(make, NAMES[:1])

        async def read(place: Place) -> None:
            found = await place.get(NAMES[0], size_bytes=size)
            assert found is not None
            assert len(found) != size
            assert len(found) <= size + 1

        self.run(make, read)

    def test_all_that_is_there_is_listed_and_what_is_deleted_is_gone(self, make: Callable[[], Place]) -> None:
        self.put(make, NAMES)

        async def delete(place: Place) -> None:
            found = await listed(place)
            assert sorted(one.name for one in found) == sorted(NAMES)
            assert {one.size_bytes for one in found} == {len(DATA)}
            await place.delete([*NAMES[:4], "not/there"])
            assert sorted(one.name for one in await listed(place)) == sorted(NAMES[4:])
            assert await place.get(NAMES[0], size_bytes=len(DATA)) is None
            assert await place.has(NAMES[4])

        self.run(make, delete)

    def test_many_things_can_be_asked_at_once_and_each_gets_its_own(self, make: Callable[[], Place]) -> None:
        async def ask(place: Place) -> None:
            await asyncio.gather(
                *(place.put(name, memoryview(name.encode() * 500)) for name in NAMES for _ in range(3))
            )
            found = await asyncio.gather(*(place.get(name, size_bytes=129 * 500) for name in NAMES * 5))
            assert [bytes(one or b"") for one in found] == [name.encode() * 500 for name in NAMES * 5]

        self.run(make, ask)

    def test_a_request_that_is_cancelled_leaves_the_place_usable(self, make: Callable[[], Place]) -> None:
        async def cancel(place: Place) -> None:
            puts = [asyncio.create_task(place.put(name, memoryview(DATA))) for name in NAMES]
            await asyncio.sleep(0)
            for task in puts:
                task.cancel()
            await asyncio.gather(*puts, return_exceptions=True)
            await place.put(NAMES[0], memoryview(DATA))
            assert await place.has(NAMES[0])

        self.run(make, cancel)


class ServedPlaceSuite(PlaceSuite):
    """Promises of places that a server keeps: `stop` ends it."""

    @pytest.fixture
    def stop(self) -> Callable[[], None]:
        raise NotImplementedError

    def test_a_server_that_is_gone_is_a_failure_with_a_reason_on_one_line(
        self, make: Callable[[], Place], stop: Callable[[], None]
    ) -> None:
        """Covers: D12."""
        self.put(make, NAMES[:1])
        stop()

        async def ask(place: Place) -> None:
            for work in (
                place.put(NAMES[0], memoryview(DATA)),
                place.get(NAMES[0], size_bytes=len(DATA)),
                place.has(NAMES[0]),
                place.delete(NAMES[:1]),
                listed(place),
            ):
                with pytest.raises(RemoteFailed) as caught:
                    await work
                assert "\n" not in str(caught.value)
                assert 10 < len(str(caught.value)) < 600

        self.run(make, ask)
