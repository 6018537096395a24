"""`kvstore drain`: a daemon takes nothing new, and what it has is with the other members before it is stopped."""

from typing import Any

import click

from kvstore.errors import InvalidRequest
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_server.commands.admin import TIMEOUT_S, admin_at, bearing
from kvstore_server.commands.courier import Courier, Tally
from kvstore_server.commands.nodes import members, reach


def drain_node(address: str, node: str, *, token: str) -> dict[str, Any]:
    """What became of its blocks; progress goes to standard error.

    `address` is that of any member, as for `kvstore status`. Raises: InvalidRequest, if there is no such member or no
    other; StoreUnavailable; NotAuthenticated, NotAllowed.
    """
    found = {member.node_id: member for member in members(address)}
    if node not in found or len(found) < 2:
        raise InvalidRequest(f"NODE: expected one of several members, {', '.join(found) or 'none'}, got {node!r}")
    at, stats = reach(found[node])
    total = stats.blocks_committed
    with Courier(at, node=node, token=token) as courier:
        courier.connect()
        with admin_at(at) as admin:
            admin.Drain(pb.DrainRequest(), timeout=TIMEOUT_S, metadata=bearing(token))
        courier.await_draining()
        shown = 0

        def progress(tally: Tally) -> None:
            nonlocal shown
            done = tally.copied + tally.there + tally.refused + tally.failed
            if done * 20 // max(1, total) > shown:  # twenty lines at most, if each block has one owner
                shown = done * 20 // max(1, total)
                click.echo(f"drain: {done} of {total} blocks looked at, {tally.copied} copied", err=True)

        tally = courier.hand_over(progress)
    return {
        "node": node,
        "blocks": total,
        "copied": tally.copied,
        "there_already": tally.there,
        "refused": tally.refused,
        "failed": tally.failed,
    }
