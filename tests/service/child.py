"""Clients for other processes than the test's. Each stops where the test may kill it, says so, and waits.

Run as `child.py SCENARIO '{"address": ..., ...}'`; not a test.
"""

import json
import os
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from builders import chain, rows, spec

from kvstore.errors import KVStoreError
from kvstore.transport.shm import Op, Reply, Request, create_memfd, seal_region
from kvstore_client import BlockRows, ClientOptions, KVClient

TIMEOUT_S = 20.0


def stop(word: str) -> None:
    """The test hears the word; this returns when the test says so."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()
    sys.stdin.readline()


def connect(address: str, fields: dict) -> KVClient:
    client = KVClient(address, spec(**fields), options=ClientOptions(name="child", timeout_s=TIMEOUT_S))
    client.wait_ready(TIMEOUT_S)
    return client


def write(address: str, fields: dict, length: int, seed: int = 0, parts: list[int] | None = None) -> None:
    """Reserves, then puts part after part; stops after each."""
    client = connect(address, fields)
    kv = client.spec
    hashes = chain(length, of=kv, seed=seed)
    data = rows(kv, hashes)
    writing = client.store(hashes, parts=parts)
    stop("reserved")
    for part in writing.parts:
        begin, size = kv.part_range(part)
        writing.put(part, data[:, begin : begin + size])
        stop(f"put {part}")
    stop(" ".join(outcome.name for outcome in writing.commit()))


def read(address: str, fields: dict, length: int, seed: int = 0) -> None:
    """Matches and views; goes on to look at its views again, and to load the blocks again."""
    client = connect(address, fields)
    kv = client.spec
    hashes = chain(length, of=kv, seed=seed)
    match = client.match(hashes)
    load = client.load(match, view=True)
    result = load.wait()
    seen = [load.view(block, 0).copy() for block in range(result.num_loaded)]
    stop(f"holding {match.num_blocks} {result.num_loaded}")
    expected = rows(kv, hashes)
    right = all((view == expected[block][: len(view)]).all() for block, view in enumerate(seen))
    try:
        load.check()
        stop(f"unchanged {right}")
    except KVStoreError as error:
        stop(f"{type(error).__name__} {right}")
    client.wait_ready(TIMEOUT_S)
    again = client.match(hashes)
    target = np.zeros((length, kv.block_bytes), np.uint8)
    result = client.load(hashes, into=BlockRows(target)).wait()
    wrong = sum(not (target[block] == expected[block]).all() for block in range(result.num_loaded))
    stop(f"matched {again.num_blocks} loaded {result.num_loaded} wrong {wrong}")


def follow(address: str, fields: dict, length: int, seed: int = 0) -> None:
    """Follows blocks in writing; stops when the first part is there, while the others are not."""
    client = connect(address, fields)
    hashes = chain(length, of=client.spec, seed=seed)
    target = np.zeros((length, client.spec.block_bytes), np.uint8)
    load = client.load(hashes, into=BlockRows(target), follow=True)
    load.wait_part(0)
    stop("part 0")


def register_as(shm_path: str, ticket: str, uid: int, register_uid: int) -> None:
    """Makes a region as one user and registers it as another; says what the daemon answered."""
    size_bytes = 4096
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.seteuid(register_uid)
    peer.connect(shm_path)
    os.seteuid(0)
    peer.send(Request(Op.ATTACH, ticket=bytes.fromhex(ticket)).encode())
    assert Reply.decode(peer.recv(Reply.MAX_BYTES)).code == 0
    os.seteuid(uid)
    fd, _memory = create_memfd("test", size_bytes)
    seal_region(fd)
    os.seteuid(0)
    socket.send_fds(peer, [Request(Op.REGION, 1, size_bytes).encode()], [fd])
    reply = Reply.decode(peer.recv(Reply.MAX_BYTES))
    stop(f"{reply.code} {reply.message}")


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
