"""A write to several daemons: one `Write` with each, seen as one."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.spec import KVSpec
from kvstore.types import IntArray, Outcome
from kvstore_client.buffers import InCudaRegion, Rows, RowsLike, as_rows
from kvstore_client.cuda_arrays import CudaRows
from kvstore_client.fanout import each
from kvstore_client.write import Write


@dataclass(frozen=True, slots=True)
class Piece:
    """What one daemon takes in: its block i is block `blocks[i]` of the whole."""

    write: Write
    blocks: IntArray


class ClusterWrite:
    """Blocks reserved with the daemons that keep them. Made by `ClusterClient.store`; used like `Write`.

    Blocks of a daemon that could not reserve them are FULL: nothing was begun, skip this save. Those of one that is
    lost later, or that refuses them, are FAILED: what was put of them is gone. The others go on, and a call raises only
    once no daemon is left.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        spec: KVSpec,
        *,
        num_blocks: int,
        parts: Sequence[int],
        in_cuda_region: InCudaRegion,
        pool: Executor,
        timeout_s: float,  # of calls that bring none
    ) -> None:
        self.parts = tuple(parts)
        self.outcomes = [Outcome.FULL] * num_blocks
        self._pieces = list(pieces)  # that go on
        self._spec = spec
        self._in_cuda_region = in_cuda_region
        self._pool = pool
        self._timeout_s = timeout_s
        self._over = ""  # how it ended
        for piece in pieces:
            self._take_outcomes(piece)
        self.new_blocks = [index for index, outcome in enumerate(self.outcomes) if outcome is Outcome.NEW]

    def __repr__(self) -> str:
        state = self._over or f"{len(self._pieces)} daemons"
        return f"<ClusterWrite [{self.num_new} of {len(self.outcomes)} blocks new; {state}]>"

    def __enter__(self) -> "ClusterWrite":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None:
            self.abort()
        elif not self._over:
            self.commit()

    @property
    def num_new(self) -> int:
        return len(self.new_blocks)

    def put(self, part: int, rows: RowsLike, *, timeout_s: float | None = None) -> None:
        """As `Write.put`. Raises what a daemon did only if no other is left."""
        if part not in self.parts:
            raise InvalidRequest(f"put: expected one of this write's parts {self.parts[:8]}, got {part}; correct it")
        size_bytes = self._spec.part_bytes[part]
        source = self._rows(rows, size_bytes, f"put(part {part})")
        self._send(source, (part,), [0], timeout_s)

    def put_blocks(self, rows: RowsLike, *, timeout_s: float | None = None) -> None:
        """As `Write.put_blocks`. Raises what a daemon did only if no other is left."""
        source = self._rows(rows, self._spec.block_bytes, "put_blocks")
        begins = [self._spec.part_range(part)[0] for part in self.parts]
        self._send(source, self.parts, begins, timeout_s)

    def commit(self, timeout_s: float | None = None) -> list[Outcome]:
        """As `Write.commit`. Raises what a daemon did only if no other is left."""
        deadline = self._deadline(timeout_s)
        self._on_all(lambda piece: piece.write.commit(_left(deadline)))
        for piece in self._pieces:
            self._take_outcomes(piece)
        self._over = "committed"
        return self.outcomes

    def abort(self) -> None:
        """The write is over; its blocks that are not committed are given up. Never raises a store error.

        Idempotent.
        """
        if self._over not in ("committed", "aborted"):
            self._over = "aborted"
            abort_all(self._pieces, self._pool)

    # Inside.

    def _rows(self, rows: RowsLike, row_bytes: int, where: str) -> Rows | CudaRows:
        in_region = self._in_cuda_region
        return as_rows(rows, num_rows=len(self.outcomes), row_bytes=row_bytes, where=where, in_cuda_region=in_region)

    def _send(self, source: Rows | CudaRows, parts: Sequence[int], begins: list[int], timeout_s: float | None) -> None:
        deadline = self._deadline(timeout_s)
        self._on_all(
            lambda piece: piece.write.send(source.pick(piece.blocks), parts, begins, timeout_s=_left(deadline))
        )

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def _on_all(self, act: Callable[[Piece], object]) -> None:
        """Done with every daemon at once; one that fails is left out from here on."""
        if self._over:
            raise InvalidRequest(f"write: expected an open write, got one that was {self._over}; store again")
        failures = _done(self._pieces, act, self._pool)
        going = []
        for piece in self._pieces:
            if id(piece) in failures:
                self._give_up(piece)
            else:
                going.append(piece)
        self._pieces = going
        if failures and not going:
            self._over = "given up"
            raise next(iter(failures.values()))

    def _give_up(self, piece: Piece) -> None:
        for place in piece.write.new_blocks:
            self.outcomes[int(piece.blocks[place])] = Outcome.FAILED

    def _take_outcomes(self, piece: Piece) -> None:
        for block, outcome in zip(piece.blocks.tolist(), piece.write.outcomes, strict=True):
            self.outcomes[block] = outcome


def abort_all(pieces: Sequence[Piece], pool: Executor) -> None:
    """All of these writes are over, and what is not committed is given up."""
    _done(pieces, lambda piece: piece.write.abort(), pool)


def _done(pieces: Sequence[Piece], act: Callable[[Piece], object], pool: Executor) -> dict[int, KVStoreError]:
    """Done with every daemon at once. By id of the piece, what failed."""
    results = each(pool, [partial(act, piece) for piece in pieces])
    told = zip(pieces, results, strict=True)
    return {id(piece): result for piece, result in told if isinstance(result, KVStoreError)}


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
