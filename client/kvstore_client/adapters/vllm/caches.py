"""One layer of the engine's paged cache as rows of bytes, one row per block.

A block is opaque: its bytes are taken in the order in which they lie in memory, and the spec names that order.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from kvstore.types import ByteArray
from kvstore_client.buffers import RowsLike

Tensor: TypeAlias = Any  # torch is optional, so its types are not known to the type checker


class LayerCache:
    """The blocks of one layer, in place where they are contiguous host memory, else through host memory.

    `tensor` is `[num_blocks, ...]`, or has a whole number of kernel blocks for each block. `group` is the KV cache
    group whose block table names this layer's blocks.
    """

    def __init__(self, tensor: Tensor, *, num_blocks: int, group: int = 0) -> None:
        self.group = group
        if tensor.shape[0] != num_blocks:
            tensor = tensor.unflatten(0, (num_blocks, -1))
        order = sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)
        self._blocks = tensor.permute(0, *order)  # within a block, as it lies in memory
        self._shape = tuple(self._blocks.shape[1:])
        self.block_bytes: int = tensor[0].numel() * tensor.element_size()
        self._rows: ByteArray | None = None
        if tensor.device.type == "cpu" and self._blocks[0].is_contiguous():
            self._rows = self._blocks.flatten(1).view(torch.uint8).numpy()

    def __repr__(self) -> str:
        where = "in place" if self._rows is not None else f"through host memory, from {self._blocks.device}"
        return f"<LayerCache [{len(self._blocks)} blocks of {self.block_bytes} bytes, {where}]>"

    def source(self, block_ids: Sequence[int]) -> RowsLike:
        """Rows to be read: the blocks themselves, or a copy of them."""
        if self._rows is not None:
            return _pick(self._rows, block_ids)
        picked = self._blocks[list(block_ids)].contiguous().flatten(1)
        return picked.view(torch.uint8).cpu().numpy()

    def target(self, block_ids: Sequence[int]) -> RowsLike:
        """Rows to be filled: the blocks themselves, or memory that `settle` brings there."""
        if self._rows is not None:
            return _pick(self._rows, block_ids)
        return torch.empty(len(block_ids), self.block_bytes, dtype=torch.uint8)

    def settle(self, block_ids: Sequence[int], filled: RowsLike) -> None:
        """What was filled, the first rows of a `target`, is in these blocks."""
        if self._rows is None and block_ids:
            rows = filled[: len(block_ids)].view(self._blocks.dtype).reshape(len(block_ids), *self._shape)
            self._blocks[list(block_ids)] = rows.to(self._blocks.device)

    def clear(self, block_ids: Sequence[int]) -> None:
        """What was filled in place, of a `target` that was not settled, is zeros."""
        if self._rows is not None:
            self._rows[list(block_ids)] = 0


def _pick(rows: ByteArray, block_ids: Sequence[int]) -> RowsLike:
    """The rows of these blocks: one array if they lie side by side, which costs less than one for each."""
    first, count = block_ids[0], len(block_ids)
    if all(block_id == first + index for index, block_id in enumerate(block_ids)):
        return rows[first : first + count]
    return [rows[block_id] for block_id in block_ids]
