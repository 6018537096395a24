"""Settings: which source wins, and what a wrong one is told."""

from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from kvstore_server.config import Settings, load, parse_size


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvstore.toml"


def test_file_gives_way_to_environment_and_environment_to_flags(file: Path) -> None:
    file.write_text('cpu_capacity = "1GiB"\nheartbeat_s = 1.0\ncopy_threads = 3\n')
    environment = {"KVSTORE_HEARTBEAT_S": "2.0", "KVSTORE_COPY_THREADS": "4", "PATH": "/bin"}
    settings = load(file, environment, {"copy_threads": 5, "log_level": None})
    assert settings.cpu_capacity == 1 << 30
    assert settings.heartbeat_s == 2.0
    assert settings.copy_threads == 5
    assert settings.log_level == Settings().log_level


def test_without_any_source_there_are_defaults() -> None:
    assert load(None, {}, None) == Settings()


@pytest.mark.parametrize(("text", "expected"), [("false", False), ("true", True), ("0", False), ("1", True)])
def test_switches_can_be_set_in_the_environment(text: str, expected: bool) -> None:
    assert load(None, {"KVSTORE_PREFAULT": text}).prefault is expected


def test_an_unknown_key_names_its_source_and_the_nearest_known_one(file: Path) -> None:
    file.write_text("cpu_capasity = 1\n")
    with pytest.raises(InvalidRequest, match=r"kvstore\.toml: unknown key 'cpu_capasity'; did you mean 'cpu_capacity'"):
        load(file, {})
    with pytest.raises(InvalidRequest, match="environment: unknown key 'hartbeat_s'; did you mean 'heartbeat_s'"):
        load(None, {"KVSTORE_HARTBEAT_S": "1"})


@pytest.mark.parametrize("text", ["= nonsense", "\0"])
def test_an_unreadable_file_is_named(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=r"kvstore\.toml"):
        load(file, {})
    with pytest.raises(InvalidRequest, match=r"missing\.toml"):
        load(file.with_name("missing.toml"), {})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("64 MiB", 64 << 20),
        ("500MB", 500 * 10**6),
        ("1.5KiB", 1536),
        ("2g", 2 * 10**9),
        ("77", 77),
        (" 1 TiB ", 1 << 40),
        (12, 12),
    ],
)
def test_sizes_are_read(text: object, size: int) -> None:
    assert parse_size(text, name="x") == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1XB", "1 2", "nan", "1e9", True, None, 1.5e300])
def test_what_is_no_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(InvalidRequest, match="cpu_capacity"):
        parse_size(text, name="cpu_capacity")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tcp_host", "0.0.0.0"),
        ("tcp_port", 70_000),
        ("slab_bytes", 4096),
        ("cpu_capacity", 1 << 20),
        ("copy_threads", 0),
        ("heartbeat_s", 0.0),
        ("heartbeat_s", float("nan")),
        ("log_format", "xml"),
        ("log_level", "loud"),
        ("copy_threads", "many"),
        ("cluster_name", "a{b}"),
        ("cluster_name", ""),
        ("node_id", "a b"),
        ("node_id", "n" * 65),
        ("replicas", 0),
        ("replicas", 17),
        ("cluster_ttl_s", 0.0),
        ("cluster_ttl_s", float("nan")),
        ("advertise", [""]),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(name: str, value: object) -> None:
    """Covers: H1. The daemon listens on loopback only."""
    with pytest.raises(InvalidRequest, match=name):
        load(None, {}, {name: value})


def test_a_daemon_must_listen_somewhere() -> None:
    with pytest.raises(InvalidRequest, match="listener"):
        load(None, {}, {"unix_socket": "", "tcp_port": 0})


REDIS = {"cluster_url": "redis://10.0.0.1", "node_id": "a"}


def test_a_daemon_of_several_needs_an_id() -> None:
    with pytest.raises(InvalidRequest, match="node_id: expected an id of this daemon's own"):
        load(None, {}, REDIS | {"node_id": ""})


def test_it_advertises_where_it_listens_unless_it_is_told_what() -> None:
    assert load(None, {}, REDIS | {"unix_socket": "/k.sock"}).advertised == ["unix:/k.sock", "127.0.0.1:7311"]
    assert load(None, {}, REDIS | {"tcp_port": 0, "unix_socket": "/k.sock"}).advertised == ["unix:/k.sock"]
    told = {"KVSTORE_ADVERTISE": '["10.0.0.7:7311"]'}
    assert load(None, told, REDIS).advertised == ["10.0.0.7:7311"]
    assert load(None, told, REDIS | {"advertise": ("kv-0:1", "kv-0:2")}).advertised == ["kv-0:1", "kv-0:2"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_names_no_machine_is_not_advertised(host: str) -> None:
    anywhere = REDIS | {"tcp_host": host, "ucx_device": "eth0"}
    with pytest.raises(InvalidRequest, match=f"advertise: expected the addresses .* {host}"):
        load(None, {}, anywhere)
    assert load(None, {}, anywhere | {"advertise": ["kv-0:7311"]}).advertised == ["kv-0:7311"]


def test_the_share_of_a_daemon_is_what_its_memory_and_disks_hold() -> None:
    disks = [{"path": "/a", "capacity": "8GiB"}, {"path": "/b", "capacity": "2GiB"}]
    assert load(None, {}, {"cpu_capacity": "1GiB"}).capacity_bytes == 1 << 30
    assert load(None, {}, {"cpu_capacity": "1GiB", "disks": disks}).capacity_bytes == 11 << 30


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "file:///mnt/x", "redis://host:6379/0/prefix", "az://a/c/p", ""])
def test_a_remote_place_is_a_url(url: str) -> None:
    assert load(None, {}, {"remote_url": url, "remote_capacity": "1TiB"}).remote_capacity == 1 << 40


@pytest.mark.parametrize("url", ["bucket/prefix", "http://bucket/x", "memory:///"])
def test_a_remote_place_of_another_kind_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="remote_url: expected a URL of one of s3, gs"):
        load(None, {}, {"remote_url": url})


@pytest.mark.parametrize("url", ["redis://user:word@host/0/p", "redis://host/0/p?password=word", "az://a/c?sig=word"])
def test_a_remote_url_with_a_secret_in_it_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidRequest, match="they come from the environment") as caught:
        load(None, {}, {"remote_url": url})
    assert "word" not in str(caught.value).replace("password", "")


@pytest.mark.parametrize(
    ("key", "value"), [("remote_capacity", 0), ("remote_requests", 0), ("remote_min_blocks", 0), ("checksums", False)]
)
def test_a_remote_tier_needs_room_requests_and_checksums(key: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=key):
        load(None, {}, {"remote_url": "file:///x", key: value})
