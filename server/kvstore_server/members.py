"""Membership in Redis: this daemon is registered there for as long as it says so again, and hears of the others.

One script a heartbeat, three of them a TTL. It renews this daemon's registration, leaves out those that lapsed, and
raises the epoch if what is left differs from what it was. How long a registration lasts is Redis' own TTL; how long a
member may be missing is this daemon's monotonic clock (roster.py). No clock is compared with another's.

Redis that is gone, hangs or is wrong costs at most `CALL_TIMEOUT_S` of a heartbeat, and nothing of any request.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
import structlog

from kvstore.errors import InvalidRequest
from kvstore.types import BootId
from kvstore_server.cluster_url import ClusterUrl, parse_cluster_url
from kvstore_server.config import Settings
from kvstore_server.roster import Heard, Member, Roster

log = structlog.get_logger()

CALL_TIMEOUT_S: Final = 1.0
HEARTBEATS_PER_TTL: Final = 3

# All keys of a store share a hash tag, so that they lie on one node of a Redis Cluster. Those of other daemons are told
# by the set of ids only, which Redis and Valkey allow for keys of one slot.
_RENEW: Final = """
local ids, era, mine = KEYS[1], KEYS[2], KEYS[3]
local id, prefix, record, ttl_ms, seen, seen_digest = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local me = cjson.decode(record)

local holder = redis.call('GET', mine)
if holder then
  holder = cjson.decode(holder)
  if holder.boot_id ~= me.boot_id and holder.state ~= 'left' then
    return {'taken', table.concat(holder.addresses, ', ')}
  end
end

redis.call('SADD', ids, id)
local nodes = redis.call('SMEMBERS', ids)
table.sort(nodes)
local members, left = {}, {}
for _, node in ipairs(nodes) do
  local said = node == id and record or redis.call('GET', prefix .. node)
  if not said then
    redis.call('SREM', ids, node)
  else
    local decoded = cjson.decode(said)
    if decoded.state == 'left' then
      left[#left + 1] = node
    elseif decoded.replicas ~= me.replicas then
      return {'replicas', node, tostring(decoded.replicas)}
    else
      members[#members + 1] = node
      members[#members + 1] = said
    end
  end
end
redis.call('SET', mine, record, 'PX', ttl_ms)

local digest = redis.sha1hex(table.concat(members, '\\n'))
local last = redis.call('HMGET', era, 'epoch', 'digest')
local epoch = tonumber(last[1] or '0')
if digest ~= last[2] or seen > epoch or (seen == epoch and seen_digest ~= digest) then
  epoch = math.max(epoch, seen) + 1
  redis.call('HSET', era, 'epoch', string.format('%.0f', epoch), 'digest', digest)
end
return {'members', epoch, digest, members, left}
"""


class _Record(msgspec.Struct, frozen=True):
    """What a daemon says of itself, as JSON. Fields and states that only a newer daemon knows are passed over."""

    boot_id: str
    addresses: tuple[str, ...]
    capacity_bytes: int
    replicas: int
    state: str


class Members:
    """Keeps one daemon registered from `join` to `leave`, and tells its roster what it hears."""

    def __init__(self, roster: Roster, settings: Settings, *, clock: Callable[[], float]) -> None:
        self._roster = roster
        self._replicas = settings.replicas
        self._ttl_s = settings.cluster_ttl_s
        self._period_s = settings.cluster_ttl_s / HEARTBEATS_PER_TTL
        self._timeout_s = min(self._period_s, CALL_TIMEOUT_S)
        self._clock = clock
        self._url = parse_cluster_url(settings.cluster_url)
        self._redis = connect(self._url, timeout_s=self._timeout_s)
        prefix = f"{{kvstore:{settings.cluster_name}}}:"
        self._nodes = f"{prefix}node:"
        self._keys = [f"{prefix}nodes", f"{prefix}epoch", f"{self._nodes}{roster.me.node_id}"]
        self._seen = (0, "")  # the highest epoch that was heard of, and its digest
        self._trouble: Literal["", "away", "refused"] = ""
        self._wake = asyncio.Event()
        self._leaving = False
        self._renewing: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """This daemon is registered, or will be once Redis can be reached; until then it is alone.

        Raises: InvalidRequest, if another daemon with this id is still there after two TTLs, or others keep another
        number of replicas.
        """
        deadline = self._clock() + 2 * self._ttl_s
        while (refusal := await self._renew()) is not None:
            if self._clock() >= deadline:
                await self._close()
                raise refusal
            await asyncio.sleep(self._period_s)  # a daemon that was killed is registered for one TTL more
        self._renewing = asyncio.create_task(self._keep_renewing())

    async def leave(self) -> None:
        """The registration is gone, if Redis answers in time, and nothing runs any more."""
        self._leaving = True
        self._wake.set()
        if self._renewing is not None:
            await self._renewing
        with contextlib.suppress(Exception):  # it lapses by itself
            await self._call("left")
        await self._close()

    def drain(self) -> None:
        """The others are told with the next heartbeat, which is now."""
        self._roster.drain()
        self._wake.set()

    async def _keep_renewing(self) -> None:
        began = self._clock()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(0.0, began + self._period_s - self._clock()))
            self._wake.clear()
            if self._leaving:
                return
            began = self._clock()
            await self._renew()

    async def _renew(self) -> InvalidRequest | None:
        """One heartbeat: the roster knows how it went. What is returned is why this daemon may not be a member."""
        epoch = self._roster.view.epoch
        try:
            answer = await self._call("draining" if self._roster.me.draining else "up")
            refusal = self._hear(answer)
        except Exception as error:  # whatever Redis and its client come up with: the store goes on without it
            self._roster.lose()
            self._note("away", error=f"{type(error).__name__}: {error}")
            return None
        if refusal is not None:
            self._roster.lose()
            self._note("refused", error=str(refusal))
            return refusal
        self._note("")
        view = self._roster.view
        if view.epoch != epoch:
            log.info("cluster: members", epoch=view.epoch, nodes=[member.node_id for member in view.members])
        return None

    def _hear(self, answer: list[Any]) -> InvalidRequest | None:
        kind = answer[0]
        if kind == b"taken":
            return InvalidRequest(
                f"node_id: expected an id of its own, got {self._roster.me.node_id!r}, which a daemon at "
                f"{answer[1].decode()} has; stop that one, or choose another"
            )
        if kind == b"replicas":
            return InvalidRequest(
                f"replicas: expected {answer[2].decode()}, as daemon {answer[1].decode()!r} has it, got "
                f"{self._replicas}; give all daemons the same, and stop all of them to change it"
            )
        _, epoch, digest, members, left = answer
        heard = Heard(
            members=tuple(
                _member(node.decode(), record) for node, record in zip(members[::2], members[1::2], strict=True)
            ),
            left=frozenset(node.decode() for node in left),
            epoch=epoch,
        )
        self._seen = (epoch, digest.decode())
        self._roster.hear(heard, now=self._clock())
        return None

    async def _call(self, state: Literal["up", "draining", "left"]) -> list[Any]:
        me = self._roster.me
        record = _Record(me.boot_id.hex(), me.addresses, me.capacity_bytes, self._replicas, state)
        arguments = (me.node_id, self._nodes, msgspec.json.encode(record), int(self._ttl_s * 1000), *self._seen)
        async with asyncio.timeout(self._timeout_s):
            answer: list[Any] = await self._redis.eval(_RENEW, len(self._keys), *self._keys, *arguments)
        return answer

    async def _close(self) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._timeout_s):
                await self._redis.aclose()

    def _note(self, trouble: Literal["", "away", "refused"], *, error: str = "") -> None:
        """One line when something begins, one when it is over."""
        if trouble == self._trouble:
            return
        self._trouble = trouble
        redis = str(self._url)
        if trouble == "away":
            log.warning("cluster: Redis cannot be reached; the members last known stand", redis=redis, error=error)
        elif trouble == "refused":
            log.warning("cluster: this daemon is no member", redis=redis, error=error)
        else:
            log.info("cluster: Redis answers, and this daemon is a member", redis=redis)


def connect(url: ClusterUrl, *, timeout_s: float) -> Any:
    """A client of `redis.asyncio`, which connects when it is used. Raises: InvalidRequest, without the package."""
    try:
        from redis.asyncio import Redis, RedisCluster, Sentinel
        from redis.asyncio.cluster import ClusterNode
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
        from redis.exceptions import ConnectionError  # no builtin
    except ImportError as error:
        raise InvalidRequest("cluster: redis is not installed; pip install 'kvstore[cluster]'") from error
    each_s = (
        timeout_s / (len(url.hosts) + 1) if len(url.hosts) > 1 else timeout_s
    )  # one that hangs leaves time for the next
    options: dict[str, Any] = {
        "socket_timeout": each_s,
        "socket_connect_timeout": each_s,
        # A connection that Redis closed is not yet Redis that is gone.
        "retry": Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
        "protocol": 2,
    }
    if url.scheme in ("redis", "rediss", "unix"):
        try:
            return Redis.from_url(url.text, **options)
        except ValueError:
            # Its text may hold secrets.
            raise InvalidRequest(f"cluster_url: expected options of redis-py after ?, at {url}; correct it") from None
    access = {"username": url.user or None, "password": url.password or None}
    if url.scheme == "redis+sentinel":
        sentinels = Sentinel(list(url.hosts), sentinel_kwargs=options)
        return sentinels.master_for(url.path[1:], **access, **options)
    return RedisCluster(startup_nodes=[ClusterNode(host, port) for host, port in url.hosts], **access, **options)


def _member(node_id: str, record: bytes) -> Member:
    said = msgspec.json.decode(record, type=_Record)
    return Member(
        node_id=node_id,
        boot_id=BootId(bytes.fromhex(said.boot_id)),
        addresses=said.addresses,
        capacity_bytes=said.capacity_bytes,
        draining=said.state == "draining",
    )
