"""What does it cost that blocks lie with several daemons? Three on this host beside one, in turns, in the same run.

    python benchmarks/cluster.py [--rounds 300] [--blocks 1000] [--part-bytes 65536] [--json]

`match` is a match of all blocks of a chain, and `ratio` that of the cluster over one daemon. Blocks of `--part-bytes`
are stored from a region and loaded into memory of the caller's, `--rounds` / 30 times each; `median` and `best` are in
GB/s. The members are told by this process, in place of what daemons agree on.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np

from kvstore.types import BlockHash
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminServicer, AdminStub, add_AdminServicer_to_server
from kvstore_client import Client, ClientOptions, connect
from kvstore_server.commands.measure import (
    DEADLINE_S,
    bench_chain,
    bench_spec,
    compared,
    load_all,
    random_bytes,
    running_daemon,
    store_all,
    timed,
)

NUM_DAEMONS = 3
Rates = dict[str, dict[str, list[float]]]


class Members(AdminServicer):
    """Says who the members are; it does not change."""

    def __init__(self, addresses: list[str]) -> None:
        told = [pb.Member(node_id=f"n{i}", addresses=[at], state=pb.Member.UP) for i, at in enumerate(addresses)]
        self._reply = pb.MembersReply(members=told, epoch=1, replicas=1)
        self.over = threading.Event()

    def Members(self, request: pb.MembersRequest, context: Any) -> Iterator[pb.MembersReply]:
        yield self._reply
        if request.watch:
            self.over.wait()


@contextmanager
def told(addresses: list[str]) -> Iterator[str]:
    """The address of a store with these members."""
    server = grpc.server(ThreadPoolExecutor(4))
    members = Members(addresses)
    add_AdminServicer_to_server(members, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"kvstore://127.0.0.1:{port}"
    finally:
        members.over.set()
        server.stop(None).wait()


def measure(*, rounds: int, num_blocks: int, part_bytes: int) -> dict[str, Any]:
    size_bytes = 2 * num_blocks * part_bytes
    with ExitStack() as stack:
        daemons = [stack.enter_context(running_daemon(size_bytes=size_bytes)).address for _ in range(NUM_DAEMONS + 1)]
        admins = [AdminStub(stack.enter_context(grpc.insecure_channel(address))) for address in daemons]
        for admin in admins:
            admin.Stats(pb.StatsRequest(), wait_for_ready=True, timeout=DEADLINE_S)
        several = stack.enter_context(told(daemons[1:]))
        spec = bench_spec("cluster", part_bytes)
        options = ClientOptions(name="bench", timeout_s=DEADLINE_S)
        clients: dict[str, Client] = {
            "one": stack.enter_context(connect(daemons[0], spec, options=options)),
            "cluster": stack.enter_context(connect(several, spec, options=options)),
        }
        for client in clients.values():
            client.wait_ready(DEADLINE_S)
        hashes = bench_chain(spec, num_blocks, seed=0)
        rates = _rates(clients, hashes, admins, rounds=max(2, rounds // 30))
        latencies = _latencies(clients, hashes, rounds=rounds)
    return {
        "daemons": NUM_DAEMONS,
        "rounds": rounds,
        "blocks": num_blocks,
        "part_bytes": part_bytes,
        "match": compared(latencies, limit="one"),
        **{
            what: {name: {"median": _gb(np.median(of)), "best": _gb(max(of))} for name, of in by_name.items()}
            for what, by_name in rates.items()
        },
    }


def _rates(clients: dict[str, Client], hashes: list[BlockHash], admins: list[AdminStub], *, rounds: int) -> Rates:
    """Bytes a second of stores and loads; what was stored last is there afterwards."""
    regions = {name: client.region(len(hashes) * client.spec.block_bytes) for name, client in clients.items()}
    target = np.zeros(len(hashes) * clients["one"].spec.block_bytes, np.uint8)
    rates: Rates = {what: {name: [] for name in clients} for what in ("store", "load")}
    for region in regions.values():
        random_bytes(region.array)
    for number in range(rounds + 1):
        for admin in admins:
            admin.Clear(pb.ClearRequest())
        for name, client in clients.items():
            stored_s = timed(lambda client=client, name=name: store_all(client, hashes, regions[name]))
            loaded_s = timed(lambda client=client: load_all(client, hashes, target))
            if number:  # the first maps memory
                rates["store"][name].append(target.size / stored_s)
                rates["load"][name].append(target.size / loaded_s)
        _show(f"stored and loaded {number} of {rounds} times")
    return rates


def _latencies(clients: dict[str, Client], hashes: list[BlockHash], *, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(rounds):
        for name, client in clients.items():
            begun = time.perf_counter()
            match = client.match(hashes)
            seconds[name].append(time.perf_counter() - begun)
            assert match.num_found == len(hashes), f"found {match.num_found} of {len(hashes)} blocks with {name}"
            match.release()
    return seconds


def _gb(rate: Any) -> float:
    return round(float(rate) / 1e9, 2)


def _show(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--part-bytes", type=int, default=65536)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = measure(rounds=arguments.rounds, num_blocks=arguments.blocks, part_bytes=arguments.part_bytes)
    print(json.dumps(result) if arguments.json else "\n".join(f"{name:12}{value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
