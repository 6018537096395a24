"""The daemon's settings: defaults < file (TOML) < environment (KVSTORE_*) < flags; unknown keys are refused."""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from kvstore.errors import InvalidRequest
from kvstore_server.cluster_url import parse_cluster_url

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}
ENVIRONMENT_PREFIX: Final = "KVSTORE_"
EVICTION_POLICIES: Final = ("lru", "lfu")
MAX_DISKS: Final = 64
REMOTE_SCHEMES: Final = ("s3", "gs", "az", "file", "redis", "rediss")
ALL_OTHERS: Final = "*"  # in a table by model or tenant: those that are not named
MAX_REPLICAS: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of a store and of its daemons: part of keys in Redis
_ANY_ADDRESS: Final = ("0.0.0.0", "::")


class DiskSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One directory of the disk tier: this daemon's own, best on a device of its own."""

    path: str
    capacity: int = 16 << 30  # of the slab files there
    reserve: int = 1 << 30  # stays free on that file system


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `kvstore serve` runs with. Sizes are bytes, or text such as "4GiB"."""

    unix_socket: str = "/run/kvstore/kvstore.sock"  # "": none
    tcp_host: str = "127.0.0.1"  # the control path is not encrypted: other than loopback only with ucx_device
    tcp_port: int = 7311  # 0: none
    ucx_device: str = ""  # network device of transfers between hosts, such as "mlx5_0:1" or "eth0"; "": none
    metrics_port: int = 0  # on tcp_host, for Prometheus; 0: none
    cpu_capacity: int = 4 << 30
    slab_bytes: int = 64 << 20
    prefault: bool = True  # take all memory at the start, so that no store waits for it
    page_lock: bool = True  # with CUDA, where there is CUDA
    checksums: bool = True  # off is for benchmarks
    copy_threads: int = 2
    eviction_policy: str = "lru"  # or "lfu": what was used often stays longer
    gpu_capacity: int = 0  # device memory for copies of what is loaded often; 0: none
    gpu_device: int = 0  # its CUDA number
    disk_path: str = ""  # short for one entry of `disks`; "": none
    disk_capacity: int = 16 << 30
    disk_reserve: int = 1 << 30
    disks: list[DiskSettings] = []  # empty, and no disk_path: no disk tier
    disk_threads: int = 4  # of each directory
    disk_codecs: dict[str, Literal["none", "lz4", "zstd", "auto"]] = {}  # by model, "*": all others
    write_policy: Literal["through", "evict"] = "through"  # blocks go to disk once stored, or before memory is full
    watermark_high: float = 0.8  # share of memory that is filled when the oldest blocks start to be written
    watermark_low: float = 0.6  # share of memory that may then hold blocks that are not on disk
    disk_scrub_bytes_s: int = 4 << 20  # how fast what is on disk is checked in the background; 0: not at all
    remote_url: str = ""  # where cold blocks are copied to, such as "s3://bucket/prefix"; "": nowhere
    remote_capacity: int = 64 << 30  # of the objects there that this daemon knows of
    remote_requests: int = 8  # under way at once
    remote_min_blocks: int = 8  # that a match must gain, or nothing is fetched
    heartbeat_s: float = 5.0
    max_region_bytes: int = 8 << 30  # of one session
    stop_timeout_s: float = 10.0
    ttl_s: dict[str, float] = {}  # tenant -> how long its blocks stay unused, "*" for all others; none: for ever
    tokens: dict[str, list[str]] = {}  # token -> tenants it may use, ["*"] for all; empty: no token is asked for
    cluster_url: str = ""  # of Redis or Valkey, where the daemons of one store find each other; "": one machine
    cluster_name: str = "kvstore"  # of the store, where several use one Redis
    node_id: str = ""  # of this daemon in the store, the same after a restart
    advertise: list[str] = []  # where clients and the other daemons reach it; empty: where it listens
    replicas: int = 1  # with how many daemons each block is kept
    cluster_ttl_s: float = 3.0  # a daemon that was not heard of for so long is gone; renewed every third
    log_format: str = "text"  # or "json"
    log_level: str = "info"

    def __post_init__(self) -> None:
        _expect(self.unix_socket or self.tcp_port, "unix_socket, tcp_port", "at least one listener", "none")
        _expect(
            self.ucx_device or self.tcp_host in ("127.0.0.1", "::1", "localhost"),
            "tcp_host",
            "a loopback address, because the control path is not encrypted yet; another only with ucx_device, for a "
            "network that you trust",
            self.tcp_host,
        )
        _expect(0 <= self.tcp_port < 65536, "tcp_port", "0 to 65535", self.tcp_port)
        _expect(0 <= self.metrics_port < 65536, "metrics_port", "0 to 65535", self.metrics_port)
        _expect(self.slab_bytes >= 1 << 16, "slab_bytes", "at least 64 KiB", self.slab_bytes)
        _expect(
            self.cpu_capacity >= self.slab_bytes,
            "cpu_capacity",
            f"at least one slab of {self.slab_bytes} bytes (slab_bytes)",
            self.cpu_capacity,
        )
        _expect(1 <= self.copy_threads <= 64, "copy_threads", "1 to 64", self.copy_threads)
        policies = ", ".join(EVICTION_POLICIES)
        _expect(
            self.eviction_policy in EVICTION_POLICIES, "eviction_policy", f"one of {policies}", self.eviction_policy
        )
        _expect(
            self.gpu_capacity == 0 or self.gpu_capacity >= self.slab_bytes,
            "gpu_capacity",
            f"0, or at least one slab of {self.slab_bytes} bytes (slab_bytes)",
            self.gpu_capacity,
        )
        _expect(self.gpu_device >= 0, "gpu_device", "the number of a CUDA device", self.gpu_device)
        _expect(not self.gpu_capacity or self.checksums, "checksums", "on, because the gpu tier needs them", "off")
        for disk in self.disk_directories:
            _expect(disk.path, "disks.path", "a directory", disk.path)
            _expect(
                disk.capacity >= self.slab_bytes,
                "disk_capacity" if self.disk_path else f"disks: capacity of {disk.path}",
                f"at least one slab of {self.slab_bytes} bytes (slab_bytes)",
                disk.capacity,
            )
        paths = [os.path.realpath(disk.path) for disk in self.disk_directories]
        _expect(len(set(paths)) == len(paths), "disks", "different directories", paths)
        _expect(len(paths) <= MAX_DISKS, "disks", f"at most {MAX_DISKS}", len(paths))
        _expect(not (self.disk_path and self.disks), "disk_path, disks", "one of the two", "both")
        _expect(1 <= self.disk_threads <= 64, "disk_threads", "1 to 64", self.disk_threads)
        _expect(not paths or self.checksums, "checksums", "on, because the disk tier needs them", "off")
        self._check_remote()
        low, high = self.watermark_low, self.watermark_high
        _expect(0 <= low <= high <= 1, "watermark_low, watermark_high", "0 <= low <= high <= 1", (low, high))
        for tenant, seconds in self.ttl_s.items():
            _expect(seconds > 0, f"ttl_s.{tenant}", "more than 0 seconds", seconds)
        _expect(0.05 <= self.heartbeat_s <= 3600, "heartbeat_s", "0.05 to 3600", self.heartbeat_s)
        self._check_cluster()
        _expect(self.log_format in ("text", "json"), "log_format", '"text" or "json"', self.log_format)
        levels = ("debug", "info", "warning", "error")
        _expect(self.log_level in levels, "log_level", f"one of {', '.join(levels)}", self.log_level)

    def _check_cluster(self) -> None:
        name = "1 to 64 of A-Z, a-z, 0-9, dot, underscore and hyphen"
        _expect(_NAME.fullmatch(self.cluster_name), "cluster_name", name, self.cluster_name)
        _expect(not self.node_id or _NAME.fullmatch(self.node_id), "node_id", name, self.node_id)
        _expect(1 <= self.replicas <= MAX_REPLICAS, "replicas", f"1 to {MAX_REPLICAS}", self.replicas)
        _expect(0.1 <= self.cluster_ttl_s <= 3600, "cluster_ttl_s", "0.1 to 3600", self.cluster_ttl_s)
        _expect(all(self.advertise), "advertise", 'addresses such as "10.0.0.7:7311"', self.advertise)
        if self.cluster_url:
            parse_cluster_url(self.cluster_url)
            _expect(self.node_id, "node_id", "an id of this daemon's own, with cluster_url", self.node_id)
            _expect(
                self.advertise or not self.tcp_port or self.tcp_host not in _ANY_ADDRESS,
                "advertise",
                f"the addresses at which others reach this daemon, as tcp_host {self.tcp_host} names none",
                self.advertise,
            )

    @property
    def advertised(self) -> list[str]:
        """The addresses at which this daemon is reached, as it tells others."""
        unix = [f"unix:{self.unix_socket}"] if self.unix_socket else []
        tcp = [f"{self.tcp_host}:{self.tcp_port}"] if self.tcp_port else []
        return self.advertise or [*unix, *tcp]

    @property
    def capacity_bytes(self) -> int:
        """Of memory and disks together: this daemon's share of a store's blocks."""
        return self.cpu_capacity + sum(disk.capacity for disk in self.disk_directories)

    def _check_remote(self) -> None:
        url = self.remote_url
        if not url:
            return
        schemes = ", ".join(REMOTE_SCHEMES)
        _expect(url.partition("://")[0] in REMOTE_SCHEMES, "remote_url", f"a URL of one of {schemes}", url)
        # It is logged, and shown by status.
        _expect(
            "@" not in url and "?" not in url,
            "remote_url",
            "no user, password or key in it; they come from the environment (docs/tiers.md)",
            "one that has '@' or '?' in it",
        )
        _expect(self.remote_capacity > 0, "remote_capacity", "more than 0 bytes", self.remote_capacity)
        _expect(1 <= self.remote_requests <= 256, "remote_requests", "1 to 256", self.remote_requests)
        _expect(self.remote_min_blocks > 0, "remote_min_blocks", "at least 1", self.remote_min_blocks)
        _expect(self.checksums, "checksums", "on, because the remote tier needs them", "off")

    @property
    def disk_directories(self) -> list[DiskSettings]:
        """Each directory of the disk tier, however it was given."""
        if self.disk_path:
            return [DiskSettings(path=self.disk_path, capacity=self.disk_capacity, reserve=self.disk_reserve)]
        return self.disks


# What comes as JSON from the environment: its type, and an example.
_TABLES: Final[dict[str, tuple[object, str]]] = {
    "tokens": (dict[str, list[str]], '{"TOKEN": ["tenant"]}'),
    "ttl_s": (dict[str, float], '{"tenant": 3600, "*": 86400}'),
    "disks": (list[dict[str, object]], '[{"path": "/disk0/kvstore", "capacity": "1TiB"}]'),
    "advertise": (list[str], '["10.0.0.7:7311"]'),
    "disk_codecs": (dict[str, str], '{"model": "zstd", "*": "auto"}'),
}
SIZES: Final = frozenset(
    {
        "cpu_capacity",
        "gpu_capacity",
        "slab_bytes",
        "max_region_bytes",
        "disk_capacity",
        "disk_reserve",
        "disk_scrub_bytes_s",
        "remote_capacity",
    }
)


def load(
    file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """The settings that file, environment and flags (None: not given) resolve to.

    Raises: InvalidRequest, naming the source and key at fault, what was expected, and the nearest known key.
    """
    values: dict[str, object] = {}
    if file is not None:
        values |= _known(_read(file), where=str(file))
    variables: dict[str, Any] = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    for name in _TABLES.keys() & variables.keys():
        variables[name] = _table(name, variables[name])
    values |= _known(variables, where="environment")
    values |= {key: value for key, value in (flags or {}).items() if value is not None}
    values |= {key: parse_size(value, name=key) for key, value in values.items() if key in SIZES}
    if isinstance(disks := values.get("disks"), list):
        values["disks"] = [_sized(disk) if isinstance(disk, dict) else disk for disk in disks]
    try:
        return msgspec.convert(values, Settings, strict=False)
    except InvalidRequest:
        raise
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"configuration: {error}; correct the value") from None


def parse_size(value: object, *, name: str) -> int:
    """Bytes, from a number or text such as "4GiB" or "500 MB". Raises: InvalidRequest."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(value).upper())
    if found is None or found[2] not in _UNITS:
        raise InvalidRequest(f'{name}: expected a size such as "4GiB" or a number of bytes, got {value!r}')
    return int(float(found[1]) * _UNITS[found[2]])


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"{file}: expected a readable TOML file, got: {error}") from None


def _table(name: str, text: str) -> object:
    of, example = _TABLES[name]
    try:
        return msgspec.json.decode(text, type=of)
    except msgspec.DecodeError:
        # The text is not repeated: it may hold secrets.
        raise InvalidRequest(f"environment: {name}: expected JSON such as {example}") from None


def _sized(disk: dict[str, Any]) -> dict[str, Any]:
    sizes = {key: parse_size(disk[key], name=f"disks: {key}") for key in ("capacity", "reserve") if key in disk}
    return disk | sizes


def _known(values: Mapping[str, object], *, where: str) -> dict[str, object]:
    names = Settings.__struct_fields__
    for key in values:
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
            raise InvalidRequest(f"{where}: unknown key {key!r}; {advice}")
    return dict(values)


def _expect(holds: object, name: str, expected: str, got: object) -> None:
    if not holds:
        raise InvalidRequest(f"{name}: expected {expected}, got {got!r}")
