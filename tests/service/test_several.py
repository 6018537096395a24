"""A store of daemons that know each other through Redis: what is in it survives their deaths, comings and goings."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, DaemonProcess, eventually, held_by
from service.redis_server import RedisServer, needs_redis

from kvstore.types import BlockHash, Outcome
from kvstore_client import BlockRows, ClientOptions, ClusterClient, KVStoreError, connect

pytestmark = [needs_redis, pytest.mark.slow]

TTL_S = 1.5
KV = spec(layers=2, bytes_per_part=4096, block_tokens=8)  # ten segments
NUM_BLOCKS = 600
HASHES = chain(NUM_BLOCKS, of=KV)
DATA = rows(KV, HASHES)


class Store:
    """Daemons by name, and clients of them all."""

    def __init__(self, make_daemon: Callable[..., DaemonProcess], stack: ExitStack, redis: RedisServer) -> None:
        self._make_daemon, self._stack = make_daemon, stack
        self.redis = redis
        self.daemons: dict[str, DaemonProcess] = {}

    def add(self, names: str, **flags: object) -> None:
        for name in names:
            settings = {"cluster_url": self.redis.url, "node_id": name, "cluster_ttl_s": TTL_S} | flags
            self.daemons[name] = self._make_daemon(**settings)

    def connect(self) -> ClusterClient:
        """A client that knows all daemons."""
        address = "kvstore://" + ",".join(daemon.address for daemon in self.daemons.values())
        options = ClientOptions(timeout_s=DEADLINE_S, breaker_cooldown_s=0.5)
        client = connect(address, KV, options=options)
        assert isinstance(client, ClusterClient)
        self._stack.enter_context(closing(client))
        client.wait_ready(DEADLINE_S)
        eventually(lambda: self.live(client) == "".join(sorted(self.daemons)), "the client knows all daemons")
        return client

    def live(self, client: ClusterClient) -> str:
        ring = client._links.current()
        return "".join(node for node, link in zip(ring.view.nodes, ring.links, strict=True) if link.live)

    def copies(self) -> int:
        """With how many daemons each block is, or more: those that joined late may have been passed over at first."""
        held = Counter(hash_ for daemon in self.daemons.values() if daemon.running for hash_ in held_by(daemon))
        return min(held[hash_] for hash_ in HASHES)

    def counts(self) -> dict[str, int]:
        return {name: daemon.stats().blocks_committed for name, daemon in self.daemons.items() if daemon.running}


@pytest.fixture
def store(redis: RedisServer, make_daemon: Callable[..., DaemonProcess], stack: ExitStack) -> Store:
    return Store(make_daemon, stack, redis)


def save(client: ClusterClient, hashes: list[BlockHash] = HASHES) -> None:
    with client.store(hashes) as write:
        write.put_blocks(rows(KV, hashes))
    assert set(write.outcomes) == {Outcome.STORED}


def num_right(client: ClusterClient) -> int:
    """How many leading blocks a match finds and a load brings, every one of which is right."""
    with client.match(HASHES) as match:
        target = np.zeros((match.num_blocks, KV.block_bytes), np.uint8)
        num_loaded = client.load(match, into=BlockRows(target)).wait().num_loaded if match.num_blocks else 0
    assert (target[:num_loaded] == DATA[:num_loaded]).all(), "a wrong byte"
    return num_loaded


def drain(store: Store, name: str) -> dict[str, object]:
    """What `kvstore drain` says."""
    address = "kvstore://" + ",".join(daemon.address for daemon in store.daemons.values())
    command = [sys.executable, "-m", "kvstore_server.cli", "drain", name, address, "--json"]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert ran.returncode == 0, ran.stderr
    said: dict[str, object] = json.loads(ran.stdout)
    return said


def test_with_two_replicas_a_daemon_that_is_killed_costs_nothing(store: Store) -> None:
    """Covers: A15, D14, E5. Whatever is asked meanwhile is answered with right bytes, or not at all."""
    store.add("abc", replicas=2)
    client = store.connect()
    save(client)
    eventually(lambda: store.copies() >= 2, "each block is with two daemons")

    store.daemons["b"].kill()
    answers = []

    def is_whole() -> bool:
        try:
            answers.append(num_right(client))
        except KVStoreError:
            return False
        return answers[-1] == NUM_BLOCKS

    eventually(is_whole, "the other owners are asked")
    eventually(lambda: store.copies() >= 2, "each block is with two daemons again")
    assert num_right(client) == NUM_BLOCKS


def test_a_daemon_that_joins_gets_its_share_of_what_is_there(store: Store) -> None:
    """Covers: D3."""
    store.add("ab")
    client = store.connect()
    save(client)
    before = store.counts()
    assert sum(before.values()) == NUM_BLOCKS

    store.add("c")
    eventually(lambda: store.live(client) == "abc", "the client knows it")
    eventually(lambda: num_right(client) == NUM_BLOCKS, "all is found by the new members")
    assert 0 < store.counts()["c"] < NUM_BLOCKS
    assert {name: store.counts()[name] for name in "ab"} == before  # copies, which go as others need the room


def test_a_daemon_that_is_drained_hands_over_what_it_has(store: Store) -> None:
    """Covers: D14."""
    store.add("abc")
    client = store.connect()
    save(client)
    held = store.counts()["b"]
    assert held

    said = drain(store, "b")
    assert (said["blocks"], said["copied"], said["failed"], said["refused"]) == (held, held, 0, 0)
    assert num_right(client) == NUM_BLOCKS
    assert store.daemons["b"].terminate() == 0
    eventually(lambda: store.live(client) == "ac", "the client knows that it is gone")
    assert num_right(client) == NUM_BLOCKS


def test_what_was_on_disk_is_there_again_after_each_was_killed_and_started(
    store: Store, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Covers: A16, D1, D2, D4."""
    for name in "abc":
        store.add(name, disk_path=str(tmp_path_factory.mktemp(name)), disk_capacity="64MiB", disk_reserve=0)
    client = store.connect()
    save(client)
    written = [daemon.stats for daemon in store.daemons.values()]
    eventually(lambda: sum(stats().counters.blocks_written for stats in written) == NUM_BLOCKS, "all is on disk")
    for name, daemon in store.daemons.items():
        daemon.kill()
        daemon.start()
        eventually(lambda: store.live(client) == "abc", f"{name} is back")
        eventually(lambda: num_right(client) == NUM_BLOCKS, f"what {name} had is there again")


def test_whatever_comes_and_goes_under_load_no_byte_is_wrong_and_none_waits_for_ever(store: Store) -> None:
    """Covers: A15, A16, D14. One joins, one is drained, two are killed at once and come back, while a client loads."""
    store.add("abc", replicas=2)
    client = store.connect()
    save(client)
    over = threading.Event()

    def load_and_store() -> int:
        """As an engine does: what is not found is computed again. How often all was found."""
        num_whole = 0
        while not over.is_set():
            with suppress(KVStoreError):
                num_loaded = num_right(client)  # which compares every byte
                num_whole += num_loaded == NUM_BLOCKS
                if num_loaded < NUM_BLOCKS:
                    with client.store(HASHES) as write:
                        write.put_blocks(DATA)
        return num_whole

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(load_and_store)
        try:
            store.add("d", replicas=2)
            eventually(lambda: store.live(client) == "abcd", "the client knows the one that joined")
            assert drain(store, "a")["failed"] == 0
            for name in "bc":
                store.daemons[name].kill()
            for name in "bc":
                store.daemons[name].start()
            eventually(lambda: store.live(client) in ("abcd", "bcd"), "those that were killed are back")
            eventually(lambda: working.done() or num_right(client) == NUM_BLOCKS, "all is found again")
        finally:
            over.set()
        assert working.result(2 * DEADLINE_S) > 0


def test_without_redis_blocks_are_stored_and_loaded_as_with_it(store: Store) -> None:
    """Covers: A15."""
    store.add("abc", replicas=2)
    client = store.connect()
    store.redis.kill()
    save(client)
    assert num_right(client) == NUM_BLOCKS
    eventually(lambda: store.copies() >= 2, "they are copied, too")


def test_a_courier_that_dies_is_replaced_and_copies_what_is_missing(store: Store) -> None:
    store.add("ab", replicas=2)
    client = store.connect()
    for name in "ab":
        for pid in couriers(store.daemons[name]):
            subprocess.run(["kill", "-9", str(pid)], check=True)
    save(client)
    eventually(lambda: store.counts() == {"a": NUM_BLOCKS, "b": NUM_BLOCKS}, "both have all")
    (courier,) = couriers(store.daemons["a"])
    store.daemons["a"].kill()
    eventually(lambda: not alive(courier), "it goes with its daemon")


def couriers(daemon: DaemonProcess) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-P", str(daemon.pid), "-f", "courier"], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in found.stdout.split()]


def alive(pid: int) -> bool:
    return subprocess.run(["kill", "-0", str(pid)], capture_output=True, check=False).returncode == 0
