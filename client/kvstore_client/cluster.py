"""ClusterClient: as KVClient, for a store of several daemons.

Who keeps a block follows from the segment of the chain that it is in (docs/spec/placement.md). Each member is asked for
its blocks, all at once, and the answers are joined. A member that is away or slow costs its blocks and nothing else.

Threads: all methods may be called from any thread. A client does not survive `fork`: make it in the child.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

from kvstore.errors import BlockCorrupt, InvalidRequest, KVStoreError, MembersChanged
from kvstore.spec import KVSpec
from kvstore.types import AnyArray, BlockHash, IntArray, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import CLUSTER_SCHEME, error_from_status
from kvstore_client.arguments import check_segments, hashes_of, packed, parts_of
from kvstore_client.breaker import BreakerState
from kvstore_client.buffers import Destination, as_destination
from kvstore_client.client import DEFAULT_OPTIONS
from kvstore_client.cluster_load import ClusterLoad, begin_legs
from kvstore_client.cluster_write import ClusterWrite, Piece, abort_all
from kvstore_client.fanout import Answered
from kvstore_client.joining import Told
from kvstore_client.link import Link, Shared, match_request, release_request
from kvstore_client.links import Links
from kvstore_client.load import Load
from kvstore_client.locate import Match, worth_loading
from kvstore_client.options import ClientOptions, ClientStatistics
from kvstore_client.owners import ask_all, ask_readers, check_any, holders, reserve
from kvstore_client.placing import NOBODY, Runs, runs_of
from kvstore_client.region import CudaRegion, Region

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
        data, runs = self._cut(hashes, segments)
        deadline = self._deadline(timeout_s)
        name = self._shared.new_lease() if lease is None else lease
        speed = self.options.prefill_tokens_per_s

        def told_of(answer: pb.ServerMessage) -> Told:
            worth = worth_loading(answer.matched, self.spec, prefill_tokens_per_s=speed)
            return Told(answer.matched.num_blocks, worth, answer.matched.num_writing)

        ring = self._links.ring(deadline)
        prefix, sessions = ask_readers(
            ring,
            data,
            runs,
            lambda part: match_request(part, name),
            told_of,
            undo=lambda _: release_request(name),
            deadline=deadline,
        )
        if lease:  # what it held with others is replaced, too
            for session in {link.channel.current for link in ring.links}.difference(sessions.values()):
                if session is not None:
                    session.tell(release_request(name))
        found_in = {
            begin: sessions[node] for begin, node in zip(runs.begins, prefix.holders, strict=False) if node != NOBODY
        }
        return Match(
            prefix.num_blocks, prefix.num_writing, prefix.num_found, name, hashes, list(sessions.values()), found_in
        )

    def prefetch(
        self, hashes: Sequence[BlockHash], *, segments: AnyArray | None = None, timeout_s: float | None = None
    ) -> int:
        """As `KVClient.prefetch`. Raises: as `match`."""
        data, runs = self._cut(hashes, segments)
        deadline = self._deadline(timeout_s)

        def told_of(answer: pb.ServerMessage) -> Told:
            count = answer.prefetched.num_blocks
            return Told(count, count, 0)

        prefix, _ = ask_readers(
            self._links.ring(deadline),
            data,
            runs,
            lambda part: pb.ClientMessage(prefetch=pb.Prefetch(hashes=part)),
            told_of,
            undo=None,
            deadline=deadline,
        )
        return prefix.num_found

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
        data, runs = self._cut(hashes, segments)
        chosen = parts_of(parts, self.spec)
        rows = None
        if into is not None:
            in_region = self._shared.regions.in_cuda_region
            rows = as_destination(into, spec=self.spec, parts=chosen, num_blocks=len(hashes), in_cuda_region=in_region)
        deadline = self._deadline(timeout_s)
        name = self._shared.new_lease() if lease is None else lease
        ring = self._links.ring(deadline)
        known = blocks.found_in if isinstance(blocks, Match) else {}
        nodes = holders(ring, data, runs, known, follow=follow, lease=self._shared.new_lease(), deadline=deadline)

        served: set[int] = set()

        def begin(node: int, theirs: IntArray, until: float) -> Load:
            link = ring.links[node]
            # Whichever load there is over first gives its lease back.
            own = name if lease is not None or node not in served else self._shared.new_lease()
            served.add(node)
            return link.load(
                link.channel.session(0.0),
                [hashes[block] for block in theirs.tolist()],
                into=None if rows is None else {part: of.pick(theirs) for part, of in rows.items()},
                parts=chosen,
                follow=follow,
                lease=own,
                owns_lease=lease is None,
                deadline=until,
            )

        legs, failed = begin_legs(ring, runs, nodes, begin, pool=self._sides, deadline=deadline)
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
        data, runs = self._cut(hashes, segments)
        chosen = parts_of(parts, self.spec)
        deadline = self._deadline(timeout_s)
        ask = partial(reserve, data=data, runs=runs, parent=parent, parts=parts, deadline=deadline)
        answers = ask(self._links.ring(deadline))
        changed = next((link for link, _, answer in answers if isinstance(answer, MembersChanged)), None)
        if changed is not None:
            abort_all(self._pieces(answers, chosen), self._sides)
            answers = ask(self._links.refresh(changed.channel.address, deadline))
        check_any([answer for _, _, answer in answers])
        pieces = self._pieces(answers, chosen)
        return ClusterWrite(
            pieces,
            self.spec,
            num_blocks=len(hashes),
            parts=chosen,
            in_cuda_region=self._shared.regions.in_cuda_region,
            pool=self._sides,
            timeout_s=self.options.timeout_s,
        )

    def region(self, size_bytes: int, *, timeout_s: float | None = None) -> Region:
        """As `KVClient.region`: every member can read it, and each that comes.

        Raises: as `KVClient.region`, if no member took it.
        """
        return self._shared.regions.create(size_bytes, deadline=self._deadline(timeout_s))

    def cuda_region(self, array: Any, *, timeout_s: float | None = None) -> CudaRegion:
        """As `KVClient.cuda_region`: every member that is reached over ucx can read and write it, and each that comes.

        Raises: as `KVClient.cuda_region`, if no member took it.
        """
        return self._shared.regions.create_cuda(array, deadline=self._deadline(timeout_s))

    def verify(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> dict[int, KVStoreError]:
        """As `KVClient.verify`, asked of every member.

        BlockCorrupt, by index, for blocks that one of them dropped; BlockMissing for those that none of them has.
        Raises: as `match`.
        """
        message = pb.Verify(hashes=packed(hashes))
        deadline = self._deadline(timeout_s)
        answers = ask_all(self._links.ring(deadline), lambda: pb.ClientMessage(verify=message), deadline=deadline)
        told = [
            {error.index: error_from_status(error.status) for error in answer.verified.errors} for answer in answers
        ]
        wrong: dict[int, KVStoreError] = {}
        for index in sorted(set().union(*told)):
            errors = [theirs[index] for theirs in told if index in theirs]
            corrupt = [error for error in errors if isinstance(error, BlockCorrupt)]
            if corrupt or len(errors) == len(told):
                wrong[index] = (corrupt or errors)[0]
        return wrong

    def release(self, lease: str, *, timeout_s: float | None = None) -> None:
        """As `KVClient.release`, with every member. Raises: as `match`; a member that is slow will do it, too."""
        deadline = self._deadline(timeout_s)
        ring = self._links.ring(deadline)
        for link in ring.links:
            session = link.channel.current
            if session is not None and not link.breaker.admits:
                session.tell(release_request(lease))
        ask_all(ring, lambda: release_request(lease), deadline=deadline)

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
        self._sides.shutdown(wait=True)
        self._shared.close()

    # Inside.

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)

    def _cut(self, hashes: Sequence[BlockHash], segments: AnyArray | None) -> tuple[bytes, Runs]:
        """The hashes as they are sent, and their runs. Raises: InvalidRequest."""
        check_segments(segments, num_blocks=len(hashes))
        data = packed(hashes)
        return data, runs_of(data, segments, block_tokens=self.spec.block_tokens)

    def _pieces(
        self, answers: Sequence[tuple[Link, IntArray, Answered | KVStoreError]], parts: Sequence[int]
    ) -> list[Piece]:
        """The writes that were begun."""
        return [
            Piece(link.write(answer.session, answer.message.reserved, parts=parts), theirs)
            for link, theirs, answer in answers
            if isinstance(answer, Answered)
        ]


def seeds_of(address: str) -> list[str]:
    """The addresses in "kvstore://a:7311,b:7311,unix:/x". Raises: InvalidRequest, if it is none."""
    seeds = [seed.strip() for seed in address.removeprefix(CLUSTER_SCHEME).split(",")]
    if not address.startswith(CLUSTER_SCHEME) or not all(":" in seed for seed in seeds):
        raise InvalidRequest(
            f'address: expected "{CLUSTER_SCHEME}HOST:PORT,..." or "{CLUSTER_SCHEME}unix:/PATH,...", '
            f"got {address!r:.200}; correct it"
        )
    return seeds
