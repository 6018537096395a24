"""KVSpec: what goes into a namespace, where parts lie, what is refused and how two specs are compared."""

import json
import pickle
import struct
from dataclasses import FrozenInstanceError, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.spec import HASH_SCHEMES, FieldDifference, KVSpec, canonical_bytes

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "spec" / "vectors.json").read_text(encoding="utf-8"))

BASE: dict[str, Any] = {
    "model": "llama",
    "revision": "0e9e39f2",
    "dtype": "bfloat16",
    "block_tokens": 16,
    "layers": 2,
    "ranks": 2,
    "part_bytes": (10, 20, 30, 40),
    "layout": "nhd",
}


def spec(**changed: Any) -> KVSpec:
    """A spec of 2 layers and 2 ranks with four unequal parts, but for the fields given."""
    return KVSpec(**{**BASE, **changed})


# ---- the namespace ----

CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model": "llama2"},
    "revision": {"revision": "0e9e39f3"},
    "dtype": {"dtype": "float8_e4m3"},
    "block_tokens": {"block_tokens": 32},
    "layers": {"layers": 4, "ranks": 1},
    "ranks": {"layers": 1, "ranks": 4},
    "part_bytes": {"part_bytes": (20, 10, 30, 40)},
    "layout": {"layout": "hnd"},
    "adapter": {"adapter": "alpha", "adapter_revision": "a1"},
    "adapter_revision": {"adapter": "alpha", "adapter_revision": "a2"},
    "quantisation": {"quantisation": "fp8/per-tensor"},
    "hash_scheme": {"hash_scheme": "vllm.sha256_cbor.v1"},
    "tenant": {"tenant": "other"},
    "salt": {"salt": "alpha"},
}


@pytest.mark.parametrize("name", [f.name for f in fields(KVSpec) if f.init])
def test_every_field_changes_the_namespace(name: str) -> None:
    """Covers: A4, A8, A10, A11, A12. A new field without an entry here, or left out of the digest, fails."""
    changed = spec(**CHANGES[name])
    assert changed.namespace != spec().namespace
    assert changed != spec()


def test_no_two_changes_share_a_namespace() -> None:
    """Covers: A8, A9, A11."""
    namespaces = {spec(**change).namespace for change in CHANGES.values()}
    assert len(namespaces) == len(CHANGES)


def test_adapter_named_like_a_salt_gives_another_namespace() -> None:
    """Covers: A9."""
    assert spec(adapter="x", adapter_revision="r").namespace != spec(salt="x").namespace
    assert spec(quantisation="x").namespace != spec(salt="x").namespace


def test_text_moved_across_a_field_boundary_gives_another_namespace() -> None:
    """Covers: A9."""
    assert spec(model="ab", revision="c").namespace != spec(model="a", revision="bc").namespace


def test_field_that_is_not_set_is_absent_from_the_encoding() -> None:
    """A field added later must leave today's namespaces as they are."""
    assert set(decode(canonical_bytes(spec()))) == set(BASE) | {"tenant", "hash_scheme"}
    assert spec() == spec(adapter=None, adapter_revision=None, quantisation=None, salt="")


def test_namespace_is_the_sha256_of_the_encoding_and_depends_on_nothing_else() -> None:
    """Covers: A12, G1."""
    assert spec().namespace == sha256(canonical_bytes(spec())).digest()
    assert spec().namespace == spec(tenant="default", hash_scheme="kvstore.sha256.v1").namespace


@pytest.mark.parametrize("vector", VECTORS["specs"], ids=lambda vector: vector["name"])
def test_spec_encodes_as_the_test_vectors_say(vector: dict[str, Any]) -> None:
    """Covers: A9, G1."""
    given_spec = KVSpec(**{**vector["spec"], "part_bytes": tuple(vector["spec"]["part_bytes"])})
    assert canonical_bytes(given_spec).hex() == vector["encoding"]
    assert given_spec.namespace.hex() == vector["namespace"]


FIELD_NAMES = {
    1: "model",
    2: "revision",
    3: "dtype",
    4: "block_tokens",
    5: "layers",
    6: "ranks",
    7: "part_bytes",
    8: "layout",
    9: "tenant",
    10: "hash_scheme",
    11: "adapter",
    12: "adapter_revision",
    13: "quantisation",
    14: "salt",
}


def decode(encoding: bytes) -> dict[str, Any]:
    """Read an encoding back, by the table in docs/spec/identity.md: the oracle for "no two encode alike"."""
    assert encoding.startswith(b"kvstore/spec/v1\0")
    found: dict[str, Any] = {}
    at = 16
    while at < len(encoding):
        number, kind, size = struct.unpack_from("<HBI", encoding, at)
        payload = encoding[at + 7 : at + 7 + size]
        if kind == 1:
            found[FIELD_NAMES[number]] = payload.decode()
        else:
            numbers = struct.unpack(f"<{size // 8}Q", payload)
            found[FIELD_NAMES[number]] = numbers[0] if kind == 2 else numbers
        at += 7 + size
    assert at == len(encoding)
    return found


short_text = st.text(st.sampled_from(["a", "b", "\0", "\x01", "\x0b", "é", "🦙"]), min_size=1, max_size=3)


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    layers, ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 1 << 28), min_size=layers * ranks, max_size=layers * ranks))
    adapter, revision = draw(st.just((None, None)) | st.tuples(short_text, short_text))
    return KVSpec(
        model=draw(short_text),
        revision=draw(short_text),
        dtype=draw(short_text),
        block_tokens=draw(st.integers(1, 65_536)),
        layers=layers,
        ranks=ranks,
        part_bytes=tuple(sizes),
        layout=draw(short_text),
        tenant=draw(short_text),
        hash_scheme=draw(st.sampled_from(sorted(HASH_SCHEMES))),
        adapter=adapter,
        adapter_revision=revision,
        quantisation=draw(st.none() | short_text),
        salt=draw(st.just("") | short_text),
    )


@given(specs())
def test_encoding_reads_back_as_the_spec_it_came_from(one: KVSpec) -> None:
    """Covers: A9. What reads back in one way only cannot be the encoding of two."""
    assert KVSpec(**decode(canonical_bytes(one))) == one


@given(specs(), specs())
@example(spec(adapter="x", adapter_revision="x"), spec(adapter="x", adapter_revision="x", salt="x"))
def test_distinct_specs_encode_to_distinct_bytes(one: KVSpec, other: KVSpec) -> None:
    """Covers: A9."""
    assert (one == other) == (canonical_bytes(one) == canonical_bytes(other))
    assert (one == other) == (one.namespace == other.namespace)
    assert (one == other) == (one.differences(other) == ())


# ---- where parts lie ----


def test_parts_lie_end_to_end_in_layer_major_order() -> None:
    one = spec()
    assert (one.num_parts, one.block_bytes) == (4, 100)
    assert [one.part_range(part) for part in range(4)] == [(0, 10), (10, 20), (30, 30), (60, 40)]
    assert [one.part_index(layer=layer, rank=rank) for layer in (0, 1) for rank in (0, 1)] == [0, 1, 2, 3]
    assert [list(one.rank_parts(rank)) for rank in (0, 1)] == [[0, 2], [1, 3]]


@given(specs())
def test_parts_cover_the_block_and_each_belongs_to_one_rank(one: KVSpec) -> None:
    end = 0
    for part in range(one.num_parts):
        offset, size = one.part_range(part)
        assert (offset, size) == (end, one.part_bytes[part])
        end += size
    assert end == one.block_bytes
    assert sorted(part for rank in range(one.ranks) for part in one.rank_parts(rank)) == [*range(one.num_parts)]
    for rank in range(one.ranks):
        indices = [one.part_index(layer=layer, rank=rank) for layer in range(one.layers)]
        assert indices == list(one.rank_parts(rank))


def test_part_layer_or_rank_that_does_not_exist_is_refused() -> None:
    one = spec()
    with pytest.raises(InvalidRequest, match="part: expected 0 to 3, got -1"):
        one.part_range(-1)
    with pytest.raises(InvalidRequest, match="part: expected 0 to 3, got 4"):
        one.part_range(4)
    with pytest.raises(InvalidRequest, match="layer: expected 0 to 1, got 2"):
        one.part_index(layer=2, rank=0)
    with pytest.raises(InvalidRequest, match="rank: expected 0 to 1, got 2"):
        one.part_index(layer=0, rank=2)
    with pytest.raises(InvalidRequest, match="rank: expected 0 to 1, got -1"):
        one.rank_parts(-1)


def test_uniform_spec_equals_the_one_written_out() -> None:
    rest = {
        **{name: value for name, value in BASE.items() if name != "part_bytes"},
        "adapter": "a",
        "adapter_revision": "r",
        "quantisation": "q",
        "hash_scheme": "sglang.sha256.v1",
        "tenant": "t",
        "salt": "s",
    }
    assert set(rest) == {f.name for f in fields(KVSpec) if f.init} - {"part_bytes"}
    assert KVSpec.uniform(**rest, bytes_per_part=8) == KVSpec(**rest, part_bytes=(8, 8, 8, 8))


def test_uniform_spec_of_absurd_size_is_refused_before_its_parts_are_made() -> None:
    shape = {name: value for name, value in BASE.items() if name not in ("part_bytes", "layers", "ranks")}
    with pytest.raises(InvalidRequest, match="layers: expected an int from 1 to 4096, got 1000000000000"):
        KVSpec.uniform(**shape, layers=10**12, bytes_per_part=1)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": ""}, "model: expected text, got an empty one; "),
        ({"tenant": ""}, "tenant: expected text, got an empty one; "),
        ({"quantisation": ""}, "quantisation: expected text, got an empty one; "),
        ({"dtype": None}, "dtype: expected text, got a NoneType; "),
        ({"salt": b"s"}, "salt: expected text, got a bytes; "),
        ({"layout": "é" * 513}, "layout: expected at most 1024 UTF-8 bytes, got 1026; "),
        ({"model": "\ud800"}, "model: expected text that UTF-8 can encode, got a lone surrogate; "),
        (
            {"revision": "/models/llama"},
            "revision: expected a name that means the same bytes for ever, got '/models",
        ),
        ({"revision": "C:\\llama"}, "revision: expected a name that means the same bytes for ever, got "),
        ({"revision": "main"}, "revision: expected a name that means the same bytes for ever, got 'main'; "),
        ({"revision": "HEAD"}, "revision: expected a name that means the same bytes for ever, got 'HEAD'; "),
        ({"adapter": "a"}, "adapter: expected adapter and adapter_revision together, got only one; "),
        (
            {"adapter_revision": "r"},
            "adapter: expected adapter and adapter_revision together, got only one; ",
        ),
        (
            {"adapter": "a", "adapter_revision": "./lora"},
            "adapter_revision: expected a name that means the same",
        ),
        ({"block_tokens": 0}, "block_tokens: expected an int from 1 to 65536, got 0; "),
        ({"block_tokens": 65_537}, "block_tokens: expected an int from 1 to 65536, got 65537; "),
        ({"block_tokens": 16.0}, "block_tokens: expected an int from 1 to 65536, got 16.0; "),
        ({"block_tokens": True}, "block_tokens: expected an int from 1 to 65536, got True; "),
        ({"layers": 4097}, "layers: expected an int from 1 to 4096, got 4097; "),
        ({"ranks": 1025}, "ranks: expected an int from 1 to 1024, got 1025; "),
        ({"layers": 4096, "ranks": 17}, "layers * ranks: expected at most 65536, got 69632; "),
        ({"part_bytes": [10, 20, 30, 40]}, "part_bytes: expected a tuple, got a list; "),
        ({"part_bytes": (10, 20, 30)}, "part_bytes: expected 4 sizes, got 3; "),
        ({"part_bytes": (10, 20, 0, 40)}, "part_bytes[2]: expected an int from 1 to 1073741824, got 0; "),
        (
            {"part_bytes": (10, 20, 30, 2**30 + 1)},
            "part_bytes[3]: expected an int from 1 to 1073741824, got ",
        ),
        (
            {"layers": 5, "ranks": 1, "part_bytes": (2**30,) * 5},
            "part_bytes: expected at most 4294967296 in all, got 5368709120; ",
        ),
    ],
)
def test_field_out_of_bounds_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    """Covers: A11 (a revision that is a path or a branch)."""
    with pytest.raises(InvalidRequest) as caught:
        spec(**changed)
    assert str(caught.value).startswith(message)


def test_values_at_the_bounds_are_accepted() -> None:
    assert spec(layers=4, ranks=1, part_bytes=(2**30,) * 4).block_bytes == 2**32
    assert spec(layers=64, ranks=1024, part_bytes=(65_536,) * 65_536).block_bytes == 2**32
    assert spec(block_tokens=65_536, model="é" * 512, salt="s" * 1024).block_tokens == 65_536


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        ("vllm.builtin", "Python's hash() is seeded at random in each process"),
        ("vllm.xxhash_cbor.v1", "xxHash is open to collisions, and engines seed its root at random"),
        ("kvstore.sha256.v2", "unknown"),
    ],
)
def test_hash_scheme_that_differs_between_processes_is_refused_with_the_reason(scheme: str, reason: str) -> None:
    """Covers: G1."""
    with pytest.raises(InvalidRequest) as caught:
        spec(hash_scheme=scheme)
    assert f"got '{scheme}' ({reason}" in str(caught.value)


def test_salt_appears_neither_in_repr_nor_in_messages() -> None:
    one, other = spec(salt="s3cret"), spec(salt="0ther")
    with pytest.raises(InvalidRequest) as caught:
        spec(salt="s3cret" * 1000)
    told = f"{one!r} {one.differences(other)!r} {one.differences(other)[0]} {caught.value}"
    assert "s3cret" not in told
    assert "0ther" not in told


# ---- comparing two ----


def test_difference_names_the_field_and_both_values() -> None:
    """Covers: A4, A10."""
    ours = spec(quantisation="fp8")
    theirs = spec(dtype="float16", layout="hnd")
    assert ours.differences(theirs) == (
        FieldDifference("dtype", "bfloat16", "float16"),
        FieldDifference("layout", "nhd", "hnd"),
        FieldDifference("quantisation", "fp8", None),
    )
    assert [str(difference) for difference in ours.differences(theirs)] == [
        "dtype: store has 'bfloat16', client has 'float16'",
        "layout: store has 'nhd', client has 'hnd'",
        "quantisation: store has 'fp8', client has None",
    ]


def test_difference_of_part_sizes_is_told_in_one_line() -> None:
    (same_sum,) = spec().differences(spec(part_bytes=(10, 30, 20, 40)))
    assert str(same_sum) == (
        "part_bytes: store has 4 parts, 100 bytes, client has 4 parts, 100 bytes; first at part 1: 20 and 30"
    )
    _, fewer = spec().differences(spec(layers=1, part_bytes=(10, 20)))
    assert str(fewer) == "part_bytes: store has 4 parts, 100 bytes, client has 2 parts, 30 bytes"


def test_difference_of_salt_is_told_without_the_salts() -> None:
    (difference,) = spec(salt="a").differences(spec(salt="b"))
    assert str(difference) == "salt: store and client have different values (not shown)"


# ---- a value ----


def test_spec_is_a_frozen_value() -> None:
    assert len({spec(), spec(), spec(tenant="other")}) == 2
    assert replace(spec(), tenant="other") == spec(tenant="other")
    assert replace(spec(), tenant="other").namespace == spec(tenant="other").namespace
    assert pickle.loads(pickle.dumps(spec())).namespace == spec().namespace
    with pytest.raises(FrozenInstanceError):
        spec().model = "other"  # type: ignore[misc]
