"""KVClient: match, load and store blocks, with a deadline and typed errors on each call.

Threads: all methods may be called from any thread. A client does not survive `fork`: make it in the child.
"""

import time
from collections.abc import Sequence
from typing import Any

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.spec import KVSpec
from kvstore.types import AnyArray, BlockHash, BootId, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import error_from_status
from kvstore_client.arguments import check_segments, hashes_of, packed, parts_of
from kvstore_client.buffers import Destination, as_destination
from kvstore_client.link import Link, Shared, match_request, release_request, store_request, undo_store
from kvstore_client.load import Load
from kvstore_client.locate import Match, worth_loading
from kvstore_client.options import ClientOptions, ClientStatistics
from kvstore_client.region import CudaRegion, Region
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
        self._shared = Shared(options)
        self._daemon: Any = None  # the embedded one, if this client runs it
        self._link = Link([address], spec, options, self._shared)

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
        breaker = self._link.breaker.state.value
        return f"<KVClient {self._link.channel.address} {self.options.name!r} [{state}, breaker {breaker}]>"

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
        session = self._link.channel.current
        return session.boot_id if session is not None else None

    @property
    def connected(self) -> bool:
        return self._link.channel.current is not None

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """The client is connected.

        Raises: SpecMismatch, NotAuthenticated, NotAllowed, InvalidRequest, as soon as the daemon refuses this
        client; StoreUnavailable, with the last reason, at the deadline.
        """
        self._link.channel.wait_ready(self._deadline(timeout_s))

    def match(
        self,
        hashes: Sequence[BlockHash],
        *,
        lease: str | None = None,
        segments: AnyArray | None = None,
        timeout_s: float | None = None,
    ) -> Match:
        """How many leading blocks are stored; they are leased under `lease` until it is released.

        `lease` None: a new name. Empty: only ask. A name in use: what it holds is replaced. `segments` are not needed
        where one daemon has all blocks; see `ClusterClient`.

        Raises: InvalidRequest; StoreTimeout; StoreUnavailable.
        """
        check_segments(segments, num_blocks=len(hashes))
        deadline = self._deadline(timeout_s)
        name = self._shared.new_lease() if lease is None else lease
        message = match_request(packed(hashes), name)
        session = self._link.channel.session(deadline)
        # Without it a late answer would lease what nobody releases.
        answer, _ = session.call(message, deadline=deadline, undo=lambda _: release_request(name))
        matched = answer.matched
        num_blocks = worth_loading(matched, self.spec, prefill_tokens_per_s=self.options.prefill_tokens_per_s)
        num_writing = matched.num_writing if num_blocks == matched.num_blocks else 0
        return Match(num_blocks, num_writing, matched.num_blocks, name, hashes, [session])

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
    ) -> Load:
        """The blocks are leased and located; with `into`, copy threads fill it, lowest part first.

        `into` has rows for each part (a sequence of `num_parts`, or a dict of part -> rows), or is
        `BlockRows(rows)`; row i is block i. With `view` nothing is copied: `Load.view` gives arrays
        in place. Of a `Match`, the blocks that it found are loaded; with `follow`, also those that
        are being written, part by part as they arrive. `parts` None: all. `segments`: as in `match`.

        Rows may be in device memory, those of one part all in one `cuda_region`. What reads or writes there must have
        ended before (synchronise its stream), as the store knows of no stream.

        Raises: InvalidRequest; Unsupported, if neither the daemon's shared memory nor ucx can be had from here, or rows
        are in device memory and the session is not over ucx; StoreTimeout; StoreUnavailable. Blocks that cannot be
        served are `Load.errors`, not exceptions.
        """
        if (into is None) == (not view):
            raise InvalidRequest("load: expected either into=... or view=True, got neither or both; choose one")
        hashes = hashes_of(blocks, follow=follow)
        check_segments(segments, num_blocks=len(hashes))
        chosen = parts_of(parts, self.spec)
        rows = None
        if into is not None:
            in_region = self._shared.regions.in_cuda_region
            rows = as_destination(into, spec=self.spec, parts=chosen, num_blocks=len(hashes), in_cuda_region=in_region)
        deadline = self._deadline(timeout_s)
        return self._link.load(
            self._link.channel.session(deadline),
            hashes,
            into=rows,
            parts=chosen,
            follow=follow,
            lease=self._shared.new_lease() if lease is None else lease,
            owns_lease=lease is None,
            deadline=deadline,
        )

    def store(
        self,
        hashes: Sequence[BlockHash],
        *,
        parent: BlockHash | None = None,
        parts: Sequence[int] | None = None,
        segments: AnyArray | None = None,
        timeout_s: float | None = None,
    ) -> Write:
        """Blocks that are new and have room are reserved for this writer; `Write.outcomes` says which.

        `hashes` is a run of a chain and `parent` the block before it; None: the run starts a chain.
        `parts`: those that this writer delivers; None: all. `segments`: as in `match`.

        Raises: InvalidRequest; StoreFull, if the daemon is draining; StoreTimeout; StoreUnavailable.
        """
        check_segments(segments, num_blocks=len(hashes))
        chosen = parts_of(parts, self.spec)
        message = store_request(packed(hashes), parent=parent, parts=None if parts is None else chosen)
        deadline = self._deadline(timeout_s)
        session = self._link.channel.session(deadline)
        answer, _ = session.call(message, deadline=deadline, undo=undo_store)
        return self._link.write(session, answer.reserved, parts=chosen)

    def region(self, size_bytes: int, *, timeout_s: float | None = None) -> Region:
        """New memory, `Region.array`, from which `Write.put` sends without a copy.

        Without a session it is registered with the next one, as it is after each reconnect.

        Raises: InvalidRequest; StoreFull, if the daemon allows this session no more; Unsupported;
        StoreTimeout.
        """
        return self._shared.regions.create(size_bytes, deadline=self._deadline(timeout_s))

    def cuda_region(self, array: Any, *, timeout_s: float | None = None) -> CudaRegion:
        """Memory of a CUDA device, that of `array`, from which `Write.put` sends and to which `load` goes, over ucx.

        `array` is one of torch, CuPy or others that have `__cuda_array_interface__` and `__dlpack_device__`, of any
        shape and dtype, without gaps; for example an engine's KV cache. Rows that are put or loaded may be any views
        of it, whose rows are contiguous. It is kept alive here until the region is closed and the daemon has dropped
        it; use it as before, but leave blocks alone that are being put or loaded.

        What is loaded there is copied to the host in pieces and compared with its checksums, as if it had been loaded
        into host memory. Needs `kvstore[gpu]` and a NIXL whose UCX has CUDA.

        Raises: InvalidRequest, if the array is not in device memory, or has gaps; Unsupported, if the client's session
        is not over ucx, or CuPy, the device, or NIXL's CUDA cannot be used (copy to host memory then); StoreFull;
        StoreTimeout.
        """
        return self._shared.regions.create_cuda(array, deadline=self._deadline(timeout_s))

    def verify(self, hashes: Sequence[BlockHash], *, timeout_s: float | None = None) -> dict[int, KVStoreError]:
        """The store has compared these blocks with their checksums and dropped those that differ.

        Returns, by index, BlockCorrupt for those that it dropped and BlockMissing for those that are
        not stored. Raises: InvalidRequest; StoreTimeout; StoreUnavailable.
        """
        answer = self._call(pb.ClientMessage(verify=pb.Verify(hashes=packed(hashes))), timeout_s)
        return {error.index: error_from_status(error.status) for error in answer.verified.errors}

    def prefetch(
        self, hashes: Sequence[BlockHash], *, segments: AnyArray | None = None, timeout_s: float | None = None
    ) -> int:
        """How many leading blocks are in memory, or on their way there. `segments`: as in `match`.

        Raises: InvalidRequest; StoreTimeout; StoreUnavailable.
        """
        check_segments(segments, num_blocks=len(hashes))
        answer = self._call(pb.ClientMessage(prefetch=pb.Prefetch(hashes=packed(hashes))), timeout_s)
        return answer.prefetched.num_blocks

    def release(self, lease: str, *, timeout_s: float | None = None) -> None:
        """The lease, if there is one of that name, is given back. Raises: StoreTimeout; StoreUnavailable."""
        self._call(release_request(lease), timeout_s)

    def statistics(self) -> ClientStatistics:
        """What this client has done so far."""
        return self._shared.counters.snapshot(self._link.breaker.state)

    def close(self) -> None:
        """The session has ended, and with it all leases and open writes; threads and descriptors are gone.

        Idempotent.
        """
        self._link.close()
        self._shared.close()
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.close()

    # Inside.

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.options.timeout_s if timeout_s is None else timeout_s)

    def _call(self, message: pb.ClientMessage, timeout_s: float | None) -> pb.ServerMessage:
        deadline = self._deadline(timeout_s)
        answer, _ = self._link.channel.session(deadline).call(message, deadline=deadline)
        return answer
