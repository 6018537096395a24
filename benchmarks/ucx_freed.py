"""How long after its kill does a client of another host still hold anything? Seconds, over ucx.

    python benchmarks/ucx_freed.py [--rounds 20] [--device lo] [--json]

A client in a process of its own loads into a region and stores from it, again and again, and is killed meanwhile. The
time ends when the daemon has no session, no leased and no half-written block of it any more. The limit is 1 s.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time

from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore_client import BlockRows, ClientOptions, KVClient
from kvstore_server.commands.measure import DEADLINE_S, admin_of, bench_chain, bench_spec, running_daemon

BLOCKS = 16
SPEC = bench_spec("freed", 1 << 20)
POLL_S = 0.002


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="lo")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--move", help=argparse.SUPPRESS)  # the client: the address of its daemon
    arguments = parser.parse_args()
    if arguments.move:
        move(arguments.move, arguments.device)
    flags = ("--ucx-device", arguments.device)
    with running_daemon(*flags, size_bytes=256 << 20) as daemon, admin_of(daemon) as admin:
        wait_until(admin, lambda stats: True)
        took = []
        for _ in range(arguments.rounds):
            stored = admin.Stats(pb.StatsRequest()).counters.blocks_stored
            command = [sys.executable, __file__, "--move", daemon.address, "--device", arguments.device]
            client = subprocess.Popen(command)
            wait_until(admin, lambda stats, stored=stored: stats.counters.blocks_stored > stored + 2 * BLOCKS)
            client.kill()
            started = time.perf_counter()
            wait_until(admin, lambda stats: not (stats.sessions or stats.blocks_leased or stats.blocks_writing))
            took.append(time.perf_counter() - started)
            client.wait()
    figures = {"median_s": statistics.median(took), "worst_s": max(took)}
    figures = {name: round(value, 4) for name, value in figures.items()} | {"rounds": arguments.rounds}
    print(json.dumps(figures) if arguments.json else "\n".join(f"{name:10} {value}" for name, value in figures.items()))


def wait_until(admin: AdminStub, condition) -> None:
    while not condition(admin.Stats(pb.StatsRequest(), wait_for_ready=True, timeout=DEADLINE_S)):
        time.sleep(POLL_S)


def move(address: str, device: str) -> None:
    """Until it is killed."""
    options = ClientOptions(timeout_s=DEADLINE_S, transport="ucx", ucx_device=device)
    client = KVClient(address, SPEC, options=options)
    client.wait_ready(DEADLINE_S)
    rows = client.region(BLOCKS * SPEC.block_bytes).array.reshape(BLOCKS, -1)
    for seed in itertools.count(time.time_ns() % (1 << 20)):
        hashes = bench_chain(SPEC, BLOCKS, seed=seed)
        with client.store(hashes) as write:
            write.put_blocks(rows)
        client.load(hashes, into=BlockRows(rows)).wait()


if __name__ == "__main__":
    main()
