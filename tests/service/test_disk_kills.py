"""The daemon is killed at random moments of a mixed load: what it said is on disk is there, and right.

`KVSTORE_TEST_KILLS` sets how often; the default keeps the suite quick.
"""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from builders import block_bytes, chain, spec
from service.disk import SMALL, Connect, MakeDaemon, Watcher, disk_stats, file_bytes, used_bytes
from service.harness import Child, eventually

from kvstore.spec import KVSpec
from kvstore.types import BlockHash, ByteArray
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockRows, KVClient, StoreFull

NUM_KILLS = int(os.environ.get("KVSTORE_TEST_KILLS", "25"))
FIELDS: list[dict[str, object]] = [
    {"layers": 2, "bytes_per_part": 8192},
    {"layers": 2, "bytes_per_part": 8192, "salt": "s"},
    {"layers": 3, "bytes_per_part": 5000, "tenant": "t"},
    {"layers": 2, "bytes_per_part": 8192, "dtype": "bfloat16"},  # compressed on disk
]
SPECS = [spec(**fields) for fields in FIELDS]  # type: ignore[arg-type]
NUM_CHAINS = 12
LENGTH = 10


class Truth:
    """What each block of the test holds, computed once."""

    def __init__(self) -> None:
        self.chains = {kv: [chain(LENGTH, of=kv, seed=seed) for seed in range(NUM_CHAINS)] for kv in SPECS}
        self._bytes: dict[tuple[bytes, bytes], ByteArray] = {}

    def of(self, kv: KVSpec, block_hash: BlockHash) -> ByteArray:
        key = (kv.namespace, block_hash)
        if key not in self._bytes:
            self._bytes[key] = block_bytes(kv, block_hash)
        return self._bytes[key]


def check(client: KVClient, truth: Truth) -> tuple[set[tuple[bytes, bytes]], int]:
    """(blocks of this namespace that are served, as they should be; blocks that are served with other bytes)."""
    kv, served, wrong = client.spec, set(), 0
    for hashes in truth.chains[kv]:
        target = np.zeros((LENGTH, kv.block_bytes), np.uint8)
        missing: set[int] = set()

        def fits(hashes: list[BlockHash] = hashes, target: ByteArray = target, missing: set[int] = missing) -> bool:
            errors = client.load(hashes, into=BlockRows(target)).wait().errors
            missing.clear()
            missing.update(errors)
            # The lease of the load before, or a slab that others have yet to unmap, may leave no room for a moment.
            return not any(isinstance(error, StoreFull) for error in errors.values())

        eventually(fits, "there is room in memory")
        for block in set(range(LENGTH)) - missing:
            right = bool((target[block] == truth.of(kv, hashes[block])).all())
            wrong += not right
            served.add((kv.namespace, hashes[block]))
    return served, wrong


@pytest.mark.slow
@pytest.mark.timeout(60 + 15 * NUM_KILLS)
@pytest.mark.parametrize(("disk_capacity", "num_kills"), [("64MiB", -(-NUM_KILLS // 2)), ("4MiB", NUM_KILLS // 2)])
def test_what_was_said_to_be_on_disk_is_served_bit_exact_after_each_of_many_kills(
    make_daemon: MakeDaemon,
    tmp_path: Path,
    connect: Connect,
    child: Callable[..., Child],
    capsys: pytest.CaptureFixture[str],
    disk_capacity: str,
    num_kills: int,
) -> None:
    """Covers: A1, A2, A12, A16, A17, A25, D2, D4, D5, D6, D7, E1.

    On the large disk nothing may be missing but what was cleared. On the small one, blocks are evicted all the time;
    one that was evicted or cleared when the daemon was killed may be there or not, and is right if it is.
    """
    is_large = disk_capacity == "64MiB"
    moments = random.Random(20 + num_kills)
    flags = SMALL | {"cpu_capacity": "2MiB", "disk_capacity": disk_capacity, "disk_scrub_bytes_s": "16MiB"}
    directory = tmp_path / "disk"
    config = tmp_path / "kvstore.toml"
    config.write_text('disk_codecs = { "*" = "zstd" }\n')
    daemon = make_daemon(config=config, disk_path=directory, **flags)
    truth = Truth()
    readers = [connect(daemon, kv) for kv in SPECS]
    children = [
        child("churn", address=daemon.address, fields=FIELDS, num_chains=NUM_CHAINS, length=LENGTH, seed=seed)
        for seed in range(2)
    ]
    durable: set[tuple[bytes, bytes]] = set()
    num_checked = num_loaded = 0
    for _ in range(num_kills):
        watcher = Watcher(daemon, durable)
        for one in children:
            assert one.step() == "ready"
            one.go_on()
        cleared = moments.choice(SPECS)  # so that there is something to store again
        daemon.admin.Clear(pb.ClearRequest(namespace=cleared.namespace))
        watcher.wait(moments.randint(1, 4))
        threading.Event().wait(moments.uniform(0, 0.2))  # any moment between two writes, too
        daemon.kill()
        watcher.close()
        for one in children:
            _, _stored, _, loaded, _, wrong = one.step().split()
            assert wrong == "0"
            num_loaded += int(loaded)

        daemon.start()

        assert disk_stats(daemon).used_bytes == used_bytes(daemon)
        assert disk_stats(daemon).slab_bytes == file_bytes(directory) <= disk_stats(daemon).capacity_bytes
        served: set[tuple[bytes, bytes]] = set()
        for reader in readers:
            reader.wait_ready()
            mine, wrong = check(reader, truth)
            assert wrong == 0
            served |= mine
        num_checked += len(served)
        if is_large:
            assert durable <= served, f"{len(durable - served)} of {len(durable)} blocks are missing"
        durable &= served
        durable |= served  # they are on disk, whoever heard of it
        for one in children:
            one.go_on()
    log = daemon.log.read_text()
    assert "this is a bug" not in log
    assert "Traceback" not in log
    assert durable
    with capsys.disabled():
        print(f" {num_kills} kills, {num_checked} blocks checked, {num_loaded} loaded meanwhile", end="")  # noqa: T201
