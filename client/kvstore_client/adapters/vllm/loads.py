"""Loads of one rank: within the forward pass, layer by layer, or in the background until all has arrived.

Nothing here raises for what the store does. A load that fails is reported, its blocks are named as invalid, and the
engine computes them.
"""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from kvstore.errors import StoreUnavailable
from kvstore_client.adapters.vllm.caches import LayerCache
from kvstore_client.adapters.vllm.counters import Tally
from kvstore_client.adapters.vllm.options import ConnectorOptions
from kvstore_client.adapters.vllm.planning import LoadJob
from kvstore_client.buffers import RowsLike
from kvstore_client.opening import AnyLoad, Client

MAX_BACKGROUND_LOADS: Final = 32  # at a time; further ones wait for their turn, within their time
IDLE_WAIT_S: Final = 0.002  # an engine that waits for a load would take a core from it, by asking without pause

_log: Final = logging.getLogger("vllm.kvstore")


@dataclass(slots=True, eq=False)
class _Running:
    """One job. `num_good`: leading blocks that are in place; None while it is not over."""

    job: LoadJob
    deadline: float
    block_ids: dict[int, list[int]] = field(default_factory=dict)  # by layer: the engine's blocks that are filled
    targets: dict[int, RowsLike] = field(default_factory=dict)  # by layer: their rows
    loads: dict[int, AnyLoad] = field(default_factory=dict)  # by layer; those that need the same blocks share one
    num_good: int | None = None


@dataclass(slots=True)
class LoadResults:
    """What a step has to report."""

    loaded: set[str] = field(default_factory=set)  # requests whose blocks are all in place
    failed: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)  # of those, the ones that were loaded in the background
    lost: set[str] = field(default_factory=set)  # of those that failed, the ones of which no token was loaded
    invalid_block_ids: set[int] = field(default_factory=set)


class Loads:
    """The loads of one rank. `caches` and `parts` are by layer, from layer 0 up.

    `fails_whole`: a load that fails is lost as a whole, and its request told instead of its blocks.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        parts: Sequence[int],
        *,
        fails_whole: bool,
        options: ConnectorOptions,
        tally: Tally,
    ) -> None:
        self._caches, self._parts, self._fails_whole = caches, parts, fails_whole
        self._options, self._tally = options, tally
        self._pool = ThreadPoolExecutor(MAX_BACKGROUND_LOADS, thread_name_prefix="kvstore-load")
        self._within: list[_Running] = []  # what this step's forward pass waits for
        self._changed = threading.Condition()
        self._over: list[_Running] = []  # ended in the background, not reported yet
        self._num_background = 0  # under way there
        self._failures_in_a_row = 0

    def begin(self, client: Client | None, job: LoadJob) -> None:
        """The load is under way. One in the background takes no time of the caller."""
        timeout_s = self._options.follow_timeout_s if job.follow else self._options.load_timeout_s
        running = _Running(job, time.monotonic() + timeout_s)
        self._tally.add("loads")
        if job.within_forward:
            self._within.append(running)
            self._locate(client, running)
        else:
            self._num_background += 1
            self._pool.submit(self._run, client, running)

    def wait_layer(self, layer: int) -> None:
        """This layer of all that the forward pass needs is in place, or its load has failed."""
        for running in self._within:
            if running.num_good is not None:
                continue
            try:
                running.loads[layer].wait_part(self._parts[layer], max(0.0, running.deadline - time.monotonic()))
                self._caches[layer].settle(running.block_ids[layer], running.targets[layer])
                self._tally.add("layers_waited")
            except Exception as error:
                self._failed(running, error, num_good=0)

    def end_step(self, *, idle: bool) -> LoadResults:
        """What has ended, in this step's forward pass or in the background, and was not reported before.

        If the engine is idle but for loads in the background, waits for a moment for one to end.
        """
        results = LoadResults()
        for running in self._within:
            if running.num_good is None:
                self._ended(running)
        ended, self._within = self._within, []
        with self._changed:
            if idle and self._num_background and not self._over:
                self._changed.wait(IDLE_WAIT_S)
            self._num_background -= len(self._over)
            ended += self._over
            self._over = []
        for running in ended:
            job, num_good = running.job, running.num_good or 0
            if not job.within_forward:
                results.finished.add(job.request_id)
                for layer, target in running.targets.items():
                    self._caches[layer].settle(running.block_ids[layer][:num_good], target)
            (results.loaded if num_good == len(job.hashes) else results.failed).add(job.request_id)
            if not self._fails_whole:
                results.invalid_block_ids.update(*(ids[num_good:] for ids in job.block_ids))
            elif num_good < len(job.hashes):
                results.lost.add(job.request_id)
            self._tally.add("blocks_loaded", num_good)
        return results

    def close(self) -> None:
        """No load is under way any more; those that were have failed."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _locate(self, client: Client | None, running: _Running) -> None:
        """What each layer needs is under way."""
        job = running.job
        try:
            if client is None:
                raise StoreUnavailable("no client: the scheduler side has not said for which model")
            for needed, layers in self._layers_by_need(job).items():
                for layer in layers:
                    cache = self._caches[layer]
                    running.block_ids[layer] = [job.block_ids[cache.group][index] for index in needed]
                    running.targets[layer] = cache.target(running.block_ids[layer])
                load = client.load(
                    [job.hashes[index] for index in needed],
                    segments=None if job.segments is None else job.segments[list(needed)],
                    into={self._parts[layer]: running.targets[layer] for layer in layers},
                    parts=[self._parts[layer] for layer in layers],
                    follow=job.follow,
                    timeout_s=self._options.timeout_s,
                )
                running.loads |= dict.fromkeys(layers, load)
        except Exception as error:
            self._failed(running, error, num_good=0)

    def _layers_by_need(self, job: LoadJob) -> dict[tuple[int, ...], list[int]]:
        """The blocks that are needed, by index, and the layers that need just these."""
        needs = [job.needed(group) for group in range(len(job.block_ids))]
        layers: dict[tuple[int, ...], list[int]] = {}
        for layer, cache in enumerate(self._caches):
            if needs[cache.group]:
                layers.setdefault(needs[cache.group], []).append(layer)
        return layers

    def _run(self, client: Client | None, running: _Running) -> None:
        """On a thread of the pool: from the beginning to the end of one load in the background."""
        self._locate(client, running)
        self._ended(running)
        with self._changed:
            self._over.append(running)
            self._changed.notify()

    def _ended(self, running: _Running) -> None:
        """Nothing is written to the engine's blocks any more, and how many are good is known."""
        if running.num_good is not None:
            return
        loads = list(dict.fromkeys(running.loads.values()))
        try:
            results = [load.wait(max(0.0, running.deadline - time.monotonic())) for load in loads]
        except Exception as error:
            self._failed(running, error, num_good=0)
            return
        num_good = len(running.job.hashes)
        if any(result.num_loaded < load.num_blocks for result, load in zip(results, loads, strict=True)):
            # Within a forward pass, layers before this one were computed with what is wrong now.
            whole = self._fails_whole or running.job.within_forward
            num_good = 0 if whole else results[0].num_loaded
        errors = [result.errors[min(result.errors)] for result in results if result.errors]
        if errors:
            self._failed(running, errors[0], num_good=num_good)
        else:
            running.num_good = num_good
            self._failures_in_a_row = 0

    def _failed(self, running: _Running, error: Exception, *, num_good: int) -> None:
        for load in running.loads.values():
            load.cancel()  # before the engine hears of it, and gives the blocks to others
        for layer, block_ids in running.block_ids.items():
            # Bytes that are no numbers would spoil even what kernels multiply by zero: tokens that are not there yet.
            self._caches[layer].clear(block_ids[num_good:])
        running.num_good = num_good
        self._tally.add("load_failures")
        level = logging.DEBUG if self._failures_in_a_row else logging.WARNING
        self._failures_in_a_row += 1
        _log.log(
            level,
            "kvstore: load of %d blocks for request %s failed (%s: %s); the engine computes them",
            len(running.job.hashes) - num_good,
            running.job.request_id,
            type(error).__name__,
            error,
        )
