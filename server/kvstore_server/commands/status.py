"""`kvstore status` and `kvstore clear`: ask a daemon's Admin service."""

from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.types import HASH_BYTES
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_server.commands.admin import TIMEOUT_S, admin_at, bearing


def snapshot(address: str) -> dict[str, Any]:
    """What the daemon says of itself, and the hit rate (None before the first match).

    Raises: StoreUnavailable, if it does not answer.
    """
    with admin_at(address) as admin:
        stats = admin.Stats(pb.StatsRequest(), timeout=TIMEOUT_S)
        namespaces = admin.Namespaces(pb.NamespacesRequest(), timeout=TIMEOUT_S).namespaces
    counters = {field.name: getattr(stats.counters, field.name) for field in pb.Counters.DESCRIPTOR.fields}
    return {
        "address": address,
        "boot_id": stats.boot_id.hex(),
        "version": stats.server_version,
        "uptime_s": round(stats.uptime_s, 1),
        "draining": stats.draining,
        "tiers": [
            {field.name: getattr(tier, field.name) for field in pb.TierStats.DESCRIPTOR.fields} for tier in stats.tiers
        ],
        "blocks": {
            "committed": stats.blocks_committed,
            "writing": stats.blocks_writing,
            "leased": stats.blocks_leased,
            "pinned": stats.blocks_pinned,
        },
        "hit_rate": counters["blocks_hit"] / counters["blocks_asked"] if counters["blocks_asked"] else None,
        "counters": counters,
        "namespaces": [
            {
                "namespace": space.namespace.hex(),
                "model": space.spec.model,
                "revision": space.spec.revision,
                "dtype": space.spec.dtype,
                "block_tokens": space.spec.block_tokens,
                "tenant": space.spec.tenant,
                "blocks": space.blocks_committed,
                "slab_bytes": space.slab_bytes,
            }
            for space in namespaces
        ],
        "sessions": [
            {
                "session_id": session.session_id,
                "client_name": session.client_name,
                "namespace": session.namespace.hex(),
                "num_leases": session.num_leases,
                "blocks_leased": session.blocks_leased,
                "num_writes": session.num_writes,
                "region_bytes": session.region_bytes,
                "age_s": session.age_s,
            }
            for session in stats.sessions
        ],
    }


def render(shown: dict[str, Any]) -> str:
    """The snapshot as text for people."""
    blocks, counters = shown["blocks"], shown["counters"]
    rate = "no match yet" if shown["hit_rate"] is None else f"{shown['hit_rate']:.1%}"
    lines = [
        f"kvstore {shown['version']} at {shown['address']}, up {shown['uptime_s']:.0f} s"
        + (", draining" if shown["draining"] else ""),
        "",
        f"{'tier':8}{'used':>12}{'slabs':>12}{'capacity':>12}   pages",
    ]
    for tier in shown["tiers"]:
        used, slabs, capacity = (size_text(tier[name]) for name in ("used_bytes", "slab_bytes", "capacity_bytes"))
        place = f" in {tier['place']}" if tier["place"] else ""
        lines.append(f"{tier['tier']:8}{used:>12}{slabs:>12}{capacity:>12}   {tier['pages']}{place}")
    lines += [
        "",
        "blocks   " + ", ".join(f"{count} {state}" for state, count in blocks.items()),
        f"hit rate {rate}: {counters['blocks_hit']} of {counters['blocks_asked']} blocks",
        f"since start: {counters['blocks_stored']} stored, {counters['blocks_loaded']} loaded, "
        f"{counters['blocks_evicted']} evicted, {counters['blocks_aborted']} aborted, "
        f"{counters['blocks_refused']} refused, {counters['blocks_lost']} lost",
        "",
    ]
    for space in shown["namespaces"]:
        lines.append(
            f"namespace {space['namespace'][:12]}  {space['model']} @ {space['revision'][:12]}, {space['dtype']}, "
            f"{space['block_tokens']} tokens a block, tenant {space['tenant']}: {space['blocks']} blocks"
        )
    for session in shown["sessions"]:
        lines.append(
            f"session {session['session_id']}  {session['client_name'] or '(no name)'}: {session['num_leases']} leases "
            f"of {session['blocks_leased']} blocks, {session['num_writes']} writes, {session['age_s']} s"
        )
    return "\n".join(lines)


def clear_blocks(address: str, namespace: str, *, token: str) -> tuple[int, int]:
    """(blocks removed, blocks kept).

    Raises: InvalidRequest, BlockMissing (namespace), NotAuthenticated, NotAllowed, StoreUnavailable.
    """
    try:
        digest = bytes.fromhex(namespace)
    except ValueError:
        digest = b"?"
    if len(digest) not in (0, HASH_BYTES):
        raise InvalidRequest(f"namespace: expected {2 * HASH_BYTES} hex digits, got {namespace!r}")
    with admin_at(address) as admin:
        reply = admin.Clear(pb.ClearRequest(namespace=digest), timeout=TIMEOUT_S, metadata=bearing(token))
    return reply.blocks_removed, reply.blocks_kept


def size_text(size_bytes: int) -> str:
    """Bytes for people: three digits and a unit."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}"
