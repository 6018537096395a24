"""The streams of sessions, on a transport that stops where the test says."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any, cast

import grpc
import pytest
from builders import spec

from kvstore.types import BootId
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import PROTOCOL_VERSION, spec_to_proto
from kvstore_server.config import Settings
from kvstore_server.mover import Mover
from kvstore_server.roster import Member, Roster
from kvstore_server.service import StoreService
from kvstore_server.store import Store
from kvstore_server.tiers.cpu import CpuTier
from kvstore_server.tiers.pinning import PageLock


class Aborted(Exception):
    """What ends a handler that has given its status."""


class Slow:
    """A stream on which no message that is sent ever comes to its end. As with grpc, metadata is sent once."""

    def __init__(self) -> None:
        self.has_metadata = False
        self.sending = asyncio.Event()
        self.status: tuple[grpc.StatusCode, str] | None = None

    async def requests(self) -> AsyncIterator[pb.ClientMessage]:
        hello = pb.Hello(protocol_version=PROTOCOL_VERSION, spec=spec_to_proto(spec()), client_name="slow")
        yield pb.ClientMessage(request_id=1, hello=hello)
        await asyncio.Event().wait()

    async def send_initial_metadata(self, metadata: tuple[()]) -> None:
        self.has_metadata = True

    async def write(self, message: pb.ServerMessage) -> None:
        self.sending.set()
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert self.has_metadata, "begun with the message that was cut short, and sent again"
        self.status = code, details
        raise Aborted


@pytest.fixture
def service() -> Iterator[StoreService]:
    tier = CpuTier(capacity_bytes=1 << 20, slab_bytes=1 << 20, page_lock=PageLock(wanted=False))
    boot_id = BootId(b"b")
    alone = Roster(Member("", boot_id, (), 1 << 20, draining=False), replicas=0, ttl_s=1.0, stale=False)
    with closing(tier), closing(Mover(num_threads=1, checksums=True)) as mover:
        yield StoreService(
            Store(tier), mover, None, alone, Settings(), boot_id=boot_id, shm_path="", version="1", clock=lambda: 0.0
        )


def test_a_session_that_is_stopped_while_it_is_welcomed_is_told_the_first_reason(service: StoreService) -> None:
    async def test() -> None:
        stream = Slow()
        serving = asyncio.create_task(service.Session(stream.requests(), cast(Any, stream)))
        await stream.sending.wait()
        (connection,) = service.connections.values()
        connection.stop_reading("the daemon is stopping")
        await asyncio.sleep(0)
        connection.stop_reading("it was silent")
        with pytest.raises(Aborted):
            await serving
        assert stream.status == (grpc.StatusCode.UNAVAILABLE, "the daemon is stopping")
        assert not service.connections

    asyncio.run(test())
