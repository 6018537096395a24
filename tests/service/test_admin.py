"""What operators and routers ask."""

from collections.abc import Callable

import grpc
import pytest
from builders import chain, rows, spec
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from service.harness import DEADLINE_S, DaemonProcess, eventually, store

from kvstore.hashing import pack, unpack
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_client import KVClient, Outcome, StoreFull, StoreUnavailable
from kvstore_server.cli import main

KV = spec(layers=2, bytes_per_part=16384)
HASHES = chain(6, of=KV)

Connect = Callable[..., KVClient]


def test_stats_count_what_was_asked_as_hit_or_missed(daemon: DaemonProcess, connect: Connect) -> None:
    """Covers: C2."""
    client = connect(daemon, KV)
    store(client, HASHES[:4])
    for hashes in (HASHES, HASHES[:2], chain(3, of=KV, seed=1), [], HASHES[3:]):
        client.match(hashes, lease="")
    stats = daemon.stats()
    counters = stats.counters
    assert counters.matches == 5
    assert counters.blocks_asked == 6 + 2 + 3 + 0 + 3
    assert counters.blocks_hit == 4 + 2 + 0 + 0 + 1
    assert counters.blocks_asked == counters.blocks_hit + counters.blocks_missed
    assert (counters.blocks_stored, counters.bytes_stored) == (4, 4 * KV.block_bytes)
    assert (stats.blocks_committed, stats.tiers[0].used_bytes) == (4, 4 * KV.block_bytes)
    assert stats.tiers[0].tier == "cpu"
    assert stats.tiers[0].capacity_bytes == 64 << 20
    assert stats.sessions[0].client_name == "client"
    assert not stats.draining


def test_namespaces_and_members_tell_who_is_there(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon, KV)
    store(client, HASHES)
    (namespace,) = daemon.admin.Namespaces(pb.NamespacesRequest()).namespaces
    assert namespace.namespace == KV.namespace
    assert namespace.spec.model == KV.model
    assert namespace.blocks_committed == 6
    (member,) = next(daemon.admin.Members(pb.MembersRequest())).members
    assert member.boot_id == client.boot_id
    assert list(member.addresses) == [daemon.address]


def test_clear_keeps_what_is_leased_or_pinned(daemon: DaemonProcess, connect: Connect) -> None:
    client = connect(daemon, KV)
    others = chain(3, of=KV, seed=1)
    pinned = chain(2, of=KV, seed=2)
    for hashes in (HASHES, others, pinned):
        store(client, hashes)
    client.match(HASHES[:2], lease="held")
    assert daemon.admin.Pin(pb.PinRequest(namespace=KV.namespace, hashes=pack(pinned))).num_blocks == 2
    reply = daemon.admin.Clear(pb.ClearRequest(namespace=KV.namespace))
    assert (reply.blocks_removed, reply.blocks_kept) == (4 + 3, 2 + 2)
    assert client.match(HASHES, lease="").num_blocks == 2
    assert client.match(others, lease="").num_blocks == 0
    assert client.match(pinned, lease="").num_blocks == 2
    client.release("held")
    daemon.admin.Unpin(pb.PinRequest(namespace=KV.namespace, hashes=pack(pinned)))
    assert daemon.admin.Clear(pb.ClearRequest()).blocks_removed == 4
    stats = daemon.stats()
    assert stats.counters.blocks_removed == 11
    assert (stats.blocks_committed, stats.blocks_pinned, stats.tiers[0].used_bytes) == (0, 0, 0)


def test_pinned_blocks_survive_eviction(make_daemon: Callable[..., DaemonProcess], connect: Connect) -> None:
    daemon = make_daemon(cpu_capacity="1MiB")
    client = connect(daemon, KV)
    store(client, HASHES)
    request = pb.PinRequest(namespace=KV.namespace, hashes=pack(HASHES))
    assert daemon.admin.Pin(request).num_blocks == 6
    assert daemon.admin.Pin(request).num_blocks == 6
    for seed in range(1, 5):
        store(client, chain(20, of=KV, seed=seed))
    stats = daemon.stats()
    assert stats.counters.blocks_evicted > 20
    assert stats.blocks_pinned == 6
    assert client.match(HASHES, lease="").num_blocks == 6
    assert daemon.admin.Unpin(request).num_blocks == 6
    for seed in range(5, 9):
        store(client, chain(20, of=KV, seed=seed))
    assert client.match(HASHES, lease="").num_blocks == 0


@pytest.mark.parametrize("method", ["Clear", "Pin", "Unpin"])
def test_an_unknown_namespace_is_not_found(daemon: DaemonProcess, method: str) -> None:
    request = {"Clear": pb.ClearRequest}.get(method, pb.PinRequest)(namespace=b"x" * 32)
    with pytest.raises(grpc.RpcError) as caught:
        getattr(daemon.admin, method)(request)
    assert caught.value.code().name == "NOT_FOUND"


def test_hashes_that_are_cut_cannot_be_pinned(daemon: DaemonProcess, connect: Connect) -> None:
    connect(daemon, KV)
    with pytest.raises(grpc.RpcError) as caught:
        daemon.admin.Pin(pb.PinRequest(namespace=KV.namespace, hashes=b"x" * 33))
    assert caught.value.code().name == "INVALID_ARGUMENT"


def test_a_draining_daemon_refuses_stores_and_sessions_and_goes_on_loading(
    daemon: DaemonProcess, connect: Connect
) -> None:
    client = connect(daemon, KV)
    store(client, HASHES)
    open_write = client.store(chain(2, of=KV, seed=1))
    daemon.admin.Drain(pb.DrainRequest())
    assert daemon.stats().draining
    with pytest.raises(StoreFull, match="draining"):
        client.store(chain(2, of=KV, seed=2))
    open_write.put_blocks(rows(KV, chain(2, of=KV, seed=1)))
    assert open_write.commit() == [Outcome.STORED] * 2
    assert client.load(HASHES, view=True).wait().num_loaded == 6
    other = connect(daemon, KV, ready=False)
    with pytest.raises(StoreUnavailable, match="draining"):
        other.wait_ready(1.0)


def test_watch_tells_what_is_there_and_then_every_change_in_sequence(
    make_daemon: Callable[..., DaemonProcess], connect: Connect
) -> None:
    daemon = make_daemon(cpu_capacity="1MiB")
    client = connect(daemon, KV)
    store(client, HASHES)
    watch = daemon.admin.Watch(pb.WatchRequest(snapshot=True), timeout=60)
    known: dict[bytes, bytes] = {}

    def take(event: pb.Event) -> None:
        assert event.boot_id == client.boot_id
        if event.kind == pb.Event.STORED:
            known.update(zip(unpack(event.hashes).tolist(), unpack(event.parents).tolist(), strict=True))
            assert (event.namespace, event.tier, event.block_tokens) == (KV.namespace, "cpu", KV.block_tokens)
        elif event.kind == pb.Event.REMOVED:
            for block_hash in unpack(event.hashes).tolist():
                del known[block_hash]

    event = next(watch)
    while event.kind != pb.Event.SNAPSHOT_END:
        take(event)
        event = next(watch)
    sequence = event.sequence
    assert known == dict(zip(HASHES, [b"\0" * 32, *HASHES], strict=False))
    for seed in range(1, 4):
        store(client, chain(20, of=KV, seed=seed))
    daemon.admin.Clear(pb.ClearRequest())
    store(client, HASHES[:1])
    while known != {HASHES[0]: b"\0" * 32}:
        event = next(watch)
        assert event.sequence == sequence + 1
        sequence = event.sequence
        take(event)
    watch.cancel()


def test_health_and_reflection_answer(daemon: DaemonProcess) -> None:
    health = health_pb2_grpc.HealthStub(daemon.channel)
    for service in ("", "kvstore.v1.Store", "kvstore.v1.Admin"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE_S)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(daemon.channel)
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    (reply,) = reflection.ServerReflectionInfo(requests, timeout=DEADLINE_S)
    names = {service.name for service in reply.list_services_response.service}
    assert {"kvstore.v1.Store", "kvstore.v1.Admin", "grpc.health.v1.Health"} <= names
    daemon.admin.Drain(pb.DrainRequest())
    drained = health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert drained.status == health_pb2.HealthCheckResponse.NOT_SERVING
    alive = health.Check(health_pb2.HealthCheckRequest(service="kvstore.v1.Admin"), timeout=DEADLINE_S)
    assert alive.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("token", "code"), [("", "UNAUTHENTICATED"), ("team", "PERMISSION_DENIED"), ("root", "")])
def test_changes_need_a_token_for_all_tenants(
    make_daemon: Callable[..., DaemonProcess], tmp_path, token: str, code: str
) -> None:
    """Covers: H1, H2."""
    (tmp_path / "kvstore.toml").write_text('[tokens]\nteam = ["team-a"]\nroot = ["*"]\n')
    daemon = make_daemon(config=tmp_path / "kvstore.toml")
    metadata = [("authorization", f"Bearer {token}")]
    calls = [
        lambda: daemon.admin.Clear(pb.ClearRequest(), metadata=metadata),
        lambda: daemon.admin.Drain(pb.DrainRequest(), metadata=metadata),
        lambda: next(daemon.admin.Watch(pb.WatchRequest(snapshot=True), metadata=metadata)),
    ]
    for call in calls:
        if not code:
            call()
            continue
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code().name == code
    assert daemon.stats().draining is (not code)
    eventually(daemon.is_idle)


@pytest.mark.parametrize(("token", "says"), [("", "token"), ("team", "all tenants"), ("root", "0 blocks removed")])
def test_the_clear_command_sends_the_token_of_a_file(
    make_daemon: Callable[..., DaemonProcess], tmp_path, token: str, says: str
) -> None:
    (tmp_path / "kvstore.toml").write_text('[tokens]\nteam = ["team-a"]\nroot = ["*"]\n')
    (tmp_path / "token").write_text(f"{token}\n")
    daemon = make_daemon(config=tmp_path / "kvstore.toml")
    result = CliRunner().invoke(main, ["clear", daemon.address, "--token-file", str(tmp_path / "token")])
    assert says in result.output
    assert result.exit_code == (0 if token == "root" else 2)
