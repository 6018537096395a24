"""The words both sides share: ids, hashes, and where a block lies. Frozen values, no behaviour."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

HASH_BYTES: Final = 32
BOOT_ID_BYTES: Final = 16

Namespace = NewType("Namespace", bytes)  # SHA-256 of a KVSpec's canonical bytes
BlockHash = NewType("BlockHash", bytes)  # chained hash of a block: its tokens and all before them
BootId = NewType("BootId", bytes)  # random, one per daemon process
SessionId = NewType("SessionId", int)
WriteId = NewType("WriteId", int)  # one Store request of one session
SlabId = NewType("SlabId", int)  # never reused within one boot

IntArray: TypeAlias = npt.NDArray[np.int64]
ByteArray: TypeAlias = npt.NDArray[np.uint8]
AnyArray: TypeAlias = npt.NDArray[Any]
HashArray: TypeAlias = npt.NDArray[np.void]  # [n] block hashes: records of HASH_BYTES bytes


class Outcome(IntEnum):
    """What became of one block of a Store or Commit request; the numbers are the wire's (`kvstore.v1.Outcome`)."""

    NEW = 1  # reserved for this writer: send its parts
    STORED = 2  # committed: no bytes are needed
    WRITING = 3  # on its way: from another writer, or waiting for other ranks
    FULL = 4  # no slot could be freed: skip this save
    ORPHAN = 5  # the block before it is not stored, so nobody could match it: skip this save
    FAILED = 6  # parts are missing and will not come: gone


class Memory(IntEnum):
    """What memory of a client is; the numbers are the wire's (`kvstore.v1.Memory`)."""

    HOST = 0
    CUDA = 1  # of a CUDA device: this process must not touch what lies there


@dataclass(frozen=True, slots=True)
class Location:
    """Where `n` blocks lie in shared slabs; three arrays `[n]`, in the order of the request."""

    slabs: IntArray
    slots: IntArray
    generations: IntArray
