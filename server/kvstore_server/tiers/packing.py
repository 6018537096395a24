"""Compresses blocks by the codec of their namespace, and finds out which that is where it is `auto`. Any thread."""

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import structlog

from kvstore.spec import KVSpec
from kvstore.transport.memory import hash_pieces
from kvstore.types import IntArray, Namespace
from kvstore_server.tiers.codec import (
    COMPRESSING,
    MAX_BYTES,
    NUMBERS,
    Codec,
    Sample,
    choose,
    compress,
    decompress,
    item_bytes,
)
from kvstore_server.tiers.records import Packed, RecordLayout, memory_at
from kvstore_server.tiers.scratch import Scratch, ScratchPool

MIN_SAMPLE_BYTES: Final = 1 << 20  # what takes less time than this cannot be timed
SAMPLE_BYTES: Final = 16 << 20
MAX_SCRATCHES: Final = 32  # kept while nothing is packed: the calls of two batches

Each = Callable[[Callable[[IntArray], None], Sequence[IntArray]], None]  # work on all parts, in threads

log = structlog.get_logger()


class Packer:
    """Says once for each namespace how its blocks are compressed, and does it."""

    def __init__(
        self,
        *,
        codec_of: Callable[[KVSpec], Codec],
        each: Each,
        num_threads: int,
        read_bytes_per_s: Callable[[], float | None],
    ) -> None:
        """`read_bytes_per_s` measures the disk; None, where it cannot. It blocks, and is asked once, for `auto`."""
        self._codec_of = codec_of
        self._each = each
        self._num_threads = min(num_threads, len(os.sched_getaffinity(0)))
        self._measure = read_bytes_per_s
        self._chosen: dict[Namespace, Codec] = {}
        self._read_bytes_per_s: float | None = None
        self._choosing = threading.Lock()
        self._scratch = ScratchPool(most=MAX_SCRATCHES)

    def pack(self, layout: RecordLayout, addresses: IntArray) -> Packed:
        """The `[n]` blocks as they are to lie on disk; those that shrink by no room stay where they are, plain.

        Raises: what measuring the disk raises; InvalidRequest, if blosc2 is needed and not installed.
        """
        packed = Packed.plain(layout.spec, addresses)
        codec = self._codec(layout, addresses)
        if codec is Codec.NONE:
            return packed
        stored, sizes, codecs, checksums = addresses.copy(), packed.sizes, packed.codecs, packed.checksums
        memory: list[Scratch] = []

        def pack_some(chosen: IntArray) -> None:
            scratch = self._scratch.take(len(chosen) * layout.data_bytes)  # a page that is not touched is no memory
            memory.append(scratch)
            for place, row in enumerate(chosen.tolist()):
                chunk = _compressed(codec, layout, int(addresses[row]))
                if _room_of(chunk, layout) < layout.data_bytes:
                    start = place * layout.data_bytes
                    scratch.memory[start : start + len(chunk)] = chunk
                    stored[row], sizes[row], codecs[row] = scratch.address + start, len(chunk), NUMBERS[codec]
            shrunk = chosen[codecs[chosen] != NUMBERS[Codec.NONE]]
            checksums[shrunk] = hash_pieces(stored[shrunk], sizes[shrunk])

        rows = np.arange(len(addresses))
        step = layout.records_per_call(len(rows), num_threads=self._num_threads)
        self._each(pack_some, [rows[first : first + step] for first in range(0, len(rows), step)])
        return Packed(stored, sizes, codecs, checksums, tuple(memory))

    def _codec(self, layout: RecordLayout, addresses: IntArray) -> Codec:
        namespace = layout.spec.namespace
        with self._choosing:  # whoever comes meanwhile waits for the answer
            codec = self._chosen.get(namespace)
            if codec is None:
                can_shrink = len(layout.rooms) > 1 and layout.spec.block_bytes <= MAX_BYTES
                codec = self._codec_of(layout.spec) if can_shrink else Codec.NONE
                if codec is Codec.AUTO:
                    if len(addresses) * layout.spec.block_bytes < MIN_SAMPLE_BYTES:
                        return Codec.NONE  # for this once
                    codec = self._choose(layout, addresses)
                self._chosen[namespace] = codec
        return codec

    def _choose(self, layout: RecordLayout, addresses: IntArray) -> Codec:
        if self._read_bytes_per_s is None:
            self._read_bytes_per_s = self._measure()
        if self._read_bytes_per_s is None:
            log.warning("disk.codec", model=layout.spec.model, codec=Codec.NONE, reason="the disk was not measured")
            return Codec.NONE
        sampled = addresses[: max(1, SAMPLE_BYTES // layout.spec.block_bytes)]
        samples = {codec: _sample(codec, layout, sampled) for codec in COMPRESSING}
        chosen = choose(samples, read_bytes_per_s=self._read_bytes_per_s, num_threads=self._num_threads)
        figures = {
            f"{codec}_{name}": round(value, 2)
            for codec, sample in samples.items()
            for name, value in (("saved", sample.saved), ("gbps", sample.decompress_bytes_per_s / 1e9))
        }
        log.info(
            "disk.codec",
            model=layout.spec.model,
            codec=chosen,
            disk_gbps=round(self._read_bytes_per_s / 1e9, 2),
            threads=self._num_threads,
            blocks=len(sampled),
            **figures,
        )
        return chosen


def _compressed(codec: Codec, layout: RecordLayout, address: int) -> bytes:
    source = memory_at(address, layout.spec.block_bytes)
    return compress(codec, source, item_bytes=item_bytes(layout.spec.dtype))


def _room_of(chunk: bytes, layout: RecordLayout) -> int:
    """The room that it takes on disk, or that of a plain block, if it is not smaller."""
    return int(layout.rooms_for(np.array([min(len(chunk), layout.data_bytes)]))[0])


def _sample(codec: Codec, layout: RecordLayout, addresses: IntArray) -> Sample:
    target = memoryview(bytearray(layout.spec.block_bytes))
    rooms_bytes, took_s = [], []
    for address in addresses.tolist():
        chunk = _compressed(codec, layout, address)
        rooms_bytes.append(_room_of(chunk, layout))
        begin = time.perf_counter()
        decompress(chunk, target)
        took_s.append(time.perf_counter() - begin)
    # The median, so that what else the machine does counts less.
    return Sample(
        saved=1 - statistics.mean(rooms_bytes) / layout.data_bytes,
        decompress_bytes_per_s=layout.spec.block_bytes / statistics.median(took_s),
    )
