"""What makes two blocks interchangeable, and the namespace that says so in 32 bytes.

`KVSpec` names everything that shapes the bytes of a block. Its canonical encoding is typed and
length-prefixed, so that two different specs never encode alike; the SHA-256 of that encoding is the
namespace, and every tier, lookup and transfer is addressed within one.

Source: docs/spec/identity.md, which defines the encoding byte by byte; docs/spec/vectors.json checks it.
"""

import hashlib
import reprlib
import struct
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NoReturn

from kvstore.errors import InvalidRequest
from kvstore.types import Namespace

MAX_TEXT_BYTES: Final = 1024
MAX_BLOCK_TOKENS: Final = 65_536
MAX_LAYERS: Final = 4096
MAX_RANKS: Final = 1024
MAX_PARTS: Final = 65_536
MAX_PART_BYTES: Final = 1 << 30
MAX_BLOCK_BYTES: Final = 1 << 32
DEFAULT_HASH_SCHEME: Final = "kvstore.sha256.v1"

# Block hash schemes that give the same 32 bytes in every process, and what computes them.
HASH_SCHEMES: Final[dict[str, str]] = {
    DEFAULT_HASH_SCHEME: "kvstore.hashing",
    "vllm.sha256.v1": "vLLM, SHA-256 over pickle; the same in every process since vLLM 0.32",
    "vllm.sha256_cbor.v1": "vLLM, SHA-256 over CBOR; the same in every process since vLLM 0.32",
    "sglang.sha256.v1": "SGLang, SHA-256 over token ids alone; its adapter puts the rest into the spec",
}

# Kinds of scheme that people do bring, by a word in their name, and why each is refused.
_UNFIT_SCHEMES: Final[dict[str, str]] = {
    "builtin": "Python's hash() is seeded at random in each process",
    "xxhash": "xxHash is open to collisions, and engines seed its root at random in each process",
}

# Names that point at other weights tomorrow, and so cannot stand for their bytes.
_MOVING_REVISIONS: Final = frozenset({"head", "latest", "main", "master"})

_MAGIC: Final = b"kvstore/spec/v1\0"
_TEXT, _UINT, _UINTS = 1, 2, 3

# Field name -> number on the wire of the encoding, ascending. A number is never reused.
_FIELD_NUMBERS: Final[dict[str, int]] = {
    "model": 1,
    "revision": 2,
    "dtype": 3,
    "block_tokens": 4,
    "layers": 5,
    "ranks": 6,
    "part_bytes": 7,
    "layout": 8,
    "tenant": 9,
    "hash_scheme": 10,
    "adapter": 11,
    "adapter_revision": 12,
    "quantisation": 13,
    "salt": 14,
}


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field in which the store's spec (`ours`) and the client's (`theirs`) differ; `str()` says so.

    Both values of a salt are `None`: a salt separates callers, so it is not repeated in messages.
    """

    name: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        if self.name == "salt":
            return "salt: store and client have different values (not shown)"
        if isinstance(self.ours, tuple) and isinstance(self.theirs, tuple):
            store, client = (f"{len(sizes)} parts, {sum(sizes)} bytes" for sizes in (self.ours, self.theirs))
            pairs = enumerate(zip(self.ours, self.theirs, strict=False))
            first = next((f"; first at part {n}: {a} and {b}" for n, (a, b) in pairs if a != b), "")
            return f"{self.name}: store has {store}, client has {client}{first}"
        return f"{self.name}: store has {self.ours!r}, client has {self.theirs!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Everything that shapes the bytes of a block; two equal specs share a namespace, two others never do.

    A block is `num_parts` parts laid end to end, layer-major: the part of (layer, rank) has the index
    `layer * ranks + rank`, and `part_bytes[index]` is its size in bytes. Values are checked when the spec
    is made, and offsets and namespace computed then, so that each later question costs O(1).

    Optional fields that are not set are absent from the encoding, so that a field added by a later version
    leaves today's namespaces as they are. `repr` leaves out the sizes (long) and the salt (not for logs).

    Raises: InvalidRequest, if a field is out of its bounds; it names the field and what to do.
    """

    model: str
    revision: str  # digest of config and weights, or the hub commit; never a path or a branch
    dtype: str
    block_tokens: int
    layers: int
    part_bytes: tuple[int, ...] = field(repr=False)
    layout: str  # layout fingerprint: engine, physical order, ISA where it packs
    ranks: int = 1
    adapter: str | None = None  # name of the LoRA adapter
    adapter_revision: str | None = None  # digest of its weights; set exactly when `adapter` is
    quantisation: str | None = None
    hash_scheme: str = DEFAULT_HASH_SCHEME
    tenant: str = "default"
    salt: str = field(default="", repr=False)

    namespace: Namespace = field(init=False, repr=False, compare=False)  # SHA-256 of the encoding
    _offsets: tuple[int, ...] = field(init=False, repr=False, compare=False)  # [num_parts + 1]

    def __post_init__(self) -> None:
        _check_texts(self)
        _check_revision("revision", self.revision)
        _check_adapter(self.adapter, self.adapter_revision)
        _check_hash_scheme(self.hash_scheme)
        _check_int("block_tokens", self.block_tokens, MAX_BLOCK_TOKENS)
        _check_grid(self.layers, self.ranks)
        _check_part_bytes(self.part_bytes, num_parts=self.layers * self.ranks)
        object.__setattr__(self, "_offsets", tuple(accumulate(self.part_bytes, initial=0)))
        object.__setattr__(self, "namespace", Namespace(hashlib.sha256(canonical_bytes(self)).digest()))

    @classmethod
    def uniform(
        cls,
        *,
        model: str,
        revision: str,
        dtype: str,
        block_tokens: int,
        layers: int,
        bytes_per_part: int,
        layout: str,
        ranks: int = 1,
        adapter: str | None = None,
        adapter_revision: str | None = None,
        quantisation: str | None = None,
        hash_scheme: str = DEFAULT_HASH_SCHEME,
        tenant: str = "default",
        salt: str = "",
    ) -> "KVSpec":
        """A spec whose parts all have `bytes_per_part` bytes. Raises: as `KVSpec` does."""
        _check_grid(layers, ranks)
        return cls(
            model=model,
            revision=revision,
            dtype=dtype,
            block_tokens=block_tokens,
            layers=layers,
            part_bytes=(bytes_per_part,) * (layers * ranks),
            layout=layout,
            ranks=ranks,
            adapter=adapter,
            adapter_revision=adapter_revision,
            quantisation=quantisation,
            hash_scheme=hash_scheme,
            tenant=tenant,
            salt=salt,
        )

    @property
    def num_parts(self) -> int:
        """Parts of one block: `layers * ranks`."""
        return len(self.part_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the sum of its parts."""
        return self._offsets[-1]

    def part_range(self, part: int) -> tuple[int, int]:
        """(offset, size) in bytes of one part within its block. Raises: InvalidRequest, if there is none."""
        _check_index("part", part, self.num_parts)
        return self._offsets[part], self.part_bytes[part]

    def part_index(self, *, layer: int, rank: int) -> int:
        """The index of the part of this layer and rank. Raises: InvalidRequest, if there is none."""
        _check_index("layer", layer, self.layers)
        _check_index("rank", rank, self.ranks)
        return layer * self.ranks + rank

    def rank_parts(self, rank: int) -> range:
        """The indices of one rank's parts, from layer 0 up. Raises: InvalidRequest, if there is none."""
        _check_index("rank", rank, self.ranks)
        return range(rank, self.num_parts, self.ranks)

    def differences(self, theirs: "KVSpec") -> tuple[FieldDifference, ...]:
        """The fields in which this spec (the store's) and `theirs` (the client's) differ, in their order."""
        names = [name for name in _FIELD_NUMBERS if getattr(self, name) != getattr(theirs, name)]
        hidden = FieldDifference("salt", None, None)
        return tuple(
            hidden if name == "salt" else FieldDifference(name, getattr(self, name), getattr(theirs, name))
            for name in names
        )


def canonical_bytes(spec: KVSpec) -> bytes:
    """The one encoding of a spec: the magic, then each field that is set, in the order of field numbers.

    A field is its number (u16), type (u8), payload length in bytes (u32) and payload, little-endian.
    Source: docs/spec/identity.md, section 1.
    """
    pieces = [_MAGIC]
    for name, number in _FIELD_NUMBERS.items():
        value: str | int | tuple[int, ...] | None = getattr(spec, name)
        if value is None or value == "":
            continue
        if isinstance(value, str):
            kind, payload = _TEXT, value.encode()
        elif isinstance(value, int):
            kind, payload = _UINT, struct.pack("<Q", value)
        else:
            kind, payload = _UINTS, struct.pack(f"<{len(value)}Q", *value)
        pieces += (struct.pack("<HBI", number, kind, len(payload)), payload)
    return b"".join(pieces)


def _check_texts(spec: KVSpec) -> None:
    for name in ("model", "revision", "dtype", "layout", "tenant", "hash_scheme"):
        _check_text(name, getattr(spec, name))
    for name in ("adapter", "adapter_revision", "quantisation"):
        if getattr(spec, name) is not None:
            _check_text(name, getattr(spec, name))
    _check_text("salt", spec.salt, may_be_empty=True)


def _check_adapter(adapter: str | None, revision: str | None) -> None:
    if (adapter is None) != (revision is None):
        _refuse("adapter", "adapter and adapter_revision together", "only one", "set both, or neither")
    if revision is not None:
        _check_revision("adapter_revision", revision)


def _check_text(name: str, value: object, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str):
        _refuse(name, "text", f"a {type(value).__name__}", "pass a str")
    if not value and not may_be_empty:
        _refuse(name, "text", "an empty one", "name it: it is part of what makes blocks interchangeable")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        _refuse(name, "text that UTF-8 can encode", "a lone surrogate", "decode it without surrogateescape")
    if size_bytes > MAX_TEXT_BYTES:
        _refuse(name, f"at most {MAX_TEXT_BYTES} UTF-8 bytes", size_bytes, "pass a digest of it instead")


def _check_revision(name: str, value: str) -> None:
    if "/" in value or "\\" in value or value.lower() in _MOVING_REVISIONS:
        advice = "pass a hex digest of config and weights, or the hub commit"
        _refuse(name, "a name that means the same bytes for ever", reprlib.repr(value), advice)


def _check_hash_scheme(scheme: str) -> None:
    if scheme not in HASH_SCHEMES:
        reasons = (reason for word, reason in _UNFIT_SCHEMES.items() if word in scheme.lower())
        got = f"{reprlib.repr(scheme)} ({next(reasons, 'unknown')})"
        _refuse("hash_scheme", f"one of {', '.join(HASH_SCHEMES)}", got, f"use {DEFAULT_HASH_SCHEME}")


def _check_grid(layers: int, ranks: int) -> None:
    _check_int("layers", layers, MAX_LAYERS)
    _check_int("ranks", ranks, MAX_RANKS)
    if layers * ranks > MAX_PARTS:
        _refuse("layers * ranks", f"at most {MAX_PARTS}", layers * ranks, "let one rank stand for several")


def _check_part_bytes(sizes: tuple[int, ...], *, num_parts: int) -> None:
    if not isinstance(sizes, tuple):
        _refuse("part_bytes", "a tuple", f"a {type(sizes).__name__}", "pass one size per (layer, rank)")
    if len(sizes) != num_parts:
        _refuse("part_bytes", f"{num_parts} sizes", len(sizes), "pass one per (layer, rank)")
    for part, size in enumerate(sizes):
        _check_int(f"part_bytes[{part}]", size, MAX_PART_BYTES)
    if sum(sizes) > MAX_BLOCK_BYTES:
        _refuse("part_bytes", f"at most {MAX_BLOCK_BYTES} in all", sum(sizes), "use fewer tokens per block")


def _check_int(name: str, value: int, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        _refuse(name, f"an int from 1 to {most}", reprlib.repr(value), "check how the model's shape was read")


def _check_index(name: str, value: int, count: int) -> None:
    if not 0 <= value < count:
        _refuse(name, f"0 to {count - 1}", value, "count from 0, within the spec of this block")


def _refuse(name: str, expected: str, got: object, advice: str) -> NoReturn:
    raise InvalidRequest(f"{name}: expected {expected}, got {got}; {advice}")
