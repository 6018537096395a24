"""`kvstore doctor`: what this machine offers to the store, and a store that writes, evicts, reads and compares."""

import platform
import resource
import socket
import tempfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import numpy as np

from kvstore.errors import KVStoreError
from kvstore.transport import memory, ucx
from kvstore_client import BlockRows, ClientOptions, KVClient
from kvstore_server.commands.measure import DEADLINE_S, bench_chain, bench_spec, random_bytes, running_daemon
from kvstore_server.tiers.cpu import shmem_pages

PART_BYTES: Final = 256 << 10
BATCH, BATCHES = 16, 6  # blocks; twice as many as memory holds
CAPACITY_BYTES: Final = BATCH * BATCHES // 2 * PART_BYTES


def examine() -> dict[str, str]:
    """What there is, in plain words."""
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rdma = _names(Path("/sys/class/infiniband"))
    why_not = ucx.why_unavailable()
    return {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "kvstore": version("kvstore"),
        "copies": "compiled" if memory.IS_NATIVE else "Python, slower: there was no C compiler at install",
        "pages of shared memory": shmem_pages(),
        "memlock limit": "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock} bytes (ulimit -l)",
        "network devices": ", ".join(name for _, name in socket.if_nameindex()),
        "RDMA devices": ", ".join(rdma) or "none: between hosts, ucx goes over tcp",
        "GPUDirect": _gpu_direct(),
        "disk tier": _installed("lmdb", "kvstore[disk]"),
        "several daemons": _installed("redis", "kvstore[cluster]"),
        "transport shm": "on, for clients of this host",
        "transport ucx": why_not
        or f"NIXL {_version('nixl-cu12')}; over tcp for trusted networks only (docs/security.md)",
    }


def self_test(transport: Literal["shm", "ucx"], device: str) -> str:
    """What went wrong, or "ok": blocks are stored until the oldest are evicted, and all that is found is compared."""
    spec = bench_spec("doctor", PART_BYTES)
    flags: list[object] = ["--cpu-capacity", CAPACITY_BYTES, "--slab-bytes", 4 << 20]
    with tempfile.TemporaryDirectory(prefix="kvstore-doctor-") as folder:
        if find_spec("lmdb") is not None:
            flags += ["--disk-path", Path(folder) / "disk", "--disk-capacity", 1 << 30, "--disk-reserve", 0]
        if transport == "ucx":
            flags += ["--ucx-device", device]
        try:
            if transport == "ucx":
                ucx.Agent("doctor", device=device).close()  # a daemon on a device that is not there would not start
            with running_daemon(*flags, size_bytes=CAPACITY_BYTES) as daemon:
                options = ClientOptions(name="doctor", timeout_s=DEADLINE_S, transport=transport, ucx_device=device)
                with KVClient(daemon.address, spec, options=options) as client:
                    client.wait_ready(DEADLINE_S)
                    return _write_evict_read(client)
        except KVStoreError as error:
            return f"{type(error).__name__}: {error}"


def _write_evict_read(client: KVClient) -> str:
    data = np.zeros((BATCH * BATCHES, PART_BYTES), np.uint8)
    random_bytes(data.reshape(-1))
    batches = [
        (bench_chain(client.spec, BATCH, seed=number), data[BATCH * number : BATCH * (number + 1)])
        for number in range(BATCHES)
    ]
    for hashes, rows in batches:
        with client.store(hashes) as write:
            write.put_blocks(rows)
    num_loaded = 0
    for hashes, rows in batches:
        target, loaded = np.zeros_like(rows), 0
        with client.match(hashes) as match:
            if match.num_blocks:  # some may not come up from disk: so small a memory is full of what is being written
                loaded = client.load(match, into=BlockRows(target[: match.num_blocks])).wait().num_loaded
        if not np.array_equal(target[:loaded], rows[:loaded]):
            return "expected the bytes that were stored, got others"
        num_loaded += loaded
    return "ok" if num_loaded >= BATCH else f"expected to load {BATCH} blocks at least, got {num_loaded}"


def _names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _gpu_direct() -> str:
    """What lets a network card reach the memory of a GPU."""
    if not Path("/proc/driver/nvidia").is_dir():
        return "no NVIDIA driver"
    loaded = [name for name in ("nvidia_peermem", "gdrdrv") if Path("/sys/module", name).is_dir()]
    return ", ".join(loaded) or "no: modprobe nvidia_peermem"


def _installed(module: str, extra: str) -> str:
    return "can be had" if find_spec(module) is not None else f"no {module}: pip install '{extra}'"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "of unknown version"
