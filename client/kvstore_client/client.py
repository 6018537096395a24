"""KVClient: match, load and store blocks, with a deadline and typed errors on each call.

Threads: all methods may be called from any thread. A client does not survive `fork`: make it in the child.
"""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from kvstore.errors import InvalidRequest, KVStoreError, SpecMismatch, Unsupported
from kvstore.hashing import pack
from kvstore.spec import KVSpec
from kvstore.types import BlockHash, BootId, Location, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import (
    MAX_HASHES,
    PROTOCOL_VERSION,
    error_from_status,
    pack_u32,
    spec_to_proto,
)
from kvstore_client.breaker import Breaker
from kvstore_client.buffers import Destination, as_destination
from kvstore_client.channel import Channel
from kvstore_client.fetching import FETCHES_AT_ONCE, RemoteSource
from kvstore_client.filling import LoadPlan
from kvstore_client.load import Load
from kvstore_client.locate import Match, locate, map_slabs, worth_loading
from kvstore_client.options import ClientOptions, ClientStatistics, Counters
from kvstore_client.regions import Region, Regions
from kvstore_client.session import Session
from kvstore_client.slabs import Slabs
from kvstore_client.source import Source
from kvstore_client.staging import Stagings
from kvstore_client.transports import choose
from kvstore_client.write import Write

DEFAULT_OPTIONS = ClientOptions()


class KVClient:
    """One engine's way to the store: blocks of one spec. A context manager.

    Connects in the background and reconnects by itself: making a client neither waits nor fails if the
    daemon is away. Until the first attempt to connect is over, calls wait for it within their deadline;
    without a session they raise StoreUnavailable at once, or the reason why the daemon refuses this
    client.

    `address` is "unix:/path/kvstore.sock" or "host:port".
    """

    def __init__(self, address: str, spec: KVSpec, *, options: ClientOptions = DEFAULT_OPTIONS) -> None:
        self.spec = spec
        self.options = options
        self._counters = Counters()
        self._breaker = Breaker(failures=options.breaker_failures, cooldown_s=options.breaker_cooldown_s)
        self._slabs = Slabs(spec)
        self._regions = Regions()
        self._stagings = Stagings(self._regions, size_bytes=options.staging_bytes)
        self._lease_numbers = itertools.count(1)
        self._pool = ThreadPoolExecutor(options.copy_threads, thread_name_prefix="kvstore-copy")
        self._fetchers = ThreadPoolExecutor(2 * FETCHES_AT_ONCE, thread_name_prefix="kvstore-fetch")
        self._daemon: Any = None  # the embedded one, if this client runs it
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            spec=spec_to_proto(spec),
            expected_namespace=options.expected_namespace,
            token=options.token,
            client_name=options.name,
        )
        self._channel = Channel(
            address,
            hello,
            breaker=self._breaker,
            counters=self._counters,
            on_session=self._adopt,
            on_retired=self._slabs.retire,
        )

    @classmethod
    def in_process(
        cls, spec: KVSpec, *, capacity_bytes: int = 256 << 20, options: ClientOptions = DEFAULT_OPTIONS
    ) -> "KVClient":
        """A client, ready for use, with a daemon of its own in this process, which ends with `close`."""
        from kvstore_server.embedded import EmbeddedDaemon

        daemon = EmbeddedDaemon(capacity_bytes=capacity_bytes)
        try:
            client = cls(daemon.address, spec, options=options)
        except BaseException:
            daemon.close()
            raise
        client._daemon = daemon
        try:
            client.wait_ready(options.timeout_s)
        except BaseException:
            client.close()
            raise
        return client

    def __repr__(self) -> str:
        state = "connected" if self.connected else "not connected"
        breaker = self._breaker.state.value
        return f"<KVClient {self._channel.address} {self.options.name!r} [{state}, breaker {breaker}]>"

    def __enter__(self) -> "KVClient":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def namespace(self) -> Namespace:
        return self.spec.namespace

    @property
    def boot_id(self) -> BootId | None:
        """Of the daemon that this client is connected to; `None` while it is not."""
        session = self._channel.current
        return session.boot_id if session is not None else None

    @property
    def connected(self) -> bool:
        return self._channel.current is not None

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """The client is connected.

        Raises: SpecMismatch, NotAuthenticated, NotAllowed, InvalidRequest, as soon as the daemon refuses this
        client; StoreUnavailable, with the last reason, at the deadline.
        """
        self._channel.wait_ready(self._deadline(timeout_s))

    def match(self, hashes: Sequence[BlockHash], *, lease: str | None = None, timeout_s: float | None = None) -> Match:
        """How many leading blocks are stored; they are leased under `lease` until it is released.

        `lease` None: a new name. Empty: only ask. A name in use: what it holds is replaced.

        Raises: InvalidRequest; StoreTimeout; StoreUnavailable.
        """
        packed = _pack(hashes)
        deadline = self._deadline(timeout_s)
        session = self._channel.session(deadline)
        name = self._new_lease() if lease is None else lease
        message = pb.ClientMessage(match=pb.Match(hashes=packed, lease=name))
        # Without it a late answer would lease what nobody releases.
        answer, _ = session.call(
            message, deadline=deadline, undo=lambda _: pb.ClientMessage(release=pb.Release(lease=name))
        )
        matched = answer.matched
        num_blocks = worth_loading(matched, self.spec, prefill_tokens_per_s=self.options.prefill_tokens_per_s)
        num_writing = matched.num_writing if num_blocks == matched.num_blocks else 0
        return Match(num_blocks, num_writing, matched.num_blocks, name, hashes, session)

    def load(
        self,
        blocks: Match | Sequence[BlockHash],
        *,
        into: Destination | None = None,
        parts: Sequence[int] | None = None,
        follow: bool = False,
        view: bool = False,
        lease: str | None = None,
        timeout_s: float | None = None,
    ) -> Load:
        """The blocks are leased and located; with `into`, copy threads fill it, lowest part first.

        `into` has rows for each part (a sequence of `num_parts`, or a dict of part -> rows), or is
        `BlockRows(rows)`; row i is block i. With `view` nothing is copied: `Load.view` gives arrays
        in place. Of a `Match`, the blocks that it found are loaded; with `follow`, also those that
        are being written, part by part as they arrive. `parts` None: all.

        Raises: InvalidRequest; Unsupported, if neither the daemon's shared memory nor ucx can be had from here;
        StoreTimeout; StoreUnavailable. Blocks that cannot be served are `Load.errors`, not exceptions.
        """
        if (into is None) == (not view):
            raise InvalidRequest("load: expected either into=... or view=True, got neither or both; choose one")
        hashes = _hashes_of(blocks, follow)
        _check_count(hashes)
        chosen = self._parts(parts)
        rows = None
        if into is not None:
            rows = as_destination(into, spec=self.spec, parts=chosen, num_blocks=len(hashes))
        deadline = self._deadline(timeout_s)
        session = self._channel.session(deadline)
        plan = LoadPlan(
            hashes=hashes,
            parts=chosen,
            part_bytes=self.spec.part_bytes,
            into=rows,
            lease=self._new_lease() if lease is None else lease,
            owns_lease=lease is None,
            checksums=self.options.integrity == "always",
            timeout_s=self.options.timeout_s,
        )
        remote = session.agent is not None
        load = Load(
            session,
            plan,
            pool=self._fetchers if remote else self._pool,
            num_workers=FETCHES_AT_ONCE if remote else self.options.copy_threads,
            counters=self._counters,
        )
        if hashes:
            locate(load, session, partial(self._source, session, plan), plan=plan, follow=follow, deadline=deadline)
        return load

    def store(
        self,
        hashes: Sequence[BlockHash],
        *,
        parent: BlockHash | None = None,
        parts: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> Write:
        """Blocks that are new and have room are reserved for this writer; `Write.outcomes` says which.

        `hashes` is a run of a chain and `parent` the block before it; None: the run starts a chain.
        `parts`: those that this writer delivers; None: all.

        Raises: InvalidRequest; StoreFull, if the daemon is draining; StoreTimeout; StoreUnavailable.
        """
        packed = _pack(hashes)
        chosen = self._parts(parts)
        deadline = self._deadline(timeout_s)
        session = self._channel.session(deadline)
        request = pb.Store_(parent=parent or b"", hashes=packed, parts=b"" if parts is None else pack_u32(chosen))
        answer, _ = session.call(
            pb.ClientMessage(store=request),
            deadline=deadline,
            undo=lambda request_id: pb.ClientMessage(abort=pb.Abort(store_request_id=request_id)),
        )
        return Write(
            session,
            self.spec,
            answer.reserved,
            parts=chosen,
            regions=self._regions,
            staging=self._stagings,
            counters=self._counters,
            timeout_s=self.options.timeout_s,
        )

    def region(self, size_bytes: int, *, timeout_s: float | None = None) -> Region:
        """New memory, `Region.array`, from which `Write.put` sends without a copy.

        Without a session it is registered with the next one, as it is after each reconnect.

        Raises: InvalidRequest; StoreFull, if the daemon allows this session no more; Unsupported;
        StoreTimeout.
        """
        return self._regions.create(size_bytes, deadline=self._deadline(timeout_s))

    def verify(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> dict[int, KVStoreError]:
        """The store has compared these blocks with their checksums and dropped those that differ.

        Returns, by index, BlockCorrupt for those that it dropped and BlockMissing for those that are
        not stored. Raises: InvalidRequest; StoreTimeout; StoreUnavailable.
        """
        answer = self._call(pb.ClientMessage(verify=pb.Verify(hashes=_pack(hashes))), timeout_s)
        return {error.index: error_from_status(error.status) for error in answer.verified.errors}

    def prefetch(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> int:
        """How many leading blocks are in memory, or on their way there.

        Raises: InvalidRequest; StoreTimeout; StoreUnavailable.
        """
        answer = self._call(pb.ClientMessage(prefetch=pb.Prefetch(hashes=_pack(hashes))), timeout_s)
        return answer.prefetched.num_blocks

    def release(self, lease: str, *, timeout_s: float | None = None) -> None:
        """The lease, if there is one of that name, is given back. Raises: StoreTimeout; StoreUnavailable."""
        self._call(pb.ClientMessage(release=pb.Release(lease=lease)), timeout_s)

    def statistics(self) -> ClientStatistics:
        """What this client has done so far."""
        return self._counters.snapshot(self._breaker.state)

    def close(self) -> None:
        """The session has ended, and with it all leases and open writes; threads and descriptors are gone.

        Idempotent.
        """
        self._channel.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._fetchers.shutdown(wait=True, cancel_futures=True)
        self._regions.close()
        self._slabs.adopt(None)
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.close()

    # Inside.

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)

    def _new_lease(self) -> str:
        return f"client/{next(self._lease_numbers)}"

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
            return Source(self.spec, plan.hashes, packed, location, mapped, plan.parts)
        return RemoteSource(
            self.spec,
            plan,
            location.generations,
            session=session,
            regions=self._regions,
            stagings=self._stagings,
        )

    def _call(self, message: pb.ClientMessage, timeout_s: float | None) -> pb.ServerMessage:
        deadline = self._deadline(timeout_s)
        answer, _ = self._channel.session(deadline).call(message, deadline=deadline)
        return answer

    def _parts(self, parts: Sequence[int] | None) -> list[int]:
        """Ascending. Raises: InvalidRequest, if one is out of bounds or given twice, or there are none."""
        num_parts = self.spec.num_parts
        if parts is None:
            return list(range(num_parts))
        chosen = sorted(parts)
        if not chosen or chosen[0] < 0 or chosen[-1] >= num_parts or len(set(chosen)) != len(chosen):
            raise InvalidRequest(f"parts: expected some of 0 to {num_parts - 1}, each once, got {chosen[:8]}")
        return chosen

    def _adopt(self, session: Session) -> None:
        """On the channel's thread, before the session can be used."""
        if session.namespace != self.spec.namespace:
            raise SpecMismatch(
                f"welcome: expected namespace {self.spec.namespace.hex()[:12]}… for this spec, got "
                f"{session.namespace.hex()[:12]}…; run client and daemon of the same version"
            )
        if self.options.integrity == "always" and "checksums" not in session.capabilities:
            raise Unsupported(
                'integrity: expected a daemon that keeps checksums for "always", got one that runs without; '
                'set checksums = true in the daemon\'s configuration, or use integrity="header"'
            )
        choose(session, self._channel.address, self.options)
        self._slabs.adopt(session)
        self._stagings.drop()
        self._regions.adopt(session)


def _pack(hashes: Sequence[BlockHash]) -> bytes:
    _check_count(hashes)
    return pack(hashes)


def _check_count(hashes: Sequence[BlockHash]) -> None:
    if len(hashes) > MAX_HASHES:
        raise InvalidRequest(f"hashes: expected at most {MAX_HASHES}, got {len(hashes)}; ask in several calls")


def _hashes_of(blocks: Match | Sequence[BlockHash], follow: bool) -> Sequence[BlockHash]:
    if not isinstance(blocks, Match):
        return blocks
    return blocks.hashes[: blocks.num_blocks + (blocks.num_writing if follow else 0)]
