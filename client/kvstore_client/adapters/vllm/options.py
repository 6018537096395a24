"""What `kv_connector_extra_config` may hold. Frozen, checked once; unknown keys are refused."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

from kvstore.errors import InvalidRequest, Unsupported
from kvstore.transport.ucx import Agent


class Granularity(StrEnum):
    """How much is saved at a time."""

    REQUEST = "request"  # all of a prompt, in the step that ends its prefill
    LAYER = "layer"  # each layer as it is computed
    CHUNK = "chunk"  # all layers, at the end of each step
    AUTO = "auto"  # LAYER where a step computes enough to be worth it, else CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """How the connector behaves; only the address has to be given.

    Raises: InvalidRequest, if a value is out of its bounds; it names the option.
    """

    address: str  # "unix:/path/kvstore.sock" or "host:port" of a daemon, or "kvstore://..." of a store of several
    token: str = ""
    tenant: str = "default"
    revision: str = ""  # of the weights; empty: the hub commit, or a digest of the model's files
    async_load: bool = True  # False: loads happen within the forward pass, layer by layer
    granularity: Granularity = Granularity.AUTO  # of saves
    timeout_s: float = 1.0  # of a lookup, a reservation, and of waiting for the daemon's other answers
    load_timeout_s: float = 5.0  # from the beginning of a load to its end
    follow_timeout_s: float = 60.0  # the same for one that follows a prefill under way elsewhere
    transport: Literal["auto", "shm", "ucx"] = "auto"  # "auto": shm where the daemon's socket can be reached, else ucx
    ucx_device: str = ""  # network device of transfers between hosts; empty: the one towards the daemon
    prefill_tokens_per_s: float = 0.0  # that this engine computes; 0: what the store has is always loaded

    def __post_init__(self) -> None:
        if not self.address:
            raise InvalidRequest(
                'address: expected the daemon\'s, got none; for example "unix:/run/kvstore/kvstore.sock"'
            )
        for name in ("timeout_s", "load_timeout_s", "follow_timeout_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise InvalidRequest(f"{name}: expected more than 0 and at most 3600, got {getattr(self, name)!r}")
        if not self.prefill_tokens_per_s >= 0:
            raise InvalidRequest(f"prefill_tokens_per_s: expected at least 0, got {self.prefill_tokens_per_s!r}")

    def check_transport(self) -> None:
        """If ucx was asked for, this process can have it, and has loaded it, which a first load or save would wait for.

        Raises: InvalidRequest, if NIXL is not installed, or there is no such device.
        """
        if self.transport == "ucx":
            try:
                Agent("trial", device=self.ucx_device or "lo").close()
            except Unsupported as error:
                raise InvalidRequest(f"transport: {error}") from None

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> "ConnectorOptions":
        """The options that an operator wrote.

        Raises: InvalidRequest, for an unknown key, or a value that does not fit.
        """
        kinds = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in config.items():
            if key not in kinds:
                nearest = difflib.get_close_matches(key, kinds, n=1, cutoff=0.0)[0]
                raise InvalidRequest(
                    f"kv_connector_extra_config: unknown option {key!r:.80}; the nearest is {nearest!r} "
                    f"(there are {', '.join(kinds)})"
                )
            values[key] = _of_kind(key, value, kinds[key])
        if "address" not in values:
            raise InvalidRequest("kv_connector_extra_config: expected an address, got none; name the daemon's socket")
        return cls(**values)


def _of_kind(key: str, value: object, kind: object) -> object:
    if kind is Granularity:
        try:
            return Granularity(str(value))
        except ValueError:
            raise InvalidRequest(f"{key}: expected one of {', '.join(Granularity)}, got {value!r:.80}") from None
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise InvalidRequest(f"{key}: expected one of {', '.join(get_args(kind))}, got {value!r:.80}")
        return value
    if kind is float and type(value) is int:
        return float(value)
    assert isinstance(kind, type)
    if type(value) is not kind:
        raise InvalidRequest(f"{key}: expected a {kind.__name__}, got {value!r:.80}; correct kv_connector_extra_config")
    return value
