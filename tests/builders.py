"""What tests are made of: specs, chains, bytes that belong to one block."""

import hashlib

import numpy as np

from kvstore.hashing import chain as chain_of
from kvstore.hashing import pack, unpack
from kvstore.spec import KVSpec
from kvstore.types import BlockHash, ByteArray, HashArray


def spec(
    *,
    layers: int = 2,
    ranks: int = 1,
    block_tokens: int = 4,
    bytes_per_part: int = 64,
    model: str = "model",
    dtype: str = "uint8",
    **fields: object,
) -> KVSpec:
    """A small spec; two that differ in any field have different namespaces."""
    return KVSpec.uniform(
        model=model,
        revision="r1",
        dtype=dtype,
        block_tokens=block_tokens,
        layers=layers,
        ranks=ranks,
        bytes_per_part=bytes_per_part,
        layout="test",
        **fields,  # type: ignore[arg-type]
    )


def chain(length: int, *, of: KVSpec | None = None, seed: int = 0) -> list[BlockHash]:
    """The hashes of `length` blocks; chains of different seeds share none."""
    kv = of or spec()
    return chain_of(kv.namespace, [seed, *range(1, length * kv.block_tokens)], block_tokens=kv.block_tokens)


def block_bytes(kv: KVSpec, block_hash: BlockHash) -> ByteArray:
    """`[block_bytes]`: what this block holds in tests; no two hold the same. Structured, unless they are bare bytes."""
    held = random_bytes(kv, block_hash)
    if kv.dtype != "uint8":
        held[1::2] = 0x3C  # like numbers of about one size
    return held


def random_bytes(kv: KVSpec, block_hash: BlockHash) -> ByteArray:
    """`[block_bytes]` that are this block's, and cannot be compressed."""
    seed = int.from_bytes(hashlib.sha256(kv.namespace + block_hash).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, kv.block_bytes, dtype=np.uint8)


def rows(kv: KVSpec, hashes: list[BlockHash]) -> ByteArray:
    """`[num_blocks, block_bytes]`."""
    return np.stack([block_bytes(kv, block_hash) for block_hash in hashes])


def records(hashes: list[BlockHash]) -> HashArray:
    """`[num_blocks]`: the hashes as the daemon takes them."""
    return unpack(pack(hashes))
