"""The client of kvstore: match, load and store KV blocks, with a deadline and typed errors on each call."""

from kvstore.errors import (
    AlreadyStored,
    BlockCorrupt,
    BlockMissing,
    InvalidRequest,
    KVStoreError,
    MembersChanged,
    NotAllowed,
    NotAuthenticated,
    SpecMismatch,
    StoreBug,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    Unsupported,
    WriterFailed,
)
from kvstore.spec import KVSpec
from kvstore.types import BlockHash, BootId, Namespace, Outcome
from kvstore_client.breaker import BreakerState
from kvstore_client.buffers import BlockRows
from kvstore_client.client import KVClient
from kvstore_client.cluster import ClusterClient
from kvstore_client.cluster_load import ClusterLoad
from kvstore_client.cluster_write import ClusterWrite
from kvstore_client.load import Load, LoadResult
from kvstore_client.locate import Match
from kvstore_client.opening import Client, connect
from kvstore_client.options import ClientOptions, ClientStatistics
from kvstore_client.region import CudaRegion, Region
from kvstore_client.write import Write

__all__ = [
    "AlreadyStored",
    "BlockCorrupt",
    "BlockHash",
    "BlockMissing",
    "BlockRows",
    "BootId",
    "BreakerState",
    "Client",
    "ClientOptions",
    "ClientStatistics",
    "ClusterClient",
    "ClusterLoad",
    "ClusterWrite",
    "CudaRegion",
    "InvalidRequest",
    "KVClient",
    "KVSpec",
    "KVStoreError",
    "Load",
    "LoadResult",
    "Match",
    "MembersChanged",
    "Namespace",
    "NotAllowed",
    "NotAuthenticated",
    "Outcome",
    "Region",
    "SpecMismatch",
    "StoreBug",
    "StoreFull",
    "StoreTimeout",
    "StoreUnavailable",
    "Unsupported",
    "Write",
    "WriterFailed",
    "connect",
]
