"""A session of which each step is the test's: its stream is here, and its agent is in a process of its own."""

import json
from typing import Any

import numpy as np
from service.harness import Child, RawStream, eventually

from kvstore.hashing import pack
from kvstore.spec import KVSpec
from kvstore.types import BlockHash
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import pack_u32, pack_u64


class Puppet:
    """A session with one region, of `length` blocks."""

    def __init__(self, stream: RawStream, peer: Child, kv: KVSpec, *, length: int) -> None:
        self.stream = stream
        self.peer = peer  # runs the scenario `agent`, and waits for its name
        self.name: str = stream.welcome.ucx.agent_name  # type: ignore[attr-defined]
        peer.go_on(self.name)
        size_bytes = length * kv.block_bytes
        address, metadata = json.loads(peer.step())
        told = {"region": 1, "size_bytes": size_bytes, "address": address, "metadata": bytes.fromhex(metadata)}
        region = pb.RegisterRegion(**told)
        # More than once: a connection to a dead host of the same address and port is not given up at once.
        eventually(lambda: stream.ask(register_region=region).status.code == 0)
        offsets = np.arange(length * kv.num_parts, dtype=np.int64) * kv.part_bytes[0]
        self._grid: dict[str, Any] = {"parts": pack_u32(range(kv.num_parts)), "offsets": pack_u64(offsets)}

    def store(self, hashes: list[BlockHash]) -> None:
        """The daemon was asked to read these blocks from the region."""
        reserved = self.stream.ask(store=pb.Store_(hashes=pack(hashes))).reserved
        blocks = pack_u32(range(len(hashes)))
        self.stream.start(store_part=pb.StorePart(write_id=reserved.write_id, blocks=blocks, region=1, **self._grid))

    def load(self, hashes: list[BlockHash]) -> None:
        """The daemon was asked to write these blocks to the region. They are leased for that only."""
        located = self.stream.ask(load=pb.Load(hashes=pack(hashes), lease="a")).located
        fetch = pb.Fetch(hashes=pack(hashes), generations=located.generations, region=1, **self._grid)
        self.stream.start(fetch=fetch)
        self.stream.ask(release=pb.Release(lease="a"))
