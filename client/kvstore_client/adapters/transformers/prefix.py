"""PrefixCache: prefills that take what the store has, and save what it has not. See the package."""

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from transformers import DynamicCache

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.hashing import chain
from kvstore.placement import segments
from kvstore.types import AnyArray, BlockHash
from kvstore_client.adapters.transformers.layers import Loading, OnLayer, Saving, StoredLayer, Tensor
from kvstore_client.adapters.transformers.spec import spec_for
from kvstore_client.opening import AnyLoad, Client

DEFAULT_TIMEOUT_S: Final = 5.0
FOLLOW_TIMEOUT_S: Final = 60.0  # the writer's prefill has to end within it

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prefill gave. The cache holds the keys and values of all `num_tokens` tokens."""

    cache: Any  # DynamicCache
    logits: Tensor  # [1, vocabulary]: of the last token
    num_tokens: int
    num_loaded_tokens: int  # that came from the store, and were not computed
    num_followed_blocks: int  # of the blocks loaded, those that were still being written when the load began
    load_error: KVStoreError | None  # why a load was given up and its tokens computed; `None`: it was not
    saving: "Future[int]"  # how many blocks the store has now of those after the loaded; never raises


class PrefixCache:
    """A model with the store behind it. A context manager; one prefill at a time.

    The client's spec must be the model's (`spec_for`); the client is not owned. A load may take `timeout_s`,
    or `follow_timeout_s` if it follows a writer; then the model computes by itself.
    """

    def __init__(
        self,
        client: Client,
        model: Any,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        follow_timeout_s: float = FOLLOW_TIMEOUT_S,
    ) -> None:
        self.num_failed_loads = 0
        self.num_failed_saves = 0
        self._client = client
        self._model = model
        self._timeout_s = timeout_s
        self._follow_timeout_s = follow_timeout_s
        config = model.config.get_text_config(decoder=True)
        self._heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvstore-save")
        spec = client.spec
        expected = spec_for(
            model,
            revision=spec.revision,
            block_tokens=spec.block_tokens,
            adapter=spec.adapter,
            adapter_revision=spec.adapter_revision,
            quantisation=spec.quantisation,
            tenant=spec.tenant,
            salt=spec.salt,
        )
        if different := spec.differences(expected):
            listed = "; ".join(f"{one.name}: {one.ours!r:.60}, not {one.theirs!r:.60}" for one in different)
            raise InvalidRequest(f"client: expected the spec of this model, got {listed}; make it with spec_for")

    def __enter__(self) -> "PrefixCache":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """No save is under way any more. Idempotent."""
        self._pool.shutdown(wait=True)

    def prefill(
        self,
        input_ids: Tensor,
        *,
        cache: Any = None,
        follow: bool = False,
        save: bool = True,
        on_loaded: OnLayer | None = None,
        on_saved: OnLayer | None = None,
    ) -> Prefill:
        """All tokens of `input_ids` `[1, tokens]` are in a cache, from the store as far as it has them.

        `cache` is a DynamicCache of the first tokens, computed before; it is left as it is, and its tokens
        are never taken from the store. At least the last token is computed. With `follow`, blocks that
        another process is writing are used too, layer by layer as it computes them. A load that fails
        anywhere is not used at all: the tokens are computed, from `cache` on.

        `on_loaded(layer)` is called when a layer's part has come, before that layer computes;
        `on_saved(layer)`, on the saving thread, when the store was handed a layer's part.

        Raises: InvalidRequest, if there are no tokens, or several sequences. No other error of the store.
        """
        tokens = _token_list(input_ids)
        num_local = cache.get_seq_length() if cache is not None else 0
        local = cache if num_local else None
        if not num_local < len(tokens):
            raise InvalidRequest(
                f"input_ids: expected more tokens than the {num_local} in the cache, got {len(tokens)}"
            )
        hashes = self._hashes(tokens)
        load_error: KVStoreError | None = None
        with self._loading(hashes, len(tokens) - 1, num_local, follow, on_loaded) as loading:
            num_loaded = loading.num_tokens if loading else 0
            try:
                logits, filled, saving = self._forward(input_ids, local, loading, hashes if save else [], on_saved)
            except KVStoreError as error:
                self._load_failed(error)
                load_error, num_loaded = error, 0
        if load_error is not None:
            logits, filled, saving = self._forward(input_ids, local, None, hashes if save else [], on_saved)
        followed = loading.num_followed_blocks if loading and load_error is None else 0
        return Prefill(filled, logits, len(tokens), num_loaded, followed, load_error, saving)

    def load(self, input_ids: Tensor, *, follow: bool = False) -> Any:
        """A DynamicCache of what is stored of `input_ids` `[1, tokens]` but its last; may be empty."""
        tokens = _token_list(input_ids)
        with self._loading(self._hashes(tokens), len(tokens) - 1, 0, follow, None) as loading:
            cache = self._cache(None, loading, None)
            try:
                for layer in cache.layers:
                    layer.fetch(self._model.device)
            except KVStoreError as error:
                self._load_failed(error)
                return self._cache(None, None, None)
        return cache

    def save(self, input_ids: Tensor, cache: Any) -> "Future[int]":
        """The full blocks of the tokens that are in `cache` are on their way to the store, on another thread.

        The result is how many of them the store has then; it never raises. Of tokens generated one by one,
        the last is not in the cache yet, so it is not saved.
        """
        hashes = self._hashes(_token_list(input_ids)[: cache.get_seq_length()])
        saving = self._saving(hashes, 0, None)
        for index, layer in enumerate(cache.layers):
            saving.hand_over(index, layer.keys, layer.values)
        return saving.finish()

    # Inside.

    def _hashes(self, tokens: list[int]) -> list[BlockHash]:
        return chain(self._client.namespace, tokens, block_tokens=self._client.spec.block_tokens)

    def _saving(self, hashes: list[BlockHash], first: int, on_saved: OnLayer | None) -> Saving:
        return Saving(self._client, self._pool, hashes, first, on_saved=on_saved, on_failed=self._save_failed)

    def _forward(
        self,
        input_ids: Tensor,
        local: Any,
        loading: "Loading | None",
        hashes: list[BlockHash],
        on_saved: OnLayer | None,
    ) -> tuple[Tensor, Any, "Future[int]"]:
        """(logits, cache, saving). Raises: what the load does; nothing is saved then."""
        num_local = local.get_seq_length() if local is not None else 0
        cache_tokens = num_local + (loading.num_tokens if loading else 0)
        saving = self._saving(hashes, cache_tokens // self._client.spec.block_tokens, on_saved)
        cache = self._cache(local, loading, saving)
        try:
            with torch.no_grad():
                rest = input_ids[:, cache_tokens:].to(self._model.device)
                output = self._model(rest, past_key_values=cache, use_cache=True, logits_to_keep=1)
        except BaseException:
            saving.abandon()
            raise
        return output.logits[:, -1], cache, saving.finish()

    def _cache(self, local: Any, loading: "Loading | None", saving: "Saving | None") -> Any:
        layers = []
        for index in range(self._client.spec.layers):
            layer = StoredLayer(
                loading=partial(loading.wait, index) if loading else None,
                num_awaited=loading.num_tokens if loading else 0,
                hand_over=partial(saving.hand_over, index) if saving else None,
            )
            if local is not None:
                layer.adopt(local.layers[index].keys, local.layers[index].values)
            layers.append(layer)
        cache = DynamicCache(config=self._model.config)
        cache.layers = layers
        return cache

    @contextmanager
    def _loading(
        self,
        hashes: list[BlockHash],
        most_tokens: int,
        num_local: int,
        follow: bool,
        on_loaded: OnLayer | None,
    ) -> "Iterator[Loading | None]":
        """A load of the blocks that follow the local tokens, or end after them; `None`: there are none."""
        spec = self._client.spec
        first = num_local // spec.block_tokens
        end = most_tokens // spec.block_tokens
        wanted, where = hashes[first:end], segments(hashes, block_tokens=spec.block_tokens)[first:end]
        deadline = time.monotonic() + (self._follow_timeout_s if follow else self._timeout_s)
        try:
            opened = self._open(wanted, where, follow) if wanted else None
        except KVStoreError as error:
            self._load_failed(error)
            opened = None
        if opened is None:
            yield None
            return
        load, rows, num_followed = opened
        with load:  # which stops it, so that nothing writes to `rows` any more
            yield Loading(
                load,
                rows,
                num_local=num_local - first * spec.block_tokens,
                num_followed_blocks=num_followed,
                deadline=deadline,
                on_loaded=on_loaded,
            )

    def _open(self, hashes: list[BlockHash], where: AnyArray, follow: bool) -> tuple[AnyLoad, Tensor, int] | None:
        with self._client.match(hashes, segments=where, timeout_s=self._timeout_s) as match:
            num_followed = match.num_writing if follow else 0
            num_blocks = match.num_blocks + num_followed
            if not num_blocks:
                return None
            spec, dtype = self._client.spec, self._model.dtype
            dim = spec.part_bytes[0] // (2 * self._heads * spec.block_tokens * dtype.itemsize)
            shape = (spec.layers, num_blocks, 2, self._heads, spec.block_tokens, dim)
            # NumPy asks for huge pages: a quarter of the time for memory that was never touched.
            memory = np.empty(num_blocks * spec.block_bytes, np.uint8)
            rows = torch.from_numpy(memory).view(dtype).reshape(shape)
            load = self._client.load(
                hashes[:num_blocks],
                into=list(rows),
                follow=follow,
                segments=where[:num_blocks],
                timeout_s=self._timeout_s,
            )
            return load, rows, num_followed

    def _load_failed(self, error: KVStoreError) -> None:
        self.num_failed_loads += 1
        _report("load", self.num_failed_loads, error)

    def _save_failed(self, error: Exception) -> None:
        self.num_failed_saves += 1
        _report("save", self.num_failed_saves, error)


def _token_list(input_ids: Tensor) -> list[int]:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        raise InvalidRequest(
            f"input_ids: expected [1, tokens], got {list(input_ids.shape)}; prefill one sequence at a time"
        )
    tokens: list[int] = input_ids[0].tolist()
    return tokens


def _report(what: str, count: int, error: Exception) -> None:
    """The first failure of its kind is a warning, the others are for those who look."""
    level = logging.WARNING if count == 1 else logging.DEBUG
    _log.log(level, "kvstore: %s failed (%s: %s); the model computes by itself", what, type(error).__name__, error)
