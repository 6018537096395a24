"""Copies blocks to the members of a store that ought to have them and do not.

Those are replicas, the share of a member that joined, and all of one that leaves.

`python -m kvstore_server.commands.courier` runs beside each daemon of a store of several, started by it. It is a client
like any other: it watches the daemon's events as a router does, loads from it, and stores with the others; blocks that
they have already cost a question and no bytes. Each change of the members is an occasion to go through all that the
daemon has. So nothing needs to be remembered: whatever was missed, for a member that was away or a courier that died,
is found then, or after `RETRY_S`.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Final

import grpc
import numpy as np
import structlog

from kvstore.errors import KVStoreError, StoreUnavailable
from kvstore.hashing import unpack
from kvstore.placement import Placement
from kvstore.spec import KVSpec
from kvstore.types import HASH_BYTES, AnyArray, BlockHash, HashArray, IntArray, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore.wire import spec_from_proto
from kvstore_client import ClientOptions, KVClient
from kvstore_client.members import Members
from kvstore_client.placing import View
from kvstore_server.access import AUTHORIZATION
from kvstore_server.config import Settings
from kvstore_server.logs import configure_logs

TIMEOUT_S: Final = 10.0
RETRY_S: Final = 10.0  # after something could not be copied
PAUSE_S: Final = 1.0  # after the daemon's events broke off
MAX_ROUNDS: Final = 10  # of a hand-over, which begins again when the members change
RUN_BLOCKS: Final = 64
RUN_BYTES: Final = 16 << 20
_NO_PARENT: Final = bytes(HASH_BYTES)

log = structlog.get_logger()


@dataclass(slots=True)
class Tally:
    """What became of the blocks that were looked at; one that ought to be in two places counts twice."""

    copied: int = 0
    there: int = 0  # already
    refused: int = 0  # no room there, or what comes before it is not there
    failed: int = 0  # will be tried again


class Courier:
    """Sees to what one daemon has. `node` is its id in the store, `token` one for all tenants, where there are tokens.

    Not for use by several threads at once.
    """

    def __init__(self, address: str, *, node: str, token: str = "") -> None:
        self.tally = Tally()
        self._node = node
        self._token = token
        self._channel = grpc.insecure_channel(address, (("grpc.enable_http_proxy", 0),))
        self._admin = AdminStub(self._channel)
        self._address = address
        self._specs: dict[Namespace, KVSpec] = {}
        self._clients: dict[tuple[str, Namespace], KVClient] = {}  # by address
        self._changed = threading.Condition()
        self._view: View | None = None
        self._events: grpc.Future[pb.Event] | None = None
        self._members = Members([address], on_view=self._adopt)

    def __enter__(self) -> "Courier":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._members.close()
        for client in self._clients.values():
            client.close()
        self._channel.close()

    def run(self) -> None:
        """Until the members change: what the daemon has, then what it takes in. Raises: StoreUnavailable."""
        view = self._known()
        if view.state_of(self._node) == pb.Member.DRAINING:
            self._wait_for_another(view)  # who drains it sees to its blocks (`kvstore drain`)
            return
        everything = True
        for event in self._watch(view):
            if event.kind == pb.Event.SNAPSHOT_END:
                everything = False
                log.info("courier: all blocks looked at", epoch=view.epoch, **asdict(self.tally))
                if self.tally.failed:
                    threading.Timer(RETRY_S, self._look_again, [view]).start()
                self.tally = Tally()
            else:
                self._spread(event, view, everything=everything)

    def hand_over(self, progress: Callable[[Tally], None]) -> Tally:
        """All that the daemon has now is with those that own it without this member. Raises: StoreUnavailable."""
        for _ in range(MAX_ROUNDS):
            self.tally = Tally()
            view = self._known()
            for event in self._watch(view):
                if event.kind == pb.Event.SNAPSHOT_END:
                    return self.tally
                self._spread(event, view, everything=True)
                progress(self.tally)
        raise StoreUnavailable(f"drain: the members changed {MAX_ROUNDS} times meanwhile; drain it again")

    def connect(self) -> None:
        """Sessions with the daemon, which takes no new ones once it drains, are open for all that it has."""
        for namespace in self._learn():
            self._client(self._address, namespace).wait_ready(TIMEOUT_S)

    def await_draining(self) -> None:
        """The members know that this one is draining. Raises: StoreUnavailable, if they are not told in time."""
        with self._changed:
            if not self._changed.wait_for(self._is_draining, TIMEOUT_S):
                raise StoreUnavailable(f"drain: {self._node} is not known to drain after {TIMEOUT_S:g} s; try again")

    # The members, and what the daemon has.

    def _adopt(self, view: View) -> None:
        """On the thread of the members."""
        with self._changed:
            self._view = view
            if self._events is not None:
                self._events.cancel()
            self._changed.notify_all()

    def _is_draining(self) -> bool:
        return self._view is not None and self._view.state_of(self._node) == pb.Member.DRAINING

    def _known(self) -> View:
        with self._changed:
            if not self._changed.wait_for(lambda: self._view is not None, TIMEOUT_S):
                raise StoreUnavailable(f"{self._address}: it tells of no members; is it up?")
            assert self._view is not None
            return self._view

    def _wait_for_another(self, view: View) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._view is not view)

    def _look_again(self, view: View) -> None:
        with self._changed:
            if self._view is view and self._events is not None:
                self._events.cancel()

    def _watch(self, view: View) -> Iterator[pb.Event]:
        """All that is stored, SNAPSHOT_END, and all that is stored from then on, as long as the view is the latest."""
        metadata = ((AUTHORIZATION, f"Bearer {self._token}"),)
        with self._changed:
            if self._view is not view:
                return
            self._events = events = self._admin.Watch(pb.WatchRequest(snapshot=True), metadata=metadata)
        try:
            for event in events:
                if event.kind == pb.Event.SNAPSHOT_END or (event.kind == pb.Event.STORED and event.segments):
                    yield event
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise StoreUnavailable(f"{self._address}: {error.details() or error.code().name}") from None
        finally:
            events.cancel()

    def _learn(self) -> list[Namespace]:
        """The namespaces that the daemon has now, whose specs are known."""
        try:
            reply = self._admin.Namespaces(pb.NamespacesRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise StoreUnavailable(f"{self._address}: {error.details() or error.code().name}") from None
        self._specs |= {Namespace(one.namespace): spec_from_proto(one.spec) for one in reply.namespaces}
        return [Namespace(one.namespace) for one in reply.namespaces]

    # Copying.

    def _spread(self, event: pb.Event, view: View, *, everything: bool) -> None:
        """The blocks of this event are where they ought to be; those just stored, with those that own them after this.

        That is, the first owner copies to the second, and so on; with `everything`, each to all others.
        """
        hashes, parents = unpack(event.hashes), unpack(event.parents)
        namespace = Namespace(event.namespace)
        if namespace not in self._specs:
            self._learn()
        if namespace not in self._specs:
            return  # it is gone already
        for target, places in targets(np.frombuffer(event.segments, "<u8"), view, self._node, everything=everything):
            for run in runs(hashes[places], parents[places], self._specs[namespace].block_bytes):
                chosen = places[run]
                try:
                    self._copy(view.addresses_of(target)[0], namespace, hashes[chosen], parents[chosen[0]].tobytes())
                except KVStoreError as error:
                    self.tally.failed += len(chosen)
                    log.debug("courier: not copied", blocks=len(chosen), to=target, why=str(error))

    def _copy(self, address: str, namespace: Namespace, hashes: HashArray, parent: bytes) -> None:
        """These blocks, a run of a chain, are with the daemon there, but for those that it refuses."""
        run = [BlockHash(one.tobytes()) for one in hashes]
        before = None if parent == _NO_PARENT else BlockHash(parent)
        with self._client(address, namespace).store(run, parent=before) as write:
            num_new = write.num_new
            if num_new:
                wanted = [run[block] for block in write.new_blocks]
                with self._client(self._address, namespace).load(wanted, view=True) as load:
                    if errors := load.wait().errors:
                        raise errors[min(errors)]
                    place_of = {block: place for place, block in enumerate(write.new_blocks)}
                    for part in write.parts:  # rows of blocks that are not new are not read
                        write.put(part, [load.view(place_of.get(block, 0), part) for block in range(len(run))])
                    load.check()
        named = [outcome.name for outcome in write.outcomes]
        self.tally.copied += num_new
        self.tally.there += named.count("STORED") + named.count("WRITING") - num_new
        self.tally.refused += named.count("FULL") + named.count("ORPHAN")

    def _client(self, address: str, namespace: Namespace) -> KVClient:
        client = self._clients.get((address, namespace))
        if client is None:
            options = ClientOptions(
                name=f"courier/{self._node}", token=self._token, timeout_s=TIMEOUT_S, integrity="always"
            )
            client = self._clients[address, namespace] = KVClient(address, self._specs[namespace], options=options)
        return client


def targets(segments: AnyArray, view: View, node: str, *, everything: bool) -> Iterator[tuple[str, IntArray]]:
    """Members, and the places of the blocks in these segments that this node ought to copy to them."""
    weights = {member.node_id: float(max(1, member.capacity_bytes)) for member in view.up}
    if not weights.keys() - {node}:
        return
    placement = Placement(weights)
    owners = placement.owners(segments, count=view.replicas)
    mine = owners == (placement.nodes.index(node) if node in placement.nodes else -1)
    wanted = ~mine & (segments != 0)[:, None]
    if not everything:
        wanted &= (np.cumsum(mine, axis=1) > 0) | ~mine.any(axis=1, keepdims=True)
    for index, target in enumerate(placement.nodes):
        places = np.flatnonzero((wanted & (owners == index)).any(axis=1))
        if len(places):
            yield target, places


def runs(hashes: HashArray, parents: HashArray, block_bytes: int) -> Iterator[slice]:
    """Runs of blocks each of which follows the one before it, bounded in number and bytes."""
    most = max(1, min(RUN_BLOCKS, RUN_BYTES // block_bytes))
    follows = np.append(False, parents[1:] == hashes[:-1])
    begins = [0] if len(hashes) else []
    for place in range(1, len(hashes)):
        if not follows[place] or place - begins[-1] >= most:
            begins.append(place)
    for begin, end in pairwise([*begins, len(hashes)]):
        yield slice(begin, end)


def main() -> None:
    """Until standard input ends, with whoever started it. What it is told comes there, as one line of JSON."""
    told = json.loads(sys.stdin.readline())
    configure_logs(Settings(log_format=told["log_format"], log_level=told["log_level"]))
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    with Courier(told["address"], node=told["node"], token=told["token"]) as courier:
        while True:
            try:
                courier.run()
            except KVStoreError as error:  # it fell behind, say
                log.warning("courier: begins again", why=str(error))
                time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
