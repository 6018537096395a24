"""The demo's hardest moment: the daemon is killed, and another finds on disk what it had stored."""

import time
from dataclasses import dataclass
from typing import Final

import grpc

from kvstore.v1 import kvstore_pb2 as pb
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore_server.commands.demo.model import DemoFailed
from kvstore_server.commands.demo.processes import Child, Children

DURABLE_S: Final = 60.0
START_S: Final = 60.0
POLL_S: Final = 0.05
# Of this channel alone, and asking often: it must notice at once that the next daemon is there.
_CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 100),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What was on disk when the daemon was killed, and what the next one found there."""

    num_written: int  # blocks, which is all that were stored
    num_restored: int
    answered_after_s: float  # since the kill
    disk_io: str  # "O_DIRECT" or "buffered"


def kill_and_restart(children: Children, daemon: Child) -> tuple[Restart, Child]:
    """The daemon died with all its blocks on disk; another, which is returned, answers on the same socket.

    Raises: DemoFailed, and then the daemon was not killed, or the next one does not answer.
    """
    written = wait_until_durable(children, daemon)
    killed_s = time.monotonic()
    daemon.kill()
    successor = children.start_daemon()
    found = ask(children, successor, timeout_s=START_S)
    restart = Restart(
        num_written=written,
        num_restored=found.blocks_committed,  # no client was asked to store anything since
        answered_after_s=time.monotonic() - killed_s,
        disk_io=next((tier.pages for tier in found.tiers if tier.tier == "disk"), "no disk tier"),
    )
    return restart, successor


def wait_until_durable(children: Children, daemon: Child, *, timeout_s: float = DURABLE_S) -> int:
    """Every block that was stored would be found after a crash; returns how many there are.

    Raises: DemoFailed, if some will not be written, or are not in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        counters = ask(children, daemon, timeout_s=START_S).counters
        written, stored = counters.blocks_written, counters.blocks_stored
        if counters.blocks_unwritten:
            raise daemon.failed(
                f"{counters.blocks_unwritten} of {stored} blocks were not written to disk; free some space in "
                f"{children.folder.parent}, or set TMPDIR to another folder"
            )
        if written >= stored:
            return written
        if time.monotonic() > deadline:
            raise daemon.failed(
                f"{written} of {stored} blocks are on disk after {timeout_s:.0f} s; set TMPDIR to a folder on a "
                "faster disk"
            )
        time.sleep(POLL_S)


def ask(children: Children, daemon: Child, *, timeout_s: float) -> pb.StatsReply:
    """What the daemon says of itself, as soon as it answers. Raises: DemoFailed, if it does not, or has ended."""
    deadline = time.monotonic() + timeout_s
    with grpc.insecure_channel(children.address, _CHANNEL_OPTIONS) as channel:
        admin = AdminStub(channel)
        while True:
            try:
                stats: pb.StatsReply = admin.Stats(pb.StatsRequest(), wait_for_ready=True, timeout=min(1.0, timeout_s))
                return stats
            except grpc.RpcError as error:
                daemon.check()
                if time.monotonic() > deadline:
                    raise DemoFailed(f"daemon: no answer within {timeout_s:.0f} s: {error.details()}") from None
