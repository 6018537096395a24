"""The table of errors, walked in both directions."""

import grpc
import pytest

from kvstore import errors
from kvstore.errors import ERRORS, KVStoreError, StoreBug, error_of
from kvstore.wire import MAX_MESSAGE_TEXT, error_from_status, status_of
from kvstore_server.service import code_of

EVERY = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, KVStoreError) and value is not KVStoreError
]
GRPC_CODES = {code.value[0]: code for code in grpc.StatusCode}


def test_every_error_is_in_the_table_under_a_code_of_its_own() -> None:
    assert sorted(ERRORS.values(), key=str) == sorted(EVERY, key=str)
    assert all(ERRORS[error.code] is error for error in EVERY)


@pytest.mark.parametrize("error", EVERY)
def test_an_error_survives_the_wire(error: type[KVStoreError]) -> None:
    back = error_from_status(status_of(error("what was expected")))
    assert type(back) is error
    assert str(back) == "what was expected"


@pytest.mark.parametrize("error", EVERY)
def test_a_code_is_one_of_grpc_and_never_ok(error: type[KVStoreError]) -> None:
    assert error.code in GRPC_CODES
    assert error.code != 0
    assert code_of(error("")) is GRPC_CODES[error.code]
    assert error.next_step


@pytest.mark.parametrize("code", sorted(set(range(20)) - set(ERRORS)))
def test_a_code_that_no_error_has_is_a_bug_of_the_store(code: int) -> None:
    assert type(error_of(code, "?")) is StoreBug


def test_errors_are_what_python_calls_them_too() -> None:
    assert issubclass(errors.InvalidRequest, ValueError)
    assert issubclass(errors.BlockMissing, KeyError)
    assert issubclass(errors.StoreTimeout, TimeoutError)
    assert issubclass(errors.StoreUnavailable, ConnectionError)
    assert issubclass(errors.NotAllowed, PermissionError)
    assert str(errors.BlockMissing("block 12: not stored")) == "block 12: not stored"


def test_a_long_message_is_cut_on_the_wire() -> None:
    assert len(status_of(StoreBug("x" * 10_000)).message) == MAX_MESSAGE_TEXT
