"""One daemon, as a client sees it: the channel to it, and the loads and writes that go there.

What a client has once, however many daemons it is connected to, is in `Shared`.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvstore.errors import KVStoreError, SpecMismatch, Unsupported
from kvstore.spec import KVSpec
from kvstore.types import BlockHash, Location
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import PROTOCOL_VERSION, pack_u32, spec_to_proto
from kvstore_client.breaker import Breaker
from kvstore_client.buffers import Rows
from kvstore_client.channel import Channel
from kvstore_client.cuda_arrays import CudaRows
from kvstore_client.fetching import FETCHES_AT_ONCE, RemoteSource
from kvstore_client.filling import LoadPlan
from kvstore_client.load import Load
from kvstore_client.locate import locate, map_slabs
from kvstore_client.options import ClientOptions, Counters
from kvstore_client.regions import Regions
from kvstore_client.session import Session
from kvstore_client.slabs import Slabs
from kvstore_client.source import Source
from kvstore_client.staging import Stagings
from kvstore_client.transports import choose
from kvstore_client.write import Write


class Shared:
    """Copy threads, regions, counters and names of leases of one client."""

    def __init__(self, options: ClientOptions) -> None:
        self.counters = Counters()
        self.regions = Regions()
        self.pool = ThreadPoolExecutor(options.copy_threads, thread_name_prefix="kvstore-copy")
        self.fetchers = ThreadPoolExecutor(2 * FETCHES_AT_ONCE, thread_name_prefix="kvstore-fetch")
        self._lease_numbers = itertools.count(1)

    def new_lease(self) -> str:
        return f"client/{next(self._lease_numbers)}"

    def close(self) -> None:
        """Threads and regions are gone, once all links are closed. Idempotent."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.fetchers.shutdown(wait=True, cancel_futures=True)
        self.regions.close()


class Link:
    """The way to one daemon. All methods are thread-safe.

    `recognise` may refuse a session, by raising why, before it is used.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        spec: KVSpec,
        options: ClientOptions,
        shared: Shared,
        *,
        recognise: Callable[[Session], None] | None = None,
    ) -> None:
        self._spec = spec
        self._options = options
        self._shared = shared
        self._recognise = recognise
        self.breaker = Breaker(failures=options.breaker_failures, cooldown_s=options.breaker_cooldown_s)
        self._slabs = Slabs(spec)
        self._stagings = Stagings(shared.regions, size_bytes=options.staging_bytes)
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            spec=spec_to_proto(spec),
            expected_namespace=options.expected_namespace,
            token=options.token,
            client_name=options.name,
        )
        self.channel = Channel(
            addresses,
            hello,
            breaker=self.breaker,
            counters=shared.counters,
            on_session=self._adopt,
            on_retired=self._slabs.retire,
        )

    def __repr__(self) -> str:
        state = "connected" if self.channel.current is not None else "not connected"
        return f"<Link {self.channel.address} [{state}, breaker {self.breaker.state.value}]>"

    @property
    def live(self) -> bool:
        """Whether a call that goes out now may be answered."""
        return self.channel.current is not None and self.breaker.admits

    def load(
        self,
        session: Session,
        hashes: Sequence[BlockHash],
        *,
        into: Mapping[int, Rows | CudaRows] | None,
        parts: Sequence[int],
        follow: bool,
        lease: str,
        owns_lease: bool,
        deadline: float,
    ) -> Load:
        """As `KVClient.load`, of what was checked."""
        for rows in (into or {}).values():  # before anything is leased
            if isinstance(rows, CudaRows):
                self._shared.regions.check_reachable(rows, session)
        plan = LoadPlan(
            hashes=hashes,
            parts=parts,
            part_bytes=self._spec.part_bytes,
            into=into,
            lease=lease,
            owns_lease=owns_lease,
            checksums=self._options.integrity == "always",
            timeout_s=self._options.timeout_s,
        )
        remote = session.agent is not None
        load = Load(
            session,
            plan,
            pool=self._shared.fetchers if remote else self._shared.pool,
            num_workers=FETCHES_AT_ONCE if remote else self._options.copy_threads,
            counters=self._shared.counters,
        )
        if hashes:
            locate(load, session, partial(self._source, session, plan), plan=plan, follow=follow, deadline=deadline)
        return load

    def write(self, session: Session, reserved: pb.Reserved, *, parts: Sequence[int]) -> Write:
        """The write that the daemon has begun in this session."""
        return Write(
            session,
            self._spec,
            reserved,
            parts=parts,
            regions=self._shared.regions,
            staging=self._stagings,
            counters=self._shared.counters,
            timeout_s=self._options.timeout_s,
        )

    def close(self) -> None:
        """The session has ended, and with it all leases and open writes. Idempotent."""
        self.channel.close()
        self._stagings.drop()
        self._slabs.adopt(None)

    # Inside.

    def _source(
        self,
        session: Session,
        plan: LoadPlan,
        packed: bytes,
        location: Location,
        errors: dict[int, KVStoreError],
        deadline: float,
    ) -> Source | RemoteSource:
        """From where a load reads, as `locate` asks for it."""
        if session.agent is None:
            mapped = map_slabs(session, self._slabs, location, errors, deadline)
            return Source(self._spec, plan.hashes, packed, location, mapped, plan.parts)
        return RemoteSource(
            self._spec,
            plan,
            location.generations,
            session=session,
            regions=self._shared.regions,
            stagings=self._stagings,
        )

    def _adopt(self, session: Session) -> None:
        """On the channel's thread, before the session can be used."""
        if self._recognise is not None:
            self._recognise(session)
        if session.namespace != self._spec.namespace:
            raise SpecMismatch(
                f"welcome: expected namespace {self._spec.namespace.hex()[:12]}… for this spec, got "
                f"{session.namespace.hex()[:12]}…; run client and daemon of the same version"
            )
        if self._options.integrity == "always" and "checksums" not in session.capabilities:
            raise Unsupported(
                'integrity: expected a daemon that keeps checksums for "always", got one that runs without; '
                'set checksums = true in the daemon\'s configuration, or use integrity="header"'
            )
        choose(session, self.channel.address, self._options)
        self._slabs.adopt(session)
        self._stagings.drop()
        self._shared.regions.adopt(session)


def match_request(packed: bytes, lease: str) -> pb.ClientMessage:
    return pb.ClientMessage(match=pb.Match(hashes=packed, lease=lease))


def release_request(lease: str) -> pb.ClientMessage:
    return pb.ClientMessage(release=pb.Release(lease=lease))


def store_request(
    packed: bytes,
    *,
    parent: BlockHash | None,
    parts: Sequence[int] | None,
    epoch: int = 0,
    heads: Sequence[int] = (),
) -> pb.ClientMessage:
    """`parts` None: all. `epoch`: of the members by which the blocks were placed; 0: they were not.

    `heads`: blocks after the first that begin a chain.
    """
    store = pb.Store_(parent=parent or b"", hashes=packed, epoch=epoch, heads=pack_u32(heads))
    if parts is not None:
        store.parts = pack_u32(parts)
    return pb.ClientMessage(store=store)


def undo_store(request_id: int) -> pb.ClientMessage:
    """Sent when a reservation was not answered in time."""
    return pb.ClientMessage(abort=pb.Abort(store_request_id=request_id))
