"""One stream on the daemon's side: what was planned is carried out, whenever the stream ends."""

import asyncio
from typing import Any, cast

import pytest

from kvstore.errors import InvalidRequest, StoreUnavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_server.connection import MAX_COPIES_IN_FLIGHT, Connection
from kvstore_server.transfers import Peer


class Wire:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[pb.ServerMessage] = []
        self.wrote = asyncio.Event()

    async def write(self, message: pb.ServerMessage) -> None:
        self.sent.append(message)
        self.wrote.set()


def connection_on(wire: Wire) -> Connection:
    return Connection(cast(Any, None), cast(Any, wire), now=0.0, told=asyncio.Event())


class Work:
    """Plans that take until `go`."""

    def __init__(self) -> None:
        self.planned = self.done = 0
        self.go = asyncio.Event()
        self.ended = asyncio.Event()

    def plan(self) -> Any:
        self.planned += 1
        return self.run()

    async def run(self) -> pb.ServerMessage:
        await self.go.wait()
        self.done += 1
        self.ended.set()
        return pb.ServerMessage(pong=pb.Pong())


def test_what_was_planned_is_carried_out_though_the_stream_ends_before_its_first_step() -> None:
    """Covers: C5. Else its slots would count as being copied into for ever."""

    async def test() -> None:
        wire, work = Wire(), Work()
        connection = connection_on(wire)
        work.go.set()
        await connection.answer_with(work.plan, request_id=7)
        await connection.stop()
        assert (work.planned, work.done, wire.sent) == (1, 1, [])

    asyncio.run(test())


def test_what_waits_for_its_turn_when_the_stream_ends_was_never_planned() -> None:
    async def test() -> None:
        wire, work = Wire(), Work()
        connection = connection_on(wire)
        for number in range(MAX_COPIES_IN_FLIGHT):
            await connection.answer_with(work.plan, request_id=number)
        waiting = asyncio.create_task(connection.answer_with(work.plan, request_id=99))
        await asyncio.sleep(0)
        waiting.cancel()
        work.go.set()
        await connection.stop()
        assert work.planned == work.done == MAX_COPIES_IN_FLIGHT

    asyncio.run(test())


def test_a_plan_that_is_refused_gives_its_turn_to_the_next() -> None:
    async def test() -> None:
        def refuse() -> Any:
            raise InvalidRequest("no")

        wire, work = Wire(), Work()
        connection = connection_on(wire)
        for _ in range(2 * MAX_COPIES_IN_FLIGHT):
            with pytest.raises(InvalidRequest):
                await connection.answer_with(refuse, request_id=1)
        work.go.set()
        await connection.answer_with(work.plan, request_id=5)
        await wire.wrote.wait()
        assert [message.request_id for message in wire.sent] == [5]
        await connection.stop()

    asyncio.run(test())


def test_a_stream_with_a_stopped_peer_ends_while_its_transfers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers: A19."""

    async def test() -> None:
        wire, work = Wire(), Work()
        connection = connection_on(wire)
        connection.peer = Peer(lambda reason: None)
        await connection.answer_with(work.plan, request_id=7)
        await connection.stop()
        assert (connection.peer.over, work.done) == ("its session has ended", 0)
        work.go.set()
        await work.ended.wait()
        assert wire.sent == []

    monkeypatch.setattr("kvstore_server.connection.PEER_GRACE_S", 0.0)
    asyncio.run(test())


def test_a_transfer_that_failed_is_not_answered() -> None:
    """Covers: A19. The end of the stream is the answer: what was sent before may still arrive."""

    async def test() -> None:
        async def fail() -> pb.ServerMessage:
            raise StoreUnavailable("the connection is broken")

        wire = Wire()
        connection = connection_on(wire)
        await connection.answer_with(fail, request_id=7)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await connection.stop()
        assert wire.sent == []

    asyncio.run(test())
