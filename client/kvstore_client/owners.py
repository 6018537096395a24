"""What the owners of blocks are asked, all of them at once: for a prefix, for what they hold, for room.

`data` are the hashes of a request, packed, and `runs` those that it is cut into. All of it raises what no answer was
given for, if there was none at all.
"""

from collections.abc import Callable, Sequence

import numpy as np

from kvstore.errors import KVStoreError, StoreFull
from kvstore.types import HASH_BYTES, BlockHash, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.fanout import Answered, Question, ask
from kvstore_client.link import Link, release_request, store_request, undo_store
from kvstore_client.links import Ring
from kvstore_client.placing import NOBODY, Run, indices_of, shares
from kvstore_client.session import Undo


def ask_readers(
    ring: Ring,
    data: bytes,
    runs: Sequence[Run],
    message_of: Callable[[bytes], pb.ClientMessage],
    *,
    undo: Undo | None,
    deadline: float,
) -> list[tuple[list[Run], Answered]]:
    """Of each member that answered, the runs that it was asked for, in this order, and the answer."""
    first, other = ring.view.readers(runs, ring.live())
    mine = shares(runs, first)
    for node, theirs in shares(runs, other).items():
        # Those that it may not have yet come last: its answer ends with the first that it does not have.
        mine[node] = [*mine.get(node, ()), *theirs]
    # Made one by one: the first member is at work while the message for the next is made.
    questions = (Question(ring.links[node], message_of(_cut(data, theirs)), undo) for node, theirs in mine.items())
    answers = ask(questions, deadline=deadline)
    check_any(answers)
    asked = zip(mine.values(), answers, strict=True)
    return [(theirs, answer) for theirs, answer in asked if isinstance(answer, Answered)]


def ask_all(ring: Ring, message: Callable[[], pb.ClientMessage], *, deadline: float) -> list[pb.ServerMessage]:
    """What each member that answered has said."""
    answers = ask([Question(link, message()) for link in ring.links], deadline=deadline)
    check_any(answers)
    return [answer.message for answer in answers if isinstance(answer, Answered)]


def holders(ring: Ring, data: bytes, runs: Sequence[Run], *, lease: str, deadline: float) -> dict[int, IntArray]:
    """By member, the blocks to load from it. One that is draining is asked first, under `lease`, what it still has."""
    first, other = ring.view.readers(runs, ring.live())
    moving = [(run, node) for run, node, instead in zip(runs, first, other, strict=True) if instead != NOBODY]
    if not moving:
        return {node: indices_of(theirs) for node, theirs in shares(runs, first).items()}
    asked = shares(*zip(*moving, strict=True))
    questions = [
        Question(
            ring.links[node],
            pb.ClientMessage(load=pb.Load(hashes=_cut(data, theirs), lease=lease)),
            lambda _: release_request(lease),
        )
        for node, theirs in asked.items()
    ]
    lengths = [run.end - run.begin for run in runs]
    owners, instead_of = np.repeat(first, lengths), np.repeat(other, lengths)
    for theirs, answer in zip(asked.values(), ask(questions, deadline=deadline), strict=True):
        missing = indices_of(theirs)
        if isinstance(answer, Answered):
            missing = missing[[error.index for error in answer.message.located.errors]]
            answer.session.tell(release_request(lease))
        owners[missing] = instead_of[missing]
    return {node: np.flatnonzero(owners == node) for node in np.unique(owners).tolist()}


def reserve(
    ring: Ring,
    data: bytes,
    runs: Sequence[Run],
    *,
    parent: BlockHash | None,
    parts: Sequence[int] | None,
    deadline: float,
) -> list[tuple[Link, IntArray, Answered | KVStoreError]]:
    """The way to each member that takes blocks in, those blocks, and the answer, or why there is none.

    Each run begins a chain, as the block before it may lie with another member, but for one that begins within a
    segment. Raises: StoreFull, if all members are draining.
    """
    owners = ring.view.writers(runs, ring.live())
    if NOBODY in owners:
        raise StoreFull("the members of the store are all draining and take nothing new; skip this save")
    mine = shares(runs, owners)
    within = bool(runs) and not data.startswith(runs[0].segment.to_bytes(8, "little"))
    questions = []
    for node, theirs in mine.items():
        message = store_request(
            _cut(data, theirs),
            parent=parent if within and theirs[0] is runs[0] else None,
            parts=parts,
            epoch=ring.view.epoch,
            heads=np.cumsum([run.end - run.begin for run in theirs])[:-1].tolist(),
        )
        questions.append(Question(ring.links[node], message, undo_store))
    answers = zip(questions, mine.values(), ask(questions, deadline=deadline), strict=True)
    return [(question.link, indices_of(theirs), answer) for question, theirs, answer in answers]


def check_any(answers: Sequence[object]) -> None:
    """Raises: the first failure, if there was nothing else."""
    failures = [answer for answer in answers if isinstance(answer, KVStoreError)]
    if failures and len(failures) == len(answers):
        raise failures[0]


def _cut(data: bytes, runs: Sequence[Run]) -> bytes:
    """The hashes of these runs."""
    return b"".join([data[run.begin * HASH_BYTES : run.end * HASH_BYTES] for run in runs])
