"""The URL of the coordinator: Redis or Valkey, alone, behind Sentinels, or as a cluster."""

import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote

from kvstore.errors import InvalidRequest

_URL: Final = re.compile(
    r"(?P<scheme>redis|rediss|unix|redis\+sentinel|redis\+cluster)://"
    r"(?:(?P<user>[^:@/?#\s]*)(?::(?P<password>[^@/?#\s]*))?@)?"
    r"(?P<hosts>[^@/?#\s]*)(?P<path>/[^@?#\s]*)?(?:\?(?P<query>[^\s]*))?"
)
_HOST: Final = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?")
_PORTS: Final = {"redis+sentinel": 26379}
_REDIS_PORT: Final = 6379


@dataclass(frozen=True, slots=True)
class ClusterUrl:
    """A URL that was read. As text it shows no user, password or query."""

    text: str = field(repr=False)
    scheme: str
    user: str = field(repr=False)
    password: str = field(repr=False)
    hosts: tuple[tuple[str, int], ...]
    path: str  # of the unix socket, or the number of the database, or the service that Sentinels watch

    def __str__(self) -> str:
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{self.scheme}://{hosts}{self.path}"


def parse_cluster_url(text: str) -> ClusterUrl:
    """Raises: InvalidRequest, which does not repeat the text, as it may hold a password."""
    found = _URL.fullmatch(text)
    if found is None:
        raise _refused("redis, rediss, unix, redis+sentinel or redis+cluster, and no bare @ / ? # in a password")
    scheme, path = found["scheme"], found["path"] or ""
    hosts = [_HOST.fullmatch(host) for host in found["hosts"].split(",")] if found["hosts"] else []
    if scheme == "unix":
        if hosts or len(path) < 2:
            raise _refused("unix:///PATH of a socket")
    elif not hosts or None in hosts or (len(hosts) > 1 and "+" not in scheme):
        raise _refused("one HOST:PORT, or several with commas between them for redis+sentinel and redis+cluster")
    if scheme == "redis+sentinel" and len(path) < 2:
        raise _refused("redis+sentinel://HOST:PORT,HOST:PORT/SERVICE")
    return ClusterUrl(
        text=text,
        scheme=scheme,
        user=unquote(found["user"] or ""),
        password=unquote(found["password"] or ""),
        hosts=tuple(
            (host["host"].strip("[]"), int(host["port"] or _PORTS.get(scheme, _REDIS_PORT))) for host in hosts if host
        ),
        path=path,
    )


def _refused(expected: str) -> InvalidRequest:
    return InvalidRequest(f"cluster_url: expected {expected}; correct it")
