"""Where objects lie that outlive a host: an object store (S3, Google, Azure, a directory), or Redis.

Both are asked in the same six calls, and know of blocks nothing. Credentials come from the environment, as each library
documents; none is ever in a URL or in a message.
"""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from kvstore.errors import InvalidRequest

T = TypeVar("T")

REQUEST_TIMEOUT_S: Final = 30.0  # of one object. Where a block takes longer, it is sooner computed
CONNECT_TIMEOUT_S: Final = 5.0
LIST_AT_ONCE: Final = 1000
_REDIS: Final = ("redis", "rediss")


class RemoteFailed(Exception):
    """The place did not do what it was asked; the message says what it answered. Ask again later."""


@dataclass(frozen=True, slots=True)
class Listed:
    """An object that is there."""

    name: str
    size_bytes: int
    written_s: float  # since the epoch; 0: the place does not say


class Place(Protocol):
    """Objects by name. Every call may raise RemoteFailed, and may be cancelled: what it did is then not known."""

    async def put(self, name: str, data: memoryview) -> None:
        """The object is there, whole; what was under its name before is not."""
        ...

    async def get(self, name: str, *, size_bytes: int) -> memoryview | None:
        """The object; None, if there is none. If it is not of this size, its beginning or nothing of it."""
        ...

    async def has(self, name: str) -> bool: ...

    async def delete(self, names: Sequence[str]) -> None:
        """None of these objects is there; what was not there before is no error."""
        ...

    def listed(self) -> AsyncIterator[list[Listed]]:
        """Every object there is, in pieces and in any order."""
        ...

    async def close(self) -> None:
        """Nothing is under way, and no connection open."""
        ...


def open_place(url: str, *, at_once: int) -> Place:
    """What lies below this URL, to be asked `at_once` things at a time. Connects to nothing yet.

    Raises: InvalidRequest, if the library is not installed, or the URL is none of its.
    """
    if urlsplit(url).scheme in _REDIS:
        return RedisPlace(url, at_once=at_once)
    return ObjectStore(url)


class ObjectStore:
    """One bucket and prefix, or one directory, through the package obstore."""

    def __init__(self, url: str, *, store: Any = None) -> None:
        """`store`: one that is open, in place of the URL's. Raises: InvalidRequest."""
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            raise InvalidRequest("remote_url: obstore is not installed; pip install 'kvstore[remote]'") from error
        self._obstore: Any = obstore
        self._errors = (BaseError, OSError)
        is_directory = urlsplit(url).scheme == "file"
        # A plain endpoint is used only where the operator names one, and allows it as the library documents.
        options = {
            "timeout": f"{REQUEST_TIMEOUT_S:g}s",
            "connect_timeout": f"{CONNECT_TIMEOUT_S:g}s",
            "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true",
        }
        arguments: dict[str, Any] = {"mkdir": True} if is_directory else {"client_options": options}
        try:
            self._store = from_url(url, **arguments) if store is None else store
        except (BaseError, OSError, ValueError) as error:
            raise InvalidRequest(f"remote_url: expected a place such as s3://bucket/prefix: {_plain(error)}") from None

    async def put(self, name: str, data: memoryview) -> None:
        with self._asking():
            await self._obstore.put_async(self._store, name, data, use_multipart=False)

    async def get(self, name: str, *, size_bytes: int) -> memoryview | None:
        with self._asking():
            try:
                found = await self._obstore.get_async(self._store, name)
            except FileNotFoundError:
                return None
            if found.meta["size"] != size_bytes:
                return memoryview(b"")
            return memoryview(await found.bytes_async())

    async def has(self, name: str) -> bool:
        with self._asking():
            try:
                await self._obstore.head_async(self._store, name)
            except FileNotFoundError:
                return False
            return True

    async def delete(self, names: Sequence[str]) -> None:
        with self._asking(), contextlib.suppress(FileNotFoundError):  # told after all others were deleted
            await self._obstore.delete_async(self._store, list(names))

    async def listed(self) -> AsyncIterator[list[Listed]]:
        with self._asking():
            async for some in self._obstore.list(self._store, chunk_size=LIST_AT_ONCE):
                yield [Listed(one["path"], one["size"], one["last_modified"].timestamp()) for one in some]

    async def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise RemoteFailed(_plain(error)) from None


class RedisPlace:
    """One database of a Redis or Valkey, keys below a prefix. The library blocks, so it is asked in threads."""

    def __init__(self, url: str, *, at_once: int) -> None:
        """Raises: InvalidRequest."""
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise InvalidRequest("remote_url: redis is not installed; pip install 'kvstore[remote]'") from error
        parts = urlsplit(url)
        number, _, prefix = parts.path.strip("/").partition("/")
        if not (parts.hostname and number.isdecimal() and prefix):
            raise InvalidRequest(f"remote_url: expected redis://host:port/database/prefix, got {url!r}")
        self._prefix = unquote(prefix) + "/"
        self._failures = (redis.RedisError, OSError)
        self._client: Any = redis.Redis(
            host=parts.hostname,
            port=parts.port or 6379,
            db=int(number),
            ssl=parts.scheme == "rediss",
            username=os.environ.get("REDIS_USERNAME"),
            password=os.environ.get("REDIS_PASSWORD"),
            socket_timeout=REQUEST_TIMEOUT_S,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 1),  # a connection that the server closed meanwhile
        )
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="kvstore-redis")

    async def put(self, name: str, data: memoryview) -> None:
        await self._call(self._client.set, self._prefix + name, data)

    async def get(self, name: str, *, size_bytes: int) -> memoryview | None:
        # One byte more, so that an object that is too large shows as one, and is not taken into memory.
        data = await self._call(self._client.getrange, self._prefix + name, 0, size_bytes)
        return memoryview(data) if data else None

    async def has(self, name: str) -> bool:
        return bool(await self._call(self._client.exists, self._prefix + name))

    async def delete(self, names: Sequence[str]) -> None:
        await self._call(self._client.unlink, *(self._prefix + name for name in names))

    async def listed(self) -> AsyncIterator[list[Listed]]:
        pattern = re.sub(r"([\[\]*?\\])", r"\\\1", self._prefix) + "*"
        cursor = 0
        while True:
            cursor, keys = await self._call(self._client.scan, cursor, pattern, LIST_AT_ONCE)
            yield await self._call(self._sized, keys)
            if not cursor:
                return

    async def close(self) -> None:
        # What threads wait for ends with its connection.
        await asyncio.to_thread(self._client.connection_pool.disconnect)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _sized(self, keys: Sequence[bytes]) -> list[Listed]:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.strlen(key)
            sizes = pipeline.execute(raise_on_error=False)  # a key of another kind is not ours
        names = [key.decode(errors="replace").removeprefix(self._prefix) for key in keys]
        return [Listed(name, size, 0.0) for name, size in zip(names, sizes, strict=True) if isinstance(size, int)]

    async def _call(self, work: Callable[..., T], *arguments: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: work(*arguments))
        except self._failures as error:
            raise RemoteFailed(_plain(error)) from None


def _plain(error: Exception) -> str:
    """What went wrong, on one line, without what follows a `?` in a URL: that may be a key."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"\?\S+", "?…", lines[0])[:500]
