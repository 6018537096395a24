"""Several daemons and one Redis: who is told to be a member, whatever becomes of either."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from builders import chain, spec
from click.testing import CliRunner
from service.harness import DEADLINE_S, DaemonProcess, RawStream, eventually, store
from service.redis_server import RedisServer, needs_redis

from kvstore.errors import MembersChanged
from kvstore.hashing import pack
from kvstore.placement import segments
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import pack_u64
from kvstore_client import KVClient, Outcome
from kvstore_server.cli import main

pytestmark = needs_redis

TTL_S = 1.5  # three heartbeats, each of which a busy machine may delay
KV = spec(layers=2, bytes_per_part=8192)
HASHES = chain(4, of=KV)
NODE_KEY = "{kvstore:kvstore}:node:"
EPOCH_KEY = "{kvstore:kvstore}:epoch"

MakeNode = Callable[..., DaemonProcess]
Connect = Callable[..., KVClient]


@pytest.fixture
def make_node(make_daemon: Callable[..., DaemonProcess], redis: RedisServer) -> MakeNode:
    """A daemon of the store, started."""

    def make(node_id: str, **flags: object) -> DaemonProcess:
        return make_daemon(**{"cluster_url": redis.url, "node_id": node_id, "cluster_ttl_s": TTL_S} | flags)

    return make


def told(daemon: DaemonProcess) -> pb.MembersReply:
    """What it says of the members now."""
    (reply,) = daemon.admin.Members(pb.MembersRequest(), timeout=DEADLINE_S)
    return reply


def nodes(reply: pb.MembersReply) -> str:
    return "".join(member.node_id for member in reply.members)


def agree(daemons: list[DaemonProcess], on: str) -> pb.MembersReply:
    """All of them tell these members, at one epoch, from a Redis that they reach; what they tell."""

    def same() -> pb.MembersReply | None:
        replies = [told(daemon) for daemon in daemons]
        if all(reply == replies[0] and nodes(reply) == on and not reply.stale for reply in replies):
            return replies[0]
        return None

    reply: pb.MembersReply = eventually(same, f"all tell {on}")
    return reply


class Watch:
    """A stream of Members; keeps all that came."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._stream = daemon.admin.Members(pb.MembersRequest(watch=True), timeout=3 * DEADLINE_S)
        self.replies = [next(self._stream)]

    def until(self, holds: Callable[[pb.MembersReply], object]) -> pb.MembersReply:
        """The first reply, from the last that was looked at on, for which that is true."""
        while not holds(self.replies[-1]):
            self.replies.append(next(self._stream))
        return self.replies[-1]

    def end(self) -> None:
        """It ends, and without an error."""
        self.replies += list(self._stream)

    def close(self) -> None:
        self._stream.cancel()


def rises(replies: list[pb.MembersReply]) -> bool:
    epochs = [reply.epoch for reply in replies]
    return epochs == sorted(epochs)


def test_daemons_find_each_other_and_tell_the_same(make_node: MakeNode) -> None:
    """Covers: D3."""
    daemons = [make_node(node_id, cpu_capacity="8MiB", replicas=2) for node_id in "bac"]
    reply = agree(daemons, "abc")
    by_id = {member.node_id: member for member in reply.members}
    for daemon, node_id in zip(daemons, "bac", strict=True):
        assert by_id[node_id] == pb.Member(
            boot_id=daemon.stats().boot_id,
            addresses=[daemon.address],
            node_id=node_id,
            capacity_bytes=8 << 20,
            state=pb.Member.UP,
        )
    assert (reply.replicas, reply.stale) == (2, False)
    assert reply.epoch >= 3


def test_stores_of_other_names_do_not_meet_and_addresses_are_those_advertised(make_node: MakeNode) -> None:
    first = make_node("a", advertise="kv-0.example:7311")
    other = make_node("a", cluster_name="other")
    assert nodes(told(first)) == nodes(told(other)) == "a"
    assert list(told(first).members[0].addresses) == ["kv-0.example:7311"]
    assert told(first).members[0].boot_id != told(other).members[0].boot_id


def test_one_that_stops_says_goodbye_and_is_gone_at_once(make_node: MakeNode, redis: RedisServer) -> None:
    """Covers: D14."""
    a, b = (make_node(node_id, cluster_ttl_s=9.0) for node_id in "ab")
    before = agree([a, b], "ab")
    assert b.terminate() == 0
    assert json.loads(redis.client.get(f"{NODE_KEY}b") or "null")["state"] == "left"
    assert agree([a], "a").epoch > before.epoch
    again = b.start()
    agree([a, again], "ab")
    assert "this daemon is no member" not in again.log.read_text(), "it waited for nobody"


def test_one_that_is_killed_lapses_and_the_others_go_on(make_node: MakeNode, connect: Connect) -> None:
    """Covers: D14."""
    a, b, c = (make_node(node_id) for node_id in "abc")
    before = agree([a, b, c], "abc")
    client = connect(a, KV)
    b.kill()
    assert agree([a, c], "ac").epoch > before.epoch
    assert store(client, HASHES) == [Outcome.STORED] * 4
    assert client.match(HASHES, lease="").num_blocks == 4


def test_one_that_was_killed_is_let_in_again_under_its_id(make_node: MakeNode) -> None:
    """Covers: A3, D3. With another boot id."""
    a, b = make_node("a"), make_node("b")
    before = agree([a, b], "ab")
    b.kill()
    b.start()
    after = agree([a, b], "ab")
    assert after.epoch > before.epoch
    assert after.members[0] == before.members[0]
    assert after.members[1].boot_id == b.stats().boot_id != before.members[1].boot_id


def test_a_registration_that_lapses_while_a_daemon_waits_lets_it_in(
    make_node: MakeNode, redis: RedisServer, tmp_path: Path
) -> None:
    """Covers: D3. As that of a daemon that was killed and is started again at once."""
    a = make_node("a")
    redis.client.set(f"{NODE_KEY}b", (redis.client.get(f"{NODE_KEY}a") or "").replace('"boot_id":"', '"boot_id":"00'))
    b = DaemonProcess(tmp_path, cluster_url=redis.url, node_id="b", cluster_ttl_s=DEADLINE_S)
    with closing(b):
        process = b.launch()
        eventually(lambda: b.log.exists() and "this daemon is no member" in b.log.read_text(), "it was told to wait")
        assert process.poll() is None
        redis.client.delete(f"{NODE_KEY}b")
        eventually(lambda: nodes(told(a)) == "ab", "it is let in")
        assert process.poll() is None


def test_a_second_daemon_with_an_id_that_is_in_use_does_not_start(
    make_node: MakeNode, redis: RedisServer, tmp_path
) -> None:
    a = make_node("a")
    before = told(a)
    second = DaemonProcess(tmp_path, cluster_url=redis.url, node_id="a", cluster_ttl_s=TTL_S)
    with closing(second):
        assert second.launch().wait(DEADLINE_S) == 2
    log = second.log.read_text()
    assert f"node_id: expected an id of its own, got 'a', which a daemon at {a.address} has" in log
    assert "Traceback" not in log
    assert told(a) == before


def test_one_that_keeps_another_number_of_replicas_does_not_start(
    make_node: MakeNode, redis: RedisServer, tmp_path
) -> None:
    a = make_node("a", replicas=2)
    before = told(a)
    second = DaemonProcess(tmp_path, cluster_url=redis.url, node_id="b", cluster_ttl_s=TTL_S, replicas=3)
    with closing(second):
        assert second.launch().wait(DEADLINE_S) == 2
    assert "replicas: expected 2, as daemon 'a' has it, got 3" in second.log.read_text()
    assert "Traceback" not in second.log.read_text()
    assert told(a) == before


def test_without_redis_the_last_known_members_stand_and_an_empty_one_takes_nobody_away(
    make_node: MakeNode, redis: RedisServer, connect: Connect, stack: ExitStack
) -> None:
    """Covers: A15, D1, D3. Killed, and started without anything it knew."""
    daemons = [make_node(node_id) for node_id in "abc"]
    before = agree(daemons, "abc")
    watches = [stack.enter_context(closing(Watch(daemon))) for daemon in daemons]
    client = connect(daemons[0], KV)
    redis.kill()
    for watch in watches:
        watch.until(lambda reply: reply.stale)
    assert store(client, HASHES) == [Outcome.STORED] * 4
    redis.start()
    after = agree(daemons, "abc")
    assert after.epoch > before.epoch
    for watch in watches:
        watch.until(lambda reply: reply == after)
        assert all(reply.members == before.members for reply in watch.replies)
        assert rises(watch.replies)
    for daemon in daemons:
        log = daemon.new_log()
        assert log.count("Redis cannot be reached; the members last known stand") == 1
        assert log.count("Redis answers, and this daemon is a member") == 1


def test_the_epoch_rises_whatever_redis_forgets(make_node: MakeNode, redis: RedisServer, stack: ExitStack) -> None:
    """Covers: D1."""
    a, b = make_node("a"), make_node("b")
    watch = stack.enter_context(closing(Watch(a)))
    for _ in range(3):
        before = agree([a, b], "ab")
        redis.client.flushall()
        watch.until(lambda reply, before=before: reply.epoch > before.epoch)
        assert all("b" in nodes(reply) for reply in watch.replies if reply.epoch >= before.epoch)
    before = agree([a, b], "ab")
    watch.until(lambda reply: reply == before)
    redis.client.hset(EPOCH_KEY, "epoch", 1)  # as one that came up from an old copy
    watch.until(lambda reply: reply.epoch != before.epoch)
    assert rises(watch.replies)


def test_one_epoch_is_one_set_of_members_also_after_a_failover(
    make_node: MakeNode, redis: RedisServer, stack: ExitStack
) -> None:
    """Covers: D1. Redis lost the epoch at which one daemon drained, and gave its number out again."""
    a, b = (make_node(node_id, cluster_ttl_s=9.0) for node_id in "ab")
    before = agree([a, b], "ab")
    watch = stack.enter_context(closing(Watch(a)))
    os.kill(a.pid, signal.SIGSTOP)
    try:
        b.admin.Drain(pb.DrainRequest())
        eventually(lambda: redis.client.hget(EPOCH_KEY, "epoch") == str(before.epoch + 1))
        b.kill()
        redis.client.hset(EPOCH_KEY, "epoch", before.epoch)
    finally:
        os.kill(a.pid, signal.SIGCONT)
    drained = watch.until(lambda reply: reply.members[1].state == pb.Member.DRAINING)
    assert drained.epoch == before.epoch + 1


def test_a_redis_that_hangs_holds_up_nothing_and_takes_nobody_away(
    make_node: MakeNode, redis: RedisServer, connect: Connect, stack: ExitStack
) -> None:
    """Covers: A15, B1. For longer than registrations last."""
    a, b = make_node("a"), make_node("b")
    before = agree([a, b], "ab")
    watch = stack.enter_context(closing(Watch(a)))
    client = connect(a, KV)
    redis.freeze()
    watch.until(lambda reply: reply.stale)
    assert store(client, HASHES) == [Outcome.STORED] * 4
    assert client.match(HASHES, lease="").num_blocks == 4
    client.close()
    assert b.terminate() == 0
    assert "Traceback" not in b.new_log()
    redis.thaw()
    watch.until(lambda reply: not reply.stale)
    assert all(reply.members == before.members for reply in watch.replies)
    assert watch.until(lambda reply: nodes(reply) == "a").epoch > before.epoch
    assert a.terminate() == 0


def test_a_daemon_that_starts_while_redis_is_frozen_starts_alone(make_node: MakeNode, redis: RedisServer) -> None:
    redis.freeze()
    a = make_node("a")
    reply = told(a)
    assert (nodes(reply), reply.epoch, reply.stale) == ("a", 0, True)
    redis.thaw()
    agree([a], "a")


def test_a_daemon_starts_serves_and_stops_without_redis_and_joins_when_it_is_there(
    make_node: MakeNode, redis: RedisServer, connect: Connect
) -> None:
    """Covers: A15, D3."""
    redis.kill()
    a, b = make_node("a"), make_node("b")
    reply = told(a)
    assert (nodes(reply), reply.epoch, reply.stale) == ("a", 0, True)
    client = connect(a, KV)
    assert store(client, HASHES) == [Outcome.STORED] * 4
    client.close()
    assert b.terminate() == 0
    b.start()
    redis.start()
    agree([a, b], "ab")


def test_a_user_who_may_do_no_more_than_the_page_says_is_enough(make_node: MakeNode, redis: RedisServer) -> None:
    """Of docs/operations/cluster.md."""
    page = (Path(__file__).parents[2] / "docs" / "operations" / "cluster.md").read_text()
    found = re.search(r"needs `([^`]+)` on `(~[^`]+)`", page)
    assert found is not None
    rules = [*found[1].split(), found[2].replace("NAME", "kvstore")]
    redis.client.acl_setuser("kv", enabled=True, passwords=["+pw"], reset=True)
    redis.client.execute_command("ACL SETUSER", "kv", *rules)
    url = f"unix://kv:pw@{redis.socket_path}"
    a, b = make_node("a", cluster_url=url), make_node("b", cluster_url=url)
    agree([a, b], "ab")
    b.kill()
    agree([a], "a")


def test_a_wrong_password_is_as_no_redis_and_is_never_logged(make_node: MakeNode, redis: RedisServer) -> None:
    redis.client.config_set("requirepass", "right")
    url = f"unix://:wr0ng@{redis.socket_path}"
    a = make_node("a", cluster_url=url)
    assert told(a).stale
    redis.client.execute_command("AUTH", "right")
    redis.client.config_set("requirepass", "wr0ng")
    agree([a], "a")
    log = a.log.read_text()
    assert log.count("Redis cannot be reached") == 1
    assert "invalid username-password pair" in log
    assert "wr0ng" not in log


def test_a_daemon_that_is_cut_off_from_redis_is_missing_for_the_others_only(
    make_node: MakeNode, redis: RedisServer, tmp_path: Path
) -> None:
    """Covers: D14. It shows the members that it knew; back again, it is a member as before."""
    path = tmp_path / "way.sock"
    path.symlink_to(redis.socket_path)
    a, b, c = make_node("a"), make_node("b"), make_node("c", cluster_url=f"unix://{path}")
    agree([a, b, c], "abc")
    path.unlink()
    for connection in redis.client.client_list():
        if connection["cmd"].startswith("eval"):  # of all daemons, of which two come back
            redis.client.client_kill_filter(_id=connection["id"])
    eventually(lambda: told(c).stale)
    agree([a, b], "ab")
    assert nodes(told(c)) == "abc"
    assert told(c).stale
    path.symlink_to(redis.socket_path)
    agree([a, b, c], "abc")


def test_an_id_that_was_taken_meanwhile_is_not_taken_back(make_node: MakeNode) -> None:
    """The daemon that was stopped for so long serves what it has, and is no member until the other is gone."""
    first = make_node("a")
    os.kill(first.pid, signal.SIGSTOP)
    try:
        second = make_node("a")
    finally:
        os.kill(first.pid, signal.SIGCONT)
    eventually(lambda: told(first).stale)
    assert "this daemon is no member" in first.log.read_text()
    assert told(second).members[0].boot_id == second.stats().boot_id
    assert second.terminate() == 0
    assert agree([first], "a").members[0].boot_id == first.stats().boot_id


def test_clocks_an_hour_apart_change_nothing(
    make_node: MakeNode, redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that jumps while the daemon runs: each reading is further off."""
    (tmp_path / "sitecustomize.py").write_text(
        "import itertools, os, time\n"
        "real, off, steps = time.time, float(os.environ['TEST_CLOCK_OFF_S']), itertools.count()\n"
        "time.time = lambda: real() + off * (1 + next(steps) % 7)\n"
    )
    daemons = []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    for node_id, off_s in (("a", 3600), ("b", -3600)):
        monkeypatch.setenv("TEST_CLOCK_OFF_S", str(off_s))
        daemons.append(make_node(node_id))
    before = agree(daemons, "ab")
    begin = redis.num_heartbeats()
    eventually(lambda: redis.num_heartbeats() > begin + 15, "two TTLs of two daemons")
    assert [told(daemon) for daemon in daemons] == [before, before]


def test_a_watch_tells_each_change_and_ends_with_the_daemon(
    make_node: MakeNode, redis: RedisServer, stack: ExitStack
) -> None:
    a = make_node("a")
    watch = stack.enter_context(closing(Watch(a)))
    assert nodes(watch.replies[0]) == "a"
    b = make_node("b")
    watch.until(lambda reply: nodes(reply) == "ab")
    b.admin.Drain(pb.DrainRequest())
    drained = watch.until(lambda reply: len(reply.members) == 2 and reply.members[1].state == pb.Member.DRAINING)
    assert drained.members[0].state == pb.Member.UP
    redis.kill()
    watch.until(lambda reply: reply.stale)
    redis.start()
    watch.until(lambda reply: not reply.stale)
    b.terminate()
    watch.until(lambda reply: nodes(reply) == "a")
    assert rises(watch.replies)
    assert all(one != other for one, other in zip(watch.replies, watch.replies[1:], strict=False))
    assert a.terminate() == 0
    watch.end()


def test_a_store_of_one_machine_is_watched_as_well(daemon: DaemonProcess, stack: ExitStack) -> None:
    watch = stack.enter_context(closing(Watch(daemon)))
    first = watch.replies[0]
    assert (nodes(first), first.epoch, first.replicas, first.stale) == ("", 0, 0, False)
    assert (first.members[0].state, first.members[0].capacity_bytes) == (pb.Member.UP, 64 << 20)
    daemon.admin.Drain(pb.DrainRequest())
    watch.until(lambda reply: reply.members[0].state == pb.Member.DRAINING)
    assert daemon.terminate() == 0
    watch.end()


def test_a_store_by_members_of_the_past_is_refused_and_reads_never_are(
    make_node: MakeNode, raw: Callable[..., RawStream]
) -> None:
    """Covers: D14."""
    a, b = make_node("a"), make_node("b")
    old = agree([a, b], "ab").epoch
    stream = raw(a, KV)
    body = {"hashes": pack(HASHES)}
    reserved = stream.ask(store=pb.Store_(**body, epoch=old)).reserved
    assert reserved.outcomes == bytes([Outcome.NEW] * 4)
    assert stream.ask(abort=pb.Abort(write_id=reserved.write_id)).aborted.num_blocks == 4
    b.terminate()
    now = agree([a], "a").epoch
    refused = stream.ask(store=pb.Store_(**body, epoch=old)).status
    assert refused.code == MembersChanged.code
    assert f"expected {now}, got {old}" in refused.message
    assert stream.ask(match=pb.Match(hashes=body["hashes"])).matched.num_writing == 0, "nothing was reserved"
    assert len(stream.ask(load=pb.Load(hashes=body["hashes"], lease="l")).located.errors) == 4
    for epoch in (now, 0, now + 1):
        reserved = stream.ask(store=pb.Store_(**body, epoch=epoch)).reserved
        assert reserved.outcomes == bytes([Outcome.NEW] * 4)
        stream.ask(abort=pb.Abort(write_id=reserved.write_id))


def test_events_tell_by_what_blocks_are_placed_where_there_are_several_daemons(
    make_node: MakeNode, daemon: DaemonProcess, connect: Connect
) -> None:
    a = make_node("a")
    for one, told_segments in ((a, pack_u64(segments(HASHES, block_tokens=KV.block_tokens))), (daemon, b"")):
        store(connect(one, KV), HASHES)
        watch = one.admin.Watch(pb.WatchRequest(snapshot=True), timeout=DEADLINE_S)
        assert next(watch).segments == told_segments
        watch.cancel()


def status_of(*arguments: str) -> dict:
    result = CliRunner().invoke(main, ["status", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_status_shows_all_daemons_and_those_that_do_not_answer(make_node: MakeNode, connect: Connect) -> None:
    a, b, c = (make_node(node_id) for node_id in "abc")
    epoch = agree([a, b, c], "abc").epoch
    client = connect(b, KV)
    store(client, HASHES)
    c.kill()
    shown = status_of(f"kvstore://unix:/nobody.sock,{a.address}")
    assert (shown["epoch"], shown["replicas"], shown["stale"]) == (epoch, 1, False)
    assert shown["nodes"] == [
        {
            "node_id": node_id,
            "boot_id": boot_id,
            "state": "up",
            "addresses": [daemon.address],
            "capacity_bytes": 64 << 20,
            "answered": answered,
            "used_bytes": used_bytes,
            "blocks": blocks,
        }
        for node_id, daemon, boot_id, answered, used_bytes, blocks in (
            ("a", a, a.stats().boot_id.hex(), True, 0, 0),
            ("b", b, b.stats().boot_id.hex(), True, 4 * KV.block_bytes, 4),
            ("c", c, shown["nodes"][2]["boot_id"], False, None, None),
        )
    ]
    agree([a, b], "ab")
    seen = status_of(b.address)
    assert [node["node_id"] for node in seen["cluster"]["nodes"]] == ["a", "b"]
    assert seen["blocks"]["committed"] == 4
    text = CliRunner().invoke(main, ["status", f"kvstore://{a.address}"]).output
    assert text.startswith(f"2 daemons, replicas 1, epoch {told(a).epoch}\n")
    assert len(text.strip().splitlines()) == 5
    nobody = CliRunner().invoke(main, ["status", "kvstore://unix:/nobody.sock,unix:/none.sock"])
    assert (nobody.exit_code, nobody.output.count("no daemon answers there")) == (2, 2)
    assert CliRunner().invoke(main, ["status", "kvstore://"]).exit_code == 2


def test_an_address_at_which_another_daemon_answers_is_no_answer(make_node: MakeNode) -> None:
    a = make_node("a")
    make_node("b", advertise=a.address)
    agree([a], "ab")
    assert [node["answered"] for node in status_of(f"kvstore://{a.address}")["nodes"]] == [True, False]


def test_status_of_one_machine_tells_of_no_others(daemon: DaemonProcess) -> None:
    assert status_of(daemon.address)["cluster"] is None
    (node,) = status_of(f"kvstore://{daemon.address}")["nodes"]
    assert (node["node_id"], node["answered"]) == ("", True)


@pytest.fixture
def port() -> int:
    """One that is free, or was a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number


def test_a_redis_cluster_is_used(make_redis: Callable[..., RedisServer], make_node: MakeNode, port: int) -> None:
    redis = make_redis("--port", str(port), "--cluster-enabled", "yes", "--cluster-port", str(port + 1)).start()
    redis.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
    eventually(lambda: redis.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    url = f"redis+cluster://127.0.0.1:1,127.0.0.1:{port}"
    a, b = make_node("a", cluster_url=url), make_node("b", cluster_url=url)
    agree([a, b], "ab")
    redis.kill()
    eventually(lambda: told(a).stale)
    assert a.terminate() == 0


def test_the_redis_that_sentinels_name_is_used(
    make_redis: Callable[..., RedisServer], make_node: MakeNode, port: int, tmp_path: Path
) -> None:
    redis = make_redis("--port", str(port), "--requirepass", "s3cret")
    redis.client.connection_pool.connection_kwargs["password"] = "s3cret"
    redis.start()
    config = tmp_path / "sentinel.conf"
    config.write_text(f"sentinel monitor main 127.0.0.1 {port} 1\nsentinel auth-pass main s3cret\n")
    make_redis(str(config), "--sentinel", "--port", str(port + 1)).start()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the first that is asked takes the connection, and no more
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{port + 1}"
        flags = {"cluster_url": f"redis+sentinel://:s3cret@{hosts}/main", "cluster_ttl_s": 3.0}
        a, b = make_node("a", **flags), make_node("b", **flags)
        agree([a, b], "ab")
    assert "s3cret" not in a.log.read_text()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes the certificate, is not installed")
def test_redis_is_reached_over_tls(
    make_redis: Callable[..., RedisServer], make_node: MakeNode, port: int, tmp_path: Path
) -> None:
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(make, check=True, capture_output=True)
    tls = ["--tls-port", str(port), "--tls-cert-file", str(tmp_path / "cert.pem")]
    tls += ["--tls-key-file", str(tmp_path / "key.pem"), "--tls-auth-clients", "no"]
    make_redis(*tls).start()
    trusted = make_node("a", cluster_url=f"rediss://localhost:{port}?ssl_ca_certs={tmp_path / 'cert.pem'}")
    agree([trusted], "a")
    assert told(make_node("b", cluster_url=f"rediss://localhost:{port}")).stale, "who signed this is not known"
