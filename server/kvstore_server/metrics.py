"""The Prometheus series of one daemon, and the listener that serves them (docs/metrics.md).

A scrape reads everything in one go on the daemon's loop, between two requests: what the series say of each other
is true in every scrape, and nothing is counted for their sake in between.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvstore.errors import StoreTimeout, StoreUnavailable
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_server.roster import View
from kvstore_server.tiers.remote import RemoteCounters, RemoteTier
from kvstore_server.values import Counters

GATHER_TIMEOUT_S: Final = 5.0  # below the 10 s after which Prometheus gives up a scrape

COUNTERS: Final = {
    "matches": "Match requests.",
    "blocks_asked": "Blocks that matches asked for.",
    "blocks_hit": "Blocks that matches found.",
    "blocks_missed": "Blocks that matches did not find.",
    "blocks_stored": "Blocks that were committed.",
    "blocks_loaded": "Blocks that loads leased and located.",
    "blocks_evicted": "Blocks that left memory to make room. Those on disk are still stored.",
    "blocks_removed": "Blocks that an operator cleared, or whose time to live was over.",
    "blocks_lost": "Blocks that were dropped because their bytes were wrong or could not be read.",
    "blocks_aborted": "Blocks that were given up before they were committed.",
    "blocks_refused": "Blocks that found no room: all was leased, pinned or being written.",
    "bytes_stored": "Bytes taken in from writers.",
    "sessions_opened": "Sessions that were welcomed.",
    "sessions_reaped": "Sessions that were ended because they were silent.",
    "blocks_written": "Blocks that were written to disk.",
    "blocks_unwritten": "Blocks that stay in memory only because the disk was full, failed or too slow.",
    "blocks_risen": "Blocks that were brought from disk or the GPU into memory.",
    "blocks_dropped": "Blocks that left the disk to make room there.",
    "blocks_scrubbed": "Blocks on disk that were read again and compared, in the background.",
    "blocks_lifted": "Blocks that were copied to the GPU.",
    "blocks_lowered": "Blocks that left the GPU to make room there.",
}

REMOTE_COUNTERS: Final = {
    "blocks_sent": "Blocks that were copied to the remote tier.",
    "blocks_unsent": "Blocks that were to be copied there, and could not be.",
    "blocks_fetched": "Blocks that were brought from there into memory.",
    "blocks_absent": "Blocks that were asked for there, and were not there.",
    "blocks_wrong": "Objects there that were not the block that they are named after. None was used.",
    "objects_deleted": "Objects that were deleted there to make room.",
    "requests_failed": "Requests to the remote tier that failed, or were not answered in time.",
}


@dataclass(frozen=True, slots=True)
class DiskState:
    """What a daemon with a disk tier says of it, beside its statistics."""

    backlog_bytes: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class RemoteState:
    """The same of a remote tier."""

    counters: RemoteCounters
    num_objects: int
    is_down: bool

    @classmethod
    def of(cls, tier: RemoteTier) -> "RemoteState":
        return cls(dataclasses.replace(tier.counters), tier.num_objects, tier.is_down)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The daemon at one moment.

    `disk` and `remote` are None where there is no such tier, `members` in a store of one machine.
    """

    stats: pb.StatsReply
    disk: DiskState | None
    members: View | None = None
    remote: RemoteState | None = None


def series(snapshot: Snapshot) -> Iterator[Metric]:
    """Every series, with its help."""
    stats = snapshot.stats
    build = {"version": stats.server_version, "boot_id": stats.boot_id.hex()}
    yield InfoMetricFamily("kvstore_build", "The daemon: its version, and what it is told apart by.", build)
    yield GaugeMetricFamily("kvstore_uptime_seconds", "Seconds since the daemon started.", stats.uptime_s)
    yield GaugeMetricFamily("kvstore_draining", "1: new sessions and stores are refused.", stats.draining)
    for field in dataclasses.fields(Counters):
        count = getattr(stats.counters, field.name)
        yield CounterMetricFamily(f"kvstore_{field.name}_total", COUNTERS[field.name], count)
    yield _gaps(stats.loop_gaps)
    yield from _blocks(stats)
    yield from _sessions(stats)
    yield from _tiers(stats)
    if snapshot.disk is not None:
        backlog, failed = snapshot.disk.backlog_bytes, snapshot.disk.num_failed
        yield GaugeMetricFamily("kvstore_spill_backlog_bytes", "Bytes that wait to be written to disk.", backlog)
        yield GaugeMetricFamily("kvstore_disks_failed", "Disks that are not written until a restart.", failed)
    if snapshot.members is not None:
        view = snapshot.members
        count = len(view.members)
        yield GaugeMetricFamily("kvstore_cluster_members", "Daemons of the store, as this one knows them.", count)
        yield GaugeMetricFamily("kvstore_cluster_epoch", "How often the members have changed.", view.epoch)
        yield GaugeMetricFamily(
            "kvstore_cluster_stale", "1: Redis cannot be reached, and the members last known stand.", view.stale
        )
    if snapshot.remote is not None:
        yield from _remote(snapshot.remote)


def _remote(state: RemoteState) -> Iterator[Metric]:
    for field in dataclasses.fields(RemoteCounters):
        count = getattr(state.counters, field.name)
        yield CounterMetricFamily(f"kvstore_remote_{field.name}_total", REMOTE_COUNTERS[field.name], count)
    yield GaugeMetricFamily("kvstore_remote_objects", "Objects in the remote tier that are known.", state.num_objects)
    yield GaugeMetricFamily(
        "kvstore_remote_down", "1: the remote tier failed, and has not answered since.", state.is_down
    )


def _gaps(gaps: pb.LoopGaps) -> Metric:
    names = [*map(str, gaps.bounds_s), "+Inf"]
    buckets = list(zip(names, itertools.accumulate(gaps.counts), strict=True))
    text = "By how much the daemon's loop was late, 20 times a second."
    return HistogramMetricFamily("kvstore_loop_gap_seconds", text, buckets=buckets, sum_value=gaps.total_s)


def _blocks(stats: pb.StatsReply) -> Iterator[Metric]:
    yield GaugeMetricFamily("kvstore_blocks_committed", "Blocks that a match finds now.", stats.blocks_committed)
    yield GaugeMetricFamily("kvstore_blocks_writing", "Blocks whose parts are arriving.", stats.blocks_writing)
    yield GaugeMetricFamily(
        "kvstore_blocks_leased",
        "Blocks that a session holds, or that are on their way to or from disk.",
        stats.blocks_leased,
    )
    yield GaugeMetricFamily("kvstore_blocks_pinned", "Blocks that an operator pinned.", stats.blocks_pinned)


def _sessions(stats: pb.StatsReply) -> Iterator[Metric]:
    leases = sum(session.num_leases for session in stats.sessions)
    writes = sum(session.num_writes for session in stats.sessions)
    regions = sum(session.region_bytes for session in stats.sessions)
    yield GaugeMetricFamily("kvstore_sessions", "Sessions that are open.", len(stats.sessions))
    yield GaugeMetricFamily("kvstore_leases", "Leases of all sessions.", leases)
    yield GaugeMetricFamily("kvstore_writes", "Writes of all sessions that have not ended.", writes)
    yield GaugeMetricFamily("kvstore_region_bytes", "Bytes of client memory that is registered for stores.", regions)


def _tiers(stats: pb.StatsReply) -> Iterator[Metric]:
    for name, text, field in (
        ("kvstore_tier_capacity_bytes", "Bytes that the slabs of the tier may take.", "capacity_bytes"),
        ("kvstore_tier_slab_bytes", "Bytes that the slabs of the tier take.", "slab_bytes"),
        ("kvstore_tier_used_bytes", "Bytes of the blocks in the tier, those being written included.", "used_bytes"),
        ("kvstore_tier_slabs", "Slabs of the tier.", "num_slabs"),
    ):
        family = GaugeMetricFamily(name, text, labels=["tier", "place"])
        for tier in stats.tiers:
            family.add_metric([tier.tier, tier.place], getattr(tier, field))
        yield family


class MetricsListener:
    """Answers GET /metrics at one address, in threads of its own, from when it is made until `close`.

    `gather` is called on the loop. A scrape that it does not answer in time is answered with status 500.
    Raises: StoreUnavailable, if the address is taken.
    """

    def __init__(
        self, gather: Callable[[], Snapshot], *, host: str, port: int, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._gather = gather
        self._loop = loop
        registry = CollectorRegistry(support_collectors_without_names=True)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise StoreUnavailable(
                f"metrics_port: expected {host}:{port} to be free, got: {error}; choose another"
            ) from None
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def collect(self) -> Iterator[Metric]:
        """The series at this moment. Not on the loop. Raises: StoreTimeout, if the loop does not get to it."""
        future = asyncio.run_coroutine_threadsafe(self._gathered(), self._loop)
        try:
            return series(future.result(GATHER_TIMEOUT_S))
        except TimeoutError:
            future.cancel()
            raise StoreTimeout(
                f"metrics: expected the daemon's loop within {GATHER_TIMEOUT_S:g} s; it is busy"
            ) from None

    async def _gathered(self) -> Snapshot:
        return self._gather()

    def close(self) -> None:
        """The port is free. Blocks until the listener has noticed, up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
