"""Hosts on one machine, for trials between hosts: network namespaces that are plugged into a switch.

Needs root, and `ip` of iproute2. The switch is a bridge in a namespace of its own, so that neither devices nor firewall
rules of the machine's own network are in the way.
"""

import contextlib
import subprocess
from pathlib import Path
from typing import Final

from kvstore.errors import Unsupported

DEVICE: Final = "eth0"  # of each host, towards the switch
_NAMESPACES: Final = Path("/run/netns")


class Hosts:
    """Network namespaces `<prefix>-<name>` with the addresses `<network>.1` and on, in the order of their names.

    There are none before `make`.
    """

    def __init__(self, prefix: str, *names: str, network: str = "10.77.0") -> None:
        self._prefix, self._names, self._network = prefix, names, network
        self._switch = f"{prefix}-switch"

    def __repr__(self) -> str:
        state = "made" if (_NAMESPACES / self._switch).exists() else "not made"
        return f"<Hosts {self._prefix} [{', '.join(self._names)}; {state}]>"

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def address(self, name: str) -> str:
        return f"{self._network}.{self._names.index(name) + 1}"

    def command(self, name: str) -> tuple[str, ...]:
        """What stands before a command that is to run on this host; the process keeps its id."""
        return ("ip", "netns", "exec", self.namespace(name))

    def make(self) -> None:
        """The hosts are there, and reach each other.

        Raises: Unsupported, if they cannot be made here, or are there already. Then nothing was changed.
        """
        for namespace in self._namespaces():
            if (_NAMESPACES / namespace).exists():
                raise Unsupported(f"network namespace {namespace}: it is there already; end what uses it")
        try:
            for namespace in self._namespaces():
                _ip("netns", "add", namespace)
            _ip("-n", self._switch, "link", "add", "name", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "dev", "switch", "up")
            for name in self._names:
                namespace = self.namespace(name)
                _ip("-n", namespace, "link", "set", "dev", "lo", "up")
                self._plug(DEVICE, self.address(name), "-n", namespace)
        except BaseException:
            self.remove()
            raise

    def join(self) -> None:
        """This machine is plugged in too, at `<network>.254`, with a device that is named as the prefix.

        Raises: Unsupported, if it cannot be; then the hosts are gone.
        """
        try:
            self._plug(self._prefix, f"{self._network}.254")
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """No host is there any more, nor the way to it. Processes on it should have ended. Idempotent."""
        for namespace in self._namespaces():
            if (_NAMESPACES / namespace).exists():
                with contextlib.suppress(Unsupported):
                    _ip("netns", "delete", namespace)
        if Path("/sys/class/net", self._prefix).exists():  # it goes with the switch, but later
            with contextlib.suppress(Unsupported):
                _ip("link", "delete", "dev", self._prefix)

    def _namespaces(self) -> list[str]:
        return [self._switch, *map(self.namespace, self._names)]

    def _plug(self, device: str, address: str, *where: str) -> None:
        """A device with this address is there, at the end of a cable to the switch."""
        port = f"port{address.rpartition('.')[2]}"
        cable = ("name", device, "type", "veth", "peer", "name", port, "netns", self._switch)
        _ip(*where, "link", "add", *cable)
        _ip(*where, "address", "add", f"{address}/24", "dev", device)
        _ip(*where, "link", "set", "dev", device, "up")
        _ip("-n", self._switch, "link", "set", "dev", port, "master", "switch", "up")


def _ip(*arguments: str) -> None:
    command = ("ip", *arguments)
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise Unsupported("network namespaces: there is no `ip` here; install iproute2") from None
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"status {error.returncode}"
        raise Unsupported(f"network namespaces: {' '.join(command)}: {reason}; they need root") from None
