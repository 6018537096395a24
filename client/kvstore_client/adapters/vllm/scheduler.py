"""Scheduler side: asks the store what it has, and plans what the workers load and save. No tensors, no blocking.

What keeps wrong bytes out of the store, and requests from being asked for ever:

- A request whose load failed is not loaded again: its tokens are computed.
- While it is not known whether a load within a forward pass succeeded, nothing is saved of any request that uses one of
  its blocks; with several ranks each knows only of its own part.
- Blocks that were computed upon a load that failed leave the engine's own prefix cache.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from kvstore.placement import segment_blocks, segments_from
from kvstore.types import AnyArray, BlockHash
from kvstore_client.adapters.vllm.counters import Tally
from kvstore_client.adapters.vllm.identity import Identity, adapter_digest, with_adapter
from kvstore_client.adapters.vllm.lookups import Lookup, Waits, lookup_pool
from kvstore_client.adapters.vllm.options import ConnectorOptions, Granularity
from kvstore_client.adapters.vllm.planning import LoadJob, Saved, SaveJob, StepPlan, saves_by_layer
from kvstore_client.breaker import BreakerState
from kvstore_client.opening import Client

Tables: TypeAlias = Sequence[Sequence[int]]  # the engine's blocks of one request, by KV cache group
TablesOf: TypeAlias = Callable[[str], Tables | None]

WORTH_TOKENS: Final = 256  # computed in a step: from here on `auto` saves layer by layer
# While the client's circuit breaker is open, only so often does a lookup reach it, to be refused or to be its probe.
PAUSE_S: Final = 0.5

_log: Final = logging.getLogger("vllm.kvstore")


@dataclass(slots=True)
class _Request:
    """What is known of one request of the engine's."""

    request: Any
    follows: bool  # its prefill may be under way elsewhere, and is waited for
    adapter: bytes | None  # digest of its LoRA adapter; None: it has none
    usable: bool  # False: its blocks cannot be named
    lookup: Lookup | None = None
    first: int = 0  # block with which the lookup begins
    loading: LoadJob | None = None
    denied: bool = False  # a load of it has failed
    saved: Saved = field(default_factory=Saved)


class SchedulerSide:
    """One engine's questions and plans. Runs on the scheduler's thread."""

    def __init__(
        self,
        *,
        options: ConnectorOptions,
        revision: str,
        block_tokens: int,
        has_windows: bool,  # some layers do not keep all tokens
        saves: bool,  # this instance writes to the store
        loads: bool,  # it reads from it
        open_client: Callable[[Identity], Client],
    ) -> None:
        self.tally = Tally()
        self._options, self._block_tokens = options, block_tokens
        # Within a forward pass at least one token is computed, for its logits. In the background the engine sees to
        # that itself, by going back one token: but of that one, a window may have left the block already.
        self._num_left = 1 if has_windows or not options.async_load else 0
        self._may_save, self._may_load = saves, loads
        self._open_client = open_client
        self._identity = Identity(revision, "")
        self._client = open_client(self._identity)
        self._pool: ThreadPoolExecutor = lookup_pool()
        self._waits = Waits(options.follow_timeout_s)
        self._requests: dict[str, _Request] = {}
        self._loads: list[LoadJob] = []  # for the next plan
        # Engine's blocks that are wrong if a load within a forward pass fails, by request: loaded, or computed upon it.
        self._unsure: dict[str, set[int]] = {}
        self._adapters: dict[str, bytes] = {}
        self._paused_until = 0.0

    def add(self, request: Any) -> None:
        """The request is known."""
        asked = (request.kv_transfer_params or {}).get("kvstore") == "follow"
        adapter, usable = None, True
        if request.lora_request is not None:
            adapter = self._adapter(request.lora_request.lora_path)
            usable = adapter is not None
        self._requests[request.request_id] = _Request(request, asked, adapter, usable)

    def num_matched_tokens(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        """(tokens behind the local ones that the store has, whether they load in the background); None: ask later."""
        state = self._requests.get(request.request_id)
        if state is None or not self._may_load or not state.usable or state.denied or state.loading:
            return 0, False
        if request.skip_reading_prefix_cache:
            return 0, False
        first = num_local_tokens // self._block_tokens
        end = (request.num_tokens - self._num_left) // self._block_tokens
        hashes = self._hashes(state, first, end)
        if not hashes:
            return 0, False
        if state.lookup is None or state.first != first or state.lookup.num_asked != len(hashes):
            if self._paused():
                self.tally.add("lookup_failures")
                state.denied = True
                return 0, False
            self._ask(state, first, hashes)
        assert state.lookup is not None
        answer = state.lookup.glance()
        if answer is None:
            return None, False
        may_follow = state.follows or not self._may_save
        num_found = answer.num_stored + (answer.num_writing if may_follow else 0)
        if state.follows and not answer.failed and num_found < len(hashes) and self._waits.go_on(request.request_id):
            self._drop_lookup(state)
            return None, False
        if answer.failed:
            self.tally.add("lookup_failures")
            state.denied = True
        if not num_found:
            self._drop_lookup(state)
            return 0, False
        return num_found * self._block_tokens, self._options.async_load

    def allocated(self, request: Any, tables: Tables, num_external_tokens: int) -> None:
        """The engine gave the request these blocks, the first of them local, and wants so many tokens loaded."""
        state = self._requests.get(request.request_id)
        if state is None or state.lookup is None or state.loading is not None:
            return
        if num_external_tokens <= 0:
            self._drop_lookup(state)
            return
        begin, end = state.first, state.first + num_external_tokens // self._block_tokens
        answer = state.lookup.glance()
        num_stored = answer.num_stored if answer is not None else 0
        job = LoadJob(
            request_id=request.request_id,
            hashes=tuple(self._hashes(state, begin, end)),
            block_ids=tuple(tuple(table[begin:end]) for table in tables),
            within_forward=not self._options.async_load,
            follow=end - begin > num_stored,
            segments=self._segments(state, begin, end),
        )
        state.loading = job
        if begin == 0:
            state.saved.num_blocks = end  # they are there
        self._loads.append(job)
        self.tally.add("lookup_hits")
        self.tally.add("hit_tokens", num_external_tokens)
        if job.within_forward:
            self._unsure[request.request_id] = set().union(*job.block_ids)

    def plan(self, num_scheduled_tokens: dict[str, int], tables_of: TablesOf) -> StepPlan:
        """What the workers do in the step that computes so many tokens of each request."""
        loads, self._loads = tuple(self._loads), []
        for request_id in self._unsure.keys() & num_scheduled_tokens.keys():
            if (state := self._requests.get(request_id)) and (tables := tables_of(request_id)):
                self._unsure[request_id].update(*(table[state.first :] for table in tables))
        saves = []
        if self._may_save:
            for request_id, num_tokens in num_scheduled_tokens.items():
                state = self._requests.get(request_id)
                if state is not None and state.usable and (job := self._save_of(state, num_tokens, tables_of)):
                    saves.append(job)
        return StepPlan(self._identity, loads, tuple(saves), idle=not num_scheduled_tokens)

    def heard(self, *, loaded: Iterable[str], failed: Iterable[str]) -> set[int]:
        """Loads that every rank has ended, and loads that failed on at least one.

        Returns the engine's blocks that may be wrong, and must leave its own prefix cache.
        """
        wrong: set[int] = set()
        for request_id in failed:
            wrong |= self._unsure.get(request_id, set())
            if state := self._requests.get(request_id):
                state.denied = True
                state.saved.num_blocks = 0  # what did not come may be lost: offer it again
        for request_id in (*loaded, *failed):
            self._unsure.pop(request_id, None)
            if state := self._requests.get(request_id):
                state.loading = None
                self._drop_lookup(state)
        return wrong

    def finished(self, request_id: str) -> None:
        """The request is over; nothing is held for it any more."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._drop_lookup(state)
        self._waits.forget(request_id)
        # A load under way within a forward pass is still unsure, for others that share its blocks.

    def reset(self) -> None:
        """From now on this engine's blocks are its own: its weights may have changed.

        The blocks of others, and of this engine before, stay in the store.
        """
        for state in self._requests.values():
            self._drop_lookup(state)
        self._identity = Identity(self._identity.revision, uuid.uuid4().hex)
        self._client.close()
        self._client = self._open_client(self._identity)
        _log.warning("kvstore: the cache was reset; until it restarts, this engine shares no blocks with others")

    def close(self) -> None:
        """The session has ended, and with it all that it held. Idempotent."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    # Inside.

    def _hashes(self, state: _Request, begin: int, end: int) -> list[BlockHash]:
        hashes: list[BlockHash] = state.request.block_hashes[begin:end]
        return hashes if state.adapter is None else with_adapter(hashes, state.adapter)

    def _segments(self, state: _Request, begin: int, end: int) -> AnyArray:
        """Of these blocks, which the store places by them."""
        length = segment_blocks(self._block_tokens)
        first = begin // length * length
        heads: list[BlockHash] = state.request.block_hashes[first:end:length]
        named = heads if state.adapter is None else with_adapter(heads, state.adapter)
        return segments_from(named, block_tokens=self._block_tokens)[begin - first : end - first]

    def _ask(self, state: _Request, first: int, hashes: list[BlockHash]) -> None:
        self._drop_lookup(state)
        self.tally.add("lookups")
        state.first = first
        where = self._segments(state, first, first + len(hashes))
        state.lookup = Lookup(self._client, hashes, where, self._pool, timeout_s=self._options.timeout_s)

    def _paused(self) -> bool:
        """Whether to ask is idle, since the store has not answered. Once in a while it is not."""
        if self._client.statistics().breaker is not BreakerState.OPEN:
            return False
        now = time.monotonic()
        if now < self._paused_until:
            return True
        self._paused_until = now + PAUSE_S
        return False

    def _drop_lookup(self, state: _Request) -> None:
        if state.lookup is not None:
            state.lookup.release()
            state.lookup = None

    def _save_of(self, state: _Request, num_tokens: int, tables_of: TablesOf) -> SaveJob | None:
        request, tokens = state.request, self._block_tokens
        num_computed = request.num_computed_tokens + num_tokens
        if num_computed // tokens <= state.saved.num_blocks:
            return None
        if self._options.granularity is Granularity.REQUEST and num_computed < request.num_prompt_tokens:
            return None
        tables = tables_of(request.request_id)
        if tables is None:
            return None
        if any(not unsure.isdisjoint(table) for unsure in self._unsure.values() for table in tables):
            return None
        begin, end = state.saved.due(
            hashes=request.block_hashes, tables=tables, num_computed_tokens=num_computed, block_tokens=tokens
        )
        if begin == end:
            return None
        hashes = self._hashes(state, max(0, begin - 1), end)
        return SaveJob(
            request_id=request.request_id,
            hashes=tuple(hashes[begin - end :]),
            block_ids=tuple(tuple(table[begin:end]) for table in tables),
            parent=hashes[0] if begin else None,
            by_layer=saves_by_layer(
                self._options.granularity, num_scheduled_tokens=num_tokens, worth_tokens=WORTH_TOKENS
            ),
            segments=self._segments(state, begin, end),
        )

    def _adapter(self, folder: str) -> bytes | None:
        """The digest of a LoRA adapter; None, once and for all, if its files cannot be read."""
        if folder not in self._adapters:
            try:
                self._adapters[folder] = adapter_digest(folder)
            except OSError as error:
                _log.warning("kvstore: requests of LoRA adapter %s go without the store: %s", folder, error)
                return None
        return self._adapters[folder]
