"""What a client is told when it is made, and what it counts while it runs. Frozen values."""

import threading
from dataclasses import dataclass, fields
from typing import Final, Literal

from kvstore.errors import InvalidRequest
from kvstore_client.breaker import BreakerState

MAX_NAME_BYTES: Final = 256
MAX_TOKEN_BYTES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client behaves; the defaults suit an engine on the daemon's host.

    Raises: InvalidRequest, if a value is out of its bounds; it names the field.
    """

    name: str = "client"  # for logs and `kvstore status`; at most 256 bytes
    token: str = ""  # at most 1 KiB
    expected_namespace: bytes = b""  # the namespace to join; empty: the spec's, whatever it is
    timeout_s: float = 5.0  # deadline of each call that brings none of its own
    integrity: Literal["header", "always"] = "header"  # "always": each part's checksum too, after each copy
    copy_threads: int = 2
    transport: Literal["auto", "shm", "ucx"] = "auto"  # "auto": shm where the daemon's socket can be reached, else ucx
    ucx_device: str = ""  # network device of transfers between hosts; empty: the one towards the daemon
    staging_bytes: int = 256 << 20  # bound of what is on its way to one daemon from this client's own memory
    prefill_tokens_per_s: float = 0.0  # what the engine computes; 0: a match is never cut for being slow to load
    breaker_failures: int = 3  # so many calls in a row without an answer open the circuit breaker
    breaker_cooldown_s: float = 1.0  # for so long at first; doubled for each probe that fails, up to 30 s

    def __post_init__(self) -> None:
        _check("name", len(self.name.encode()) <= MAX_NAME_BYTES, f"at most {MAX_NAME_BYTES} bytes", self.name)
        _check("token", len(self.token.encode()) <= MAX_TOKEN_BYTES, f"at most {MAX_TOKEN_BYTES} bytes", "more")
        _check(
            "expected_namespace",
            len(self.expected_namespace) in (0, 32),
            "32 bytes, or none",
            f"{len(self.expected_namespace)} bytes",
        )
        _check("timeout_s", self.timeout_s > 0, "more than 0", self.timeout_s)
        _check("integrity", self.integrity in ("header", "always"), "'header' or 'always'", self.integrity)
        _check("transport", self.transport in ("auto", "shm", "ucx"), "'auto', 'shm' or 'ucx'", self.transport)
        _check("copy_threads", 1 <= self.copy_threads <= 256, "1 to 256", self.copy_threads)
        _check("staging_bytes", self.staging_bytes >= 1 << 20, "at least 1 MiB", self.staging_bytes)
        _check("prefill_tokens_per_s", self.prefill_tokens_per_s >= 0, "at least 0", self.prefill_tokens_per_s)
        _check("breaker_failures", self.breaker_failures >= 1, "at least 1", self.breaker_failures)
        _check("breaker_cooldown_s", self.breaker_cooldown_s > 0, "more than 0", self.breaker_cooldown_s)


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """Since the client was made."""

    calls: int  # sent, or refused because there was nothing to send them to
    failures: int  # of these, ended with an error of any kind
    timeouts: int  # of these, for their deadline
    bytes_loaded: int  # copied and checked
    bytes_stored: int  # sent and acknowledged
    checksum_failures: int  # parts
    generation_misses: int  # blocks whose slot held something else before or after the copy
    reconnects: int
    breaker: BreakerState


class Counters:
    """The counters behind `ClientStatistics`; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {field.name: 0 for field in fields(ClientStatistics) if field.name != "breaker"}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self, breaker: BreakerState) -> ClientStatistics:
        with self._lock:
            return ClientStatistics(**self._values, breaker=breaker)


def _check(name: str, fits: bool, expected: str, got: object) -> None:
    if not fits:
        raise InvalidRequest(f"options.{name}: expected {expected}, got {got!r:.80}; correct it")
