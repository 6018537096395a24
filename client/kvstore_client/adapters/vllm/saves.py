"""Saves of one rank: reserved while the first layer computes, handed over by layer or by step, committed behind it.

Nothing here raises for what the store does: a save that fails is given up and counted. `Write.put` copies the bytes
before it returns, so the engine may reuse its blocks when the step is over, whatever becomes of the request.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from kvstore.errors import StoreTimeout
from kvstore.types import Outcome
from kvstore_client.adapters.vllm.caches import LayerCache
from kvstore_client.adapters.vllm.counters import Tally
from kvstore_client.adapters.vllm.options import ConnectorOptions
from kvstore_client.adapters.vllm.planning import SaveJob
from kvstore_client.opening import AnyWrite, Client

_log: Final = logging.getLogger("vllm.kvstore")


class _Save:
    """One save: its reservation under way, then its write; `over` when nothing more is to be put."""

    def __init__(self, job: SaveJob, reserving: "Future[AnyWrite]", deadline: float) -> None:
        self.job = job
        self.reserving = reserving
        self.deadline = deadline  # of the reservation
        self.write: AnyWrite | None = None
        self.next_layer = 0
        self.over = False


class Saves:
    """The saves of one rank. `caches` and `parts` are by layer, from layer 0 up."""

    def __init__(
        self, caches: Sequence[LayerCache], parts: Sequence[int], *, options: ConnectorOptions, tally: Tally
    ) -> None:
        self._caches, self._parts = caches, parts
        self._options, self._tally = options, tally
        self._reservations = ThreadPoolExecutor(1, thread_name_prefix="kvstore-reserve")
        self._commits = ThreadPoolExecutor(1, thread_name_prefix="kvstore-commit")
        self._open: list[_Save] = []  # of this step
        self._failures_in_a_row = 0

    def begin_step(self, client: Client, jobs: Sequence[SaveJob]) -> None:
        """Reservations for this step's saves are under way."""
        self._abandon()
        for job in jobs:
            self._tally.add("saves")
            deadline = time.monotonic() + self._options.timeout_s
            reserving = self._reservations.submit(self._reserve, client, job)
            self._open.append(_Save(job, reserving, deadline))

    def layer_computed(self, layer: int) -> None:
        """This layer of the saves that go layer by layer is with the store, or on its way there."""
        for save in self._open:
            if save.job.by_layer and save.next_layer == layer:
                self._put(save, layer)
                if not save.over:
                    self._tally.add("layers_saved")

    def end_step(self) -> None:
        """All that this step saves is with the store, or on its way there; it is committed in the background."""
        for save in self._open:
            for layer in range(save.next_layer, len(self._parts)):
                self._put(save, layer)
            if save.write is not None and not save.over:
                self._commits.submit(self._commit, save, save.write)
        self._open = []

    def close(self) -> None:
        """No save is under way any more."""
        self._abandon()
        self._reservations.shutdown(wait=True, cancel_futures=True)
        self._commits.shutdown(wait=True)

    def _reserve(self, client: Client, job: SaveJob) -> AnyWrite:
        """On the reserving thread."""
        return client.store(
            job.hashes,
            parent=job.parent,
            parts=self._parts,
            segments=job.segments,
            timeout_s=self._options.timeout_s,
        )

    def _put(self, save: _Save, layer: int) -> None:
        save.next_layer = layer + 1
        if save.over:
            return
        try:
            if save.write is None:
                save.write = save.reserving.result(max(0.0, save.deadline - time.monotonic()))
            if save.write.num_new:
                cache = self._caches[layer]
                rows = cache.source(save.job.block_ids[cache.group])
                save.write.put(self._parts[layer], rows, timeout_s=self._options.timeout_s)
        except Exception as error:
            self._give_up(save, error)

    def _commit(self, save: _Save, write: AnyWrite) -> None:
        """On the committing thread."""
        reserved = set(write.new_blocks)
        try:
            outcomes = write.commit(self._options.timeout_s)
        except Exception as error:
            self._give_up(save, error)
            return
        self._failures_in_a_row = 0
        for index, outcome in enumerate(outcomes):
            if outcome in (Outcome.FULL, Outcome.ORPHAN):
                self._tally.add("blocks_refused")
            elif index not in reserved:
                self._tally.add("blocks_known")
            elif outcome is not Outcome.FAILED:
                self._tally.add("blocks_saved")

    def _give_up(self, save: _Save, error: Exception) -> None:
        if isinstance(error, TimeoutError) and not isinstance(error, StoreTimeout):
            error = StoreTimeout("reservation: not answered within the deadline")
        save.over = True
        save.reserving.add_done_callback(self._abort)
        self._tally.add("save_failures")
        level = logging.DEBUG if self._failures_in_a_row else logging.WARNING
        self._failures_in_a_row += 1
        _log.log(level, "kvstore: a save failed (%s: %s); the engine goes on", type(error).__name__, error)

    def _abandon(self) -> None:
        """What a step left behind that did not come to its end, is given up: its bytes may be anything."""
        for save in self._open:
            save.over = True
            save.reserving.add_done_callback(self._abort)
        self._open = []

    def _abort(self, reserving: "Future[AnyWrite]") -> None:
        """The write, if there is one, is given up, and nobody waits for that."""
        if not reserving.cancelled() and reserving.exception() is None:
            try:
                self._commits.submit(reserving.result().abort)
            except RuntimeError:  # closed: the session, which ends, takes it along
                return
