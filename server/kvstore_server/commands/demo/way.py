"""How the demo's bytes go: by shared memory, or by ucx, between network namespaces where they can be made."""

from dataclasses import dataclass
from typing import Final

from kvstore.errors import Unsupported
from kvstore_server.commands.hosts import DEVICE, Hosts

HOSTS: Final = ("store", "engines")
TCP_PORT: Final = 7311


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Where daemon and engines run, and what they are told of each other."""

    transport: str  # "shm" or "ucx"
    says: str  # for people
    daemon_flags: tuple[str, ...] = ("--tcp-port", "0")
    to_daemon: tuple[str, ...] = ()  # what stands before a command that runs where the daemon is
    to_engines: tuple[str, ...] = ()
    address: str = ""  # of the daemon, for engines; empty: its unix socket


SHARED_MEMORY: Final = Way(transport="shm", says="shared memory")


def way_by(transport: str, hosts: Hosts) -> Way:
    """The way by this transport. If it is one between `hosts`, those are made; the caller removes them in any case."""
    if transport == "shm":
        return SHARED_MEMORY
    try:
        hosts.make()
    except Unsupported as error:
        says = f"ucx over loopback, and not between network namespaces ({error})"
        return Way(transport="ucx", says=says, daemon_flags=("--tcp-port", "0", "--ucx-device", "lo"))
    store, engines = HOSTS
    host = hosts.address(store)
    return Way(
        transport="ucx",
        says=f"ucx between the network namespaces {hosts.namespace(store)} and {hosts.namespace(engines)}",
        daemon_flags=("--tcp-host", host, "--tcp-port", str(TCP_PORT), "--ucx-device", DEVICE),
        to_daemon=hosts.command(store),
        to_engines=hosts.command(engines),
        address=f"{host}:{TCP_PORT}",
    )
