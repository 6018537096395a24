"""One client's stream on the daemon's side: sends in turn, and the tasks that serve it."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeAlias

import grpc
import structlog

from kvstore.errors import KVStoreError, StoreBug, StoreUnavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import status_of
from kvstore_server.session import Session
from kvstore_server.transfers import Peer

Context: TypeAlias = "grpc.aio.ServicerContext[pb.ClientMessage, pb.ServerMessage]"

log = structlog.get_logger()

MAX_COPIES_IN_FLIGHT: Final = 16  # StoreParts of one session; more wait in the stream
PEER_GRACE_S: Final = 0.5  # for transfers under way when a session ends; a connection that broke is noticed in less


class Connection:
    """One stream: its session, and the tasks that serve it."""

    def __init__(self, session: Session, context: Context, *, now: float, told: asyncio.Event) -> None:
        self.session = session
        self.peer: Peer | None = None  # the client's agent, where there is ucx
        self.opened_at = now
        self.heard_at = now
        self.told = told  # set when the teller has something to send
        self.ending = ""  # why this side ended the stream
        reader = asyncio.current_task()
        assert reader is not None
        self._reader = reader
        self._context = context
        self._posted: list[pb.ServerMessage] = []
        self._turn = asyncio.Lock()
        self._copies = asyncio.Semaphore(MAX_COPIES_IN_FLIGHT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._jobs: set[asyncio.Task[pb.ServerMessage]] = set()

    async def send(self, message: pb.ServerMessage) -> None:
        """The message is sent, unless the stream is over; messages of different tasks do not mix."""
        async with self._turn:
            # A send fails when the stream is over: the client left, and nobody waits for this any more.
            with contextlib.suppress(grpc.aio.BaseError):
                await self._context.write(message)

    def post(self, message: pb.ServerMessage) -> None:
        """The teller will send the message."""
        self._posted.append(message)
        self.told.set()

    def take_posted(self) -> list[pb.ServerMessage]:
        posted, self._posted = self._posted, []
        return posted

    def stop_reading(self, reason: str) -> None:
        """The stream ends from this side, with UNAVAILABLE and the first reason that was given."""
        if not self.ending:
            self.ending = reason
            self._reader.cancel()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]], *, request_id: int) -> None:
        """The work goes on beside the reader, until the stream ends."""
        task = asyncio.create_task(self._guard(work, request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def answer_with(self, plan: Callable[[], Coroutine[Any, Any, pb.ServerMessage]], *, request_id: int) -> None:
        """What was planned is under way beside the reader, and its result will be sent.

        Waits first while too much is under way. What is planned goes on to its end whatever becomes of the stream, and
        `stop` waits for it. Raises: what `plan` does.
        """
        await self._copies.acquire()
        try:
            job = asyncio.create_task(plan())
        except BaseException:
            self._copies.release()
            raise
        self._jobs.add(job)
        job.add_done_callback(self._forget)
        self.start(lambda: self._send_result(job, request_id), request_id=request_id)

    async def _send_result(self, job: asyncio.Task[pb.ServerMessage], request_id: int) -> None:
        message = await asyncio.shield(job)
        message.request_id = request_id
        await self.send(message)

    def _forget(self, job: asyncio.Task[pb.ServerMessage]) -> None:
        self._jobs.discard(job)
        self._copies.release()
        if not job.cancelled():
            job.exception()  # it is answered with, if the stream is still there

    async def stop(self) -> None:
        """No task of this connection runs any more, and copies have been waited for.

        But not for long for those with another host, which may have stopped: they hold what they need.
        """
        for task in self._tasks:
            task.cancel()
        if self.peer is not None:
            self.peer.leave("its session has ended")
            if self._jobs:
                await asyncio.wait(self._jobs, timeout=PEER_GRACE_S)
        await asyncio.gather(*self._tasks, *([] if self.peer else self._jobs), return_exceptions=True)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]], request_id: int) -> None:
        try:
            await work()
        except StoreUnavailable:
            pass  # the stream ends, and that is the answer: before, the client's memory may still be written to
        except KVStoreError as error:
            await self.send(pb.ServerMessage(request_id=request_id, status=status_of(error)))
        except Exception as error:
            await self.send(bug_of(error, request_id, kind="beside the reader"))


def bug_of(error: Exception, request_id: int, *, kind: str) -> pb.ServerMessage:
    """The answer to a request that met a bug of ours, which is in the log. Call it while handling the error."""
    log.exception("request failed: this is a bug of the store", request=kind, id=request_id)
    bug = StoreBug(f"request {request_id} ({kind}): {type(error).__name__}: {error}; report it")
    return pb.ServerMessage(request_id=request_id, status=status_of(bug))
