"""Layers of a cache that wait for their part of a load, and hand over their part of a save.

Both happen when the model reaches the layer, in `update`, so the other layers are on their way meanwhile.

Keys and values of a layer are `[1, heads, tokens, dim]` in a cache; its part of a block is, contiguous,
`[2, heads, block_tokens, dim]`, keys first.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers.cache_utils import DynamicLayer

from kvstore.placement import segments
from kvstore.types import BlockHash, ByteArray, Outcome
from kvstore_client.opening import AnyLoad, Client

Tensor: TypeAlias = Any  # torch is optional, so its types are not known to the type checker
OnLayer: TypeAlias = Callable[[int], None]


class StoredLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a DynamicCache that, in its first update, fetches its prefix and hands over all it holds."""

    def __init__(
        self,
        *,
        loading: Callable[[], Tensor] | None,
        num_awaited: int,
        hand_over: Callable[[Tensor, Tensor], None] | None,
    ) -> None:
        super().__init__()
        self._loading = loading  # waits, then gives [2, heads, blocks, block_tokens, dim]
        self._num_awaited = num_awaited  # tokens at the end of those blocks
        self._hand_over = hand_over

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """These are what it holds. They are not changed: a layer grows by concatenation."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values = keys, values
        self.is_initialized = True

    def fetch(self, device: Any) -> None:
        """What was awaited is in place. Raises: what the load does."""
        if self._loading is not None:
            rows = self._arrived()
            none = torch.empty(1, rows.shape[1], 0, rows.shape[-1], dtype=rows.dtype, device=device)
            self._join(rows, none, none)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._loading is not None:
            self._join(self._arrived(), key_states, value_states)
        else:
            super().update(key_states, value_states, *args, **kwargs)
        hand_over, self._hand_over = self._hand_over, None
        if hand_over is not None:
            hand_over(self.keys, self.values)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        length: int = super().get_seq_length()
        return length + self._num_awaited

    def _arrived(self) -> Tensor:
        assert self._loading is not None
        loading, self._loading = self._loading, None
        return loading()

    def _join(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        awaited, self._num_awaited = self._num_awaited, 0
        before = (self.keys, self.values) if self.is_initialized else (keys[:, :, :0], values[:, :, :0])
        self.adopt(
            _joined(before[0], rows[0], awaited, keys),
            _joined(before[1], rows[1], awaited, values),
        )


def _joined(local: Tensor, rows: Tensor, num_awaited: int, new: Tensor) -> Tensor:
    """`[1, heads, tokens, dim]`: local, the last `num_awaited` tokens of the rows, new; each copied once."""
    heads, num_blocks, block_tokens, dim = rows.shape
    end = local.shape[-2] + num_awaited
    begin = end - num_blocks * block_tokens
    out = torch.empty(1, heads, end + new.shape[-2], dim, dtype=new.dtype, device=new.device)
    out[0, :, begin:end].unflatten(1, (num_blocks, block_tokens)).copy_(rows)
    out[:, :, : local.shape[-2]] = local  # after the rows, whose first block may begin within the local tokens
    out[:, :, end:] = new
    return out


def _block_rows(keys: Tensor, values: Tensor, block_tokens: int) -> ByteArray:
    """`[blocks, 2, heads, block_tokens, dim * itemsize]` of `[heads, tokens, dim]` each.

    Copied by NumPy, on this thread alone: torch would take the cores that the forward pass is using.
    """
    both = [states.cpu().view(torch.uint8).numpy() for states in (keys, values)]
    heads, tokens, width = both[0].shape
    rows = np.empty((tokens // block_tokens, 2, heads, block_tokens, width), np.uint8)
    for index, states in enumerate(both):
        rows[:, index] = states.reshape(heads, -1, block_tokens, width).transpose(1, 0, 2, 3)
    return rows


class Loading:
    """A load under way, seen as layers."""

    def __init__(
        self,
        load: AnyLoad,
        rows: Tensor,
        *,
        num_local: int,  # tokens of the first block that are local
        num_followed_blocks: int,
        deadline: float,
        on_loaded: OnLayer | None,
    ) -> None:
        self.num_tokens: int = rows.shape[1] * rows.shape[4] - num_local
        self.num_followed_blocks = num_followed_blocks
        self._load, self._deadline, self._on_loaded = load, deadline, on_loaded
        self._rows = rows  # [layers, blocks, 2, heads, block_tokens, dim]

    def wait(self, layer: int) -> Tensor:
        """`[2, heads, blocks, block_tokens, dim]`, arrived. Raises: what `Load.wait_part` does."""
        self._load.wait_part(layer, max(0.0, self._deadline - time.monotonic()))
        if self._on_loaded is not None:
            self._on_loaded(layer)
        return self._rows[layer].permute(1, 2, 0, 3, 4)


class Saving:
    """One write, from block `first` on, on the saving thread; a failure goes to `on_failed` and ends it."""

    def __init__(
        self,
        client: Client,
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
        self._segments = segments(hashes, block_tokens=client.spec.block_tokens)[first:]
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
        self._write = self._client.store(self._hashes, parent=self._parent, segments=self._segments)
        return 0

    def _put(self, layer: int, keys: Tensor, values: Tensor) -> int:
        if self._write.num_new:
            tokens = self._client.spec.block_tokens
            begin, end = self._first * tokens, (self._first + len(self._hashes)) * tokens
            self._write.put(layer, _block_rows(keys[0, :, begin:end], values[0, :, begin:end], tokens))
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
