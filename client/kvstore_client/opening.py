"""The client for an address: of one daemon, or of a store of several."""

from typing import TypeAlias

from kvstore.spec import KVSpec
from kvstore.wire import CLUSTER_SCHEME
from kvstore_client.client import DEFAULT_OPTIONS, KVClient
from kvstore_client.cluster import ClusterClient
from kvstore_client.cluster_load import ClusterLoad
from kvstore_client.cluster_write import ClusterWrite
from kvstore_client.load import Load
from kvstore_client.options import ClientOptions
from kvstore_client.write import Write

Client: TypeAlias = KVClient | ClusterClient
AnyLoad: TypeAlias = Load | ClusterLoad
AnyWrite: TypeAlias = Write | ClusterWrite


def connect(address: str, spec: KVSpec, *, options: ClientOptions = DEFAULT_OPTIONS) -> Client:
    """A client of the daemon at "unix:/path" or "host:port", or of the store at "kvstore://host:port,unix:/path,...".

    Neither waits nor fails if nobody is there. Raises: InvalidRequest, if the address of a store is none.
    """
    kind: type[KVClient] | type[ClusterClient] = ClusterClient if address.startswith(CLUSTER_SCHEME) else KVClient
    return kind(address, spec, options=options)
