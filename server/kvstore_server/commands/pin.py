"""`kvstore pin` and `kvstore unpin`: tell a daemon which blocks it must keep."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.hashing import pack
from kvstore.types import HASH_BYTES, BlockHash, Namespace
from kvstore.v1 import kvstore_pb2 as pb
from kvstore_server.commands.admin import TIMEOUT_S, admin_at, bearing

BATCH_HASHES: Final = 1 << 16  # of one request: the daemon answers nobody else meanwhile, for about 1 ms
_SHOWN_DIGITS: Final = 12  # of a namespace, as in `kvstore status`


def read_hashes(lines: Iterable[str], *, where: str) -> list[BlockHash]:
    """The hashes of a file that has one a line, each once, in order; empty lines are passed over.

    Raises: InvalidRequest, naming the line at fault, or if there is no hash.
    """
    found: dict[BlockHash, None] = {}
    for number, line in enumerate(lines, start=1):
        digits = line.strip()
        if digits:
            if not re.fullmatch(f"[0-9a-fA-F]{{{2 * HASH_BYTES}}}", digits):
                expected = f"expected a block hash of {2 * HASH_BYTES} hex digits"
                raise InvalidRequest(
                    f"{where}:{number}: {expected}, got {digits!r:.80} of {len(digits)}; write one hash a line"
                )
            found[BlockHash(bytes.fromhex(digits))] = None
    if not found:
        raise InvalidRequest(f"{where}: expected at least one block hash, got none; write one a line, in hex")
    return list(found)


def set_pinned(address: str, namespace: str, hashes: Sequence[BlockHash], *, pinned: bool, token: str) -> int:
    """How many of the blocks are pinned now, or, without `pinned`, are not any more. The others are not stored.

    `namespace` is the first hex digits of one, as many as tell it from the others. Idempotent: after an error, some
    of the blocks may have been pinned. Raises: InvalidRequest (namespace), NotAuthenticated, NotAllowed,
    StoreUnavailable.
    """
    with admin_at(address) as admin:
        known = admin.Namespaces(pb.NamespacesRequest(), timeout=TIMEOUT_S).namespaces
        meant = _the_one(namespace, [Namespace(space.namespace) for space in known])
        method = admin.Pin if pinned else admin.Unpin
        return sum(
            method(
                pb.PinRequest(namespace=meant, hashes=pack(hashes[first : first + BATCH_HASHES])),
                timeout=TIMEOUT_S,
                metadata=bearing(token),
            ).num_blocks
            for first in range(0, len(hashes), BATCH_HASHES)
        )


def _the_one(digits: str, known: Sequence[Namespace]) -> Namespace:
    """The only namespace that begins with these digits. Raises: InvalidRequest, if none or several do."""
    if not re.fullmatch(f"[0-9a-fA-F]{{1,{2 * HASH_BYTES}}}", digits):
        raise InvalidRequest(
            f"namespace: expected 1 to {2 * HASH_BYTES} hex digits, got {digits!r}; see `kvstore status`"
        )
    found = [namespace for namespace in known if namespace.hex().startswith(digits.lower())]
    if len(found) == 1:
        return found[0]
    names = ", ".join(f"{namespace.hex()[:_SHOWN_DIGITS]}…" for namespace in found or known) or "none"
    if found:
        raise InvalidRequest(f"namespace: expected digits of only one, got {digits!r} of {names}; give more of them")
    raise InvalidRequest(f"namespace: expected one that is known there ({names}), got {digits!r}; see `kvstore status`")
