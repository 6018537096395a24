"""Places for the remote tier that tests can look into and spoil: a dict with faults, an S3 server, a Redis."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore_server.tiers.places import Listed, RemoteFailed

DEADLINE_S = 30.0
BUCKET = "bucket"


class DictPlace:
    """Objects in a dict. What is in `failing`, names of calls, fails; `before` may wait, or raise what it likes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.failing: set[str] = set()
        self.asked: list[str] = []  # names of calls
        self.under_way = 0
        self.most_under_way = 0
        self.before: Callable[[str], Awaitable[object] | None] = lambda call: None

    async def put(self, name: str, data: memoryview) -> None:
        await self._call("put")
        self.objects.pop(name, None)
        self.objects[name] = bytes(data)

    async def get(self, name: str, *, size_bytes: int) -> memoryview | None:
        await self._call("get")
        data = self.objects.get(name)
        return None if data is None else memoryview(data[: size_bytes + 1])

    async def has(self, name: str) -> bool:
        await self._call("has")
        return name in self.objects

    async def delete(self, names: Sequence[str]) -> None:
        await self._call("delete")
        for name in names:
            self.objects.pop(name, None)

    async def listed(self) -> AsyncIterator[list[Listed]]:
        await self._call("list")
        yield [Listed(name, len(data), float(age)) for age, (name, data) in enumerate(self.objects.items())]

    async def close(self) -> None:
        assert not self.under_way

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.objects.values()))

    async def _call(self, call: str) -> None:
        self.asked.append(call)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if (waiting := self.before(call)) is not None:
                await waiting
            await asyncio.sleep(0)
            if call in self.failing:
                raise RemoteFailed(f"{call}: refused")
        except asyncio.CancelledError:
            for _ in range(20):  # a connection takes a moment to go
                await asyncio.sleep(0)
            raise
        finally:
            self.under_way -= 1


class Server:
    """A process that listens on loopback, killed and started again on the same port."""

    def __init__(self, command: Sequence[str], is_up: Callable[[int], bool]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._command = [part.replace("PORT", str(self.port)) for part in command]
        self._is_up = is_up
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(self._command, stdin=quiet, stdout=quiet, stderr=quiet)
        deadline = time.monotonic() + DEADLINE_S
        while not self._answers():
            assert self._process.poll() is None, f"{self._command[0]} ended"
            assert time.monotonic() < deadline, f"{self._command[0]} does not answer"
            time.sleep(0.02)

    def send(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            self._process = None

    def _answers(self) -> bool:
        try:
            return self._is_up(self.port)
        except OSError:
            return False


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An S3 that forgets when it is stopped, with a bucket; the environment says how to reach it."""
    pytest.importorskip("moto.server", reason="the S3 server is not installed: pip install 'moto[server]'")

    def has_bucket(port: int) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return bool(answer.status == 200)

    server = Server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "PORT"], has_bucket)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": f"http://127.0.0.1:{server.port}",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def redis_server(folder: Path, *arguments: str) -> Iterator[Server]:
    """A Redis that keeps what was written when it is stopped."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("neither redis-server nor valkey-server is installed")

    def answers(port: int) -> bool:
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as peer:
            peer.sendall(b"PING\r\n")
            return peer.recv(5) in (b"+PONG", b"-NOAU")

    folder.mkdir(exist_ok=True)
    keeping = ["--appendonly", "yes", "--appendfsync", "always", "--dir", os.fspath(folder)]
    server = Server([program, "--port", "PORT", "--bind", "127.0.0.1", *keeping, *arguments], answers)
    server.start()
    try:
        yield server
    finally:
        server.stop()
