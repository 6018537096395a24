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
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Final

import grpc
import structlog

from kvstore.errors import KVStoreError, StoreUnavailable
from kvstore.spec import KVSpec
from kvstore.types import HASH_BYTES, BlockHash, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore.wire import spec_from_proto
from kvstore_client import ClientOptions, KVClient
from kvstore_client.links import addresses_of
from kvstore_client.members import Members
from kvstore_client.placing import View
from kvstore_server.commands.admin import admin_at, bearing
from kvstore_server.commands.freight import Blocks, runs, snapshot, targets
from kvstore_server.config import Settings
from kvstore_server.logs import configure_logs

TIMEOUT_S: Final = 10.0
RETRY_S: Final = 10.0  # after something could not be copied
CONNECT_S: Final = 3.0
PAUSE_S: Final = 1.0  # after the daemon's events broke off
MAX_ROUNDS: Final = 10  # of a hand-over, which begins again when the members change
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
        self._clients: dict[tuple[bytes, Namespace], KVClient] = {}  # by boot id of the daemon; empty: the own one
        self._retry: threading.Timer | None = None
        self._changed = threading.Condition()
        self._view: View | None = None
        self._events: grpc.Future[pb.Event] | None = None
        self._members = Members([address], on_view=self._adopt)

    def __enter__(self) -> "Courier":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._members.close()
        if self._retry is not None:
            self._retry.cancel()
        for client in self._clients.values():
            client.close()
        self._channel.close()

    def run(self) -> None:
        """Until the members change: what the daemon has, then what it takes in. Raises: StoreUnavailable."""
        view = self._known()
        if view.state_of(self._node) == pb.Member.DRAINING:
            self._wait_for_another(view)  # who drains it sees to its blocks (`kvstore drain`)
            return
        self._part_with_others(view)
        self.tally = Tally()
        events = self._watch(view)
        pieces = snapshot(events)
        if pieces is None:
            return
        for blocks in pieces:
            self._spread(blocks, view)
        log.info("courier: all blocks looked at", epoch=view.epoch, **asdict(self.tally))
        for event in events:
            self._spread(Blocks.of(event), view)

    def hand_over(self, progress: Callable[[Tally], None]) -> Tally:
        """All that the daemon has now is with those that own it without this member. Raises: StoreUnavailable."""
        for _ in range(MAX_ROUNDS):
            self.tally = Tally()
            view = self._known()
            pieces = snapshot(self._watch(view))
            for blocks in pieces or []:
                self._spread(blocks, view)
                progress(self.tally)
            if pieces is not None and self._view is view:
                return self.tally
        raise StoreUnavailable(f"drain: the members changed {MAX_ROUNDS} times meanwhile; drain it again")

    def connect(self) -> None:
        """Sessions with the daemon, which takes no new ones once it drains, are open for all that it has."""
        for namespace in self._learn():
            self._own(namespace).wait_ready(TIMEOUT_S)

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

    def _failed(self, num_blocks: int, target: str, error: KVStoreError) -> None:
        """These are looked at again after a while, with all others."""
        self.tally.failed += num_blocks
        log.debug("courier: not copied", blocks=num_blocks, to=target, why=str(error))
        if self._retry is None:
            self._retry = threading.Timer(RETRY_S, self._look_again)
            self._retry.daemon = True
            self._retry.start()

    def _look_again(self) -> None:
        with self._changed:
            self._retry = None
            if self._events is not None:
                self._events.cancel()

    def _watch(self, view: View) -> Iterator[pb.Event]:
        """All that is stored, SNAPSHOT_END, and all that is stored from then on, as long as the view is the latest."""
        with self._changed:
            if self._view is not view:
                return
            self._events = events = self._admin.Watch(pb.WatchRequest(snapshot=True), metadata=bearing(self._token))
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
        with admin_at(self._address) as admin:
            reply = admin.Namespaces(pb.NamespacesRequest(), timeout=TIMEOUT_S)
        self._specs |= {Namespace(one.namespace): spec_from_proto(one.spec) for one in reply.namespaces}
        return [Namespace(one.namespace) for one in reply.namespaces]

    # Copying.

    def _spread(self, blocks: Blocks, view: View) -> None:
        """The blocks are with all that own them."""
        if blocks.namespace not in self._specs:
            self._learn()
        if blocks.namespace not in self._specs:
            return  # it is gone already
        block_bytes = self._specs[blocks.namespace].block_bytes
        for target, places in targets(blocks.segments, view, self._node):
            mine = blocks[places]
            for run in runs(mine.hashes, mine.parents, block_bytes):
                try:
                    self._copy(view.member(target), mine[run])
                except KVStoreError as error:
                    self._failed(run.stop - run.start, target, error)

    def _copy(self, target: pb.Member, blocks: Blocks) -> None:
        """These blocks, a run of a chain, are with that member, but for those that it refuses."""
        run = [BlockHash(one.tobytes()) for one in blocks.hashes]
        first = blocks.parents[0].tobytes()
        parent = None if first == _NO_PARENT else BlockHash(first)
        with self._client(target, blocks.namespace).store(run, parent=parent) as write:
            num_new = write.num_new
            if num_new:
                wanted = [run[block] for block in write.new_blocks]
                with self._own(blocks.namespace).load(wanted, view=True) as load:
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

    def _own(self, namespace: Namespace) -> KVClient:
        return self._clients.get((b"", namespace)) or self._open(b"", namespace, self._address)

    def _client(self, member: pb.Member, namespace: Namespace) -> KVClient:
        """Of that member. Raises: StoreUnavailable, if none of its addresses leads to it from here."""
        known = self._clients.get((member.boot_id, namespace))
        if known is not None:
            return known
        for address in addresses_of(member):
            client = self._open(member.boot_id, namespace, address)
            with suppress(StoreUnavailable):
                client.wait_ready(CONNECT_S)
            if client.boot_id == member.boot_id:  # hosts may have the same path for their sockets
                return client
            self._clients.pop((member.boot_id, namespace)).close()
        raise StoreUnavailable(f"member {member.node_id}: it is at none of {', '.join(member.addresses)}")

    def _open(self, boot_id: bytes, namespace: Namespace, address: str) -> KVClient:
        name = f"courier/{self._node}"
        options = ClientOptions(
            name=name,
            token=self._token,
            timeout_s=TIMEOUT_S,
            breaker_failures=1,  # others need not wait for a member that hangs
            breaker_cooldown_s=RETRY_S,
            integrity="always",
        )
        client = self._clients[boot_id, namespace] = KVClient(address, self._specs[namespace], options=options)
        return client

    def _part_with_others(self, view: View) -> None:
        """Nothing is left of members that are gone."""
        here = {b"", *(member.boot_id for member in view.members)}
        for name in [name for name in self._clients if name[0] not in here]:
            self._clients.pop(name).close()


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
