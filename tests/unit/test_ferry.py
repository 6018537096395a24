"""Cold blocks on their way to a place and back, without a daemon: what is copied, when, and what is never believed."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from builders import block_bytes, chain, records
from houses import DEADLINE_S, A, B, RemoteHouse, remote_house, run
from remote_places import DictPlace

from kvstore import placement
from kvstore.types import BlockHash
from kvstore_server.level import State
from kvstore_server.tiers import outage, remote
from kvstore_server.tiers.objects import block_key, name_of, object_bytes, unseal
from kvstore_server.tiers.records import Packed, RecordLayout

CHAIN = chain(96, of=A)
OBJECT_BYTES = object_bytes(RecordLayout.of(A))


def name(block_hash: BlockHash) -> str:
    return name_of(block_key(A.namespace, block_hash))


async def fill(at: RemoteHouse, hashes: list[BlockHash] = CHAIN) -> None:
    """The chain was stored, piece by piece, which is more than memory holds; all that is cold was copied."""
    for first in range(0, len(hashes), 6):
        at.put(A, hashes[first : first + 6], parent=hashes[first - 1] if first else None)
        await asyncio.wait_for(at.ferry.settle(), DEADLINE_S)


async def seek(at: RemoteHouse, hashes: list[BlockHash] = CHAIN) -> tuple[int, int]:
    """What a match found, and what one finds after the search that it began."""
    before = at.match(A, hashes)
    await asyncio.wait_for(at.ferry.settle(), DEADLINE_S)
    at.check(A, hashes)
    return before, at.match(A, hashes)


async def restored(tmp_path: Path, place: DictPlace, hashes: list[BlockHash] = CHAIN) -> None:
    """The chain was stored by a daemon that is gone, and all of its cold blocks are in the place."""
    async with remote_house(tmp_path, place) as at:
        await fill(at, hashes)


def test_what_memory_evicts_was_copied_before_and_comes_back_bit_exact(tmp_path: Path) -> None:
    """Covers: F6."""

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place) as at:
            others = [chain(6, of=A, seed=seed) for seed in range(1, 20)]
            for hashes in others:
                await fill(at, hashes)
            found = [await seek(at, hashes) for hashes in others]
            assert [after for _, after in found] == [6] * len(others)
            assert sum(before < 6 for before, _ in found) > 5
            assert at.remote.counters.blocks_unsent == 0
            assert at.remote.counters.blocks_wrong == 0

    run(test)


def test_another_daemon_finds_what_one_copied_and_neither_waits(tmp_path: Path) -> None:
    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place) as at:
            await fill(at)
            copied = at.remote.counters.blocks_sent
            assert copied == len(place.objects) > 24
        async with remote_house(tmp_path, place) as at:
            assert await seek(at) == (0, 13), "a quarter of memory"
            assert at.remote.counters.blocks_fetched == 13
            assert at.store.counters.blocks_stored == 13

    run(test)


def test_a_chain_is_copied_from_its_beginning_even_if_that_is_hot(tmp_path: Path) -> None:
    """Covers: E6."""

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place) as at:
            head, tail = CHAIN[:6], CHAIN[6:12]
            at.put(A, head)
            at.put(A, tail, parent=head[-1])
            for seed in range(1, 4):
                at.match(A, head)
                await fill(at, chain(6, of=A, seed=seed))
            assert {name(one) for one in tail} & place.objects.keys()
            assert {name(one) for one in head} <= place.objects.keys()

    run(test)


def test_nothing_is_copied_before_memory_fills_up_and_nothing_twice(tmp_path: Path) -> None:
    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place) as at:
            await fill(at, CHAIN[:18])
            assert place.asked == ["list"]
            await fill(at)
            assert place.asked.count("put") == len(place.objects)
        async with remote_house(tmp_path, place) as at:
            await fill(at)
            assert place.asked.count("put") == len(place.objects), "a daemon that was started again knows what is there"

    run(test)


def test_what_is_cold_on_disk_is_copied_from_there(tmp_path: Path) -> None:
    async def test() -> None:
        place = DictPlace()
        chains = [chain(6, of=A, seed=seed) for seed in range(1, 25)]
        async with remote_house(tmp_path / "a", place, memory_slabs=2, disk_slabs=16) as at:
            for hashes in chains:
                at.put(A, hashes)
                await at.settle()
                await asyncio.wait_for(at.ferry.settle(), DEADLINE_S)
            assert at.store.counters.blocks_evicted > 100
            assert 70 < len(place.objects) < 120
            assert at.store.counters.blocks_risen == 0
        async with remote_house(tmp_path / "b", place) as at:
            for hashes in chains[:12]:
                assert await seek(at, hashes) == (0, 6)

    run(test)


# What is never believed.


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


SPOILS: dict[str, Callable[[DictPlace, str, str], bytes]] = {
    "a bit of the block": lambda place, one, other: flipped(place.objects[one], 4096 + 12_345),
    "its last bit": lambda place, one, other: flipped(place.objects[one], OBJECT_BYTES - 1),
    "a bit of the hash": lambda place, one, other: flipped(place.objects[one], 48),
    "a bit of a checksum": lambda place, one, other: flipped(place.objects[one], 144),
    "a bit of the codec": lambda place, one, other: flipped(place.objects[one], 120),
    "another block": lambda place, one, other: place.objects[other],
    "cut short": lambda place, one, other: place.objects[one][:-1],
    "too long": lambda place, one, other: place.objects[one] + b"\0",
    "only a header": lambda place, one, other: place.objects[one][:4096],
    "empty": lambda place, one, other: b"",
    "zeros": lambda place, one, other: bytes(OBJECT_BYTES),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_an_object_that_is_not_its_block_is_never_served(
    tmp_path: Path, spoil: Callable[[DictPlace, str, str], bytes]
) -> None:
    """Covers: A1, A2, A25."""

    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        place.objects[name(CHAIN[5])] = spoil(place, name(CHAIN[5]), name(CHAIN[6]))
        async with remote_house(tmp_path, place) as at:
            assert await seek(at) == (0, 5)
            assert at.remote.counters.blocks_wrong == 1
            assert not at.remote.holds(A.namespace, CHAIN[5]), "it will be written over"

    run(test)


def test_a_compressed_object_is_never_unpacked(tmp_path: Path) -> None:
    """Covers: A25. It is well made, but for what no daemon writes."""

    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        layout = RecordLayout.of(A)
        held = np.frombuffer(place.objects[name(CHAIN[5])], np.uint8)
        plain = held[: layout.header_bytes].view(layout.header)
        packed = Packed(
            np.zeros(1, np.int64), plain["stored_bytes"].astype(np.int64), np.ones(1, np.int64), np.zeros(1)
        )
        header = layout.headers(
            packed,
            hashes=plain["hash"],
            parents=plain["parent"],
            sequences=plain["sequence"],
            checksums=plain["checksums"],
        )
        place.objects[name(CHAIN[5])] = header.tobytes() + held[layout.header_bytes :].tobytes()
        log_of_wrong = unseal(layout, CHAIN[5], memoryview(place.objects[name(CHAIN[5])]))
        assert log_of_wrong == "expected a plain block, got a compressed one"
        async with remote_house(tmp_path, place) as at:
            assert await seek(at) == (0, 5)

    run(test)


def test_an_object_of_another_namespace_is_never_served(tmp_path: Path) -> None:
    """Covers: A2, A12. Its name says that it is ours, and its block has our size and hash."""

    async def test() -> None:
        place, twin = DictPlace(), dataclasses.replace(A, model="twin")
        async with remote_house(tmp_path, place) as at:
            at.put(twin, CHAIN[:6])
            for seed in range(1, 12):
                at.put(twin, chain(6, of=A, seed=seed))
                await at.ferry.settle()
        for one in CHAIN[:6]:
            place.objects[name(one)] = place.objects[name_of(block_key(twin.namespace, one))]
        async with remote_house(tmp_path, place) as at:
            assert await seek(at, CHAIN[:6]) == (0, 0)
            assert at.remote.counters.blocks_wrong == 2, "those of one piece"

    run(test)


def test_a_block_that_is_lost_and_its_slot_used_again_while_it_is_copied_is_not_sent(tmp_path: Path) -> None:
    """Covers: A13, A19."""

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place, at_once=1) as at:
            taken: list[BlockHash] = []
            take = at.ferry._take

            async def lose_first(space: object, row: object, parcel: object) -> object:
                if not taken:
                    taken.append(BlockHash(at.store.spaces[A.namespace].index.hashes_of(row)[0].tobytes()))  # type: ignore[call-overload]
                    work = asyncio.ensure_future(take(space, row, parcel))  # type: ignore[arg-type]
                    await asyncio.sleep(0)  # it has seen the slot, and has not copied
                    address = at.tier.addresses(at.store.spaces[A.namespace].index.memory.slots(row))  # type: ignore[arg-type]
                    at.store.lose(at.store.spaces[A.namespace], taken[0])
                    at.put(A, chain(1, of=A, seed=99))
                    again = at.store.spaces[A.namespace].index.find(records(chain(1, of=A, seed=99)))
                    assert at.tier.addresses(at.store.spaces[A.namespace].index.memory.slots(again)) == address
                    return await work
                return await take(space, row, parcel)  # type: ignore[arg-type]

            at.ferry._take = lose_first  # type: ignore[method-assign, assignment]
            await fill(at, CHAIN[:42])
            assert taken
            for one, data in place.objects.items():
                (block_hash,) = [held for held in [*CHAIN, *chain(1, of=A, seed=99)] if name(held) == one]
                assert data[4096:] == block_bytes(A, block_hash).tobytes()

    run(test)


# A place that is down, slow, full or forgetful.


def test_a_place_that_fails_costs_no_store_and_one_line_and_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers: A1, D12."""
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(outage, "LONGEST_PAUSE_S", 0.01)

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place) as at:
            await fill(at, CHAIN[:18])
            place.failing = {"put"}
            refused = asyncio.Event()

            def count(call: str) -> None:
                if place.asked.count("put") == 4:
                    refused.set()

            place.before = count
            for first in range(18, 42, 6):
                assert len(at.put(A, CHAIN[first : first + 6], parent=CHAIN[first - 1]).index.stored())
                await asyncio.sleep(0)
            assert at.match(A, CHAIN[:24]) == 24
            await asyncio.wait_for(refused.wait(), DEADLINE_S)
            assert at.remote.is_down
            assert not place.objects
            place.failing = set()
            await asyncio.wait_for(at.ferry.settle(), DEADLINE_S)
            assert not at.remote.is_down
            unsent = at.remote.counters.blocks_unsent
            assert 4 <= unsent <= 8
            assert len(place.objects) == 42 - unsent, "what was not even asked for waits"

    run(test)
    out = capsys.readouterr().out
    assert out.count("failed, the store goes on without it") == 1
    assert out.count("answers again") == 1


def test_a_place_that_cannot_be_written_can_still_be_read(tmp_path: Path) -> None:
    """Covers: D12."""

    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        place.failing = {"put"}
        async with remote_house(tmp_path, place) as at:
            at.put(A, chain(40, of=A, seed=1))
            assert await asyncio.wait_for(at.remote.write(A, CHAIN[0], memoryview(b"x")), DEADLINE_S) is False
            assert at.remote.is_down
            assert await found_after_a_search(at) == 13

    async def found_after_a_search(at: RemoteHouse) -> int:
        at.match(A, CHAIN)
        await at.ferry._seeker.settle()
        return at.match(A, CHAIN)

    run(test)


@pytest.mark.parametrize("call", ["get", "has"])
def test_a_search_that_fails_leaves_nothing_behind_and_is_not_repeated_at_once(tmp_path: Path, call: str) -> None:
    """Covers: D12."""

    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        place.failing = {call}
        async with remote_house(tmp_path, place) as at:
            assert await seek(at) == (0, 0)
            asked = len(place.asked)
            assert await seek(at) == (0, 0)
            assert len(place.asked) == asked
            assert at.store.counters.blocks_aborted == 0, "nobody waited for these blocks"

    run(test)


def test_no_match_waits_for_a_slow_place_and_a_request_has_a_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: F1, D12."""
    monkeypatch.setattr(remote, "REQUEST_TIMEOUT_S", 0.05)

    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        async with remote_house(tmp_path, place) as at:
            place.before = lambda call: asyncio.get_running_loop().create_future() if call == "has" else None
            assert at.match(A, CHAIN) == 0
            at.put(A, CHAIN[:6])
            assert at.match(A, CHAIN) == 6
            await asyncio.wait_for(at.ferry.settle(), DEADLINE_S)
            assert at.remote.counters.requests_failed == 1
            assert at.remote.is_down
            at.check(A, CHAIN)

    run(test)


def test_a_stop_does_not_wait_for_a_place_that_hangs(tmp_path: Path) -> None:
    """Covers: D12."""

    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        for hanging in ("get", "put"):
            async with remote_house(tmp_path, place, memory_slabs=2) as at:
                reached = asyncio.Event()

                def hang(
                    call: str, hanging: str = hanging, reached: asyncio.Event = reached
                ) -> asyncio.Future[None] | None:
                    if call != hanging:
                        return None
                    reached.set()
                    return asyncio.get_running_loop().create_future()

                place.before = hang
                at.match(A, CHAIN)
                at.put(A, chain(20, of=A, seed=7))
                await asyncio.wait_for(reached.wait(), DEADLINE_S)
                place.before = lambda call: None
            await place.close()

    run(test)


def test_what_is_under_way_is_bounded(tmp_path: Path) -> None:
    """Covers: C7."""

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place, at_once=3) as at:
            await fill(at)
        assert place.most_under_way == 3
        async with remote_house(tmp_path, place, at_once=3) as at:
            for _ in range(3):
                at.match(A, CHAIN)
            at.put(A, chain(40, of=A, seed=1))
            await asyncio.wait_for(at.ferry.settle(), DEADLINE_S)
        assert place.most_under_way == 3

    run(test)


def test_the_capacity_is_a_limit_and_the_oldest_objects_go_first(tmp_path: Path) -> None:
    """Covers: E1."""

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place, capacity_bytes=10 * OBJECT_BYTES) as at:
            first = chain(6, of=A, seed=1)
            await fill(at, first)
            for seed in range(2, 14):
                await fill(at, chain(6, of=A, seed=seed))
                assert place.size_bytes <= 10 * OBJECT_BYTES
            assert len(place.objects) >= 9
            assert at.remote.statistics().used_bytes == place.size_bytes
            assert not {name(one) for one in first} & place.objects.keys()
            assert at.remote.counters.objects_deleted > 10
        # A smaller one, after a restart.
        async with remote_house(tmp_path, place, capacity_bytes=4 * OBJECT_BYTES) as at:
            place.objects["not ours"] = b"x"
            await seek(at)
            assert at.remote.num_objects == len(place.objects) - 1 == 3, "four, and a hundredth to spare"

    run(test)


def test_an_object_that_is_being_written_is_not_deleted_for_another(tmp_path: Path) -> None:
    """Covers: E1. It would come after its deletion, and not count."""

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place, capacity_bytes=OBJECT_BYTES) as at:
            await at.ferry.settle()
            go_on, begun = asyncio.Event(), asyncio.Event()

            def hold(call: str) -> Awaitable[object] | None:
                begun.set()
                return go_on.wait() if call == "put" else None

            place.before = hold
            first = asyncio.create_task(at.remote.write(A, CHAIN[0], memoryview(bytes(OBJECT_BYTES))))
            await begun.wait()
            assert not await at.remote.write(A, CHAIN[1], memoryview(bytes(OBJECT_BYTES)))
            go_on.set()
            assert await first
            assert list(place.objects) == [name(CHAIN[0])]
            assert await at.remote.write(A, CHAIN[1], memoryview(bytes(OBJECT_BYTES)))
            assert list(place.objects) == [name(CHAIN[1])]

    run(test)


def test_a_block_larger_than_the_capacity_is_not_written(tmp_path: Path) -> None:
    """Covers: E1."""

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place, capacity_bytes=OBJECT_BYTES - 1) as at:
            await fill(at)
            assert not place.objects
            assert at.remote.counters.blocks_unsent > 0

    run(test)


# What it costs to ask.


def test_a_gain_below_the_threshold_is_not_asked_for(tmp_path: Path) -> None:
    """Covers: F2."""

    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        async with remote_house(tmp_path, place, min_blocks=5) as at:
            await seek(at, CHAIN[:4])
            assert place.asked[-1] == "list"
            for one in CHAIN[4:]:
                place.objects.pop(name(one), None)
            assert await seek(at) == (0, 0)
            assert place.asked[-1] == "has"
            assert "get" not in place.asked

    run(test)


def test_what_nobody_found_is_not_asked_for_again_at_once(tmp_path: Path) -> None:
    """Covers: F2."""

    async def test() -> None:
        place = DictPlace()
        async with remote_house(tmp_path, place) as at:
            for _ in range(3):
                assert await seek(at) == (0, 0)
            assert place.asked == ["list", "has"]
            assert at.remote.counters.blocks_absent == 1

    run(test)


def test_what_another_client_is_writing_is_not_asked_for(tmp_path: Path) -> None:
    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        async with remote_house(tmp_path, place) as at:
            session = at.session(at.store.open_space(A))
            session.reserve(1, parent=None, hashes=records(CHAIN[:1]), parts=[])
            assert await seek(at) == (0, 0)
            assert place.asked[-1] == "list"
            session.end()

    run(test)


def test_a_prefetch_begins_a_search_too(tmp_path: Path) -> None:
    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        async with remote_house(tmp_path, place) as at:
            assert at.store.lower.prefetch(at.store.open_space(A), records(CHAIN)) == 0
            await at.ferry.settle()
            assert at.store.lower.prefetch(at.store.open_space(A), records(CHAIN)) == 13

    run(test)


@pytest.mark.parametrize("placed", [False, True])
def test_of_several_daemons_each_begins_a_chain_with_each_segment_that_comes(
    tmp_path: Path, placed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        async with remote_house(tmp_path, place) as at:
            monkeypatch.setattr(placement, "SEGMENT_TOKENS", 4 * A.block_tokens)
            at.store.placed = placed
            asked = CHAIN[:4] + CHAIN[8:12] if placed else CHAIN[:8]  # what lies between is another daemon's
            assert await seek(at, asked) == (0, 8)
            index = at.store.spaces[A.namespace].index
            parents = index.parent_hashes(index.find(records(asked))).tolist()
            expected = [bytes(32), *asked[:7]]
            if placed:
                expected[4] = bytes(32)
            assert parents == expected

    run(test)


def test_what_was_stored_meanwhile_is_left_as_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        async with remote_house(tmp_path, place, at_once=4) as at:

            def store_one(call: str) -> None:
                if call == "get" and A.namespace in at.store.spaces and not at.match(A, CHAIN[:3]):
                    at.put(A, CHAIN[:3])

            place.before = store_one
            assert (await seek(at, CHAIN[:12]))[1] == 12
            assert at.remote.counters.blocks_fetched == 9
            at.check(A, CHAIN)

    run(test)


def test_a_namespace_that_ends_while_its_blocks_come_takes_none(tmp_path: Path) -> None:
    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        async with remote_house(tmp_path, place) as at:
            space = at.store.open_space(A)

            def end(call: str) -> None:
                if call == "get":
                    at.store.close_space_if_empty(space)

            place.before = end
            at.match(A, CHAIN)
            await at.ferry.settle()
            assert not at.store.spaces
            assert at.tier.arena.used_bytes == 0

    run(test)


def test_memory_that_is_full_of_what_is_held_takes_no_block(tmp_path: Path) -> None:
    """Covers: E11."""

    async def test() -> None:
        place = DictPlace()
        await restored(tmp_path, place)
        async with remote_house(tmp_path, place, memory_slabs=1) as at:
            space = at.put(B, chain(30, of=B))
            space.index.lease(rows := space.index.memory.rows())
            assert await seek(at) == (0, 0)
            assert (space.index.states(rows) == State.COMMITTED).all()
            space.index.unlease(rows)

    run(test)
