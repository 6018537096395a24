"""One question to several daemons at once: all requests are on their way before the first answer is waited for."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.link import Link
from kvstore_client.session import Call, Session, Undo

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Question:
    """What one daemon is asked; `undo` as in `Session.call`."""

    link: Link
    message: pb.ClientMessage
    undo: Undo | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """What it answered, and in which session."""

    session: Session
    message: pb.ServerMessage


def ask(questions: Iterable[Question], *, deadline: float) -> list[Answered | KVStoreError]:
    """The answer to each, or why there is none. A daemon that is away or slow keeps none of the others waiting."""
    begun: list[tuple[Session, Call] | KVStoreError] = []
    try:
        for question in questions:
            begun.append(_begun(question, deadline))
        return [one if isinstance(one, KVStoreError) else _answer(*one) for one in begun]
    except BaseException:
        for one in begun:
            if not isinstance(one, KVStoreError):
                one[1].abandon()
        raise


def _begun(question: Question, deadline: float) -> tuple[Session, Call] | KVStoreError:
    try:
        session = question.link.channel.session(0.0)  # waits for no attempt to connect
        return session, session.begin(question.message, deadline=deadline, undo=question.undo)
    except KVStoreError as error:
        return error


def _answer(session: Session, call: Call) -> Answered | KVStoreError:
    try:
        return Answered(session, call.answer())
    except KVStoreError as error:
        return error


def half_way(deadline: float) -> float:
    """When to turn to another daemon, so that there is time left for it."""
    now = time.monotonic()
    return now + (deadline - now) / 2


def each(pool: Executor, steps: Sequence[Callable[[], Result]]) -> list[Result | KVStoreError]:
    """What each step gave, or raised; they run side by side, one of them on this thread.

    Raises: InvalidRequest, if one did, once all are over.
    """
    others = [_begin(pool, step) for step in steps[1:]]
    results = [_result(step) for step in [*steps[:1], *others]]
    for result in results:
        if isinstance(result, InvalidRequest):
            raise result
    return results


def _begin(pool: Executor, step: Callable[[], Result]) -> Callable[[], Result]:
    """What waits for the step, and gives what it does."""
    try:
        return pool.submit(step).result
    except RuntimeError:  # the client is being closed, as the step will find
        return step


def _result(step: Callable[[], Result]) -> Result | KVStoreError:
    try:
        return step()
    except KVStoreError as error:
        return error
