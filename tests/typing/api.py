"""The public API as a program that embeds it sees it: checked by `make types`, never run."""

from collections.abc import Sequence
from typing import assert_type

import numpy as np

from kvstore.hashing import chain
from kvstore.placement import segments
from kvstore.types import ByteArray
from kvstore_client import (
    BlockHash,
    BlockRows,
    BootId,
    BreakerState,
    Client,
    ClientOptions,
    ClientStatistics,
    ClusterClient,
    ClusterLoad,
    ClusterWrite,
    CudaRegion,
    KVClient,
    KVSpec,
    KVStoreError,
    Load,
    LoadResult,
    Match,
    Namespace,
    Outcome,
    Region,
    StoreUnavailable,
    Write,
    connect,
)

spec = KVSpec.uniform(
    model="toy", revision="r1", dtype="float16", block_tokens=16, layers=4, bytes_per_part=8192, layout="toy"
)
assert_type(spec, KVSpec)
assert_type(spec.namespace, Namespace)
assert_type(spec.block_bytes, int)

hashes = chain(spec.namespace, range(64), block_tokens=spec.block_tokens)
assert_type(hashes, list[BlockHash])

client = KVClient("unix:/run/kvstore.sock", spec, options=ClientOptions(timeout_s=0.5, name="decode-0"))
assert_type(client.boot_id, BootId | None)
assert_type(client.connected, bool)
assert_type(client.statistics(), ClientStatistics)
assert_type(client.statistics().breaker, BreakerState)
assert_type(KVClient.in_process(spec), KVClient)

with client as entered:
    assert_type(entered, KVClient)

with client.match(hashes, lease="request-7") as match:
    assert_type(match, Match)
    assert_type(match.num_blocks, int)

rows = np.zeros((4, spec.block_bytes), np.uint8)
with client.load(match, into=BlockRows(rows), timeout_s=0.2) as load:
    assert_type(load, Load)
    assert_type(load.wait(), LoadResult)
    assert_type(load.errors, dict[int, KVStoreError])
by_part: Sequence[np.ndarray] = [np.zeros((4, 8192), np.uint8) for _ in range(4)]
client.load(hashes, into=by_part, follow=True).wait_part(0)
assert_type(client.load(hashes, view=True).view(0, 0), ByteArray)

with client.store(hashes, parent=None) as write:
    assert_type(write, Write)
    assert_type(write.outcomes, list[Outcome])
    write.put(0, by_part[0])
    write.put_blocks(rows)
    assert_type(write.commit(), list[Outcome])

with client.region(1 << 20) as region:
    assert_type(region, Region)
    assert_type(region.array, ByteArray)
with client.cuda_region(object()) as cuda_region:
    assert_type(cuda_region, CudaRegion)

assert_type(client.prefetch(hashes), int)
assert_type(client.verify(hashes), dict[int, KVStoreError])

try:
    client.wait_ready(1.0)
except StoreUnavailable as error:
    assert_type(str(error), str)

# Of one daemon or of several: the same calls.
either = connect("kvstore://a:7311,b:7311,unix:/run/kvstore.sock", spec, options=ClientOptions(name="decode-1"))
assert_type(either, Client)
where = segments(hashes, block_tokens=spec.block_tokens)
with either, either.match(hashes[2:], segments=where[2:]) as found:
    assert_type(found, Match)
    assert_type(either.load(found, into=BlockRows(rows), segments=where[2:]), Load | ClusterLoad)
    assert_type(either.load(hashes, view=True).wait(), LoadResult)
with either.store(hashes[2:], parent=hashes[1], segments=where[2:]) as written:
    assert_type(written, Write | ClusterWrite)
    written.put(0, by_part[0], timeout_s=1.0)
    assert_type(written.outcomes, list[Outcome])
assert_type(either.region(1 << 20), Region)
assert_type(either.cuda_region(object()), CudaRegion)
assert_type(either.prefetch(hashes), int)
assert_type(either.verify(hashes), dict[int, KVStoreError])
assert_type(either.statistics(), ClientStatistics)
either.release("request-7")
cluster = ClusterClient("kvstore://a:7311", spec)
assert_type(cluster.connected, bool)
assert_type(cluster.namespace, Namespace)

# What must not pass: mypy reports an ignore that is not needed, so each line is a check.
client.load(hashes, rows)  # type: ignore[call-arg]
client.store(hashes, None)  # type: ignore[call-arg]
KVClient("unix:/run/kvstore.sock")  # type: ignore[call-arg]
client.match("abc")  # type: ignore[arg-type]
