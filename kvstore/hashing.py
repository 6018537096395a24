"""The block hash: 32 bytes that name a block by every token up to its end, and by what else shaped it.

Each hash covers its parent's, so equal hashes mean equal prefixes, and a list of them can be matched from
the left. All input is typed and counted; nothing depends on process, platform or language.

Source: docs/spec/identity.md, which defines the hash byte by byte; docs/spec/vectors.json checks it.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, SupportsIndex, TypeAlias

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.types import HASH_BYTES, BlockHash, HashArray, Namespace

MIN_DIGEST_BYTES: Final = 16
MAX_DIGEST_BYTES: Final = 64
MAX_KIND_BYTES: Final = 255

_ROOT_TAG: Final = b"kvstore/root/v1\0"
_BLOCK_TAG: Final = b"kvstore/block/v1\0"
_TOKEN_BYTES: Final = 4
_MAX_U32: Final = (1 << 32) - 1


class SupportsArray(Protocol):
    """An array of NumPy, or one that converts to it, such as a tensor in host memory."""

    def __array__(self) -> np.ndarray[Any, Any]: ...


TokenIds: TypeAlias = Sequence[SupportsIndex] | SupportsArray  # an array is 1-D, of an integer type


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something other than tokens that shaped a block: an image, say, by a digest of its content.

    `kind` says what it is (1 to 255 UTF-8 bytes); `digest` is 16 to 64 bytes. Anything shorter than 128 bits
    is refused, because two images that share it would be served each other's blocks.

    Raises: InvalidRequest, if kind or digest is out of these bounds.
    """

    kind: str
    digest: bytes

    def __post_init__(self) -> None:
        try:
            kind_bytes = len(self.kind.encode())
        except (AttributeError, UnicodeEncodeError):
            kind_bytes = 0
        if not 1 <= kind_bytes <= MAX_KIND_BYTES:
            raise InvalidRequest(
                f"extra key: expected a kind of 1 to {MAX_KIND_BYTES} UTF-8 bytes, got {self.kind!r:.80}; "
                "pass a short name such as 'image'"
            )
        if not isinstance(self.digest, bytes):
            raise InvalidRequest(
                f"extra key {self.kind!r}: expected a digest as bytes, got a {type(self.digest).__name__}; "
                "pass hashlib.sha256(content).digest()"
            )
        if not MIN_DIGEST_BYTES <= len(self.digest) <= MAX_DIGEST_BYTES:
            raise InvalidRequest(
                f"extra key {self.kind!r}: expected a digest of {MIN_DIGEST_BYTES} to {MAX_DIGEST_BYTES} "
                f"bytes, got {len(self.digest)}; pass the SHA-256 of the whole content"
            )


def root_hash(namespace: Namespace) -> BlockHash:
    """The parent of the first block of every chain in this namespace.

    Raises: InvalidRequest, if the namespace is not 32 bytes.
    """
    _check_digest("namespace", namespace)
    return BlockHash(hashlib.sha256(_ROOT_TAG + namespace).digest())


def block_hash(parent: BlockHash, token_ids: TokenIds, extra_keys: Sequence[ExtraKey] = ()) -> BlockHash:
    """The hash of the block that holds `token_ids` and follows `parent` (or the root).

    The order of `extra_keys` counts: two images in one block are not the same two the other way round.

    Raises: InvalidRequest, if the parent is not 32 bytes, there are no tokens, or an id is no u32.
    """
    _check_digest("parent", parent)
    tokens = _token_bytes(token_ids)
    if not tokens:
        raise InvalidRequest("token_ids: expected the tokens of one full block, got none; hash full blocks only")
    return _digest(parent, _u32(len(tokens) // _TOKEN_BYTES), tokens, _encode_keys(extra_keys))


def chain(
    namespace: Namespace,
    token_ids: TokenIds,
    *,
    block_tokens: int,
    extra_keys: Mapping[int, Sequence[ExtraKey]] | None = None,
) -> list[BlockHash]:
    """The hashes of all full blocks of `token_ids`, first to last; a partial block at the end has none.

    `extra_keys` maps a block's index to what else shaped that block. An index may be that of the partial
    block, whose keys are not used yet; one beyond it is refused: it cannot be meant as a block index.

    Raises: InvalidRequest, if an argument is out of bounds; it gives index and value of a token id at fault.
    """
    if type(block_tokens) is not int or not 1 <= block_tokens <= _MAX_U32:
        raise InvalidRequest(
            f"block_tokens: expected an int from 1 to {_MAX_U32}, got {block_tokens!r}; use the spec's"
        )
    tokens = _token_bytes(token_ids)
    size_bytes = block_tokens * _TOKEN_BYTES
    num_blocks = len(tokens) // size_bytes
    keys = {index: _encode_keys(block_keys) for index, block_keys in (extra_keys or {}).items()}
    num_begun = -(-len(tokens) // size_bytes)
    for index in keys:
        if not 0 <= index < num_begun:
            raise InvalidRequest(
                f"extra_keys: expected indices of the {num_begun} blocks that these tokens begin, "
                f"got {index}; pass indices of blocks, not of tokens"
            )
    count = _u32(block_tokens)
    parent = root_hash(namespace)
    hashes = []
    for index in range(num_blocks):
        start = index * size_bytes
        parent = _digest(parent, count, tokens[start : start + size_bytes], keys.get(index, _NO_KEYS))
        hashes.append(parent)
    return hashes


def pack(hashes: Sequence[BlockHash]) -> bytes:
    """The hashes end to end, 32 bytes each.

    Raises: InvalidRequest, if one of them is not 32 bytes.
    """
    if [*map(len, hashes)].count(HASH_BYTES) != len(hashes):
        for index, value in enumerate(hashes):
            _check_digest(f"hashes[{index}]", value)
    return b"".join(hashes)


def unpack(data: bytes) -> HashArray:
    """`[n]`: the hashes that `pack` put end to end, in place.

    Raises: InvalidRequest, if the length is no multiple of 32.
    """
    if len(data) % HASH_BYTES:
        raise InvalidRequest(f"hashes: expected a multiple of {HASH_BYTES} bytes, got {len(data)}; do not cut them")
    return np.frombuffer(data, dtype=f"V{HASH_BYTES}")


def _digest(parent: bytes, count: bytes, tokens: bytes, keys: bytes) -> BlockHash:
    return BlockHash(hashlib.sha256(b"".join((_BLOCK_TAG, parent, count, tokens, keys))).digest())


def _encode_keys(extra_keys: Sequence[ExtraKey]) -> bytes:
    """The number of keys (u32), then kind and digest of each, both preceded by their length (u32)."""
    pieces = [_u32(len(extra_keys))]
    for key in extra_keys:
        kind = key.kind.encode()
        pieces += (_u32(len(kind)), kind, _u32(len(key.digest)), key.digest)
    return b"".join(pieces)


def _token_bytes(token_ids: TokenIds) -> bytes:
    """The ids as little-endian u32, 4 bytes each."""
    if hasattr(token_ids, "__array__"):
        return _array_bytes(np.asarray(token_ids))
    layout = f"<{len(token_ids)}I"
    try:
        return struct.pack(layout, *token_ids)
    except (struct.error, TypeError):
        _refuse_first(token_ids)


def _array_bytes(ids: np.ndarray[Any, Any]) -> bytes:
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest(
            f"token_ids: expected a 1-D array of integers, got {ids.ndim}-D {ids.dtype}; convert it first"
        )
    if ids.size and (ids.min() < 0 or ids.max() > _MAX_U32):
        _refuse_first(ids.tolist())
    return ids.astype("<u4").tobytes()


def _refuse_first(token_ids: Sequence[Any]) -> NoReturn:
    """Raise for the first id that does not fit into a u32, by its index and value."""
    for index, value in enumerate(token_ids):
        try:
            _u32(value)
        except (struct.error, TypeError):
            raise InvalidRequest(
                f"token_ids[{index}]: expected an int from 0 to {_MAX_U32}, got {value!r:.80}; "
                "pass token ids as the tokenizer gave them"
            ) from None
    raise AssertionError("every id fits into a u32")


def _check_digest(name: str, value: bytes) -> None:
    if len(value) != HASH_BYTES:
        raise InvalidRequest(f"{name}: expected {HASH_BYTES} bytes, got {len(value)}; pass the digest, not its hex")


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


_NO_KEYS: Final = _encode_keys(())
