"""Block hash <-> row, for whole lists of hashes at once: open addressing with linear probing, over NumPy columns.

A dict takes 0.1 us a hash and a Python object for each; here a list costs a few vectorised steps, however long it
is. At most a quarter of the places are taken, so that few hashes need more than two steps.
"""

import ctypes
import secrets
from typing import Final

import numpy as np

from kvstore.native import load
from kvstore.transport.memory import address_of
from kvstore.types import HASH_BYTES, AnyArray, HashArray, IntArray

NONE: Final = -1  # in arrays of rows: no such row
_EMPTY: Final = -1  # in the table: nothing was ever here since the last rebuild, so a search ends
_GONE: Final = -2  # in the table: something was here, so a search goes on
_PLACES_PER_ROW: Final = 4
_WORDS: Final = HASH_BYTES // 8
_ALL_EQUAL: Final = 0x01010101  # four comparisons of words that are all true, read as one integer
_WINDOW: Final = np.arange(8)


_native: Final = load(
    __file__,
    "kvstore_find",
    *(ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
)


class HashTable:
    """Hashes of different rows differ. Rows are numbers below what `resize` was told, given by the caller."""

    def __init__(self) -> None:
        # Secret, so that nobody can choose hashes that all fall on one place.
        self._factors = np.frombuffer(secrets.token_bytes(8 * _WORDS), np.uint64) | np.uint64(1)
        self._words: AnyArray = np.zeros((0, _WORDS), np.uint64)  # [num_rows, 4]: the hash of each row
        self._place_of: AnyArray = np.zeros(0, np.int32)  # [num_rows]
        self._rows: AnyArray = np.zeros(0, np.int32)  # [num_places]
        self._mask = 0
        self._shift = np.uint64(0)
        self._num_empty = 0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def resize(self, num_rows: int, used: IntArray) -> None:
        """There is room for `num_rows` rows, a power of two; `used` are those that have a hash."""
        more = num_rows - len(self._words)
        self._words = np.concatenate([self._words, np.zeros((more, _WORDS), np.uint64)])
        self._place_of = np.concatenate([self._place_of, np.zeros(more, np.int32)])
        num_places = _PLACES_PER_ROW * num_rows
        self._mask = num_places - 1
        self._shift = np.uint64(64 - self._mask.bit_length())
        self.rebuild(used)

    def find(self, hashes: HashArray) -> IntArray:
        """`[n]` rows, NONE where the hash is not known."""
        words = _words_of(hashes)
        return self._search_natively(words) if _native is not None else self.search(words)

    def add(self, hashes: HashArray, rows: IntArray) -> None:
        """These rows have these hashes, all different and none of them known."""
        words = _words_of(hashes)
        self._words[rows] = words
        self._settle(rows, self._home(words))
        self._count += len(rows)

    def remove(self, rows: IntArray) -> None:
        """These different rows have no hash any more."""
        places = self._place_of[rows]
        self._rows[places] = _GONE
        self._count -= len(rows)
        # What is gone right before an empty place is empty too: no search needs to pass it.
        while len(places):
            places = places[(self._rows[(places + 1) & self._mask] == _EMPTY) & (self._rows[places] == _GONE)]
            self._rows[places] = _EMPTY
            self._num_empty += len(places)
            places = (places - 1) & self._mask

    def needs_rebuild(self) -> bool:
        """Whether so many places are gone that searches have become long."""
        return self._num_empty < len(self._rows) // 2

    def rebuild(self, used: IntArray) -> None:
        """No place is gone any more; `used` are the rows that have a hash."""
        self._rows = np.full(self._mask + 1, _EMPTY, np.int32)
        self._num_empty = len(self._rows)
        self._settle(used, self._home(self._words[used]))

    def hashes_of(self, rows: IntArray) -> HashArray:
        """`[n]` hashes of rows that have one."""
        hashes: HashArray = self._words.take(rows, axis=0).view(f"V{HASH_BYTES}").reshape(-1)
        return hashes

    def search(self, words: AnyArray) -> IntArray:
        """As `find`, of `[n, 4]` words, without table.c."""
        places = self._home(words)
        rows = self._rows.take(places).astype(np.int64)
        # Most are at the first place of their search; an empty one, which reads as the last row here, is no row.
        known = _equal(self._words.take(rows, axis=0), words) & (rows >= 0)
        left = np.flatnonzero(~known & (rows != _EMPTY))
        rows[~known] = NONE
        places = places.take(left) + 1
        while len(left):
            # The rest is looked for in several places at once; a hash is in at most one.
            window = self._rows.take((places[:, None] + _WINDOW) & self._mask)
            known = _equal(self._words.take(window, axis=0), words.take(left, axis=0)[:, None]) & (window >= 0)
            position, column = np.nonzero(known)
            rows[left[position]] = window[position, column]
            going = ~(known | (window == _EMPTY)).any(axis=1)
            left, places = left[going], places[going] + len(_WINDOW)
        return rows

    def _search_natively(self, words: AnyArray) -> IntArray:
        found = np.empty(len(words), np.int64)
        assert _native is not None
        _native(
            len(words),
            address_of(words),
            address_of(self._factors),
            int(self._shift),
            self._mask,
            address_of(self._rows),
            address_of(self._words),
            address_of(found),
        )
        return found

    def _home(self, words: AnyArray) -> AnyArray:
        """`[n]`: the place at which the search for each hash begins."""
        mixed: AnyArray = (words @ self._factors) >> self._shift
        return mixed.astype(np.int64)

    def _settle(self, rows: IntArray, place: AnyArray) -> None:
        """Each row is put into the first free place from `place` on."""
        while len(rows):
            before = self._rows[place]
            free = before < 0
            self._rows[place[free]] = rows[free]  # of several that want one place, the last one gets it
            settled = self._rows[place] == rows
            self._place_of[rows[settled]] = place[settled]
            self._num_empty -= int(np.count_nonzero(before[settled] == _EMPTY))
            rows, place = rows[~settled], (place[~settled] + 1) & self._mask

    def validate(self, used: IntArray) -> None:
        """Every invariant of this class holds, and `used` are the rows that have a hash. For tests."""
        assert self._count == len(used)
        assert self._num_empty == np.count_nonzero(self._rows == _EMPTY)
        assert sorted(self._rows[self._rows >= 0].tolist()) == sorted(used.tolist())
        assert (self._rows[self._place_of[used]] == used).all()
        hashes = self.hashes_of(used)
        assert (self.find(hashes) == used).all()
        assert (self.search(_words_of(hashes)) == used).all()


def _equal(left: AnyArray, right: AnyArray) -> AnyArray:
    """`[...]` bool, of `[..., 4]` words each: whether all four are equal."""
    equal: AnyArray = (left == right).view(np.uint32)[..., 0] == _ALL_EQUAL
    return equal


def _words_of(hashes: HashArray) -> AnyArray:
    return np.ascontiguousarray(hashes).view(np.uint64).reshape(-1, _WORDS)
