"""Copies and hashes many pieces of memory in one call, which holds no lock of the interpreter.

Pieces are given by address. Nothing is checked here: whoever calls has made sure that every address is in memory
that stays mapped until the call returns.

The work is done by memory.c, with the xxh3 of the xxhash package; where that was not compiled, here, a piece at a
time.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import xxhash

from kvstore.native import load
from kvstore.types import AnyArray, IntArray

Move: TypeAlias = Callable[[AnyArray | None, AnyArray, AnyArray, AnyArray | None], None]


def copy_pieces(targets: IntArray, sources: IntArray, sizes: IntArray) -> None:
    """`sizes[i]` bytes at address `sources[i]` are at `targets[i]` too, for all i."""
    _move(_packed(targets), _packed(sources), _packed(sizes), None)


def copy_and_hash_pieces(targets: IntArray, sources: IntArray, sizes: IntArray) -> AnyArray:
    """As `copy_pieces`; returns `[n]` u64: the xxh3-64 of each source, taken right after it was copied."""
    checksums = np.empty(len(sources), np.uint64)
    _move(_packed(targets), _packed(sources), _packed(sizes), checksums)
    return checksums


def hash_pieces(addresses: IntArray, sizes: IntArray) -> AnyArray:
    """`[n]` u64: the xxh3-64 of `sizes[i]` bytes at each address."""
    checksums = np.empty(len(addresses), np.uint64)
    _move(None, _packed(addresses), _packed(sizes), checksums)
    return checksums


def address_of(array: AnyArray) -> int:
    """Where the array's first byte lies."""
    address: int = array.ctypes.data  # not `__array_interface__`: it describes a dtype of fields at length
    return address


def _packed(values: IntArray) -> AnyArray:
    return np.ascontiguousarray(values, np.int64)


def load_native() -> Move | None:
    """The work of memory.c; None, if it was not compiled, or the xxhash package does not show its xxh3."""
    move = load(__file__, "kvstore_move", ctypes.c_size_t, *[ctypes.c_void_p] * 5)
    package = importlib.util.find_spec("xxhash._xxhash")
    try:
        xxh3 = ctypes.cast(ctypes.CDLL(package.origin if package else None).XXH3_64bits, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None
    if move is None:
        return None

    def native(targets: AnyArray | None, sources: AnyArray, sizes: AnyArray, checksums: AnyArray | None) -> None:
        move(
            len(sources),
            None if targets is None else address_of(targets),
            address_of(sources),
            address_of(sizes),
            None if checksums is None else xxh3,
            None if checksums is None else address_of(checksums),
        )

    return native


def move_in_python(targets: AnyArray | None, sources: AnyArray, sizes: AnyArray, checksums: AnyArray | None) -> None:
    """The same without memory.c."""
    for piece, (source, size) in enumerate(zip(sources.tolist(), sizes.tolist(), strict=True)):
        if targets is not None:
            ctypes.memmove(int(targets[piece]), source, size)
        if checksums is not None:
            checksums[piece] = xxhash.xxh3_64_intdigest((ctypes.c_char * size).from_address(source))


_native: Final = load_native()
_move: Final = _native or move_in_python
IS_NATIVE: Final = _native is not None
