"""Proto messages to types and back; every size is bounded before anything is allocated for it.

Source: proto/kvstore/v1/kvstore.proto. Packed arrays are little-endian and unpadded.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, error_of
from kvstore.hashing import unpack
from kvstore.spec import MAX_PARTS, KVSpec
from kvstore.types import HASH_BYTES, HashArray, IntArray
from kvstore.v1 import kvstore_pb2 as pb

PROTOCOL_VERSION: Final = 1
MAX_MESSAGE_BYTES: Final = 64 << 20
CLUSTER_SCHEME: Final = "kvstore://"  # before the addresses of several daemons
MAX_HASHES: Final = 1 << 20
MAX_LEASE_BYTES: Final = 256
MAX_MESSAGE_TEXT: Final = 4096


def spec_to_proto(spec: KVSpec) -> pb.Spec:
    return pb.Spec(
        model=spec.model,
        revision=spec.revision,
        dtype=spec.dtype,
        block_tokens=spec.block_tokens,
        layers=spec.layers,
        ranks=spec.ranks,
        part_bytes=spec.part_bytes,
        layout=spec.layout,
        tenant=spec.tenant,
        hash_scheme=spec.hash_scheme,
        adapter=spec.adapter,
        adapter_revision=spec.adapter_revision,
        quantisation=spec.quantisation,
        salt=spec.salt,
    )


def spec_from_proto(message: pb.Spec) -> KVSpec:
    """The spec that the message describes. Raises: InvalidRequest, if a field is out of its bounds."""
    if len(message.part_bytes) > MAX_PARTS:
        raise InvalidRequest(f"spec.part_bytes: expected at most {MAX_PARTS} sizes, got {len(message.part_bytes)}")
    return KVSpec(
        model=message.model,
        revision=message.revision,
        dtype=message.dtype,
        block_tokens=message.block_tokens,
        layers=message.layers,
        ranks=message.ranks,
        part_bytes=tuple(message.part_bytes),
        layout=message.layout,
        tenant=message.tenant,
        hash_scheme=message.hash_scheme,
        adapter=message.adapter if message.HasField("adapter") else None,
        adapter_revision=message.adapter_revision if message.HasField("adapter_revision") else None,
        quantisation=message.quantisation if message.HasField("quantisation") else None,
        salt=message.salt,
    )


def unpack_hashes(data: bytes) -> HashArray:
    """`[n]` hashes of a request. Raises: InvalidRequest, if cut or more than `MAX_HASHES`."""
    if len(data) > MAX_HASHES * HASH_BYTES:
        raise InvalidRequest(
            f"hashes: expected at most {MAX_HASHES}, got {len(data) // HASH_BYTES}; ask in several requests"
        )
    return unpack(data)


def pack_u32(values: IntArray | Sequence[int]) -> bytes:
    return np.asarray(values).astype("<u4").tobytes()


def pack_u64(values: IntArray | Sequence[int]) -> bytes:
    return np.asarray(values).astype("<u8").tobytes()


def unpack_u32(data: bytes, *, name: str) -> IntArray:
    """`[n]` integers. Raises: InvalidRequest, if the length is no multiple of 4."""
    return _unpack(data, "<u4", name)


def unpack_u64(data: bytes, *, name: str) -> IntArray:
    """`[n]` integers, below 2**63. Raises: InvalidRequest, if one is not, or the length is no multiple of 8."""
    values = _unpack(data, "<u8", name)
    if values.size and values.min() < 0:
        raise InvalidRequest(f"{name}: expected integers below 2**63, got a larger one; check the packing")
    return values


def _unpack(data: bytes, dtype: str, name: str) -> IntArray:
    width = np.dtype(dtype).itemsize
    if len(data) % width:
        raise InvalidRequest(f"{name}: expected a multiple of {width} bytes, got {len(data)}; do not cut it")
    return np.frombuffer(data, dtype).astype(np.int64)


def status_of(error: KVStoreError) -> pb.Status:
    return pb.Status(code=error.code, message=str(error)[:MAX_MESSAGE_TEXT])


def error_from_status(status: pb.Status) -> KVStoreError:
    return error_of(status.code, status.message)
