"""Block hashes: the same everywhere, different for anything that differs, quick to pack and unpack."""

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.hashing import ExtraKey, block_hash, chain, pack, root_hash, unpack
from kvstore.types import BlockHash, Namespace

VECTORS = json.loads((Path(__file__).parents[2] / "docs" / "spec" / "vectors.json").read_text(encoding="utf-8"))
NAMESPACE = Namespace(bytes(range(32)))
OTHER_NAMESPACE = Namespace(bytes(range(1, 33)))
CAT = ExtraKey("image", b"cat." * 8)
DOG = ExtraKey("image", b"dog." * 8)

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


# ---- the hash ----


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["name"])
def test_chain_gives_the_hashes_of_the_test_vectors(vector: dict[str, Any]) -> None:
    """Covers: A7, A9, G1."""
    namespace = next(Namespace(bytes.fromhex(s["namespace"])) for s in VECTORS["specs"] if s["name"] == vector["spec"])
    extra_keys = {
        int(index): [ExtraKey(key["kind"], bytes.fromhex(key["digest"])) for key in keys]
        for index, keys in vector["extra_keys"].items()
    }
    hashes = chain(namespace, vector["token_ids"], block_tokens=vector["block_tokens"], extra_keys=extra_keys)
    assert root_hash(namespace).hex() == vector["root"]
    assert [value.hex() for value in hashes] == vector["hashes"]


def test_hashes_are_equal_in_processes_with_different_hash_seeds() -> None:
    """Covers: G1."""
    program = (
        "from kvstore.hashing import ExtraKey, chain, pack; from kvstore.spec import KVSpec;"
        "s = KVSpec(model='m', revision='r', dtype='d', block_tokens=2, layers=1, part_bytes=(8,),"
        " layout='l');"
        "k = {1: [ExtraKey('image', bytes(16))]};"
        "print(pack(chain(s.namespace, [1, 2, 3, 4], block_tokens=2, extra_keys=k)).hex())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert len(told) == 1
    assert len(told.pop().strip()) == 2 * 64


@given(token_lists, token_lists, st.integers(1, 8))
def test_chain_of_a_prefix_is_a_prefix_of_the_chain(prefix: list[int], rest: list[int], block_tokens: int) -> None:
    short = chain(NAMESPACE, prefix, block_tokens=block_tokens)
    long = chain(NAMESPACE, prefix + rest, block_tokens=block_tokens)
    assert len(short) == len(prefix) // block_tokens
    assert len(long) == len(prefix + rest) // block_tokens
    assert long[: len(short)] == short


@given(token_lists, token_lists, st.integers(1, 4))
def test_chains_agree_exactly_as_far_as_the_tokens_do(one: list[int], other: list[int], block_tokens: int) -> None:
    pairs = zip(
        chain(NAMESPACE, one, block_tokens=block_tokens),
        chain(NAMESPACE, other, block_tokens=block_tokens),
        strict=False,
    )
    for index, (a, b) in enumerate(pairs):
        end = (index + 1) * block_tokens
        assert (a == b) == (one[:end] == other[:end])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(1, 8), st.data())
def test_chain_is_block_hash_repeated_from_the_root(ids: list[int], block_tokens: int, data: st.DataObject) -> None:
    num_begun = -(-len(ids) // block_tokens)
    some_keys = st.lists(st.sampled_from([CAT, DOG]), max_size=2)
    extra_keys = data.draw(st.dictionaries(st.integers(0, num_begun - 1), some_keys))
    parent, expected = root_hash(NAMESPACE), []
    for index in range(len(ids) // block_tokens):
        block = ids[index * block_tokens : (index + 1) * block_tokens]
        parent = block_hash(parent, block, extra_keys.get(index, ()))
        expected.append(parent)
    assert chain(NAMESPACE, ids, block_tokens=block_tokens, extra_keys=extra_keys) == expected


def test_same_tokens_in_two_namespaces_share_no_hash() -> None:
    """Covers: A12."""
    ids = list(range(64))
    ours, theirs = (chain(namespace, ids, block_tokens=16) for namespace in (NAMESPACE, OTHER_NAMESPACE))
    assert not set(ours) & set(theirs)


def test_same_tokens_in_blocks_of_another_size_share_no_hash() -> None:
    """Covers: A10."""
    ids = list(range(64))
    assert not set(chain(NAMESPACE, ids, block_tokens=16)) & set(chain(NAMESPACE, ids, block_tokens=32))


def test_partial_block_has_no_hash() -> None:
    """Covers: A6."""
    assert chain(NAMESPACE, [1, 2, 3], block_tokens=4) == []
    assert chain(NAMESPACE, [], block_tokens=4) == []
    assert len(chain(NAMESPACE, range(7), block_tokens=4)) == 1


# ---- extra keys ----


def test_two_images_under_the_same_text_share_no_block_from_the_image_on() -> None:
    """Covers: A7."""
    ids = list(range(12))
    cat = chain(NAMESPACE, ids, block_tokens=4, extra_keys={1: [CAT]})
    dog = chain(NAMESPACE, ids, block_tokens=4, extra_keys={1: [DOG]})
    none = chain(NAMESPACE, ids, block_tokens=4)
    assert cat[0] == dog[0] == none[0]
    assert len({cat[1], dog[1], none[1], cat[2], dog[2], none[2]}) == 6


def test_image_hash_of_16_bits_is_refused() -> None:
    """Covers: A7."""
    with pytest.raises(InvalidRequest, match="extra key 'image': expected a digest of 16 to 64 bytes, got 2; "):
        ExtraKey("image", b"\x12\x34")


@pytest.mark.parametrize(
    ("kind", "digest", "message"),
    [
        ("image", bytes(15), "expected a digest of 16 to 64 bytes, got 15; "),
        ("image", bytes(65), "expected a digest of 16 to 64 bytes, got 65; "),
        ("image", "00" * 16, "expected a digest as bytes, got a str; "),
        ("", bytes(16), "expected a kind of 1 to 255 UTF-8 bytes, got ''; "),
        ("é" * 128, bytes(16), "expected a kind of 1 to 255 UTF-8 bytes, got 'éé"),
        ("\ud800", bytes(16), "expected a kind of 1 to 255 UTF-8 bytes, got '"),
        (None, bytes(16), "expected a kind of 1 to 255 UTF-8 bytes, got None; "),
    ],
)
def test_extra_key_out_of_bounds_is_refused(kind: Any, digest: Any, message: str) -> None:
    """Covers: A7."""
    with pytest.raises(InvalidRequest) as caught:
        ExtraKey(kind, digest)
    assert message in str(caught.value)


def test_order_kind_and_number_of_extra_keys_count() -> None:
    """Covers: A7, A9. The last two carry the same bytes, cut at another place."""
    root = root_hash(NAMESPACE)
    keys: list[list[ExtraKey]] = [
        [],
        [CAT],
        [CAT, CAT],
        [CAT, DOG],
        [DOG, CAT],
        [ExtraKey("video", CAT.digest)],
        [ExtraKey("a", b"b" * 17)],
        [ExtraKey("ab", b"b" * 16)],
    ]
    assert len({block_hash(root, [1], some) for some in keys}) == len(keys)


def test_extra_keys_of_a_block_that_is_not_full_are_not_used_yet() -> None:
    ids = list(range(6))
    assert chain(NAMESPACE, ids, block_tokens=4, extra_keys={1: [CAT]}) == chain(NAMESPACE, ids, block_tokens=4)


@pytest.mark.parametrize(("num_tokens", "index"), [(8, 2), (6, 2), (8, -1), (0, 0)])
def test_extra_key_at_an_index_that_names_no_block_is_refused(num_tokens: int, index: int) -> None:
    """Covers: A7. Ignored, a token's position passed for a block's would let two images share a hash."""
    with pytest.raises(InvalidRequest, match=f"got {index}; pass indices of blocks, not of tokens"):
        chain(NAMESPACE, range(num_tokens), block_tokens=4, extra_keys={index: [CAT]})


# ---- token ids ----


class Tensor:
    """Converts to an array on demand, as a torch tensor in host memory does."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.arange(9, dtype=np.int64)


@pytest.mark.parametrize(
    "ids",
    [
        range(9),
        tuple(range(9)),
        array("H", range(9)),
        [np.int64(i) for i in range(9)],
        np.arange(9),
        np.arange(9, dtype=np.uint8),
        np.arange(9, dtype=">i4"),
        np.arange(18, dtype=np.uint64)[::2] // 2,
        Tensor(),
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}",
)
def test_every_kind_of_integer_sequence_gives_the_same_chain(ids: Any) -> None:
    """Covers: G1."""
    assert chain(NAMESPACE, ids, block_tokens=4) == chain(NAMESPACE, list(range(9)), block_tokens=4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, -1], "token_ids[2]: expected an int from 0 to 4294967295, got -1; "),
        ([1, 2**32], "token_ids[1]: expected an int from 0 to 4294967295, got 4294967296; "),
        ([1, 2**70], "token_ids[1]: expected an int from 0 to 4294967295, got 1180591620717411303424; "),
        ([1, 2.0], "token_ids[1]: expected an int from 0 to 4294967295, got 2.0; "),
        ([1, np.array(2.0)], "token_ids[1]: expected an int from 0 to 4294967295, got array(2.); "),
        ([None], "token_ids[0]: expected an int from 0 to 4294967295, got None; "),
        ("abcd", "token_ids[0]: expected an int from 0 to 4294967295, got 'a'; "),
        (np.array([5, -7]), "token_ids[1]: expected an int from 0 to 4294967295, got -7; "),
        (np.array([2**40]), "token_ids[0]: expected an int from 0 to 4294967295, got 1099511627776; "),
        (np.array([1.0]), "token_ids: expected a 1-D array of integers, got 1-D float64; "),
        (np.array([True]), "token_ids: expected a 1-D array of integers, got 1-D bool; "),
        (np.array([[1, 2]]), "token_ids: expected a 1-D array of integers, got 2-D int64; "),
    ],
)
def test_token_id_that_is_no_u32_is_refused_by_index_and_value(ids: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chain(NAMESPACE, ids, block_tokens=1)
    assert str(caught.value).startswith(message)


def test_arguments_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="namespace: expected 32 bytes, got 64; pass the digest, not its hex"):
        root_hash(Namespace(b"0" * 64))
    with pytest.raises(InvalidRequest, match="parent: expected 32 bytes, got 0; "):
        block_hash(BlockHash(b""), [1])
    with pytest.raises(InvalidRequest, match="token_ids: expected the tokens of one full block, got none; "):
        block_hash(root_hash(NAMESPACE), [])
    for block_tokens in (0, -1, 2**32, True):
        with pytest.raises(InvalidRequest, match=f"block_tokens: expected an int from 1 .*, got {block_tokens}; "):
            chain(NAMESPACE, [1], block_tokens=block_tokens)


# ---- packing ----


@given(st.lists(st.binary(min_size=32, max_size=32).map(BlockHash), max_size=8))
def test_unpack_undoes_pack(hashes: list[BlockHash]) -> None:
    assert unpack(pack(hashes)).tolist() == hashes
    assert pack(hashes) == b"".join(hashes)


def test_unpacked_hashes_are_bytes_and_keep_their_zeros() -> None:
    (value,) = unpack(bytes(32)).tolist()
    assert type(value) is bytes
    assert value == bytes(32)


def test_hash_of_another_length_is_refused_where_it_stands() -> None:
    with pytest.raises(InvalidRequest, match=r"hashes\[1\]: expected 32 bytes, got 31; "):
        pack([BlockHash(bytes(32)), BlockHash(bytes(31)), BlockHash(bytes(33))])
    with pytest.raises(InvalidRequest, match="hashes: expected a multiple of 32 bytes, got 33; "):
        unpack(bytes(33))
