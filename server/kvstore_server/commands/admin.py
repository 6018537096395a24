"""The Admin service of a daemon, as commands call it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from kvstore.errors import StoreUnavailable, error_of
from kvstore.v1.kvstore_pb2_grpc import AdminStub
from kvstore_server.access import AUTHORIZATION

TIMEOUT_S: Final = 5.0  # of each call


@contextmanager
def admin_at(address: str) -> Iterator[AdminStub]:
    """Calls of the daemon there. Raises: StoreUnavailable, if it does not answer; the KVStoreError that it answers."""
    with grpc.insecure_channel(address) as channel:
        try:
            yield AdminStub(channel)
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise StoreUnavailable(
                    f"{address}: no daemon answers there; start one with `kvstore serve`, or check ADDRESS"
                ) from None
            raise error_of(code.value[0], error.details() or "no details") from None


def bearing(token: str) -> list[tuple[str, str]] | None:
    """The metadata of a call that shows the token; empty: none."""
    return [(AUTHORIZATION, f"Bearer {token}")] if token else None
