"""A Redis of a test's own, on a unix socket and without persistence, that can be killed, frozen and started again."""

import contextlib
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError
from service.harness import DEADLINE_S, eventually

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed (apt-get install redis-server)")


class RedisServer:
    """`options` are arguments of redis-server; a file of settings comes first."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket_path = folder / "redis.sock"
        self.url = f"unix://{self.socket_path}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.client = Redis(unix_socket_path=str(self.socket_path), socket_timeout=DEADLINE_S, decode_responses=True)

    def start(self) -> "RedisServer":
        """It answers, and knows nothing."""
        assert BINARY is not None
        command = [BINARY, *self._options, "--unixsocket", str(self.socket_path), "--save", "", "--appendonly", "no"]
        command += ["--dir", str(self.folder), "--logfile", str(self.folder / "redis.log")]
        command += [] if "--port" in self._options else ["--port", "0"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        eventually(self._answers, "redis-server answers")
        return self

    def _answers(self) -> bool:
        with contextlib.suppress(RedisError, OSError):
            return bool(self.client.ping())
        return False

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(DEADLINE_S)

    def freeze(self) -> None:
        """It takes connections and answers nothing."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    def num_heartbeats(self) -> int:
        """Scripts that were run since it started."""
        stats: dict[str, Any] = self.client.info("commandstats")  # type: ignore[assignment]
        return int(stats.get("cmdstat_eval", {"calls": 0})["calls"])

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self.client.close()

    def _send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)
