"""Who may use what: a token names the tenants that its bearer may use."""

import secrets
from collections.abc import Mapping
from typing import Final

from kvstore.errors import NotAllowed, NotAuthenticated

AUTHORIZATION: Final = "authorization"  # metadata key of unary calls: "Bearer TOKEN"
ALL_TENANTS: Final = "*"
MAX_TOKEN_BYTES: Final = 1024


def authorize(tokens: Mapping[str, list[str]], token: str, *, tenant: str | None) -> None:
    """The bearer may use the tenant (None: all of them). Without configured tokens, everyone may.

    Raises: NotAuthenticated, if the token is unknown; NotAllowed, if it is not for this tenant.
    """
    if not tokens:
        return
    if len(token.encode()) > MAX_TOKEN_BYTES:
        raise NotAuthenticated(f"token: expected at most {MAX_TOKEN_BYTES} bytes")
    for known, tenants in tokens.items():
        if secrets.compare_digest(known.encode(), token.encode()):
            if ALL_TENANTS in tenants or tenant in tenants:
                return
            wanted = "all tenants" if tenant is None else f"tenant {tenant!r}"
            raise NotAllowed(f"token: expected one for {wanted}, got one for {tenants}; ask the operator")
    raise NotAuthenticated("token: expected one that the daemon knows; ask the operator")
