"""What vLLM shows of the connector: its periodic log line, and Prometheus series `vllm:kvstore_*`."""

from typing import Any, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvstore_client.adapters.vllm.counters import SERIES, sum_of

PromClass: TypeAlias = Any


class KVStoreStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name since the last time; both sides and all ranks are added up."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: "KVStoreStats") -> "KVStoreStats":
        return KVStoreStats(data=sum_of(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in SERIES if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class KVStorePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter for each name, one child for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, PromClass],
        labelnames: list[str],
        per_engine: dict[int, list[Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {}
        for name, says in SERIES.items():
            counter = self._counter_cls(name=f"vllm:kvstore_{name}", documentation=says, labelnames=labelnames)
            for engine, values in per_engine.items():
                self._counters[engine, name] = counter.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[engine_idx, name].inc(amount)
