"""ClusterClient: as KVClient, for a store of several daemons.

Who keeps a block follows from the segment of the chain that it is in (docs/spec/placement.md). Each member is asked for
its blocks, all at once, and the answers are joined. A member that is away or slow costs its blocks and nothing else.

Threads: all methods may be called from any thread. A client does not survive `fork`: make it in the child.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np

from kvstore.errors import (
    BlockCorrupt,
    InvalidRequest,
    KVStoreError,
    MembersChanged,
    StoreFull,
)
from kvstore.hashing import unpack
from kvstore.placement import segments as segments_of
from kvstore.spec import KVSpec
from kvstore.types import AnyArray, BlockHash, IntArray, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import error_from_status
from kvstore_client.arguments import check_segments, hashes_of, packed, parts_of
from kvstore_client.breaker import BreakerState
from kvstore_client.buffers import Destination, as_destination
from kvstore_client.client import DEFAULT_OPTIONS
from kvstore_client.cluster_load import ClusterLoad, Leg
from kvstore_client.cluster_write import ClusterWrite, Piece
from kvstore_client.fanout import Answered, Question, ask, each
from kvstore_client.joining import Found, join
from kvstore_client.link import Link, Shared, match_request, release_request, store_request, undo_store
from kvstore_client.links import Links, Ring
from kvstore_client.load import Load
from kvstore_client.locate import Match, worth_loading
from kvstore_client.options import ClientOptions, ClientStatistics
from kvstore_client.placing import NOBODY, Share, shares
from kvstore_client.regions import Region
from kvstore_client.session import Undo

SCHEME: Final = "kvstore://"
MOST_SIDES: Final = 64  # calls to members that wait side by side, over all calls of a client


class ClusterClient:
    """One engine's way to a store of several daemons: blocks of one spec. A context manager, used like `KVClient`.

    `address` is "kvstore://" and the addresses of some members, with commas between; the others are learned from them.

    `segments`, where a method takes them, are `[n]` u64: the segment of its chain that each block is in, from
    `kvstore.placement.segments`. None: the blocks begin a chain.

    Each session has a staging region of its own, so `options.staging_bytes` bounds what is on its way to one member.
    """

    def __init__(self, address: str, spec: KVSpec, *, options: ClientOptions = DEFAULT_OPTIONS) -> None:
        """Raises: InvalidRequest, if the address is none."""
        self.spec = spec
        self.options = options
        self._address = address
        self._shared = Shared(options)
        self._sides = ThreadPoolExecutor(MOST_SIDES, thread_name_prefix="kvstore-member")
        self._links = Links(seeds_of(address), spec, options, self._shared)

    def __repr__(self) -> str:
        links = self._links.current().links
        num_live = sum(link.live for link in links)
        return f"<ClusterClient {self._address} {self.options.name!r} [{num_live} of {len(links)} members live]>"

    def __enter__(self) -> "ClusterClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def namespace(self) -> Namespace:
        return self.spec.namespace

    @property
    def connected(self) -> bool:
        """Whether at least one member is."""
        return any(link.channel.current is not None for link in self._links.current().links)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Each member was tried, and at least one is connected. Raises: as `KVClient.wait_ready`."""
        self._links.wait_ready(self._deadline(timeout_s))

    def match(
        self,
        hashes: Sequence[BlockHash],
        *,
        lease: str | None = None,
        segments: AnyArray | None = None,
        timeout_s: float | None = None,
    ) -> Match:
        """As `KVClient.match`: the leading blocks that are stored with their owners.

        Blocks of members that do not answer count as missing. Raises: InvalidRequest; StoreTimeout, StoreUnavailable,
        if no member that was asked has answered.
        """
        name = self._shared.new_lease() if lease is None else lease
        asked = self._ask_readers(
            hashes,
            segments,
            lambda data: match_request(data, name),
            self._deadline(timeout_s),
            undo=lambda _: release_request(name),
        )
        speed = self.options.prefill_tokens_per_s
        found = []
        for blocks, answer in asked:
            matched = answer.message.matched
            worth = worth_loading(matched, self.spec, prefill_tokens_per_s=speed)
            found.append(Found(blocks, matched.num_blocks, worth, matched.num_writing))
        prefix = join(found, num_blocks=len(hashes))
        sessions = [answer.session for _, answer in asked]
        return Match(prefix.num_blocks, prefix.num_writing, prefix.num_found, name, hashes, sessions)

    def prefetch(
        self, hashes: Sequence[BlockHash], *, segments: AnyArray | None = None, timeout_s: float | None = None
    ) -> int:
        """As `KVClient.prefetch`. Raises: as `match`."""
        asked = self._ask_readers(
            hashes,
            segments,
            lambda data: pb.ClientMessage(prefetch=pb.Prefetch(hashes=data)),
            self._deadline(timeout_s),
        )
        counts = [(blocks, answer.message.prefetched.num_blocks) for blocks, answer in asked]
        return join([Found(blocks, count, count, 0) for blocks, count in counts], num_blocks=len(hashes)).num_found

    def load(
        self,
        blocks: Match | Sequence[BlockHash],
        *,
        into: Destination | None = None,
        parts: Sequence[int] | None = None,
        follow: bool = False,
        view: bool = False,
        lease: str | None = None,
        segments: AnyArray | None = None,
        timeout_s: float | None = None,
    ) -> ClusterLoad:
        """As `KVClient.load`, from every owner at once.

        Blocks of members that do not answer are `errors` of the load. Raises: InvalidRequest; Unsupported;
        StoreTimeout, StoreUnavailable, if no member that was asked has answered.
        """
        if (into is None) == (not view):
            raise InvalidRequest("load: expected either into=... or view=True, got neither or both; choose one")
        hashes = hashes_of(blocks, follow=follow)
        segments = _segments(hashes, segments)
        chosen = parts_of(parts, self.spec)
        rows = None
        if into is not None:
            rows = as_destination(into, spec=self.spec, parts=chosen, num_blocks=len(hashes))
        deadline = self._deadline(timeout_s)
        name = self._shared.new_lease() if lease is None else lease
        ring = self._links.ring(deadline)
        owners = self._holders(ring, hashes, segments, deadline=deadline)
        mine = shares(owners)

        def begin(share: Share) -> Load:
            link = ring.links[share.node]
            return link.load(
                link.channel.session(0.0),
                [hashes[block] for block in share.blocks.tolist()],
                into=None if rows is None else {part: each.pick(share.blocks) for part, each in rows.items()},
                parts=chosen,
                follow=follow,
                lease=name,
                owns_lease=lease is None,
                deadline=deadline,
            )

        legs, failed = [], {}
        begun = each(self._sides, [partial(begin, share) for share in mine])
        for share, load in zip(mine, begun, strict=True):
            if isinstance(load, KVStoreError):
                failed.update(dict.fromkeys(share.blocks.tolist(), load))
            else:
                legs.append(Leg(load, share.blocks))
        if mine and not legs:
            raise failed[int(mine[0].blocks[0])]
        return ClusterLoad(hashes, legs, failed, lease=name, timeout_s=self.options.timeout_s)

    def store(
        self,
        hashes: Sequence[BlockHash],
        *,
        parent: BlockHash | None = None,
        parts: Sequence[int] | None = None,
        segments: AnyArray | None = None,
        timeout_s: float | None = None,
    ) -> ClusterWrite:
        """As `KVClient.store`, with every owner at once. A run with a parent brings its segments.

        Raises: InvalidRequest; StoreFull, if all members are draining; StoreTimeout, StoreUnavailable, if no member
        that was asked has answered.
        """
        if parent is not None and segments is None:
            raise InvalidRequest("store: expected segments for a run with a parent, got none; cut them like the hashes")
        segments = _segments(hashes, segments)
        chosen = parts_of(parts, self.spec)
        deadline = self._deadline(timeout_s)
        ring = self._links.ring(deadline)
        pieces, failures = self._reserve(ring, hashes, segments, parent, parts, deadline)
        changed = next((link for link, error in failures if isinstance(error, MembersChanged)), None)
        if changed is not None:
            each(self._sides, [piece.write.abort for piece in pieces])
            ring = self._links.refresh(changed.channel.address, deadline)
            pieces, failures = self._reserve(ring, hashes, segments, parent, parts, deadline)
        if failures and not pieces:
            raise failures[0][1]
        return ClusterWrite(pieces, self.spec, num_blocks=len(hashes), parts=chosen, pool=self._sides)

    def region(self, size_bytes: int, *, timeout_s: float | None = None) -> Region:
        """As `KVClient.region`: every member can read it, and each that comes.

        Raises: as `KVClient.region`, if no member took it.
        """
        return self._shared.regions.create(size_bytes, deadline=self._deadline(timeout_s))

    def verify(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> dict[int, KVStoreError]:
        """As `KVClient.verify`, asked of every member.

        BlockCorrupt, by index, for blocks that one of them dropped; BlockMissing for those that none of them has.
        Raises: as `match`.
        """
        message = pb.Verify(hashes=packed(hashes))
        answers = self._ask_all(lambda: pb.ClientMessage(verify=message), self._deadline(timeout_s))
        told = [{error.index: error_from_status(error.status) for error in each.verified.errors} for each in answers]
        wrong: dict[int, KVStoreError] = {}
        for index in sorted(set().union(*told)):
            errors = [each[index] for each in told if index in each]
            corrupt = [error for error in errors if isinstance(error, BlockCorrupt)]
            if corrupt or len(errors) == len(told):
                wrong[index] = (corrupt or errors)[0]
        return wrong

    def release(self, lease: str, *, timeout_s: float | None = None) -> None:
        """As `KVClient.release`, with every member. Raises: as `match`; a member that is slow will do it, too."""
        self._ask_all(lambda: release_request(lease), self._deadline(timeout_s))

    def statistics(self) -> ClientStatistics:
        """What this client has done so far. The breaker is open while that of every member is."""
        states = {link.breaker.state for link in self._links.current().links} or {BreakerState.CLOSED}
        order = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)
        return self._shared.counters.snapshot(min(states, key=order.index))

    def close(self) -> None:
        """The sessions have ended, and with them all leases and open writes; threads and descriptors are gone.

        Idempotent.
        """
        self._links.close()
        self._sides.shutdown(wait=True, cancel_futures=True)
        self._shared.close()

    # Inside.

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)

    def _ask_readers(
        self,
        hashes: Sequence[BlockHash],
        segments: AnyArray | None,
        message_of: Callable[[bytes], pb.ClientMessage],
        deadline: float,
        *,
        undo: Undo | None = None,
    ) -> list[tuple[IntArray, Answered]]:
        """Of each member that answered, its blocks by index and the answer. Raises: why nobody did."""
        array = unpack(packed(hashes))
        segments = _segments(hashes, segments)
        ring = self._links.ring(deadline)
        first, other = ring.view.readers(segments, ring.live())
        questions, asked = [], []
        for node, link in enumerate(ring.links):
            # Those that it may not have yet come last: its answer ends with the first that it does not have.
            blocks = np.concatenate([np.flatnonzero(first == node), np.flatnonzero(other == node)])
            if len(blocks):
                questions.append(Question(link, message_of(array[blocks].tobytes()), undo))
                asked.append(blocks)
        answers = ask(questions, deadline=deadline)
        _check_any(answers)
        return [(blocks, each) for blocks, each in zip(asked, answers, strict=True) if isinstance(each, Answered)]

    def _ask_all(self, message: Callable[[], pb.ClientMessage], deadline: float) -> list[pb.ServerMessage]:
        """What each member that answered has said. Raises: why nobody did."""
        links = self._links.ring(deadline).links
        answers = ask([Question(link, message()) for link in links], deadline=deadline)
        _check_any(answers)
        return [answer.message for answer in answers if isinstance(answer, Answered)]

    def _holders(self, ring: Ring, hashes: Sequence[BlockHash], segments: AnyArray, *, deadline: float) -> IntArray:
        """From whom each block is loaded. A member that is draining is asked first what it still has of its blocks."""
        first, other = ring.view.readers(segments, ring.live())
        moving = np.flatnonzero(other != NOBODY)
        if not len(moving):
            return first
        lease = self._shared.new_lease()
        parts = [Share(share.node, moving[share.blocks]) for share in shares(first[moving])]
        questions = [
            Question(
                ring.links[share.node],
                pb.ClientMessage(
                    load=pb.Load(hashes=b"".join([hashes[i] for i in share.blocks.tolist()]), lease=lease)
                ),
                lambda _: release_request(lease),
            )
            for share in parts
        ]
        for share, answer in zip(parts, ask(questions, deadline=deadline), strict=True):
            missing = share.blocks
            if isinstance(answer, Answered):
                missing = share.blocks[[error.index for error in answer.message.located.errors]]
                answer.session.tell(release_request(lease))
            first[missing] = other[missing]
        return first

    def _reserve(
        self,
        ring: Ring,
        hashes: Sequence[BlockHash],
        segments: AnyArray,
        parent: BlockHash | None,
        parts: Sequence[int] | None,
        deadline: float,
    ) -> tuple[list[Piece], list[tuple[Link, KVStoreError]]]:
        """The writes that were begun, and the members that began none.

        A member gets its blocks as one run. Where that begins with a segment, or leaves some out, the block before may
        lie with another, so that it counts as the beginning of a chain.
        """
        array = unpack(packed(hashes))
        owners = ring.view.writers(segments, ring.live())
        if NOBODY in owners:
            raise StoreFull("the members of the store are all draining and take nothing new; skip this save")
        mine = shares(owners)
        questions = []
        for share in mine:
            begins_within = share.blocks[0] == 0 and not _begins_segment(hashes[0], segments[0])
            message = store_request(
                array[share.blocks].tobytes(),
                parent=parent if begins_within else None,
                parts=parts,
                segments=segments[share.blocks],
                epoch=ring.view.epoch,
            )
            questions.append(Question(ring.links[share.node], message, undo_store))
        pieces, failures = [], []
        for share, question, answer in zip(mine, questions, ask(questions, deadline=deadline), strict=True):
            if isinstance(answer, KVStoreError):
                failures.append((question.link, answer))
            else:
                write = question.link.write(answer.session, answer.message.reserved, parts=parts_of(parts, self.spec))
                pieces.append(Piece(write, share.blocks))
        return pieces, failures


def seeds_of(address: str) -> list[str]:
    """The addresses in "kvstore://a:7311,b:7311,unix:/x". Raises: InvalidRequest, if it is none."""
    seeds = [seed.strip() for seed in address.removeprefix(SCHEME).split(",")]
    if not address.startswith(SCHEME) or not all(":" in seed for seed in seeds):
        raise InvalidRequest(
            f'address: expected "{SCHEME}HOST:PORT,..." or "{SCHEME}unix:/PATH,...", got {address!r:.200}; correct it'
        )
    return seeds


def _segments(hashes: Sequence[BlockHash], segments: AnyArray | None) -> AnyArray:
    check_segments(segments, num_blocks=len(hashes))
    return segments_of(hashes) if segments is None else segments


def _begins_segment(block: BlockHash, segment: int) -> bool:
    return int.from_bytes(block[:8], "little") == int(segment)


def _check_any(answers: Sequence[Answered | KVStoreError]) -> None:
    """Raises: the first failure, if there was nothing else."""
    failures = [answer for answer in answers if isinstance(answer, KVStoreError)]
    if failures and len(failures) == len(answers):
        raise failures[0]
