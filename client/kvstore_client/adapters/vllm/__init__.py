"""vLLM's KV connector: what one engine has computed, every engine can load.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
                           "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"address": "unix:/run/kvstore/kvstore.sock"}}'

`connector` holds what vLLM calls, and picks the side by role: `scheduler` asks and plans, `worker` moves bytes. The
other modules import no vLLM: `options`, `identity`, `groups`, `planning`, `lookups`, `caches`, `loads`, `saves`,
`counters`.

Importing this package imports no vLLM, because vLLM calls `register` while it is being imported itself.
"""

from typing import Any

__all__ = ["KVStoreConnector", "register"]


def register() -> None:
    """The connector is known by its name. A plugin of vLLM's, called in each of its processes; idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KVStoreConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KVStoreConnector", __name__, "KVStoreConnector")


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":
        from kvstore_client.adapters.vllm.connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
