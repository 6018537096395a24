"""Codecs of blocks on disk: what each is, both ways through blosc2, and which one pays.

Source: docs/adr/0012-codec.md for the choice of filters and levels, and for the rule of `choose`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Final

from kvstore.errors import InvalidRequest

MAX_BYTES: Final = (1 << 31) - 1 - 32  # of one block: blosc2 counts in 32 bits, and adds a header
MIN_SAVED: Final = 0.1
MIN_DISK_SPEEDS: Final = 2.0  # at which to decompress: reading and comparing need the processor, too


class Codec(StrEnum):
    """What the blocks of a namespace are compressed with on their way to disk."""

    NONE = "none"
    LZ4 = "lz4"  # bit shuffle, then LZ4
    ZSTD = "zstd"  # byte shuffle, then ZSTD
    AUTO = "auto"  # whichever of the others pays, measured on the first blocks


NUMBERS: Final = {Codec.NONE: 0, Codec.LZ4: 1, Codec.ZSTD: 2}  # in the headers of records; never reused
COMPRESSING: Final = (Codec.LZ4, Codec.ZSTD)


@dataclass(frozen=True, slots=True)
class Sample:
    """What a codec did to some blocks."""

    saved: float  # the share of their room on disk that they do not take
    decompress_bytes_per_s: float  # of plain bytes, in one thread


def choose(samples: Mapping[Codec, Sample], *, read_bytes_per_s: float, num_threads: int) -> Codec:
    """Of the codecs that pay, the one that saves most, of equals the fastest; NONE, if none pays.

    A codec pays if it saves at least a tenth of the room, and as many threads decompress at least twice as fast as the
    disk reads: a load then takes about as long as one of plain blocks (docs/benchmarks/codec.md).
    """
    paying = [
        codec
        for codec, sample in samples.items()
        if sample.saved >= MIN_SAVED
        and sample.decompress_bytes_per_s * num_threads >= MIN_DISK_SPEEDS * read_bytes_per_s
    ]
    return max(
        paying, key=lambda codec: (samples[codec].saved, samples[codec].decompress_bytes_per_s), default=Codec.NONE
    )


def item_bytes(dtype: str) -> int:
    """Bytes of one element, which the filters must know: 2 for "bfloat16", 1 for "fp8_e4m3".

    1 where the name does not say: blocks are then compressed less, and no less rightly.
    """
    bits = re.search(r"(?:float|fp|bf|int)(8|16|32|64)(?!\d)", dtype.lower())
    return int(bits[1]) // 8 if bits else 1


def compress(codec: Codec, source: memoryview, *, item_bytes: int) -> bytes:
    """The source, of at most MAX_BYTES, as one blosc2 chunk; up to 32 bytes larger if it cannot be compressed.

    Without the interpreter's lock, in this thread only. Raises: InvalidRequest, if blosc2 is not installed.
    """
    blosc2 = load_blosc2()
    codecs = {
        Codec.LZ4: (blosc2.Codec.LZ4, blosc2.Filter.BITSHUFFLE),
        Codec.ZSTD: (blosc2.Codec.ZSTD, blosc2.Filter.SHUFFLE),
    }
    inner, shuffle = codecs[codec]
    chunk: bytes = blosc2.compress2(source, codec=inner, filters=[shuffle], clevel=1, typesize=item_bytes, nthreads=1)
    return chunk


def decompress(source: bytes | memoryview, target: memoryview) -> None:
    """The target, all of it and nothing else, holds what was compressed. The source must be as `compress` made it.

    Without the interpreter's lock, in this thread only. Raises: ValueError, if the sizes differ or it is no chunk;
    InvalidRequest, if blosc2 is not installed.
    """
    blosc2 = load_blosc2()
    # It writes as many bytes as the chunk says, whatever room there is.
    if blosc2.get_cbuffer_sizes(source)[:2] != (len(target), len(source)):
        raise ValueError("the chunk is of another size")
    blosc2.decompress2(source, target, nthreads=1)


@cache
def load_blosc2() -> Any:
    """The package blosc2. Raises: InvalidRequest, if it is not installed."""
    try:
        import blosc2
    except ImportError as error:
        raise InvalidRequest("disk codec: blosc2 is not installed; pip install 'kvstore[codec]'") from error
    blosc2.set_releasegil(True)  # for the whole process; without it no other thread runs meanwhile
    return blosc2
