"""URLs of Redis: what is read from them, and that no secret is in what is shown."""

import pytest

from kvstore.errors import InvalidRequest
from kvstore_server.cluster_url import parse_cluster_url
from kvstore_server.config import load
from kvstore_server.members import connect

SECRET = "s3cr%2Fet"


@pytest.mark.parametrize(
    ("text", "scheme", "hosts", "path", "shown"),
    [
        ("redis://10.0.0.1", "redis", [("10.0.0.1", 6379)], "", "redis://10.0.0.1:6379"),
        (f"redis://me:{SECRET}@r:7/2?db=1", "redis", [("r", 7)], "/2", "redis://r:7/2"),
        (f"rediss://:{SECRET}@r.local:7", "rediss", [("r.local", 7)], "", "rediss://r.local:7"),
        ("redis://[fd00::1]:7", "redis", [("fd00::1", 7)], "", "redis://[fd00::1]:7"),
        (f"unix:///run/r.sock?password={SECRET}", "unix", [], "/run/r.sock", "unix:///run/r.sock"),
        (
            f"redis+sentinel://me:{SECRET}@a,b:7/main",
            "redis+sentinel",
            [("a", 26379), ("b", 7)],
            "/main",
            "redis+sentinel://a:26379,b:7/main",
        ),
        ("redis+cluster://a:1,b:2", "redis+cluster", [("a", 1), ("b", 2)], "", "redis+cluster://a:1,b:2"),
    ],
)
def test_each_form_is_read_and_shown_without_secrets(
    text: str, scheme: str, hosts: list[tuple[str, int]], path: str, shown: str
) -> None:
    url = parse_cluster_url(text)
    assert (url.scheme, url.hosts, url.path, str(url)) == (scheme, tuple(hosts), path, shown)
    assert "s3cr" not in repr(url)


def test_user_and_password_are_unquoted() -> None:
    url = parse_cluster_url(f"redis+cluster://me%40home:{SECRET}@a:1")
    assert (url.user, url.password) == ("me@home", "s3cr/et")


@pytest.mark.parametrize(
    "text",
    [
        "http://s3cr/",
        "redis:s3cr",
        "redis://",
        "redis://:s3cr/et@host",
        "redis://:s3cr#et@host",
        "redis://:s3cr@et@host",
        "redis://:s3cr?et@host",
        "redis://a,b",
        "redis://ho st",
        "redis://a:s3cr",
        "redis+sentinel://a:1,b:2",
        "redis+sentinel://a:1/",
        "redis+cluster://a,,s3cr",
        "unix://s3cr",
        "unix:///",
        "redis://s3cr\n",
    ],
)
def test_what_is_no_such_url_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidRequest, match="cluster_url: expected") as caught:
        load(None, {}, {"cluster_url": text, "node_id": "a"})
    assert "s3cr" not in str(caught.value)


def test_options_that_the_client_does_not_take_are_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidRequest, match="cluster_url: expected options") as caught:
        connect(parse_cluster_url("redis://:s3cr@a?db=s3cr"), timeout_s=1)
    assert "s3cr" not in str(caught.value)
