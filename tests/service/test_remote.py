"""A daemon whose cold blocks go to a directory, an S3 server or a Redis: they come back, or are a miss."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import chain, rows, spec
from remote_places import BUCKET, Server, redis_server, s3_server
from service.disk import PIECE, SMALL, Connect, MakeDaemon, load, pieces
from service.harness import DEADLINE_S, DaemonProcess, eventually, held_by
from service.redis_server import needs_redis

from kvstore.placement import Placement, segments
from kvstore.spec import KVSpec
from kvstore.types import BlockHash
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import BlockRows, ClientOptions, ClusterClient, KVClient, Outcome
from kvstore_client import connect as connect_to_all
from kvstore_server.tiers.objects import block_key, name_of, object_bytes
from kvstore_server.tiers.records import RecordLayout

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'kvstore[remote]'")
pytest.importorskip("redis", reason="redis is not installed: pip install 'kvstore[remote]'")

KV = spec(layers=2, bytes_per_part=8192)
OBJECT_BYTES = object_bytes(RecordLayout.of(KV))
SPREAD = spec(layers=2, bytes_per_part=8192, block_tokens=32)  # segments of 16 blocks
CHAINS = [chain(40, of=KV, seed=seed) for seed in range(5)]
ROOM = 60  # blocks that fit into memory
KEPT = 40  # the blocks used last, a bit more than 0.6 of the 60 of memory: these are not cold
SIZES = {name: SMALL[name] for name in ("cpu_capacity", "slab_bytes")}


class Place:
    """Where the daemon's objects are: its URL, the server if there is one, and a way past the daemon to them."""

    def __init__(
        self, url: str, server: Server | None, get: Callable[[str], bytes], put: Callable[[str, bytes], object]
    ) -> None:
        self.url = url
        self.server = server
        self.get = get
        self.put = put

    def has(self, name: str) -> bool:
        try:
            return bool(self.get(name))
        except FileNotFoundError:
            return False


def directory(folder: Path) -> Place:
    path = folder / "objects"
    return Place(
        f"file://{path}",
        None,
        lambda name: (path / name).read_bytes(),
        lambda name, data: (path / name).write_bytes(data),
    )


def bucket(server: Server) -> Place:
    import obstore
    from obstore.store import from_url

    store = from_url(f"s3://{BUCKET}/prefix", client_options={"allow_http": True})
    return Place(
        f"s3://{BUCKET}/prefix",
        server,
        lambda name: bytes(obstore.get(store, name).bytes()),
        lambda name, data: obstore.put(store, name, data),
    )


def database(server: Server, number: int = 2) -> Place:
    import redis

    client = redis.Redis(port=server.port, db=number)
    return Place(
        f"redis://127.0.0.1:{server.port}/{number}/prefix",
        server,
        lambda name: bytes(client.get(f"prefix/{name}") or b""),
        lambda name, data: client.set(f"prefix/{name}", data),
    )


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    match getattr(request, "param", "directory"):
        case "s3":
            with s3_server(monkeypatch) as server:
                yield bucket(server)
        case "redis":
            with redis_server(tmp_path / "redis") as server:
                yield database(server)
        case _:
            yield directory(tmp_path)


everywhere = pytest.mark.parametrize("place", ["directory", "s3", "redis"], indirect=True)
on_servers = pytest.mark.parametrize("place", ["s3", "redis"], indirect=True)


@pytest.fixture
def serve(make_daemon: MakeDaemon, place: Place, tmp_path: Path) -> Callable[..., DaemonProcess]:
    """A daemon with memory for 60 blocks, and this place, of which fewer than `min_blocks` are not fetched."""

    def serve(*, min_blocks: int = 4, **flags: object) -> DaemonProcess:
        config = tmp_path / "kvstore.toml"
        config.write_text(f"remote_min_blocks = {min_blocks}\nremote_requests = 4\n")
        return make_daemon(config=config, remote_url=place.url, **SIZES | flags)

    return serve


def name(block_hash: BlockHash, kv: KVSpec = KV) -> str:
    return name_of(block_key(kv.namespace, block_hash))


def used_there(daemon: DaemonProcess) -> int:
    """Blocks that are in the place, as far as the daemon knows."""
    (shown,) = (tier for tier in daemon.stats().tiers if tier.tier == "remote")
    return shown.used_bytes // OBJECT_BYTES


def store_piecewise(client: KVClient, hashes: Sequence[BlockHash], then: Callable[[int], None]) -> None:
    """The chain is stored; after each piece `then` was called with its length."""
    before = None
    for piece in pieces(hashes):
        with client.store(piece, parent=before) as write:
            write.put_blocks(rows(client.spec, piece))
        assert set(write.outcomes) == {Outcome.STORED}, write.outcomes
        then(len(piece))
        before = piece[-1]


def store_and_copy(place: Place, client: KVClient, chains: Sequence[list[BlockHash]]) -> None:
    """These were stored, each piece once all that it may evict had been copied. So nothing is lost."""
    copied: set[BlockHash] = set()
    for number, hashes in enumerate(chains):
        length = 0

        def wait(more: int, number: int = number) -> None:
            nonlocal length
            length += more
            old = [block_hash for chain in chains[: max(0, number - 1)] for block_hash in chain]
            old += chains[number - 1][KEPT - length :] if number else []
            for block_hash in old:
                if block_hash not in copied:
                    eventually(lambda block_hash=block_hash: place.has(name(block_hash)), "what is old was copied")
                    copied.add(block_hash)

        store_piecewise(client, hashes, wait)


def found(client: KVClient, hashes: Sequence[BlockHash]) -> int:
    return client.match(hashes, lease="").num_blocks


def check_comes_back(client: KVClient, hashes: Sequence[BlockHash]) -> None:
    """A match after the first ones finds the whole chain, and it is served bit-exact."""
    eventually(lambda: found(client, hashes) == len(hashes), "the chain came back")
    assert load(client, hashes) == {}


@everywhere
def test_what_memory_let_go_of_comes_back_bit_exact_also_after_kill_9(
    serve: Callable[..., DaemonProcess], place: Place, connect: Connect
) -> None:
    """Covers: D4, F6."""
    daemon = serve()
    client = connect(daemon, KV)
    store_and_copy(place, client, CHAINS)
    assert daemon.stats().blocks_committed == 60
    for hashes in CHAINS:
        check_comes_back(client, hashes)

    daemon.kill()
    daemon.start()
    client.wait_ready()

    eventually(lambda: used_there(daemon) >= 160, "the daemon knows what is there")
    for hashes in CHAINS[:4]:
        check_comes_back(client, hashes)


def test_what_the_disk_let_go_of_comes_back(
    serve: Callable[..., DaemonProcess], tmp_path: Path, connect: Connect
) -> None:
    daemon = serve(**SMALL | {"disk_path": tmp_path / "disk", "disk_capacity": "2MiB"})
    client = connect(daemon, KV)
    stored = 0

    def wait(more: int) -> None:
        nonlocal stored
        stored += more
        eventually(lambda: daemon.stats().counters.blocks_written >= stored, "written through")
        if stored > 100:
            eventually(lambda: used_there(daemon) >= stored - 70, "copied to the place")

    for hashes in [*CHAINS, *(chain(40, of=KV, seed=seed) for seed in range(5, 8))]:
        store_piecewise(client, hashes, wait)
    assert daemon.stats().counters.blocks_dropped > 150
    for hashes in CHAINS:
        check_comes_back(client, hashes)


def test_another_daemon_finds_what_one_copied(
    serve: Callable[..., DaemonProcess], place: Place, connect: Connect
) -> None:
    one, other = serve(), serve()
    store_and_copy(place, connect(one, KV), CHAINS)
    assert daemon_has_nothing(other)
    check_comes_back(connect(other, KV), CHAINS[0])


def daemon_has_nothing(daemon: DaemonProcess) -> bool:
    return daemon.stats().blocks_committed == 0


@everywhere
def test_wrong_bytes_in_an_object_are_never_served(
    serve: Callable[..., DaemonProcess], place: Place, connect: Connect
) -> None:
    """Covers: A1, A2, A25."""
    daemon = serve()
    client = connect(daemon, KV)
    store_and_copy(place, client, CHAINS)
    daemon.kill()
    bad, foreign, short = (name(CHAINS[number][10]) for number in range(3))
    flipped = bytearray(place.get(bad))
    flipped[-1] ^= 1
    place.put(bad, bytes(flipped))
    place.put(foreign, place.get(name(CHAINS[0][11])))
    place.put(short, place.get(short)[:-1])
    daemon.start()
    client.wait_ready()

    for hashes in CHAINS[:3]:
        eventually(lambda hashes=hashes: found(client, hashes) == 10, "all before it came back")
        errors = load(client, hashes)  # compares every byte that is served
        assert sorted(errors)[0] == 10
        assert found(client, hashes) == 10
    check_comes_back(client, CHAINS[3])
    log = daemon.new_log()
    assert log.count("an object is not its block") >= 3
    store_piecewise(client, CHAINS[0], lambda more: None)
    assert load(client, CHAINS[0]) == {}


@on_servers
def test_a_server_that_is_killed_costs_no_store_and_no_match_and_is_used_again(
    serve: Callable[..., DaemonProcess], place: Place, connect: Connect
) -> None:
    """Covers: A1, D12."""
    daemon = serve()
    client = connect(daemon, KV)
    store_and_copy(place, client, CHAINS[:2])
    assert place.server is not None
    place.server.stop()

    for hashes in CHAINS[2:]:
        store_piecewise(client, hashes, lambda more: None)
    newest = CHAINS[-1]
    assert found(client, newest) == 40
    assert load(client, newest) == {}
    eventually(lambda: "failed, the store goes on without it" in daemon.log.read_text(), "it was logged")
    assert found(client, CHAINS[0]) < 40  # a short match, and at once

    place.server.start()
    for seed in range(10, 14):
        copied = used_there(daemon)
        store_piecewise(client, chain(40, of=KV, seed=seed), lambda more: None)
        eventually(lambda copied=copied: used_there(daemon) > copied, "copied again")
    eventually(lambda: "answers again" in daemon.log.read_text(), "it was logged")
    later = [chain(40, of=KV, seed=seed) for seed in range(20, 23)]
    store_and_copy(place, client, later)
    check_comes_back(client, later[0])
    assert daemon.log.read_text().count("failed, the store goes on without it") <= 2, "once each way"


def test_a_server_that_hangs_holds_up_no_match_and_no_stop(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect
) -> None:
    """Covers: D12, F1."""
    with redis_server(tmp_path / "redis") as server:
        there = database(server, number=0)
        daemon = make_daemon(remote_url=f"redis://127.0.0.1:{server.port}/0/prefix", **SIZES)
        client = connect(daemon, KV)
        store_and_copy(there, client, CHAINS[:2])
        server.send(signal.SIGSTOP)
        for hashes in CHAINS[2:]:
            store_piecewise(client, hashes, lambda more: None)
        assert found(client, CHAINS[0]) < 40
        assert found(client, CHAINS[-1]) == 40
        client.close()
        assert daemon.terminate() == 0
        assert "Traceback" not in daemon.new_log()


def test_wrong_credentials_are_told_once_and_the_store_goes_on(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: D12."""
    monkeypatch.setenv("REDIS_PASSWORD", "a-wrong-word")
    with redis_server(tmp_path / "redis", "--requirepass", "the-right-word") as server:
        daemon = make_daemon(remote_url=f"redis://127.0.0.1:{server.port}/0/prefix", **SIZES)
        client = connect(daemon, KV)
        for hashes in CHAINS:
            store_piecewise(client, hashes, lambda more: None)
        assert load(client, CHAINS[-1]) == {}
        eventually(lambda: "failed, the store goes on without it" in daemon.log.read_text(), "it was logged")
        assert daemon.terminate() == 0
        log = daemon.log.read_text()
        assert log.count("failed, the store goes on without it") == 1
        assert "a-wrong-word" not in log


def test_a_redis_that_is_full_takes_no_more_and_is_read_as_before(
    make_daemon: MakeDaemon, tmp_path: Path, connect: Connect
) -> None:
    """Covers: D12, E2."""
    with redis_server(tmp_path / "redis") as server:
        there = database(server, number=0)
        config = tmp_path / "kvstore.toml"
        config.write_text("remote_min_blocks = 4\n")
        daemon = make_daemon(config=config, remote_url=f"redis://127.0.0.1:{server.port}/0/prefix", **SIZES)
        client = connect(daemon, KV)
        store_and_copy(there, client, CHAINS[:3])
        import redis

        admin = redis.Redis(port=server.port)
        admin.config_set("maxmemory", 1 << 20)
        for hashes in CHAINS[3:]:
            store_piecewise(client, hashes, lambda more: None)
        eventually(lambda: "failed, the store goes on without it" in daemon.log.read_text(), "it was logged")
        check_comes_back(client, CHAINS[0])
        admin.close()


def test_the_capacity_is_a_limit_also_after_a_restart(
    serve: Callable[..., DaemonProcess], tmp_path: Path, connect: Connect
) -> None:
    """Covers: D5, E1, E2."""
    limit = 60 * OBJECT_BYTES
    daemon = serve(remote_capacity=limit)
    client = connect(daemon, KV)

    def check(more: int) -> None:
        size_bytes = 0
        for path in (tmp_path / "objects").rglob("*/*"):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                size_bytes += path.stat().st_size
        assert size_bytes <= limit

    for restarted in (False, True):
        for hashes in CHAINS:
            store_piecewise(client, hashes, check)
        eventually(lambda: used_there(daemon) >= 58, "filled")
        check(0)
        if not restarted:
            daemon.kill()
            daemon.start()
            client.wait_ready()


def test_what_was_cleared_here_can_still_come_back(
    serve: Callable[..., DaemonProcess], place: Place, connect: Connect
) -> None:
    """Copies there are of their own: clearing is for this host, as docs/tiers.md says."""
    daemon = serve()
    client = connect(daemon, KV)
    store_and_copy(place, client, CHAINS[:3])
    eventually(lambda: daemon.stats().blocks_leased == 0)
    daemon.admin.Clear(pb.ClearRequest())
    assert daemon.stats().blocks_committed == 0
    check_comes_back(client, CHAINS[0])


class Several:
    """Three daemons of one store with one place, and a client of them all, which knows what each was given to keep."""

    def __init__(self, serve: Callable[..., DaemonProcess], place: Place, redis: Any, stack: ExitStack) -> None:
        cluster = {"cluster_url": redis.url, "cluster_ttl_s": 1.5}
        self.daemons = {node: serve(node_id=node, min_blocks=1, **cluster) for node in "abc"}
        self._place = place
        address = "kvstore://" + ",".join(daemon.address for daemon in self.daemons.values())
        options = ClientOptions(timeout_s=DEADLINE_S, breaker_cooldown_s=0.5)
        client = connect_to_all(address, SPREAD, options=options)
        assert isinstance(client, ClusterClient)
        self.client = stack.enter_context(closing(client))
        client.wait_ready(DEADLINE_S)
        eventually(lambda: self.live() == "abc", "the client knows all daemons")
        self._kept: dict[str, list[BlockHash]] = {node: [] for node in "abc"}  # in the order in which they were stored
        self._copied: set[BlockHash] = set()

    def live(self) -> str:
        ring = self.client._links.current()
        return "".join(node for node, link in zip(ring.view.nodes, ring.links, strict=True) if link.live)

    def store(self, hashes: list[BlockHash]) -> None:
        """The chain is stored, each piece once all that it may evict had been copied. So nothing is lost."""
        where = segments(hashes, block_tokens=SPREAD.block_tokens)
        owners = Placement(dict.fromkeys("abc", 1.0)).owners(where)[:, 0]
        for begin in range(0, len(hashes), PIECE):
            piece = slice(begin, begin + PIECE)
            parent = hashes[begin - 1] if begin else None
            with self.client.store(hashes[piece], parent=parent, segments=where[piece]) as write:
                write.put_blocks(rows(SPREAD, hashes[piece]))
            assert set(write.outcomes) == {Outcome.STORED}
            for owner, block_hash in zip(owners[piece].tolist(), hashes[piece], strict=True):
                self._kept["abc"[owner]].append(block_hash)
            for block_hash in {*self.cold("a"), *self.cold("b"), *self.cold("c")} - self._copied:
                eventually(partial(self._place.has, name(block_hash, SPREAD)), "what is old was copied")
                self._copied.add(block_hash)

    def cold(self, node: str) -> list[BlockHash]:
        """The blocks of this daemon that are in the place."""
        kept = self._kept[node]
        return kept[:-KEPT] if len(kept) > 0.8 * ROOM else []

    def in_place(self, hashes: list[BlockHash]) -> bool:
        """Whether all of the chain is in the place, and some of it is for b to keep."""
        return bool({*hashes} & {*self._kept["b"]}) and self._copied.issuperset(hashes)

    def check_comes_back(self, hashes: list[BlockHash]) -> None:
        """As `check_comes_back`."""

        def whole() -> bool:
            return self.client.match(hashes, lease="").num_found == len(hashes)

        eventually(whole, "the chain came back")
        target = np.zeros((len(hashes), SPREAD.block_bytes), np.uint8)
        assert not self.client.load(hashes, into=BlockRows(target)).wait().errors
        assert (target == rows(SPREAD, hashes)).all()


@pytest.fixture
def several(serve: Callable[..., DaemonProcess], place: Place, redis: Any, stack: ExitStack) -> Several:
    return Several(serve, place, redis, stack)


@needs_redis
def test_daemons_of_one_store_share_a_place_and_who_is_next_finds_there_what_a_dead_one_kept(several: Several) -> None:
    """Covers: D4, D14, F6. A chain lies in three segments, each with its owner, until that needs the room."""
    chains = [chain(40, of=SPREAD, seed=seed) for seed in range(24)]
    for hashes in chains:
        several.store(hashes)
    for node, daemon in several.daemons.items():
        assert not held_by(daemon).issuperset(several.cold(node)), "it has let go of some"
    copied = [hashes for hashes in chains if several.in_place(hashes)]
    assert len(copied) >= 6
    now, while_b_is_dead, later = copied[::3], copied[1::3], copied[2::3]  # nobody is asked for one twice in 30 s
    for hashes in now:
        several.check_comes_back(hashes)

    several.daemons["b"].kill()
    for hashes in while_b_is_dead:
        several.check_comes_back(hashes)

    several.daemons["b"].start()
    eventually(lambda: several.live() == "abc", "it is back, and has nothing")
    for hashes in later:
        several.check_comes_back(hashes)
    assert several.daemons["b"].stats().blocks_committed > 0
