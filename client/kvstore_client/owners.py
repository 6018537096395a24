"""What the owners of blocks are asked, all of them at once: for a prefix, for what they hold, for room.

`data` are the hashes of a request, packed, and `runs` those that it is cut into. All of it raises what no answer was
given for, if there was none at all.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvstore.errors import KVStoreError, StoreFull, WriterFailed
from kvstore.types import HASH_BYTES, AnyArray, BlockHash, IntArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.fanout import Answered, Question, ask, half_way
from kvstore_client.joining import Prefix, Told, join
from kvstore_client.link import Link, release_request, store_request, undo_store
from kvstore_client.links import Ring
from kvstore_client.placing import NOBODY, Cost, Runs, shares
from kvstore_client.session import Session, Undo


def ask_readers(
    ring: Ring,
    data: bytes,
    runs: Runs,
    message_of: Callable[[bytes], pb.ClientMessage],
    told_of: Callable[[pb.ServerMessage], Told],
    *,
    undo: Undo | None,
    deadline: float,
) -> tuple[Prefix, dict[int, Session]]:
    """The leading blocks that those asked have, and the sessions in which they said so, by member.

    Where the chain would end, whoever else may have the rest is asked for it. A message takes the place of an earlier
    one to the same member, so that it names what that one has, too. Who fails is asked nothing more, and gives back
    what it leased before.
    """
    view, live, costs = ring.view, ring.live(), ring.costs()
    asked = shares(view.readers(runs, live, costs))
    tried: list[set[int]] = [set() for _ in range(len(runs))] if view.has_others else []
    told: dict[int, tuple[int, list[int], Told]] = {}
    sessions: dict[int, Session] = {}
    failures: list[KVStoreError] = []
    while True:
        # Made one by one: the first member is at work while the message for the next is made.
        questions = (Question(ring.links[node], message_of(runs.cut(data, mine)), undo) for node, mine in asked.items())
        answers = ask(questions, deadline=half_way(deadline) if view.has_others else deadline)
        for (node, mine), answer in zip(asked.items(), answers, strict=True):
            if isinstance(answer, Answered):
                told[node] = node, mine, told_of(answer.message)
                sessions[node] = answer.session
            else:
                failures.append(answer)
                told.pop(node, None)
                former = sessions.pop(node, None)
                if former is not None and former.alive and undo is not None:
                    former.tell(undo(0))
        prefix = join(runs, told.values())
        if not view.has_others or prefix.gap == len(runs):
            break
        for node in asked:
            for run in _heard(runs, told[node]) if node in told else range(len(runs)):
                tried[run].add(node)
        fresh = _whom_else(ring, runs, prefix, told, tried, live=live, costs=costs)
        if not fresh:
            break
        for node, more in fresh.items():
            if prefix.gap in more:  # so that it is asked for this once, whatever it says
                tried[prefix.gap].add(node)
        asked = {node: _with_held(runs, told.get(node), more) for node, more in fresh.items()}
    if failures and not told:
        raise failures[0]
    return prefix, sessions


def _whom_else(
    ring: Ring,
    runs: Runs,
    prefix: Prefix,
    told: Mapping[int, tuple[int, list[int], Told]],
    tried: Sequence[set[int]],
    *,
    live: Sequence[bool],
    costs: Sequence[Cost],
) -> dict[int, list[int]]:
    """Whom to ask for which runs, so that the chain goes on; nobody, if all have been asked for what comes next.

    An answer ends with the first run of which blocks are missing. So whoever has but a part of a run, or some in
    writing, would not speak of that again if it lacked what it is asked for; it is asked for nothing but what comes
    next, and not for that, if what it has in writing counts.
    """
    in_part = {node for node, mine, answer in told.values() if _ends_in_part(runs, mine, answer)}
    behind_found = (run for run in range(prefix.gap) if runs.begins[run + 1] > prefix.num_found)
    counted = in_part.intersection(prefix.holders[run] for run in behind_found)
    asked: dict[int, list[int]] = {}
    for run in range(prefix.gap, len(runs)):
        if run == prefix.gap or prefix.holders[run] == NOBODY:
            others = tried[run] | (counted if run == prefix.gap else in_part)
            node = ring.view.next_reader(runs.segments[run], live, costs, others)
            if node != NOBODY:
                asked.setdefault(node, []).append(run)
            elif run == prefix.gap:
                return {}
    return asked


def _heard(runs: Runs, told: tuple[int, list[int], Told]) -> list[int]:
    """The runs that an answer speaks of: all that are there or in writing, and the first that is not whole."""
    _, asked, (num_found, _, num_writing) = told
    num_whole, left = _reach(runs, asked, num_found + num_writing)
    # What is there behind blocks in writing is not told.
    return asked[:num_whole] if num_writing and not left else asked[: num_whole + 1]


def _ends_in_part(runs: Runs, asked: Sequence[int], answer: Told) -> bool:
    """Whether this answer ends within a run, or with blocks in writing."""
    return answer.num_writing > 0 or _reach(runs, asked, answer.num_found)[1] > 0


def _with_held(runs: Runs, told: tuple[int, list[int], Told] | None, more: list[int]) -> list[int]:
    """These runs between those that the member has: its answer ends with the first of which it lacks a block."""
    if told is None:
        return more
    _, asked, answer = told
    num_whole, _ = _reach(runs, asked, answer.num_found)
    return [*asked[:num_whole], *more, *(run for run in asked[num_whole:] if run not in more)]


def _reach(runs: Runs, asked: Sequence[int], count: int) -> tuple[int, int]:
    """How many leading runs of those asked for so many blocks are, and how many are left for the one behind them."""
    for place, run in enumerate(asked):
        size = runs.begins[run + 1] - runs.begins[run]
        if count < size:
            return place, count
        count -= size
    return len(asked), 0


def ask_all(ring: Ring, message: Callable[[], pb.ClientMessage], *, deadline: float) -> list[pb.ServerMessage]:
    """What each member that answered has said."""
    answers = ask([Question(link, message()) for link in ring.links], deadline=deadline)
    check_any(answers)
    return [answer.message for answer in answers if isinstance(answer, Answered)]


def holders(
    ring: Ring, data: bytes, runs: Runs, known: Mapping[int, Session], *, follow: bool, lease: str, deadline: float
) -> IntArray:
    """`[num_blocks]`: the member to load each block from.

    `known`: the session in which the run that begins there was found. Where it is not known who has a block, and
    several may, they are asked, under `lease`; with `follow`, whoever has it in writing has it.
    """
    view, live, costs = ring.view, ring.live(), ring.costs()
    nodes = {link.channel.current: node for node, link in enumerate(ring.links)} | {None: NOBODY}
    found = [nodes.get(known.get(begin), NOBODY) for begin in runs.begins[:-1]]
    first = view.readers(runs, live, costs)
    chosen = runs.by_block([mine if mine != NOBODY else other for mine, other in zip(found, first, strict=True)])
    if not view.has_others:
        return chosen
    run_of = runs.by_block(range(len(runs)))
    tried = [{node} for node in first]
    unsure = np.flatnonzero(runs.by_block(found) == NOBODY)
    while len(unsure):
        others = {
            run: view.next_reader(runs.segments[run], live, costs, tried[run]) for run in set(run_of[unsure].tolist())
        }
        after = np.array([others[run] for run in run_of[unsure].tolist()], np.int64)
        unsure, after = unsure[after != NOBODY], after[after != NOBODY]
        missing = _missing(ring, data, unsure, chosen[unsure], follow=follow, lease=lease, deadline=half_way(deadline))
        unsure = unsure[missing]
        chosen[unsure] = after[missing]
        for run, other in others.items():
            tried[run].add(other)
    return chosen


def _missing(
    ring: Ring, data: bytes, blocks: IntArray, nodes: IntArray, *, follow: bool, lease: str, deadline: float
) -> AnyArray:
    """`[n]` bool: which of these blocks the member given with each does not have, or does not say so in time."""
    missing = np.ones(len(blocks), bool)
    hashes = np.frombuffer(data, np.dtype((np.void, HASH_BYTES)))
    asked = {node: np.flatnonzero(nodes == node) for node in set(nodes.tolist())}
    questions = (
        Question(
            ring.links[node],
            pb.ClientMessage(load=pb.Load(hashes=hashes[blocks[mine]].tobytes(), lease=lease)),
            lambda _: release_request(lease),
        )
        for node, mine in asked.items()
    )
    for mine, answer in zip(asked.values(), ask(questions, deadline=deadline), strict=True):
        if isinstance(answer, Answered):
            missing[mine] = False
            errors = [each for each in answer.message.located.errors if each.index < len(mine)]
            lacking = [each.index for each in errors if not (follow and each.status.code == WriterFailed.code)]
            missing[mine[lacking]] = True
            answer.session.tell(release_request(lease))
    return missing


def reserve(
    ring: Ring,
    data: bytes,
    runs: Runs,
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
    sizes = runs.sizes()
    within = bool(sizes) and not data.startswith(runs.segments[0].to_bytes(8, "little"))
    mine = shares(owners)
    questions = []
    for node, theirs in mine.items():
        message = store_request(
            runs.cut(data, theirs),
            parent=parent if within and theirs[0] == 0 else None,
            parts=parts,
            epoch=ring.view.epoch,
            heads=list(itertools.accumulate(sizes[run] for run in theirs[:-1])),
        )
        questions.append(Question(ring.links[node], message, undo_store))
    by_block = runs.by_block(owners)
    answers = zip(questions, mine, ask(questions, deadline=deadline), strict=True)
    return [(question.link, np.flatnonzero(by_block == node), answer) for question, node, answer in answers]


def check_any(answers: Sequence[object]) -> None:
    """Raises: the first failure, if there was nothing else."""
    failures = [answer for answer in answers if isinstance(answer, KVStoreError)]
    if failures and len(failures) == len(answers):
        raise failures[0]
