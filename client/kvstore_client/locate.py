"""From hashes to bytes: what a Match found, and how a Load is set going."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.errors import BlockMissing, KVStoreError, StoreBug
from kvstore.hashing import pack
from kvstore.spec import KVSpec
from kvstore.types import BlockHash, IntArray, Location
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import error_from_status, unpack_u32, unpack_u64
from kvstore_client.filling import LoadPlan, Readable
from kvstore_client.load import Load
from kvstore_client.session import Session
from kvstore_client.slabs import Slab, Slabs


@dataclass(frozen=True, slots=True)
class Match:
    """How many leading blocks are stored; a context manager that releases their lease."""

    num_blocks: int  # leading blocks that are stored and worth loading
    num_writing: int  # blocks right after them that are being written and can be followed
    num_found: int  # leading blocks that are stored, and leased unless `lease` is empty
    lease: str
    hashes: Sequence[BlockHash] = field(repr=False)  # all that were asked for
    _sessions: Sequence[Session] = field(repr=False)  # in which it is leased, each with its daemon
    # Of a store of several daemons, by the first of blocks that are in one segment: in which of the sessions they are.
    found_in: Mapping[int, Session] = field(repr=False, default_factory=dict)

    def __enter__(self) -> "Match":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def release(self) -> None:
        """The lease is given back, without waiting for the daemon.

        Idempotent; nothing to do once the session ended.
        """
        for session in self._sessions:
            if self.lease and session.alive:
                session.release(self.lease)


def worth_loading(matched: pb.Matched, spec: KVSpec, *, prefill_tokens_per_s: float) -> int:
    """How many of the blocks found take less time to load than to compute.

    Those in memory always do. Of the others each takes as long to bring up as any, so all do, or none.
    """
    if not prefill_tokens_per_s or not matched.rise_bytes_per_s or matched.num_warm == matched.num_blocks:
        return matched.num_blocks
    bring_up_s = spec.block_bytes / matched.rise_bytes_per_s
    return matched.num_blocks if bring_up_s < spec.block_tokens / prefill_tokens_per_s else matched.num_warm


def locate(
    load: Load,
    session: Session,
    source_of: Callable[[bytes, Location, dict[int, KVStoreError], float], Readable],
    *,
    plan: LoadPlan,
    follow: bool,
    deadline: float,
) -> None:
    """The daemon has leased and located the blocks, and the load is under way.

    `source_of` makes that which they are read from, of their hashes, packed, their places and errors, to which it may
    add, by a deadline. Raises: what it does; InvalidRequest; StoreTimeout; StoreUnavailable;
    StoreBug, if the answer makes no sense. The lease is given back then.
    """
    packed = pack(plan.hashes)
    message = pb.ClientMessage(load=pb.Load(hashes=packed, lease=plan.lease, follow=follow))
    undo = None if follow else lambda _: pb.ClientMessage(release=pb.Release(lease=plan.lease))
    try:
        answer, request_id = session.call(message, deadline=deadline, then=load.hear, lasting=True, undo=undo)
        location, errors, writing = _decode(answer.located, num_blocks=len(plan.hashes))
        source = source_of(packed, location, errors, deadline)
    except BaseException:
        session.forget(message.request_id)
        load.release()
        raise
    load.begin(source, request_id, errors=errors, writing=writing)


def _decode(located: pb.Located, *, num_blocks: int) -> tuple[Location, dict[int, KVStoreError], IntArray]:
    location = Location(
        unpack_u32(located.slabs, name="located.slabs"),
        unpack_u32(located.slots, name="located.slots"),
        unpack_u64(located.generations, name="located.generations"),
    )
    writing = unpack_u32(located.writing, name="located.writing")
    counts = {len(location.slabs), len(location.slots), len(location.generations)}
    errors = {error.index: error_from_status(error.status) for error in located.errors}
    if counts != {num_blocks} or max(errors, default=0) >= num_blocks or (writing >= num_blocks).any():
        raise StoreBug(f"located: expected places for {num_blocks} blocks, got others; report it")
    return location, errors, writing


def map_slabs(
    session: Session,
    slabs: Slabs,
    location: Location,
    errors: dict[int, KVStoreError],
    deadline: float,
) -> dict[int, Slab]:
    """The slabs of the blocks without an error; blocks of a slab that is gone get one."""
    served = np.ones(len(location.slabs), bool)
    served[list(errors)] = False
    mapped = {}
    for number in set(location.slabs[served].tolist()):
        mine = (location.slabs == number) & served
        try:
            slab = slabs.get(session, number, deadline=deadline)
        except BlockMissing as error:
            errors.update(dict.fromkeys(np.flatnonzero(mine).tolist(), error))
            continue
        if location.slots[mine].max() >= len(slab.table):
            raise StoreBug(f"located: expected slots below {len(slab.table)} in slab {number}; report it")
        mapped[number] = slab
    return mapped
