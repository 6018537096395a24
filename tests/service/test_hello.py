"""Who is let in: protocol, spec, token, tenant. What does not fit is refused, by the name of what differs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from builders import chain, rows, spec
from service.harness import DEADLINE_S, DaemonProcess, RawStream

from kvstore.v1 import kvstore_pb2 as pb
from kvstore.wire import spec_to_proto
from kvstore_client import InvalidRequest, KVClient, KVStoreError, NotAllowed, NotAuthenticated, SpecMismatch

KV = spec(layers=2, bytes_per_part=8192)
HASHES = chain(2, of=KV)

Connect = Callable[..., KVClient]
Raw = Callable[..., RawStream]


@pytest.mark.parametrize("version", [0, 2, 4_000_000_000])
def test_another_protocol_version_is_refused_with_a_clear_message(
    shared: DaemonProcess, raw: Raw, version: int
) -> None:
    """Covers: G2."""
    stream = raw(shared)
    stream.start(hello=pb.Hello(protocol_version=version, spec=spec_to_proto(KV)))
    error = stream.end()
    assert error.code().name == "FAILED_PRECONDITION"
    assert f"store speaks 1, client speaks {version}" in error.details()


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("dtype", spec(layers=2, bytes_per_part=8192).__class__.uniform(
            model="model", revision="r1", dtype="float16", block_tokens=4, layers=2, ranks=1,
            bytes_per_part=8192, layout="test")),
        ("model", spec(layers=2, bytes_per_part=8192, model="other")),
        ("layers", spec(layers=3, bytes_per_part=8192)),
        ("part_bytes", spec(layers=2, bytes_per_part=4096)),
        ("adapter", spec(layers=2, bytes_per_part=8192, adapter="lora", adapter_revision="r1")),
        ("quantisation", spec(layers=2, bytes_per_part=8192, quantisation="fp8")),
    ],
)  # fmt: skip
def test_a_client_of_another_spec_is_told_which_field_differs(
    shared: DaemonProcess, connect: Connect, field: str, theirs
) -> None:
    """Covers: A4, A8, A10, G2."""
    first = connect(shared, KV)
    with first.store(HASHES) as write:
        write.put_blocks(rows(KV, HASHES))
    other = connect(shared, theirs, ready=False, expected_namespace=KV.namespace)
    with pytest.raises(SpecMismatch, match=field):
        other.wait_ready(DEADLINE_S)
    with pytest.raises(SpecMismatch, match=field):
        other.match(HASHES)
    assert first.match(HASHES, lease="").num_blocks == 2


def test_an_expected_namespace_that_nobody_uses_is_refused(shared: DaemonProcess, connect: Connect) -> None:
    client = connect(shared, KV, ready=False, expected_namespace=b"x" * 32)
    with pytest.raises(SpecMismatch, match="is known here"):
        client.wait_ready(DEADLINE_S)


def test_the_expected_namespace_of_the_spec_itself_is_welcome(shared: DaemonProcess, connect: Connect) -> None:
    client = connect(shared, KV, expected_namespace=KV.namespace)
    assert client.match(HASHES).num_blocks == 0


def test_specs_that_differ_in_one_field_share_no_block(shared: DaemonProcess, connect: Connect) -> None:
    """Covers: A8, A10, A11, A12, H3. The same 32 bytes name another block in another namespace."""
    first = connect(shared, KV)
    with first.store(HASHES) as write:
        write.put_blocks(rows(KV, HASHES))
    for fields in (
        {"model": "other"},
        {"adapter": "lora", "adapter_revision": "r1"},
        {"quantisation": "fp8"},
        {"salt": "s"},
        {"tenant": "t"},
    ):
        other = connect(shared, spec(layers=2, bytes_per_part=8192, **fields))
        assert other.match(HASHES).num_blocks == 0
        loaded = other.load(HASHES, view=True).wait()
        assert loaded.num_loaded == 0
        assert len(loaded.errors) == 2


@pytest.mark.parametrize(
    "broken",
    [
        {"model": ""},
        {"block_tokens": 0},
        {"layers": 0},
        {"ranks": 1 << 31},
        {"part_bytes": []},
        {"part_bytes": [8192]},
        {"part_bytes": [0, 0]},
        {"part_bytes": [1 << 62, 1 << 62]},
        {"part_bytes": [1] * 100_000},
        {"hash_scheme": "builtin"},
        {"model": "m" * 100_000},
        {"adapter": ""},
    ],
)
def test_a_spec_out_of_bounds_is_refused(shared: DaemonProcess, raw: Raw, broken: dict) -> None:
    message = spec_to_proto(KV)
    for name, value in broken.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    stream = raw(shared)
    stream.start(hello=pb.Hello(protocol_version=1, spec=message))
    assert stream.end().code().name == "INVALID_ARGUMENT"


def test_a_block_larger_than_the_tier_is_refused(shared: DaemonProcess, raw: Raw) -> None:
    stream = raw(shared)
    stream.start(hello=pb.Hello(protocol_version=1, spec=spec_to_proto(spec(bytes_per_part=64 << 20))))
    error = stream.end()
    assert error.code().name == "INVALID_ARGUMENT"
    assert "cpu tier" in error.details()


def test_a_name_that_is_too_long_is_refused(shared: DaemonProcess, raw: Raw) -> None:
    stream = raw(shared)
    stream.start(hello=pb.Hello(protocol_version=1, spec=spec_to_proto(KV), client_name="é" * 200))
    assert stream.end().code().name == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("token", "tenant", "refusal"),
    [
        ("secret", "team-a", None),
        ("secret", "team-b", NotAllowed),
        ("root", "team-b", None),
        ("", "team-a", NotAuthenticated),
        ("secre", "team-a", NotAuthenticated),
        ("t" * 1024, "team-a", NotAuthenticated),
    ],
)
def test_a_token_opens_the_tenants_it_is_for(
    token_daemon: DaemonProcess, connect: Connect, token: str, tenant: str, refusal: type[KVStoreError] | None
) -> None:
    """Covers: H2, H3."""
    kv = spec(layers=2, bytes_per_part=8192, tenant=tenant)
    client = connect(token_daemon, kv, ready=False, token=token)
    if refusal is None:
        client.wait_ready(DEADLINE_S)
        assert client.match(HASHES).num_blocks == 0
        return
    with pytest.raises(refusal) as caught:
        client.wait_ready(DEADLINE_S)
    assert not token or token not in str(caught.value), "a token is not repeated"
    with pytest.raises(refusal):
        client.match(HASHES)
    log = token_daemon.log.read_text()
    assert "secre" not in log, "nor is it logged"


def test_a_token_longer_than_its_bound_is_refused_by_the_daemon(token_daemon: DaemonProcess, raw: Raw) -> None:
    stream = raw(token_daemon)
    stream.start(hello=pb.Hello(protocol_version=1, spec=spec_to_proto(KV), token="t" * 1025))
    assert stream.end().code().name == "UNAUTHENTICATED"


def test_a_token_longer_than_its_bound_is_refused_by_the_client(shared: DaemonProcess, connect: Connect) -> None:
    with pytest.raises(InvalidRequest, match="token"):
        connect(shared, KV, token="t" * 1025)


@pytest.fixture
def token_daemon(make_daemon: Callable[..., DaemonProcess], tmp_path: Path) -> DaemonProcess:
    (tmp_path / "kvstore.toml").write_text('[tokens]\nsecret = ["team-a"]\nroot = ["*"]\n')
    return make_daemon(config=tmp_path / "kvstore.toml")
