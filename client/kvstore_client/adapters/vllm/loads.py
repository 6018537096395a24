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
from kvstore_client.client import KVClient
from kvstore_client.load import Load

MAX_BACKGROUND_LOADS: Final = 32  # at a time; further ones wait for their turn, within their time
IDLE_WAIT_S: Final = 0.002  # an engine that waits for a load would take a core from it, by asking without pause

_log: Final = logging.getLogger("vllm.kvstore")


@dataclass(slots=True, eq=False)
class _Running:
    """One load. `num_good`: leading blocks that are in place; None while it is not over."""

    job: LoadJob
    deadline: float
    targets: list[RowsLike]  # by layer
    load: Load | None = None
    num_good: int | None = None


@dataclass(slots=True)
class LoadResults:
    """What a step has to report."""

    loaded: set[str] = field(default_factory=set)  # requests whose blocks are all in place
    failed: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)  # of those, the ones that were loaded in the background
    invalid_block_ids: set[int] = field(default_factory=set)


class Loads:
    """The loads of one rank. `caches` and `parts` are by layer, from layer 0 up."""

    def __init__(
        self, caches: Sequence[LayerCache], parts: Sequence[int], *, options: ConnectorOptions, tally: Tally
    ) -> None:
        self._caches, self._parts = caches, parts
        self._options, self._tally = options, tally
        self._pool = ThreadPoolExecutor(MAX_BACKGROUND_LOADS, thread_name_prefix="kvstore-load")
        self._within: list[_Running] = []  # what this step's forward pass waits for
        self._changed = threading.Condition()
        self._over: list[_Running] = []  # ended in the background, not reported yet
        self._num_background = 0  # under way there
        self._failures_in_a_row = 0

    def begin(self, client: KVClient | None, job: LoadJob) -> None:
        """The load is under way. One in the background takes no time of the caller."""
        timeout_s = self._options.follow_timeout_s if job.follow else self._options.load_timeout_s
        targets = [cache.target(job.block_ids) for cache in self._caches]
        running = _Running(job, time.monotonic() + timeout_s, targets)
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
            if running.load is None or running.num_good is not None:
                continue
            try:
                running.load.wait_part(self._parts[layer], max(0.0, running.deadline - time.monotonic()))
                self._caches[layer].settle(running.job.block_ids, running.targets[layer])
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
                for cache, target in zip(self._caches, running.targets, strict=True):
                    cache.settle(job.block_ids[:num_good], target)
            results.invalid_block_ids.update(job.block_ids[num_good:])
            (results.loaded if num_good == len(job.block_ids) else results.failed).add(job.request_id)
            self._tally.add("blocks_loaded", num_good)
        return results

    def close(self) -> None:
        """No load is under way any more; those that were have failed."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _locate(self, client: KVClient | None, running: _Running) -> None:
        job = running.job
        try:
            if client is None:
                raise StoreUnavailable("no client: the scheduler side has not said for which model")
            running.load = client.load(
                job.hashes,
                into=dict(zip(self._parts, running.targets, strict=True)),
                parts=self._parts,
                follow=job.follow,
                timeout_s=self._options.timeout_s,
            )
        except Exception as error:
            self._failed(running, error, num_good=0)

    def _run(self, client: KVClient | None, running: _Running) -> None:
        """On a thread of the pool: from the beginning to the end of one load in the background."""
        self._locate(client, running)
        if running.load is not None:
            self._ended(running)
        with self._changed:
            self._over.append(running)
            self._changed.notify()

    def _ended(self, running: _Running) -> None:
        """Nothing is written to the engine's blocks any more, and how many are good is known."""
        if running.load is None:
            return
        try:
            result = running.load.wait(max(0.0, running.deadline - time.monotonic()))
        except Exception as error:
            self._failed(running, error, num_good=0)
            return
        num_good = result.num_loaded
        if result.errors and running.job.within_forward:
            num_good = 0  # layers before this one were computed with what is wrong now
        if result.errors:
            self._failed(running, result.errors[min(result.errors)], num_good=num_good)
        else:
            running.num_good = num_good
            self._failures_in_a_row = 0

    def _failed(self, running: _Running, error: Exception, *, num_good: int) -> None:
        running.num_good = num_good
        self._tally.add("load_failures")
        level = logging.DEBUG if self._failures_in_a_row else logging.WARNING
        self._failures_in_a_row += 1
        _log.log(
            level,
            "kvstore: load of %d blocks for request %s failed (%s: %s); the engine computes them",
            len(running.job.block_ids) - num_good,
            running.job.request_id,
            type(error).__name__,
            error,
        )
