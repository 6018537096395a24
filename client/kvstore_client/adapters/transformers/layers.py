"""Layers of a cache that wait for their part of a load, and hand over their part of a save.

Both happen when the model reaches the layer, in `update`, so the other layers are on their way meanwhile.

Keys and values of a layer are `[1, heads, tokens, dim]` in a cache; its part of a block is, contiguous,
`[2, heads, block_tokens, dim]`, keys first.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from transformers.cache_utils import DynamicLayer

from kvstore.types import BlockHash, Outcome
from kvstore_client.client import KVClient
from kvstore_client.load import Load

Tensor: TypeAlias = Any  # torch is optional, so its types are not known to the type checker
OnLayer: TypeAlias = Callable[[int], None]


class StoredLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a DynamicCache that, in its first update, fetches its prefix and hands over what it holds."""

    def __init__(self, *, fetch: Callable[[], Tensor] | None, num_awaited: int, hand_over: Any) -> None:
        super().__init__()
        self._fetch = fetch
        self._num_awaited = num_awaited
        self._hand_over = hand_over

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Begins with these, which are not changed: a cache grows by concatenation."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.is_initialized = True

    def fetch(self) -> None:
        """What was awaited is in place. Raises: what the load does."""
        fetch, self._fetch, awaited = self._fetch, None, self._num_awaited
        if fetch is None:
            return
        keys, values = fetch()  # each [1, heads, tokens, dim]
        assert keys.shape[-2] == awaited
        self._num_awaited = 0
        if self.is_initialized:
            keys, values = torch.cat([self.keys, keys], dim=-2), torch.cat([self.values, values], dim=-2)
        self.adopt(keys, values)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.fetch()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        hand_over, self._hand_over = self._hand_over, None
        if hand_over is not None:
            hand_over(keys, values)
        return keys, values

    def get_seq_length(self) -> int:
        length: int = super().get_seq_length()
        return length + self._num_awaited


class Loading:
    """A load under way, seen as layers."""

    def __init__(
        self,
        load: Load,
        rows: Tensor,
        skip: int,
        num_followed: int,
        deadline: float,
        device: Any,
        on_loaded: Any,
    ) -> None:
        # rows [layers, blocks, 2, heads, block_tokens, dim]; the first `skip` tokens of the first are local.
        self.num_followed_blocks = num_followed
        self.num_tokens: int = rows.shape[1] * rows.shape[4] - skip
        self._load, self._rows, self._skip = load, rows, skip
        self._deadline, self._device, self._on_loaded = deadline, device, on_loaded

    def fetch(self, layer: int) -> Tensor:
        """`[2, 1, heads, num_tokens, dim]`, once it has arrived. Raises: what `Load.wait_part` does."""
        self._load.wait_part(layer, max(0.0, self._deadline - time.monotonic()))
        if self._on_loaded is not None:
            self._on_loaded(layer)
        joined = self._rows[layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
        return joined[:, None, :, self._skip :].contiguous().to(self._device)


class Saving:
    """One write, from block `first` on, on the saving thread. A failure is told to `on_failed` and ends it."""

    def __init__(
        self,
        client: KVClient,
        pool: ThreadPoolExecutor,
        hashes: Sequence[BlockHash],
        first: int,
        *,
        on_saved: OnLayer | None,
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._client, self._pool, self._on_saved, self._on_failed = client, pool, on_saved, on_failed
        self._first = first
        self._hashes = hashes[first:]
        self._parent = hashes[first - 1] if hashes[first:] and first else None
        self._write: Any = None
        self._over = not self._hashes
        self._submit(self._reserve)

    def hand_over(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Takes `[1, heads, tokens, dim]` each, which must not be changed any more. Returns at once."""
        self._submit(self._put, layer, keys, values)

    def finish(self) -> "Future[int]":
        return self._submit(self._commit)

    def abandon(self) -> None:
        self._submit(self._abort)

    def _submit(self, step: Callable[..., int], *args: Any) -> "Future[int]":
        try:
            return self._pool.submit(self._guarded, step, *args)
        except RuntimeError as error:  # closed
            self._on_failed(error)
            done: Future[int] = Future()
            done.set_result(0)
            return done

    def _guarded(self, step: Callable[..., int], *args: Any) -> int:
        if self._over:
            return 0
        try:
            return step(*args)
        except Exception as error:
            self._over = True
            self._on_failed(error)
            if self._write is not None:
                self._write.abort()
            return 0

    def _reserve(self) -> int:
        self._write = self._client.store(self._hashes, parent=self._parent)
        return 0

    def _put(self, layer: int, keys: Tensor, values: Tensor) -> int:
        if self._write.num_new:
            tokens = self._client.spec.block_tokens
            begin, end = self._first * tokens, (self._first + len(self._hashes)) * tokens
            both = torch.stack([keys[0, :, begin:end], values[0, :, begin:end]]).cpu()
            self._write.put(layer, both.unflatten(2, (-1, tokens)).permute(2, 0, 1, 3, 4).contiguous())
        if self._on_saved is not None:
            self._on_saved(layer)
        return 0

    def _commit(self) -> int:
        self._over = True
        outcomes: list[Outcome] = self._write.commit()
        return outcomes.count(Outcome.STORED)

    def _abort(self) -> int:
        self._over = True
        self._write.abort()
        return 0
