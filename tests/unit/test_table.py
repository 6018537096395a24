"""The hash table against a dict: the same answers, whatever was added, removed and searched for, both ways."""

import secrets

import numpy as np
import pytest
from builders import records
from hypothesis import given
from hypothesis import strategies as st

from kvstore.types import BlockHash
from kvstore_server import table as table_module
from kvstore_server.table import NONE, HashTable, _words_of

ROWS = 64


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


@pytest.fixture
def one_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search begins at one place, as if all hashes had been chosen to."""
    monkeypatch.setattr(secrets, "token_bytes", bytes)


def run(actions: list[tuple[bool, set[int]]]) -> None:
    table, oracle = HashTable(), dict[BlockHash, int]()
    table.resize(ROWS, np.zeros(0, np.int64))
    for adding, numbers in actions:
        if adding:
            new = [hash_of(number) for number in numbers if hash_of(number) not in oracle]
            unused = [row for row in range(ROWS) if row not in oracle.values()]
            rows = unused[: len(new)]
            table.add(records(new[: len(rows)]), np.array(rows, np.int64))
            oracle.update(zip(new, rows, strict=False))
        else:
            gone = [oracle.pop(hash_of(number)) for number in numbers if hash_of(number) in oracle]
            table.remove(np.array(gone, np.int64))
        if table.needs_rebuild():
            table.rebuild(np.array(sorted(oracle.values()), np.int64))
            assert not table.needs_rebuild()
        table.validate(np.array(sorted(oracle.values()), np.int64))
        asked = [hash_of(number) for number in range(100)]
        expected = [oracle.get(value, NONE) for value in asked]
        assert table.find(records(asked)).tolist() == expected
        assert table.search(_words_of(records(asked))).tolist() == expected


actions = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 99), max_size=40)), max_size=12)


@given(actions)
def test_it_answers_as_a_dict_does(actions: list[tuple[bool, set[int]]]) -> None:
    run(actions)


@pytest.mark.usefixtures("one_home")
def test_hashes_that_all_fall_on_one_place_are_told_apart() -> None:
    # The factors are 1 now, and what these hashes differ in is shifted away.
    table = HashTable()
    table.resize(ROWS, np.zeros(0, np.int64))
    assert set(table._home(_words_of(records([hash_of(number) for number in range(100)])))) == {0}
    run([(True, set(range(64))), (False, {1, 2, 40, 63}), (True, {70, 71}), (False, set(range(64))), (True, {5, 6})])


def test_it_grows_with_what_is_in_it() -> None:
    table = HashTable()
    table.resize(4, np.zeros(0, np.int64))
    table.add(records([hash_of(1), hash_of(2)]), np.array([3, 0]))
    table.resize(1024, np.array([0, 3]))
    assert table.find(records([hash_of(2), hash_of(1), hash_of(3)])).tolist() == [0, 3, NONE]
    assert table.hashes_of(np.array([3])).tolist() == [hash_of(1)]
    assert len(table) == 2


def test_table_c_is_compiled_where_there_is_a_compiler() -> None:
    """The search that stands in for it is right but slow, so nobody would notice."""
    import shutil

    assert table_module._native is not None or shutil.which("cc") is None
