"""A store of several daemons on hosts of their own, whose links are cut while Redis goes on saying that all are up.

Redis is reached by a unix socket, which is the same on all hosts: it is at no end of any link. A link that is cut
swallows what is sent, and nobody is told, so all that a client learns it learns from what does not come.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from builders import chain, spec
from service.harness import DEADLINE_S, NO_UCX, Child, DaemonProcess, cut, eventually, held_by, made_hosts
from service.redis_server import RedisServer, needs_redis

from kvstore.placement import Placement, segments
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_server.commands.hosts import DEVICE, Hosts

pytestmark = [pytest.mark.skipif(bool(NO_UCX), reason=NO_UCX), needs_redis, pytest.mark.slow]

FIELDS: dict[str, Any] = {"layers": 2, "bytes_per_part": 4096, "block_tokens": 8}  # ten segments
KV = spec(**FIELDS)
NUM_BLOCKS = 600
NODES = "abc"
PORT = 7311
TTL_S = 1.5
TIMEOUT_S = 2.0  # of each call of the engine


class Store:
    """A daemon on each of the hosts a, b and c, which a client on the host `engine` reaches, and others."""

    def __init__(self, hosts: Hosts, redis: RedisServer, make_daemon: Callable[..., DaemonProcess], **flags: object):
        self.hosts = hosts
        self.redis = redis
        self.daemons = {}
        for node in NODES:
            address = hosts.address(node)
            self.daemons[node] = make_daemon(
                prefix=hosts.command(node),
                tcp_host=address,
                tcp_port=PORT,
                ucx_device=DEVICE,
                advertise=f"{address}:{PORT}",
                cluster_url=redis.url,
                cluster_ttl_s=TTL_S,
                node_id=node,
                **flags,
            )
        self.address = "kvstore://" + ",".join(f"{hosts.address(node)}:{PORT}" for node in NODES)
        eventually(lambda: all(len(self.told(node).members) == len(NODES) for node in NODES), "all know each other")

    def told(self, node: str) -> pb.MembersReply:
        """Who is a member, as this daemon tells it."""
        reply: pb.MembersReply = next(self.daemons[node].admin.Members(pb.MembersRequest(), timeout=DEADLINE_S))
        return reply

    def copies(self, seed: int) -> int:
        """With how many daemons each block of the chain is, or more."""
        held = [held_by(daemon) for daemon in self.daemons.values()]
        return min(sum(block in each for each in held) for block in chain(NUM_BLOCKS, of=KV, seed=seed))

    def heartbeats_of(self, num_ttls: int) -> int:
        """What Redis will have counted when so many TTLs have passed."""
        return self.redis.num_heartbeats() + len(NODES) * 3 * num_ttls


class Engine:
    """The client in its own process (`engine` of child.py): told a word, it says what came of it."""

    def __init__(self, child: Child) -> None:
        self.child = child
        assert child.step() == "ready"

    def tell(self, word: str, *seed: int) -> None:
        self.child.go_on(" ".join([word, *map(str, seed)]))

    def ask(self, word: str, *seed: int) -> Any:
        self.tell(word, *seed)
        return json.loads(self.child.step())

    def missed(self, seed: int) -> list[int]:
        """The blocks that a load does not bring; every byte of the others is right."""
        return came(self.ask("load", seed))


def came(told: dict[str, Any]) -> list[int]:
    assert told["wrong"] == 0
    missed: list[int] = told["missed"]
    return missed


def owned_by(node: str, seed: int) -> list[int]:
    """The blocks of the chain whose first owner this is."""
    placement = Placement(dict.fromkeys(NODES, 1.0))
    where = segments(chain(NUM_BLOCKS, of=KV, seed=seed), block_tokens=KV.block_tokens)
    return np.flatnonzero(placement.owners(where)[:, 0] == NODES.index(node)).tolist()


@pytest.fixture
def transport() -> str:
    return "ucx"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with made_hosts(*NODES, "engine") as hosts:
        yield hosts


@pytest.fixture
def make_store(hosts: Hosts, redis: RedisServer, make_daemon: Callable[..., DaemonProcess]) -> Callable[..., Store]:
    return lambda **flags: Store(hosts, redis, make_daemon, **flags)


@pytest.fixture
def open_engine(hosts: Hosts, child: Callable[..., Child]) -> Callable[..., Engine]:
    """A client that knows all daemons, on the host `engine` or another."""

    def open_engine(store: Store, host: str = "engine") -> Engine:
        arguments = {"address": store.address, "fields": FIELDS, "length": NUM_BLOCKS, "timeout_s": TIMEOUT_S}
        engine = Engine(child("engine", prefix=hosts.command(host), **arguments))
        eventually(lambda: engine.ask("live") == NODES, "the client knows all daemons")
        return engine

    return open_engine


@pytest.mark.parametrize(
    ("replicas", "beyond"),
    [(1, ["engine"]), (2, ["engine"]), (2, ["a", "c", "engine"])],
    ids=["1 replica", "2 replicas", "2 replicas, beyond all other hosts"],
)
def test_a_daemon_that_redis_sees_and_a_client_does_not_costs_its_blocks_at_most(
    make_store: Callable[..., Store], open_engine: Callable[..., Engine], replicas: int, beyond: list[str]
) -> None:
    """Covers: A15, A22, D10, D14. Membership does not notice; the client does by itself, and needs nobody to be told.

    What it stored meanwhile with who is next, couriers copy to the daemon, at once or when they reach it again.
    """
    store = make_store(replicas=replicas, heartbeat_s=1.0)
    engine = open_engine(store)
    lost = owned_by("b", 0)
    assert engine.ask("store", 0) == []
    eventually(lambda: store.copies(0) >= replicas, "each block is with so many daemons")
    assert engine.missed(0) == []
    before = store.told("a")

    def noticed() -> bool:
        assert engine.missed(0) in (lost, []), "what the others have is not missed"
        return bool(engine.ask("live") == "ac")

    with cut(store.hosts, "b", *beyond):
        long_after = store.heartbeats_of(num_ttls=3)
        eventually(noticed, "the client has noticed by itself")
        assert engine.missed(0) == (lost if replicas == 1 else [])
        assert engine.ask("match", 0) == (lost[0] if replicas == 1 else NUM_BLOCKS)
        for seed in (0, 1):
            assert engine.ask("store", seed) == [], "who is next takes its place"
            assert engine.missed(seed) == []
            assert engine.ask("match", seed) == NUM_BLOCKS
        eventually(lambda: store.redis.num_heartbeats() >= long_after, "a daemon that is gone would be known to be")
        assert [store.told(node) for node in NODES] == [before] * len(NODES)

    eventually(lambda: engine.ask("live") == NODES, "the client is connected again")
    num_asked = store.daemons["b"].stats().counters.matches
    for seed in (0, 1):
        found = "what was stored meanwhile is found"
        eventually(lambda seed=seed: engine.missed(seed) == [], found, timeout_s=2 * DEADLINE_S)
        assert engine.ask("match", seed) == NUM_BLOCKS
    assert store.daemons["b"].stats().counters.matches > num_asked
    assert engine.ask("store", 2) == []
    assert engine.missed(2) == []


def test_a_client_that_is_cut_off_while_it_loads_gets_all_but_the_blocks_beyond_the_cut(
    make_store: Callable[..., Store], open_engine: Callable[..., Engine]
) -> None:
    """Covers: A22, B1, D14. First while bytes move, then while it follows blocks of which half is written.

    Its sessions outlive the cuts, so that nothing but a deadline ends a call.
    """
    store = make_store(heartbeat_s=20.0)
    engine = open_engine(store)
    assert engine.ask("store", 0) == []
    seen = store.daemons["b"].stats().counters.blocks_loaded
    engine.tell("load_until_missed", 0)
    eventually(lambda: store.daemons["b"].stats().counters.blocks_loaded > seen + 2 * len(owned_by("b", 0)))
    with cut(store.hosts, "engine", "b"):
        assert came(json.loads(engine.child.step())) == owned_by("b", 0)
    eventually(lambda: engine.ask("live") == NODES and engine.missed(0) == [], "it is whole again")

    writer = open_engine(store, "a")
    writer.tell("store_in_steps", 1)
    assert writer.child.step() == "part 0"
    engine.tell("follow", 1)
    assert engine.child.step() == "part 0"
    with cut(store.hosts, "engine", "b"):
        writer.child.go_on()
        assert json.loads(writer.child.step()) == []
        engine.child.go_on()
        assert came(json.loads(engine.child.step())) == owned_by("b", 1)
    eventually(lambda: engine.ask("live") == NODES and engine.missed(1) == [], "it is whole again")
