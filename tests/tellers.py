"""Daemons that are members of one store, as someone who is not among them tells."""

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc

from kvstore.spec import KVSpec
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from kvstore_client import ClientOptions, ClusterClient
from kvstore_server.embedded import EmbeddedDaemon

GIB = 1 << 30


class Teller(AdminServicer):
    """Serves Admin.Members from what the test says; `address` is a seed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reply = pb.MembersReply(replicas=1)
        self._closed = False
        self.num_watching = 0
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        add_AdminServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def tell(self, members: list[pb.Member], *, replicas: int = 1) -> None:
        """From now on these are the members."""
        with self._changed:
            ordered = sorted(members, key=lambda member: member.node_id)
            self._reply = pb.MembersReply(members=ordered, epoch=self._reply.epoch + 1, replicas=replicas)
            self._changed.notify_all()

    def Members(self, request: pb.MembersRequest, context: Any) -> Iterator[pb.MembersReply]:
        told = self._reply
        yield told
        if not request.watch:
            return
        context.add_callback(self._look)
        self.num_watching += 1
        try:
            while context.is_active() and not self._closed:
                with self._changed:
                    if self._reply is told:
                        self._changed.wait()
                if self._reply is not told:
                    told = self._reply
                    yield told
        finally:
            self.num_watching -= 1

    def _look(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.stop(grace=None).wait()


def member(node: str, boot_id: bytes, address: str, *, draining: bool = False, **fields: Any) -> pb.Member:
    """A daemon as a member."""
    told = {
        "boot_id": boot_id,
        "addresses": [address],
        "node_id": node,
        "capacity_bytes": GIB,
        "state": pb.Member.DRAINING if draining else pb.Member.UP,
    }
    return pb.Member(**(told | fields))


@contextmanager
def cluster_in_process(kv: KVSpec, *, num_daemons: int = 2, **options: Any) -> Iterator[ClusterClient]:
    """A client of a store whose daemons are all in this process."""
    with ExitStack() as stack:
        teller = stack.enter_context(closing(Teller()))
        daemons = [stack.enter_context(closing(EmbeddedDaemon(capacity_bytes=8 << 20))) for _ in range(num_daemons)]
        teller.tell([member(f"n{i}", each.daemon.boot_id, each.address) for i, each in enumerate(daemons)])
        address = f"kvstore://{teller.address}"
        client = stack.enter_context(ClusterClient(address, kv, options=ClientOptions(**options)))
        client.wait_ready(20)
        yield client
