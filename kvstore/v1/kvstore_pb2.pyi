from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_NEW: _ClassVar[Outcome]
    OUTCOME_STORED: _ClassVar[Outcome]
    OUTCOME_WRITING: _ClassVar[Outcome]
    OUTCOME_FULL: _ClassVar[Outcome]
    OUTCOME_ORPHAN: _ClassVar[Outcome]
    OUTCOME_FAILED: _ClassVar[Outcome]

class Memory(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_HOST: _ClassVar[Memory]
    MEMORY_CUDA: _ClassVar[Memory]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_NEW: Outcome
OUTCOME_STORED: Outcome
OUTCOME_WRITING: Outcome
OUTCOME_FULL: Outcome
OUTCOME_ORPHAN: Outcome
OUTCOME_FAILED: Outcome
MEMORY_HOST: Memory
MEMORY_CUDA: Memory

class ClientMessage(_message.Message):
    __slots__ = ("request_id", "timeout_ms", "hello", "match", "prefetch", "load", "store", "store_part", "commit", "abort", "release", "verify", "drop_regions", "slabs_dropped", "ping", "register_region", "fetch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STORE_PART_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DROP_REGIONS_FIELD_NUMBER: _ClassVar[int]
    SLABS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    REGISTER_REGION_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    timeout_ms: int
    hello: Hello
    match: Match
    prefetch: Prefetch
    load: Load
    store: Store_
    store_part: StorePart
    commit: Commit
    abort: Abort
    release: Release
    verify: Verify
    drop_regions: DropRegions
    slabs_dropped: SlabsDropped
    ping: Ping
    register_region: RegisterRegion
    fetch: Fetch
    def __init__(self, request_id: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., match: _Optional[_Union[Match, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., store: _Optional[_Union[Store_, _Mapping]] = ..., store_part: _Optional[_Union[StorePart, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., drop_regions: _Optional[_Union[DropRegions, _Mapping]] = ..., slabs_dropped: _Optional[_Union[SlabsDropped, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., register_region: _Optional[_Union[RegisterRegion, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("request_id", "status", "welcome", "matched", "prefetched", "located", "arrived", "reserved", "part_stored", "committed", "aborted", "released", "verified", "regions_dropped", "slabs_retired", "pong", "region_registered", "fetched")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    PREFETCHED_FIELD_NUMBER: _ClassVar[int]
    LOCATED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    PART_STORED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    REGIONS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    SLABS_RETIRED_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    REGION_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    status: Status
    welcome: Welcome
    matched: Matched
    prefetched: Prefetched
    located: Located
    arrived: Arrived
    reserved: Reserved
    part_stored: PartStored
    committed: Committed
    aborted: Aborted
    released: Released
    verified: Verified
    regions_dropped: RegionsDropped
    slabs_retired: SlabsRetired
    pong: Pong
    region_registered: RegionRegistered
    fetched: Fetched
    def __init__(self, request_id: _Optional[int] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., matched: _Optional[_Union[Matched, _Mapping]] = ..., prefetched: _Optional[_Union[Prefetched, _Mapping]] = ..., located: _Optional[_Union[Located, _Mapping]] = ..., arrived: _Optional[_Union[Arrived, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., part_stored: _Optional[_Union[PartStored, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., aborted: _Optional[_Union[Aborted, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., verified: _Optional[_Union[Verified, _Mapping]] = ..., regions_dropped: _Optional[_Union[RegionsDropped, _Mapping]] = ..., slabs_retired: _Optional[_Union[SlabsRetired, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., region_registered: _Optional[_Union[RegionRegistered, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class BlockError(_message.Message):
    __slots__ = ("index", "status")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    index: int
    status: Status
    def __init__(self, index: _Optional[int] = ..., status: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Spec(_message.Message):
    __slots__ = ("model", "revision", "dtype", "block_tokens", "layers", "ranks", "part_bytes", "layout", "tenant", "hash_scheme", "adapter", "adapter_revision", "quantisation", "salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    HASH_SCHEME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    dtype: str
    block_tokens: int
    layers: int
    ranks: int
    part_bytes: _containers.RepeatedScalarFieldContainer[int]
    layout: str
    tenant: str
    hash_scheme: str
    adapter: str
    adapter_revision: str
    quantisation: str
    salt: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., block_tokens: _Optional[int] = ..., layers: _Optional[int] = ..., ranks: _Optional[int] = ..., part_bytes: _Optional[_Iterable[int]] = ..., layout: _Optional[str] = ..., tenant: _Optional[str] = ..., hash_scheme: _Optional[str] = ..., adapter: _Optional[str] = ..., adapter_revision: _Optional[str] = ..., quantisation: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "spec", "expected_namespace", "token", "client_name")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    spec: Spec
    expected_namespace: bytes
    token: str
    client_name: str
    def __init__(self, protocol_version: _Optional[int] = ..., spec: _Optional[_Union[Spec, _Mapping]] = ..., expected_namespace: _Optional[bytes] = ..., token: _Optional[str] = ..., client_name: _Optional[str] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("boot_id", "session_id", "namespace", "heartbeat_ms", "shm", "limits", "capabilities", "server_version", "ucx")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UCX_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    session_id: int
    namespace: bytes
    heartbeat_ms: int
    shm: ShmOffer
    limits: Limits
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    server_version: str
    ucx: UcxOffer
    def __init__(self, boot_id: _Optional[bytes] = ..., session_id: _Optional[int] = ..., namespace: _Optional[bytes] = ..., heartbeat_ms: _Optional[int] = ..., shm: _Optional[_Union[ShmOffer, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., capabilities: _Optional[_Iterable[str]] = ..., server_version: _Optional[str] = ..., ucx: _Optional[_Union[UcxOffer, _Mapping]] = ...) -> None: ...

class ShmOffer(_message.Message):
    __slots__ = ("socket_path", "ticket")
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    socket_path: str
    ticket: bytes
    def __init__(self, socket_path: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class UcxOffer(_message.Message):
    __slots__ = ("agent_name",)
    AGENT_NAME_FIELD_NUMBER: _ClassVar[int]
    agent_name: str
    def __init__(self, agent_name: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_hashes", "max_message_bytes", "max_region_bytes")
    MAX_HASHES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_hashes: int
    max_message_bytes: int
    max_region_bytes: int
    def __init__(self, max_hashes: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_region_bytes: _Optional[int] = ...) -> None: ...

class Match(_message.Message):
    __slots__ = ("hashes", "lease")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    lease: str
    def __init__(self, hashes: _Optional[bytes] = ..., lease: _Optional[str] = ...) -> None: ...

class Matched(_message.Message):
    __slots__ = ("num_blocks", "num_writing", "num_warm", "rise_bytes_per_s")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WARM_FIELD_NUMBER: _ClassVar[int]
    RISE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_writing: int
    num_warm: int
    rise_bytes_per_s: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_writing: _Optional[int] = ..., num_warm: _Optional[int] = ..., rise_bytes_per_s: _Optional[int] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class Prefetched(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("hashes", "lease", "follow")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    lease: str
    follow: bool
    def __init__(self, hashes: _Optional[bytes] = ..., lease: _Optional[str] = ..., follow: _Optional[bool] = ...) -> None: ...

class Located(_message.Message):
    __slots__ = ("slabs", "slots", "generations", "errors", "writing")
    SLABS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    WRITING_FIELD_NUMBER: _ClassVar[int]
    slabs: bytes
    slots: bytes
    generations: bytes
    errors: _containers.RepeatedCompositeFieldContainer[BlockError]
    writing: bytes
    def __init__(self, slabs: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., errors: _Optional[_Iterable[_Union[BlockError, _Mapping]]] = ..., writing: _Optional[bytes] = ...) -> None: ...

class Arrived(_message.Message):
    __slots__ = ("blocks", "parts", "errors", "last")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    parts: bytes
    errors: _containers.RepeatedCompositeFieldContainer[BlockError]
    last: bool
    def __init__(self, blocks: _Optional[bytes] = ..., parts: _Optional[bytes] = ..., errors: _Optional[_Iterable[_Union[BlockError, _Mapping]]] = ..., last: _Optional[bool] = ...) -> None: ...

class Store_(_message.Message):
    __slots__ = ("parent", "hashes", "parts", "epoch", "heads")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    parent: bytes
    hashes: bytes
    parts: bytes
    epoch: int
    heads: bytes
    def __init__(self, parent: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., parts: _Optional[bytes] = ..., epoch: _Optional[int] = ..., heads: _Optional[bytes] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("write_id", "outcomes")
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    write_id: int
    outcomes: bytes
    def __init__(self, write_id: _Optional[int] = ..., outcomes: _Optional[bytes] = ...) -> None: ...

class StorePart(_message.Message):
    __slots__ = ("write_id", "blocks", "parts", "region", "offsets")
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    write_id: int
    blocks: bytes
    parts: bytes
    region: int
    offsets: bytes
    def __init__(self, write_id: _Optional[int] = ..., blocks: _Optional[bytes] = ..., parts: _Optional[bytes] = ..., region: _Optional[int] = ..., offsets: _Optional[bytes] = ...) -> None: ...

class PartStored(_message.Message):
    __slots__ = ("num_committed",)
    NUM_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    num_committed: int
    def __init__(self, num_committed: _Optional[int] = ...) -> None: ...

class RegisterRegion(_message.Message):
    __slots__ = ("region", "size_bytes", "address", "metadata", "memory")
    REGION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    region: int
    size_bytes: int
    address: int
    metadata: bytes
    memory: Memory
    def __init__(self, region: _Optional[int] = ..., size_bytes: _Optional[int] = ..., address: _Optional[int] = ..., metadata: _Optional[bytes] = ..., memory: _Optional[_Union[Memory, str]] = ...) -> None: ...

class RegionRegistered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("hashes", "generations", "parts", "region", "offsets")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    generations: bytes
    parts: bytes
    region: int
    offsets: bytes
    def __init__(self, hashes: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., parts: _Optional[bytes] = ..., region: _Optional[int] = ..., offsets: _Optional[bytes] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("errors", "checksums")
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    errors: _containers.RepeatedCompositeFieldContainer[BlockError]
    checksums: bytes
    def __init__(self, errors: _Optional[_Iterable[_Union[BlockError, _Mapping]]] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("write_id",)
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    write_id: int
    def __init__(self, write_id: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    def __init__(self, outcomes: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("write_id", "store_request_id")
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    STORE_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    write_id: int
    store_request_id: int
    def __init__(self, write_id: _Optional[int] = ..., store_request_id: _Optional[int] = ...) -> None: ...

class Aborted(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: str
    def __init__(self, lease: _Optional[str] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: bytes
    def __init__(self, hashes: _Optional[bytes] = ...) -> None: ...

class Verified(_message.Message):
    __slots__ = ("errors",)
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    errors: _containers.RepeatedCompositeFieldContainer[BlockError]
    def __init__(self, errors: _Optional[_Iterable[_Union[BlockError, _Mapping]]] = ...) -> None: ...

class DropRegions(_message.Message):
    __slots__ = ("regions",)
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    regions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, regions: _Optional[_Iterable[int]] = ...) -> None: ...

class RegionsDropped(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SlabsDropped(_message.Message):
    __slots__ = ("slabs",)
    SLABS_FIELD_NUMBER: _ClassVar[int]
    slabs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slabs: _Optional[_Iterable[int]] = ...) -> None: ...

class SlabsRetired(_message.Message):
    __slots__ = ("slabs",)
    SLABS_FIELD_NUMBER: _ClassVar[int]
    slabs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slabs: _Optional[_Iterable[int]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pong(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("boot_id", "server_version", "uptime_s", "tiers", "counters", "blocks_committed", "blocks_writing", "blocks_leased", "blocks_pinned", "sessions", "draining", "loop_gaps")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WRITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LEASED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PINNED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LOOP_GAPS_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    server_version: str
    uptime_s: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    counters: Counters
    blocks_committed: int
    blocks_writing: int
    blocks_leased: int
    blocks_pinned: int
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStats]
    draining: bool
    loop_gaps: LoopGaps
    def __init__(self, boot_id: _Optional[bytes] = ..., server_version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., blocks_committed: _Optional[int] = ..., blocks_writing: _Optional[int] = ..., blocks_leased: _Optional[int] = ..., blocks_pinned: _Optional[int] = ..., sessions: _Optional[_Iterable[_Union[SessionStats, _Mapping]]] = ..., draining: _Optional[bool] = ..., loop_gaps: _Optional[_Union[LoopGaps, _Mapping]] = ...) -> None: ...

class LoopGaps(_message.Message):
    __slots__ = ("bounds_s", "counts", "total_s")
    BOUNDS_S_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    bounds_s: _containers.RepeatedScalarFieldContainer[float]
    counts: _containers.RepeatedScalarFieldContainer[int]
    total_s: float
    def __init__(self, bounds_s: _Optional[_Iterable[float]] = ..., counts: _Optional[_Iterable[int]] = ..., total_s: _Optional[float] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "slab_bytes", "used_bytes", "num_slabs", "pages", "place")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLABS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    capacity_bytes: int
    slab_bytes: int
    used_bytes: int
    num_slabs: int
    pages: str
    place: str
    def __init__(self, tier: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., slab_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_slabs: _Optional[int] = ..., pages: _Optional[str] = ..., place: _Optional[str] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("matches", "blocks_asked", "blocks_hit", "blocks_missed", "blocks_stored", "blocks_loaded", "blocks_evicted", "blocks_removed", "blocks_lost", "blocks_aborted", "blocks_refused", "bytes_stored", "sessions_opened", "sessions_reaped", "blocks_written", "blocks_unwritten", "blocks_risen", "blocks_dropped", "blocks_scrubbed", "blocks_lifted", "blocks_lowered")
    MATCHES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ASKED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HIT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MISSED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOADED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ABORTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    BYTES_STORED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_OPENED_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_REAPED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_UNWRITTEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RISEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SCRUBBED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LIFTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOWERED_FIELD_NUMBER: _ClassVar[int]
    matches: int
    blocks_asked: int
    blocks_hit: int
    blocks_missed: int
    blocks_stored: int
    blocks_loaded: int
    blocks_evicted: int
    blocks_removed: int
    blocks_lost: int
    blocks_aborted: int
    blocks_refused: int
    bytes_stored: int
    sessions_opened: int
    sessions_reaped: int
    blocks_written: int
    blocks_unwritten: int
    blocks_risen: int
    blocks_dropped: int
    blocks_scrubbed: int
    blocks_lifted: int
    blocks_lowered: int
    def __init__(self, matches: _Optional[int] = ..., blocks_asked: _Optional[int] = ..., blocks_hit: _Optional[int] = ..., blocks_missed: _Optional[int] = ..., blocks_stored: _Optional[int] = ..., blocks_loaded: _Optional[int] = ..., blocks_evicted: _Optional[int] = ..., blocks_removed: _Optional[int] = ..., blocks_lost: _Optional[int] = ..., blocks_aborted: _Optional[int] = ..., blocks_refused: _Optional[int] = ..., bytes_stored: _Optional[int] = ..., sessions_opened: _Optional[int] = ..., sessions_reaped: _Optional[int] = ..., blocks_written: _Optional[int] = ..., blocks_unwritten: _Optional[int] = ..., blocks_risen: _Optional[int] = ..., blocks_dropped: _Optional[int] = ..., blocks_scrubbed: _Optional[int] = ..., blocks_lifted: _Optional[int] = ..., blocks_lowered: _Optional[int] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session_id", "client_name", "namespace", "num_leases", "blocks_leased", "num_writes", "region_bytes", "age_s")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_WRITES_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    client_name: str
    namespace: bytes
    num_leases: int
    blocks_leased: int
    num_writes: int
    region_bytes: int
    age_s: int
    def __init__(self, session_id: _Optional[int] = ..., client_name: _Optional[str] = ..., namespace: _Optional[bytes] = ..., num_leases: _Optional[int] = ..., blocks_leased: _Optional[int] = ..., num_writes: _Optional[int] = ..., region_bytes: _Optional[int] = ..., age_s: _Optional[int] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStats]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStats, _Mapping]]] = ...) -> None: ...

class NamespaceStats(_message.Message):
    __slots__ = ("namespace", "spec", "blocks_committed", "slab_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    spec: Spec
    blocks_committed: int
    slab_bytes: int
    def __init__(self, namespace: _Optional[bytes] = ..., spec: _Optional[_Union[Spec, _Mapping]] = ..., blocks_committed: _Optional[int] = ..., slab_bytes: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("blocks_removed", "blocks_kept")
    BLOCKS_REMOVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_KEPT_FIELD_NUMBER: _ClassVar[int]
    blocks_removed: int
    blocks_kept: int
    def __init__(self, blocks_removed: _Optional[int] = ..., blocks_kept: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("namespace", "hashes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    hashes: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ("watch",)
    WATCH_FIELD_NUMBER: _ClassVar[int]
    watch: bool
    def __init__(self, watch: _Optional[bool] = ...) -> None: ...

class MembersReply(_message.Message):
    __slots__ = ("members", "epoch", "replicas", "stale")
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    epoch: int
    replicas: int
    stale: bool
    def __init__(self, members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., epoch: _Optional[int] = ..., replicas: _Optional[int] = ..., stale: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("boot_id", "addresses", "node_id", "capacity_bytes", "state")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Member.State]
        UP: _ClassVar[Member.State]
        DRAINING: _ClassVar[Member.State]
    STATE_UNSPECIFIED: Member.State
    UP: Member.State
    DRAINING: Member.State
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    addresses: _containers.RepeatedScalarFieldContainer[str]
    node_id: str
    capacity_bytes: int
    state: Member.State
    def __init__(self, boot_id: _Optional[bytes] = ..., addresses: _Optional[_Iterable[str]] = ..., node_id: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., state: _Optional[_Union[Member.State, str]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: bool
    def __init__(self, snapshot: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("boot_id", "sequence", "kind", "namespace", "hashes", "parents", "tier", "block_tokens", "segments")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Event.Kind]
        STORED: _ClassVar[Event.Kind]
        REMOVED: _ClassVar[Event.Kind]
        SNAPSHOT_END: _ClassVar[Event.Kind]
    KIND_UNSPECIFIED: Event.Kind
    STORED: Event.Kind
    REMOVED: Event.Kind
    SNAPSHOT_END: Event.Kind
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    sequence: int
    kind: Event.Kind
    namespace: bytes
    hashes: bytes
    parents: bytes
    tier: str
    block_tokens: int
    segments: bytes
    def __init__(self, boot_id: _Optional[bytes] = ..., sequence: _Optional[int] = ..., kind: _Optional[_Union[Event.Kind, str]] = ..., namespace: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., tier: _Optional[str] = ..., block_tokens: _Optional[int] = ..., segments: _Optional[bytes] = ...) -> None: ...
