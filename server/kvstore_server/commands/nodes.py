"""`kvstore status` of a store of several daemons: who is a member, and what each says of itself."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kvstore.errors import InvalidRequest, KVStoreError, StoreUnavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import CLUSTER_SCHEME
from kvstore_server.commands.admin import TIMEOUT_S, admin_at
from kvstore_server.commands.status import size_text

_MAX_ASKED_AT_ONCE: Final = 32


def cluster(address: str) -> dict[str, Any] | None:
    """The members that any one daemon of `address` tells, and what each answers, or that it does not.

    `address` is "kvstore://ADDRESS,ADDRESS", or that of one daemon: None then, if it is not one of several.
    Raises: InvalidRequest (no address), StoreUnavailable, if none of the daemons answers.
    """
    reply = _told(address)
    if not (address.startswith(CLUSTER_SCHEME) or any(member.node_id for member in reply.members)):
        return None
    with ThreadPoolExecutor(min(len(reply.members), _MAX_ASKED_AT_ONCE)) as pool:
        nodes = list(pool.map(_node, reply.members))
    return {"epoch": reply.epoch, "replicas": reply.replicas, "stale": reply.stale, "nodes": nodes}


def render_cluster(shown: dict[str, Any]) -> str:
    """The members as text for people."""
    lines = [
        f"{len(shown['nodes'])} daemons, replicas {shown['replicas']}, epoch {shown['epoch']}"
        + (", stale: the daemon that was asked cannot reach Redis" if shown["stale"] else ""),
        "",
        f"{'node':24}{'state':10}{'boot id':14}{'capacity':>12}{'used':>12}{'blocks':>12}   addresses",
    ]
    for node in shown["nodes"]:
        used = size_text(node["used_bytes"]) if node["answered"] else "-"
        blocks = node["blocks"] if node["answered"] else "-"
        lines.append(
            f"{node['node_id']:24}{node['state']:10}{node['boot_id'][:12]:14}{size_text(node['capacity_bytes']):>12}"
            f"{used:>12}{blocks:>12}   {', '.join(node['addresses'])}" + ("" if node["answered"] else "   NO ANSWER")
        )
    return "\n".join(lines)


def members(address: str) -> list[pb.Member]:
    """Those that any one daemon of `address` tells. Raises: as `cluster`."""
    return [member for member in _told(address).members if member.node_id]


def _told(address: str) -> pb.MembersReply:
    seeds = [seed for seed in address.removeprefix(CLUSTER_SCHEME).split(",") if seed]
    if not seeds:
        raise InvalidRequest("ADDRESS: expected kvstore://HOST:PORT,HOST:PORT, got no host; name at least one daemon")
    refusals: list[KVStoreError] = []
    for seed in seeds:
        try:
            with admin_at(seed) as admin:
                reply: pb.MembersReply = next(admin.Members(pb.MembersRequest(), timeout=TIMEOUT_S))
                return reply
        except KVStoreError as error:
            refusals.append(error)
    raise refusals[0] if len(seeds) == 1 else StoreUnavailable("; ".join(map(str, refusals)))


def reach(member: pb.Member) -> tuple[str, pb.StatsReply]:
    """The first address at which the member itself answers, and what it says. Raises: StoreUnavailable."""
    for address in member.addresses:
        try:
            with admin_at(address) as admin:
                stats = admin.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)
        except KVStoreError:
            continue
        if stats.boot_id == member.boot_id:  # an address such as a unix socket may be another daemon's on this host
            return address, stats
    raise StoreUnavailable(f"member {member.node_id}: it answers at none of {', '.join(member.addresses)}")


def _node(member: pb.Member) -> dict[str, Any]:
    """What is known of the member, and what it says of itself at the first of its addresses that answers."""
    known = {
        "node_id": member.node_id,
        "boot_id": member.boot_id.hex(),
        "state": pb.Member.State.Name(member.state).lower(),
        "addresses": list(member.addresses),
        "capacity_bytes": member.capacity_bytes,
    }
    try:
        _, stats = reach(member)
    except StoreUnavailable:
        return known | {"answered": False, "used_bytes": None, "blocks": None}
    used = sum(tier.used_bytes for tier in stats.tiers if tier.tier != "gpu")  # as capacity counts
    return known | {"answered": True, "used_bytes": used, "blocks": stats.blocks_committed}
