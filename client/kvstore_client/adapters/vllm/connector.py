"""What vLLM calls: each method goes to the side that this instance is of."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore_client.adapters.vllm.caches import Tensor
from kvstore_client.adapters.vllm.counters import Tally
from kvstore_client.adapters.vllm.groups import NULL_BLOCK, check_options, groups_of
from kvstore_client.adapters.vllm.identity import Identity, check_config, check_version, spec_of, weights_revision
from kvstore_client.adapters.vllm.loads import LoadResults
from kvstore_client.adapters.vllm.options import ConnectorOptions, Granularity
from kvstore_client.adapters.vllm.planning import StepPlan
from kvstore_client.adapters.vllm.scheduler import WORTH_TOKENS, SchedulerSide
from kvstore_client.adapters.vllm.stats import KVStorePromMetrics, KVStoreStats
from kvstore_client.adapters.vllm.worker import WorkerSide
from kvstore_client.opening import Client, connect
from kvstore_client.options import ClientOptions

_log: Final = logging.getLogger("vllm.kvstore")


@dataclass
class PlanMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler side to every worker, once a step."""

    plan: StepPlan


@dataclass
class LoadReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler side: what became of loads. Of one request a failure on any rank counts."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: "LoadReport") -> "LoadReport":
        failed = self.failed | other.failed
        return LoadReport((self.loaded | other.loaded) - failed, failed)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Saves what this engine computes, and loads what any engine of the same model has saved. Best effort."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises: InvalidRequest, if the version, the configuration or an option does not fit; it says what to do."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_version(vllm.__version__)
        check_config(vllm_config, kv_cache_config)
        self._options = ConnectorOptions.parse(self._kv_transfer_config.kv_connector_extra_config)
        self._options.check_transport()
        self._groups = groups_of(kv_cache_config)
        transfer = self._kv_transfer_config
        check_options(self._options, self._groups, saves=transfer.is_kv_producer, loads=transfer.is_kv_consumer)
        self._isa = _isa(vllm_config, kv_cache_config)
        self._results = LoadResults()
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler_side()
        else:
            self._worker = self._make_worker_side()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether the hooks around each layer must run: a graph of the whole forward pass would skip them."""
        options = ConnectorOptions.parse(extra_config)
        return not options.async_load or options.granularity in (Granularity.LAYER, Granularity.AUTO)

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Raises: InvalidRequest, if another block than the one expected stands for those that windows have left."""
        if gpu_block_pool.null_block.block_id != NULL_BLOCK:
            raise InvalidRequest(f"vLLM: expected null block {NULL_BLOCK}, got {gpu_block_pool.null_block.block_id}")

    def on_new_request(self, request: Any) -> None:
        self._planner.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._planner.num_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PlanMetadata:
        tables_of = scheduler_output.kv_connector_block_state.get_block_ids
        return PlanMetadata(self._planner.plan(scheduler_output.num_scheduled_tokens, tables_of))

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        loaded = set(connector_output.finished_recving or ())
        failed: set[str] = set()
        if isinstance(report, LoadReport):
            loaded |= report.loaded
            failed |= report.failed
        wrong = self._planner.heard(loaded=loaded - failed, failed=failed)
        if wrong and self._kv_cache_manager is not None:
            self._kv_cache_manager.evict_blocks(wrong)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def reset_cache(self) -> bool:
        self._planner.reset()
        return True

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._mover.register(kv_caches, self._groups, num_blocks=self._kv_cache_config.num_blocks)

    def bind_connector_metadata(self, connector_metadata: PlanMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._mover.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._mover.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._mover.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        self._mover.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        self._mover.end_saves()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        self._results = self._mover.end_loads()
        return KVConnectorTransferResults(
            finished_recving=set(self._results.finished), failed_recving=set(self._results.lost)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._results.invalid_block_ids

    def build_connector_worker_meta(self) -> LoadReport | None:
        results, self._results = self._results, LoadResults()
        loaded = results.loaded - results.finished  # those are told as finished, once every rank is
        return LoadReport(loaded, results.failed) if loaded or results.failed else None

    # Both.

    def get_kv_connector_stats(self) -> KVStoreStats | None:
        counts = self._tally.take()
        return KVStoreStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStoreStats:
        return KVStoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[Any]],
    ) -> KVStorePromMetrics:
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        return ()  # the daemon tells routers, for all engines at once

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # Inside.

    @property
    def _planner(self) -> SchedulerSide:
        assert self._scheduler is not None, "called on the worker side"
        return self._scheduler

    @property
    def _mover(self) -> WorkerSide:
        assert self._worker is not None, "called on the scheduler side"
        return self._worker

    @property
    def _tally(self) -> Tally:
        return self._scheduler.tally if self._scheduler is not None else self._mover.tally

    def _make_scheduler_side(self) -> SchedulerSide:
        options, transfer = self._options, self._kv_transfer_config
        model_config = self._vllm_config.model_config
        load_format = self._vllm_config.load_config.load_format
        revision = options.revision or weights_revision(model_config, str(load_format), find_commit=_hub_commit)
        spec = self._spec_for(Identity(revision, ""))
        _log.info(
            "kvstore: namespace %s… at %s: blocks of %d tokens and %d bytes, %d layers x %d ranks; loads %s; saves by "
            "%s%s; transport %s; role %s",
            spec.namespace.hex()[:12],
            options.address,
            spec.block_tokens,
            spec.block_bytes,
            spec.layers,
            spec.ranks,
            "in the background" if options.async_load else "within the forward pass, layer by layer",
            options.granularity.value,
            f" (layer by layer where a step computes {WORTH_TOKENS} tokens of a request, else at the end of the step)"
            if options.granularity == "auto"
            else "",
            options.transport,
            transfer.kv_role,
        )
        return SchedulerSide(
            options=options,
            revision=revision,
            block_tokens=spec.block_tokens,
            has_windows=self._groups.has_windows,
            saves=transfer.is_kv_producer,
            loads=transfer.is_kv_consumer,
            open_client=lambda identity: self._open_client(self._spec_for(identity), "scheduler"),
        )

    def _make_worker_side(self) -> WorkerSide:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        replicas = self._kv_cache_config.kv_tp_replicas
        tp_rank = get_tensor_model_parallel_rank()
        return WorkerSide(
            options=self._options,
            rank=tp_rank // replicas,
            saves=tp_rank % replicas == 0,
            spec_for=self._spec_for,
            open_client=lambda spec: self._open_client(spec, f"rank-{tp_rank}"),
        )

    def _spec_for(self, identity: Identity) -> KVSpec:
        return spec_of(
            self._vllm_config,
            self._kv_cache_config,
            version=vllm.__version__,
            isa=self._isa,
            identity=identity,
            tenant=self._options.tenant,
        )

    def _open_client(self, spec: KVSpec, side: str) -> Client:
        options = self._options
        name = f"vllm-{self._kv_transfer_config.engine_id}-{side}"[:256]
        client_options = ClientOptions(
            name=name,
            token=options.token,
            timeout_s=options.timeout_s,
            transport=options.transport,
            ucx_device=options.ucx_device,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
        )
        return connect(options.address, spec, options=client_options)


def _isa(vllm_config: Any, kv_cache_config: Any) -> str:
    """Which CPU kernels pack the keys; empty where none do."""
    if vllm_config.device_config.device_type != "cpu":
        return ""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    firsts = [next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values())) for spec in specs]
    return "+".join(sorted({_get_attn_isa(dtype, each.block_size, each.head_size, cache_dtype) for each in firsts}))


def _hub_commit(model: str, revision: str | None) -> str:
    """The commit of a model in the hub's cache; empty: it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return found.split("/snapshots/")[1].split("/")[0] if isinstance(found, str) else ""
