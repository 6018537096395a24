"""Who the members of a store are: told by any of its daemons, on a thread, for as long as the client lives."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvstore.errors import KVStoreError, StoreUnavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client.channel import CHANNEL_OPTIONS, FIRST_BACKOFF_S, MAX_BACKOFF_S
from kvstore_client.placing import View

if TYPE_CHECKING:
    import grpc  # imported when it is first needed, on the background thread

_log: Final = logging.getLogger("kvstore")

ASK_TIMEOUT_S: Final = 3.0
WATCH_S: Final = 30.0  # of one daemon; one that hangs, and tells nothing more, is left by then


class Members:
    """What the members are now. `on_view` hears of each change, on the background thread.

    Seeds and all members known are asked, one after the other, until one answers; that one is watched until it goes, or
    for `WATCH_S`, and then the next. Once several are known, a daemon that stands alone is none of them.
    """

    def __init__(self, seeds: Sequence[str], *, on_view: Callable[[View], None]) -> None:
        self._seeds = tuple(seeds)
        self._on_view = on_view
        self._changed = threading.Condition()
        self._reply: pb.MembersReply | None = None
        self._num_told = 0  # replies so far
        self._failure: KVStoreError | None = None  # of the last round, if nobody answered
        self._wanted = ""  # whom to ask next
        self._closing = threading.Event()
        self._watch: grpc.Future[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-members", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        known = "unknown" if self._reply is None else f"{len(self._reply.members)}, epoch {self._reply.epoch}"
        return f"<Members of {','.join(self._seeds)} [{known}]>"

    def wait_tried(self, deadline: float) -> None:
        """The members are known, or nobody answered, or the deadline has passed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._reply or self._failure or self._closing.is_set(), max(0.0, deadline - time.monotonic())
            )

    def wait_known(self, deadline: float) -> None:
        """The members are known. Raises: StoreUnavailable, with the last reason, at the deadline."""
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._reply or self._closing.is_set(), max(0.0, deadline - time.monotonic())
            )
        if not known:
            raise self.why_unknown()

    def why_unknown(self) -> KVStoreError:
        """Why nothing can be asked for now."""
        if self._closing.is_set():
            return StoreUnavailable("client: it was closed; make another")
        reason = f": {self._failure}" if self._failure is not None else ": no answer yet"
        return StoreUnavailable(f"{','.join(self._seeds)}: no member answers{reason}; recompute, the client reconnects")

    def ask(self, address: str, *, deadline: float) -> None:
        """The daemon there, which knows better, was asked and is watched from now on; or the deadline has passed."""
        with self._changed:
            told = self._num_told
            self._wanted = address
            if self._watch is not None:
                self._watch.cancel()
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._num_told > told or self._closing.is_set(), max(0.0, deadline - time.monotonic())
            )

    def close(self) -> None:
        """Nobody is watched any more (waits up to 2 s for the thread). Idempotent."""
        self._closing.set()
        with self._changed:
            if self._watch is not None:
                self._watch.cancel()
            self._changed.notify_all()
        self._thread.join(2.0)

    # The background thread.

    def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        last = ""
        failure: KVStoreError | None = None
        while not self._closing.is_set():
            answered = False
            for address in self._candidates(last):
                last = address
                begun = time.monotonic()
                answered, failure = self._listen(address)
                if answered or self._wanted or self._closing.is_set():
                    break
            if answered and time.monotonic() - begun > MAX_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            with self._changed:
                self._failure = None if answered else failure
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._wanted or self._closing.is_set(), backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _candidates(self, last: str) -> Iterator[str]:
        """Whom to ask: who is wanted, then everybody, beginning behind the one asked last."""
        with self._changed:
            wanted, self._wanted = self._wanted, ""
        known = [] if self._reply is None else [address for each in self._reply.members for address in each.addresses]
        everybody = list(dict.fromkeys([*known, *self._seeds]))
        behind = everybody.index(last) + 1 if last in everybody else 0
        yield from filter(None, [wanted, *everybody[behind:], *everybody[:behind]])

    def _listen(self, address: str) -> tuple[bool, KVStoreError | None]:
        """Whether this daemon answered, and why it says no more. It is asked once first, as it may hang."""
        import grpc

        from kvstore.v1.kvstore_pb2_grpc import AdminStub

        answered = False
        with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
            stub = AdminStub(channel)
            try:
                for watch, timeout_s in ((False, ASK_TIMEOUT_S), (True, WATCH_S)):
                    call = stub.Members(pb.MembersRequest(watch=watch), timeout=timeout_s)
                    with self._changed:
                        self._watch = call
                    if self._wanted or self._closing.is_set():
                        call.cancel()
                    for reply in call:
                        self._tell(reply)
                        answered = True
                return answered, None
            except grpc.RpcError as error:
                return answered, StoreUnavailable(f"{address}: {error.details() or error.code().name}")
            except KVStoreError as error:
                _log.warning("members: what %s tells is of no use: %s", address, error)
                return answered, error

    def _tell(self, reply: pb.MembersReply) -> None:
        if not reply.epoch and self._reply is not None and self._reply.epoch:
            raise StoreUnavailable("it stands alone, and is no member of this store")
        if reply != self._reply:
            self._on_view(View.of(reply))
        with self._changed:
            self._reply = reply
            self._num_told += 1
            self._failure = None
            self._changed.notify_all()
