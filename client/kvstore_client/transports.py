"""The choice of transport: shared memory on one host, ucx between hosts; and the reason for it."""

import logging
import time
from typing import Final
from urllib.parse import urlsplit

from kvstore.errors import Unsupported
from kvstore.transport.ucx import Agent, device_towards
from kvstore_client.options import ClientOptions
from kvstore_client.session import Session

_log: Final = logging.getLogger("kvstore")

PROBE_TIMEOUT_S: Final = 2.0


def choose(session: Session, address: str, options: ClientOptions) -> None:
    """The session moves bytes by the transport that the options ask for, and it was tried.

    With "auto", where neither can be had, there is none: loads and stores are refused then, with the reason.

    Raises: Unsupported, if the one that was asked for cannot be had.
    """
    why_not_shm = "options.transport" if options.transport == "ucx" else ""
    if not why_not_shm:
        try:
            session.exchange.probe(deadline=time.monotonic() + PROBE_TIMEOUT_S)
        except Unsupported as error:
            if options.transport == "shm":
                raise
            why_not_shm = str(error)
        else:
            _log.debug("transport: shm, because the daemon's socket can be reached")
            return
    try:
        if not session.agent_name:
            raise Unsupported("ucx: the daemon offers none; set ucx_device in its configuration")
        device = options.ucx_device or device_towards(_host_of(address))
        session.use(Agent(session.agent_name, device=device))
    except Unsupported as error:
        if options.transport == "ucx":
            raise
        session.exchange.no_other = f"nor is there another transport: {error}"
        _log.warning("transport: none; loads and stores will be refused: %s; %s", why_not_shm, error)
        return
    _log.info("transport: ucx on %s, because of %s", device, why_not_shm)


def _host_of(address: str) -> str:
    """Empty: this one."""
    if address.startswith("unix:"):
        return ""
    return urlsplit(f"//{address}").hostname or ""
