"""A daemon inside this process, for tests and single-process users: same code, private unix socket.

Source: docs/adr/0006.
"""

import asyncio
import tempfile
import threading
from pathlib import Path

import structlog

from kvstore_server.config import Settings
from kvstore_server.daemon import Daemon
from kvstore_server.logs import configure_logs


class EmbeddedDaemon:
    """Listens at `address` from the moment it is made until `close`; runs on a thread of its own."""

    def __init__(self, *, capacity_bytes: int, slab_bytes: int = 4 << 20, heartbeat_s: float = 5.0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvstore-embedded-")
        path = Path(self._folder.name) / "kvstore.sock"
        self.address = f"unix:{path}"
        self._settings = Settings(
            unix_socket=str(path),
            tcp_port=0,
            cpu_capacity=max(capacity_bytes, slab_bytes),
            slab_bytes=slab_bytes,
            heartbeat_s=heartbeat_s,
            prefault=False,
            stop_timeout_s=1.0,
            log_level="warning",
        )
        if not structlog.is_configured():  # a guest in someone's process speaks up only when something is wrong
            configure_logs(self._settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvstore-embedded", daemon=True)
        self._thread.start()
        self.daemon = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def _start(self) -> Daemon:
        daemon = Daemon(self._settings)
        await daemon.start()
        return daemon

    def close(self) -> None:
        """The daemon has stopped, and nothing of it is left. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self.daemon.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()
