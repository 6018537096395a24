"""The composition root: builds a daemon from its settings, in order; runs it; stops it in reverse.

A stop is graceful: new sessions are refused, requests under way are answered, sessions are ended, and what
does not end within `stop_timeout_s` is cut off.
"""

import asyncio
import os
import resource
import secrets
import socket
import tempfile
import threading
import time
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.errors import InvalidRequest, StoreUnavailable
from kvstore.transport import memory
from kvstore.types import BOOT_ID_BYTES, BootId
from kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from kvstore.wire import MAX_MESSAGE_BYTES
from kvstore_server.admin import AdminService, Journal
from kvstore_server.beside import TiersBeside
from kvstore_server.config import Settings
from kvstore_server.descriptors import DescriptorSocket
from kvstore_server.escort import keep_courier
from kvstore_server.expiry import Expiry
from kvstore_server.gaps import LoopGaps
from kvstore_server.members import Members
from kvstore_server.mover import Mover
from kvstore_server.roster import Member, Roster
from kvstore_server.service import SILENT_HEARTBEATS, StoreService
from kvstore_server.store import Store
from kvstore_server.tiers.cpu import CpuTier, shmem_pages
from kvstore_server.tiers.pinning import PageLock
from kvstore_server.transfers import Transfers
from kvstore_server.values import Change

if TYPE_CHECKING:
    from kvstore_server.metrics import MetricsListener, Snapshot

log = structlog.get_logger()

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a second daemon on one port fails instead of sharing it
)


class Daemon:
    """One store, listening. Everything runs on the loop that `start` is awaited on, but for the copying threads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.boot_id = BootId(secrets.token_bytes(BOOT_ID_BYTES))
        self.addresses: list[str] = []
        version = distribution_version("kvstore")
        page_lock = PageLock(wanted=settings.page_lock)
        self._page_lock_reason = page_lock.reason
        self.tier = CpuTier(capacity_bytes=settings.cpu_capacity, slab_bytes=settings.slab_bytes, page_lock=page_lock)
        self._mover = Mover(num_threads=settings.copy_threads, checksums=settings.checksums)
        self._transfers: Transfers | None = None
        if settings.ucx_device:
            self._transfers = Transfers(
                device=settings.ucx_device,
                num_drivers=max(1, settings.copy_threads // 2),  # the kernel copies on as many cores again
                patience_s=SILENT_HEARTBEATS * settings.heartbeat_s,
            )
        clustered = bool(settings.cluster_url)
        self._journal = Journal(self.boot_id)
        me = Member(
            node_id=settings.node_id if clustered else "",
            boot_id=self.boot_id,
            addresses=tuple(settings.advertised),
            capacity_bytes=settings.capacity_bytes,
            draining=False,
        )
        self._roster = Roster(
            me, replicas=settings.replicas if clustered else 0, ttl_s=settings.cluster_ttl_s, stale=clustered
        )
        self._members = Members(self._roster, settings, clock=time.monotonic) if clustered else None
        self.store = Store(
            self.tier,
            on_change=self._changed,
            on_slab_closed=lambda slab, readers: self.service.slab_closed(slab, readers),
            policy=settings.eviction_policy,
            placed=clustered,
        )
        self._private: tempfile.TemporaryDirectory[str] | None = None  # of the shm socket, if there is no unix socket
        self._shm_path = self._choose_shm_path()
        self._beside = TiersBeside.open(self.store, settings)
        self.store.lower.below = self._beside
        self.service = StoreService(
            self.store,
            self._mover,
            self._transfers,
            self._roster,
            settings,
            boot_id=self.boot_id,
            shm_path=str(self._shm_path),
            version=version,
            clock=time.monotonic,
        )
        self._health = health.aio.HealthServicer()
        self._gaps = LoopGaps(time.monotonic)
        self._admin = AdminService(
            self.store,
            self.service,
            self._journal,
            self._roster,
            settings,
            self._gaps,
            on_drain=self._show_draining,
            boot_id=self.boot_id,
            version=version,
            clock=time.monotonic,
        )
        self._descriptors = DescriptorSocket(self._shm_path, self.tier, self.service.session_of, self.service.call)
        self._metrics: MetricsListener | None = None
        self._stop_prefault = threading.Event()
        self._version = version

    async def start(self) -> None:
        """The daemon listens on all its addresses. Raises: StoreUnavailable, if one of them is taken."""
        raise_descriptor_limit()
        if self._transfers is not None:
            await self._transfers.start()
        self._beside.start(scrub_bytes_per_s=self.settings.disk_scrub_bytes_s)
        self._server = grpc.aio.server(options=_OPTIONS)
        kvstore_pb2_grpc.add_StoreServicer_to_server(self.service, self._server)
        kvstore_pb2_grpc.add_AdminServicer_to_server(self._admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = [service.full_name for service in kvstore_pb2.DESCRIPTOR.services_by_name.values()]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._listen()
        if self.settings.metrics_port:
            await self._serve_metrics()
        if self._members is not None:  # whoever hears of this daemon finds that it listens
            await self._members.join()
        self._descriptors.start()
        await self._server.start()
        for name in ["", *names]:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._reaper = asyncio.create_task(self.service.reap_silent())
        expiry = Expiry(self.store, ttl_s=self.settings.ttl_s, clock=time.monotonic)
        self._expiry = asyncio.create_task(expiry.run())
        self._striking = asyncio.create_task(self._gaps.run())
        if self._members is not None:
            self._courier = asyncio.create_task(keep_courier(self.addresses[0], self.settings))
        self._prefault = threading.Thread(target=self._take_memory, name="kvstore-prefault", daemon=True)
        if self.settings.prefault:
            self._prefault.start()
        self._report()

    async def stop(self) -> None:
        """Nothing runs or listens any more, and all memory, descriptors and socket files are given back."""
        log.info("stopping", sessions=len(self.service.connections), timeout_s=self.settings.stop_timeout_s)
        self.service.drain()
        await self._health.enter_graceful_shutdown()
        if self._members is not None:
            self._courier.cancel()
            await asyncio.gather(self._courier, return_exceptions=True)
            await self._members.leave()
        self._admin.close()
        self._stop_prefault.set()
        for connection in list(self.service.connections.values()):
            connection.stop_reading("the daemon is stopping; reconnect later")
        await self._server.stop(self.settings.stop_timeout_s)
        tasks = self._reaper, self._expiry, self._striking
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._descriptors.close()
        await asyncio.to_thread(self._mover.close)
        if self._transfers is not None:
            await self._transfers.close()
        await self._beside.stop(self.settings.stop_timeout_s)
        if self._metrics is not None:  # until now, so that a flush can be watched
            await asyncio.to_thread(self._metrics.close)
        if self.settings.prefault:
            await asyncio.to_thread(self._prefault.join)
        self.tier.close()
        self._remove_files()
        log.info("stopped")

    async def _show_draining(self) -> None:
        """Health checks say NOT_SERVING, but for the Admin service: a daemon that drains is not one to restart."""
        for name in ("", "kvstore.v1.Store"):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._members is not None:
            self._members.drain()
        else:
            self._roster.drain()

    def _changed(self, change: Change) -> None:
        self._journal.record(change)
        self._beside.changed(change)

    async def _serve_metrics(self) -> None:
        from kvstore_server.metrics import MetricsListener  # a tenth of the start, which most do not need

        # In a thread: the listener looks up the name of its host.
        self._metrics = await asyncio.to_thread(
            MetricsListener,
            self._snapshot,
            host=self.settings.tcp_host,
            port=self.settings.metrics_port,
            loop=asyncio.get_running_loop(),
        )
        log.info("metrics", listening=self._metrics.url)

    def _snapshot(self) -> "Snapshot":
        from kvstore_server.metrics import DiskState, RemoteState, Snapshot

        spill, ferry = self._beside.disk, self._beside.remote
        disk = None if spill is None else DiskState(spill.backlog_bytes, len(spill.disks.failures))
        members = None if self._members is None else self._roster.view
        remote = None if ferry is None else RemoteState.of(ferry.tier)
        return Snapshot(self._admin.stats(), disk, members, remote)

    def _remove_files(self) -> None:
        if self.settings.unix_socket:
            Path(self.settings.unix_socket).unlink(missing_ok=True)
        if self._private is not None:
            self._private.cleanup()

    def _choose_shm_path(self) -> Path:
        if self.settings.unix_socket:
            path = Path(self.settings.unix_socket)
            return path.with_name(path.name + ".shm")
        self._private = tempfile.TemporaryDirectory(prefix="kvstore-")
        return Path(self._private.name) / "kvstore.shm"

    def _listen(self) -> None:
        if self.settings.unix_socket:
            path = Path(self.settings.unix_socket)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            clear_stale_socket(path, socket.SOCK_STREAM)
            clear_stale_socket(self._shm_path, socket.SOCK_SEQPACKET)
            self._bind(f"unix:{path}")
            path.chmod(0o600)
        if self.settings.tcp_port:
            self._bind(f"{self.settings.tcp_host}:{self.settings.tcp_port}")

    def _bind(self, address: str) -> None:
        try:
            self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise StoreUnavailable(
                f"{address}: expected an address that is free, got: {error}; choose another"
            ) from None
        self.addresses.append(address)

    def _take_memory(self) -> None:
        """Spare slabs are made until the capacity is reached; their pages are there before a store needs them."""
        started = time.monotonic()
        taken = 0
        while not self._stop_prefault.is_set() and self.tier.add_spare():
            taken += self.settings.slab_bytes
        log.info("memory taken", size=_gib(taken), seconds=round(time.monotonic() - started, 2))

    def _report(self) -> None:
        """What was resolved at the start, in plain words."""
        settings = self.settings
        memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
        log.info("kvstore is ready", version=self._version, boot_id=self.boot_id.hex(), listening=self.addresses)
        log.info("memory: cpu tier", capacity=_gib(settings.cpu_capacity), slab=_gib(settings.slab_bytes))
        for shown in self.store.lower.below.statistics():
            if shown.tier == "gpu":
                log.info("gpu tier", device=shown.pages, capacity=_gib(shown.capacity_bytes))
                continue
            if shown.tier == "remote":
                log.info("remote tier", place=shown.place, capacity=_gib(shown.capacity_bytes))
                continue
            log.info("disk tier", directory=shown.place, capacity=_gib(shown.capacity_bytes), io=shown.pages)
        if self._beside.disk is not None:
            high, low = settings.watermark_high, settings.watermark_low
            log.info("disk tier: movement", write_policy=settings.write_policy, watermark_high=high, watermark_low=low)
        log.info("memory: huge pages asked for", granted=shmem_pages())
        log.info("memory: page lock", state=self._page_lock_reason)
        log.info("memory: memlock limit", limit="unlimited" if memlock < 0 else _gib(memlock))
        log.info("memory: NUMA", nodes=nodes, placement="one pool" if nodes > 1 else "one node, one pool")
        log.info("transport: shm is on", why="clients on this host share memory", socket=str(self._shm_path))
        log.info(
            "copies",
            threads=settings.copy_threads,
            code="compiled" if memory.IS_NATIVE else "Python, slower: there was no C compiler at install",
        )
        if self._transfers is None:
            log.info("transport: ucx is off", why="ucx_device is not set; clients must be on this host")
        else:
            why = "the control path and the data path are open to this network: trust it, or close it to others"
            log.info("transport: ucx is on", device=self._transfers.device, why=why)
        log.info("integrity", checksums="xxh3 at ingest" if settings.checksums else "off: for benchmarks only")
        log.info(
            "access",
            tokens="asked for" if settings.tokens else f"none asked for: who reaches {self.addresses} is let in",
        )


def raise_descriptor_limit() -> None:
    """The process may open as many descriptors as the hard limit allows: each slab takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def clear_stale_socket(path: Path, kind: socket.SocketKind) -> None:
    """The socket file of a daemon that is gone is removed. Raises: StoreUnavailable, if one listens there."""
    if not path.exists():
        return
    if not path.is_socket():
        raise InvalidRequest(f"{path}: expected a socket or nothing, got another kind of file; choose another path")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise StoreUnavailable(f"{path}: a daemon listens there already; stop it, or choose another unix_socket")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.2f} GiB"
