"""What the scheduler side tells the workers to do in one step. Pure: no vLLM, tensor, thread or clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.types import AnyArray, BlockHash
from kvstore_client.adapters.vllm.groups import NULL_BLOCK
from kvstore_client.adapters.vllm.identity import Identity
from kvstore_client.adapters.vllm.options import Granularity


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to load into the engine's blocks `block_ids`, for one request."""

    request_id: str
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[tuple[int, ...], ...]  # by group, one for each hash; the null block: not needed there
    within_forward: bool  # the step's forward pass needs them, layer by layer; else the request waits for all
    follow: bool  # some may still be being written
    segments: AnyArray | None = field(default=None, compare=False)  # of the blocks; None: they begin a chain

    def needed(self, group: int) -> tuple[int, ...]:
        """Which of the blocks this group needs, by index: those that its window has not left."""
        pairs = zip(self.block_ids[group], range(len(self.hashes)), strict=True)
        return tuple(index for block_id, index in pairs if block_id != NULL_BLOCK)


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks whose last tokens are computed in this step or were before, all of one request."""

    request_id: str
    hashes: tuple[BlockHash, ...]
    block_ids: tuple[tuple[int, ...], ...]  # by group, one for each hash
    parent: BlockHash | None  # the block before the first; None: it starts a chain
    by_layer: bool  # as each layer is computed; else at the end of the step
    segments: AnyArray | None = field(default=None, compare=False)  # of the blocks; None: they begin a chain


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All that the connector has to do in one step."""

    identity: Identity
    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    idle: bool = False  # nothing is computed: the engine only waits for what loads in the background


@dataclass(slots=True)
class Saved:
    """How far the blocks of one request have been handed to the store."""

    num_blocks: int = field(default=0)

    def due(
        self,
        *,
        hashes: Sequence[BlockHash],
        tables: Sequence[Sequence[int]],  # by group
        num_computed_tokens: int,  # once this step is over
        block_tokens: int,
    ) -> tuple[int, int]:
        """(begin, end) of the blocks that can be saved now, and count as handed over from here on.

        A block is due when all of its tokens are computed and its hash is known: with asynchronous scheduling hashes
        lag behind. The blocks before those computed here are offered too. The store has most of them, and takes no
        bytes then; but of one that it has lost, nothing behind it could be stored. What a window has left cannot be
        offered; it never leaves a block before the step that computes it is over.
        """
        end = min(num_computed_tokens // block_tokens, len(hashes), *map(len, tables))
        begin = self.num_blocks
        if end <= begin:
            return begin, begin
        self.num_blocks = end
        gone = [index for table in tables for index in range(begin, end) if table[index] == NULL_BLOCK]
        return max(gone, default=begin - 1) + 1, end


def saves_by_layer(granularity: Granularity, *, num_scheduled_tokens: int, worth_tokens: int) -> bool:
    """Whether a save goes layer by layer: with `auto`, if the step computes at least `worth_tokens` of the request."""
    if granularity is Granularity.AUTO:
        return num_scheduled_tokens >= worth_tokens
    return granularity is Granularity.LAYER
