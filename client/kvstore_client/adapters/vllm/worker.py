"""Worker side: moves the bytes of one rank, as the step's plan says. Never raises into a forward pass."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore_client.adapters.vllm.caches import LayerCache, Tensor
from kvstore_client.adapters.vllm.counters import Tally
from kvstore_client.adapters.vllm.groups import CacheGroups
from kvstore_client.adapters.vllm.identity import Identity
from kvstore_client.adapters.vllm.loads import LoadResults, Loads
from kvstore_client.adapters.vllm.options import ConnectorOptions
from kvstore_client.adapters.vllm.planning import StepPlan
from kvstore_client.adapters.vllm.saves import Saves
from kvstore_client.opening import Client

_log: Final = logging.getLogger("vllm.kvstore")


class WorkerSide:
    """One rank's way to the store. Its client is made when the first plan says for which identity."""

    def __init__(
        self,
        *,
        options: ConnectorOptions,
        rank: int,  # whose parts these are; ranks that hold the same piece share a number
        saves: bool,  # False: another rank saves that piece
        spec_for: Callable[[Identity], KVSpec],
        open_client: Callable[[KVSpec], Client],
    ) -> None:
        self.tally = Tally()
        self._options, self._rank, self._may_save = options, rank, saves
        self._spec_for, self._open_client = spec_for, open_client
        self._identity: Identity | None = None
        self._client: Client | None = None
        self._layer_of: dict[str, int] = {}
        self._loads: Loads | None = None
        self._saves: Saves | None = None
        self._plan: StepPlan | None = None

    def register(self, tensors: Mapping[str, Tensor], groups: CacheGroups, *, num_blocks: int) -> None:
        """The engine's cache is known: one tensor for each layer.

        Raises: InvalidRequest, if a layer's blocks have another size than the scheduler side will expect.
        """
        import kvstore.v1.kvstore_pb2_grpc  # noqa: F401 - while the engine starts, and not while its first step waits

        spec = self._spec_for(Identity("unknown", ""))
        parts = list(spec.rank_parts(self._rank))
        layers = groups.layers
        caches = [LayerCache(tensors[layer.name], num_blocks=num_blocks, group=layer.group) for layer in layers]
        for layer, cache, part in zip(layers, caches, parts, strict=True):
            if cache.block_bytes != spec.part_bytes[part]:
                raise InvalidRequest(
                    f"{layer.name}: expected blocks of {spec.part_bytes[part]} bytes, got {cache.block_bytes}; this "
                    "engine lays out its cache in a way that the connector does not know"
                )
        self._layer_of = {layer.name: index for index, layer in enumerate(layers)}
        self._loads = Loads(caches, parts, fails_whole=groups.fails_whole, options=self._options, tally=self.tally)
        self._saves = Saves(caches, parts, options=self._options, tally=self.tally)
        _log.info("kvstore: rank %d: %d layers, %r", self._rank, len(layers), caches[0])

    def begin_step(self, plan: StepPlan) -> None:
        """The plan is bound, and room for what it saves is being reserved."""
        self._plan = plan
        if plan.identity != self._identity:
            self._adopt(plan.identity)
        if self._saves is not None and self._client is not None:
            self._saves.begin_step(self._client, plan.saves if self._may_save else ())

    def start_loads(self) -> None:
        """The step's loads are under way."""
        if self._loads is not None and self._plan is not None:
            for job in self._plan.loads:
                self._loads.begin(self._client, job)

    def wait_layer(self, name: str) -> None:
        """What the step loads of this layer is in place, or has failed."""
        layer = self._layer_of.get(name)  # None: it keeps no keys of its own
        if layer is not None and self._loads is not None and self._plan is not None and self._plan.loads:
            self._loads.wait_layer(layer)

    def layer_computed(self, name: str) -> None:
        """What the step saves of this layer is with the store, or on its way there."""
        layer = self._layer_of.get(name)
        if layer is not None and self._saves is not None and self._plan is not None and self._plan.saves:
            self._saves.layer_computed(layer)

    def end_saves(self) -> None:
        """The engine may reuse every block: what the step saves was copied."""
        if self._saves is not None:
            self._saves.end_step()

    def end_loads(self) -> LoadResults:
        """What became of loads that ended in this step, or in the background since the last."""
        plan, self._plan = self._plan, None
        if self._loads is None:
            return LoadResults()
        return self._loads.end_step(idle=plan is not None and plan.idle)

    def close(self) -> None:
        """The session has ended, after the saves under way; loads under way have failed. Idempotent."""
        if self._saves is not None:
            self._saves.close()
        if self._client is not None:
            self._client.close()
        if self._loads is not None:
            self._loads.close()

    def _adopt(self, identity: Identity) -> None:
        """From now on blocks are those of this identity. Loads and saves under way have failed."""
        former, self._client = self._client, None
        if former is not None:
            former.close()
        self._identity = identity
        self._client = self._open_client(self._spec_for(identity))
