"""Every failure a caller can meet, one class each, with its status code and what to do next.

    KVStoreError
    ├── InvalidRequest (ValueError)      INVALID_ARGUMENT
    ├── SpecMismatch                     FAILED_PRECONDITION
    ├── BlockMissing (KeyError)          NOT_FOUND
    ├── AlreadyStored                    ALREADY_EXISTS
    ├── StoreFull                        RESOURCE_EXHAUSTED
    ├── WriterFailed                     ABORTED
    ├── MembersChanged                   OUT_OF_RANGE
    ├── BlockCorrupt                     DATA_LOSS
    ├── NotAuthenticated                 UNAUTHENTICATED
    ├── NotAllowed (PermissionError)     PERMISSION_DENIED
    ├── Unsupported                      UNIMPLEMENTED
    ├── StoreTimeout (TimeoutError)      DEADLINE_EXCEEDED
    ├── StoreUnavailable (ConnectionError)  UNAVAILABLE
    └── StoreBug                         INTERNAL

Codes are the numbers of gRPC's status codes, which the session stream carries too. UNAVAILABLE means repeat
this call, ABORTED start over one level up, FAILED_PRECONDITION do not repeat until someone fixes something.
"""

from typing import ClassVar


class KVStoreError(Exception):
    """A failure with a status code; never raised itself, only its subclasses are."""

    code: ClassVar[int]
    next_step: ClassVar[str]

    def __str__(self) -> str:
        # KeyError would show the repr of its argument.
        return Exception.__str__(self)


class InvalidRequest(KVStoreError, ValueError):
    """The caller asked for something that has no meaning; the message says what was expected."""

    code = 3
    next_step = "fix the caller: raise in tests, count and skip in production"


class StoreTimeout(KVStoreError, TimeoutError):
    """The deadline passed; nothing is written to the caller's buffers after this is raised."""

    code = 4
    next_step = "recompute"


class BlockMissing(KVStoreError, KeyError):
    """These blocks are not stored (any more)."""

    code = 5
    next_step = "recompute those blocks"


class AlreadyStored(KVStoreError):
    """The bytes are there, or on their way from another writer."""

    code = 6
    next_step = "nothing"


class NotAllowed(KVStoreError, PermissionError):
    """The token is good, but not for this tenant."""

    code = 7
    next_step = "stop; tell the operator"


class StoreFull(KVStoreError):
    """No room could be made: what is stored is leased or pinned, or the daemon is draining."""

    code = 8
    next_step = "skip this save"


class SpecMismatch(KVStoreError):
    """Client and store disagree on what the blocks are, or on the protocol; the message names the field."""

    code = 9
    next_step = "stop using the store until the configuration is fixed"


class WriterFailed(KVStoreError):
    """A block that was being written will not be completed."""

    code = 10
    next_step = "recompute what did not arrive, or match again"


class MembersChanged(KVStoreError):
    """The store has other members than those by which the caller placed its blocks."""

    code = 11
    next_step = "ask for the members again, and place by those"


class Unsupported(KVStoreError):
    """The peer cannot do this: it is older, or the capability is off."""

    code = 12
    next_step = "fall back to what both sides can do"


class StoreBug(KVStoreError):
    """The store broke its own rules while answering."""

    code = 13
    next_step = "recompute; report it with the request id"


class StoreUnavailable(KVStoreError, ConnectionError):
    """The store cannot be reached, went away, or the circuit breaker is open."""

    code = 14
    next_step = "recompute; the client reconnects by itself"


class BlockCorrupt(KVStoreError):
    """Bytes did not match their checksum; the store drops the block."""

    code = 15
    next_step = "recompute; the store has dropped it"


class NotAuthenticated(KVStoreError):
    """The daemon asks for a token, and none or an unknown one came."""

    code = 16
    next_step = "stop; tell the operator"


ERRORS: dict[int, type[KVStoreError]] = {
    error.code: error
    for error in (
        InvalidRequest,
        StoreTimeout,
        BlockMissing,
        AlreadyStored,
        NotAllowed,
        StoreFull,
        SpecMismatch,
        WriterFailed,
        MembersChanged,
        Unsupported,
        StoreBug,
        StoreUnavailable,
        BlockCorrupt,
        NotAuthenticated,
    )
}


def error_of(code: int, message: str) -> KVStoreError:
    """The error that carries this status code; a code that no error has becomes `StoreBug`."""
    return ERRORS.get(code, StoreBug)(message)
