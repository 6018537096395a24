"""What makes this engine's blocks those of another one: read from vLLM's configuration, without importing vLLM.

vLLM's block hashes say which tokens a block holds, with images, LoRA adapter and salt. Everything else that shapes the
bytes is in the spec, and so in the namespace.
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec
from kvstore.types import BlockHash
from kvstore_client.adapters.vllm.groups import groups_of, unfit_groups

# The versions that the tests run on, oldest first. Another may lay out its blocks or order its calls differently.
SUPPORTED_VERSIONS: Final = ("0.32",)

HASH_SCHEMES: Final = {"sha256": "vllm.sha256.v1", "sha256_cbor": "vllm.sha256_cbor.v1"}

_LORA_TAG: Final = b"kvstore/vllm/lora/v1\0"
_SNAPSHOT: Final = re.compile(r"/snapshots/([0-9a-f]{40})$")
# Keys of a configuration that say where it came from, and not what it is.
_PROVENANCE: Final = frozenset({"_name_or_path", "transformers_version"})
# Rotary embeddings whose factors depend on how long a sequence may become.
_MOVING_ROPES: Final = frozenset({"dynamic", "longrope"})

_log: Final = logging.getLogger("vllm.kvstore")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker cannot see for itself of the spec; the scheduler side decides it for all ranks."""

    revision: str
    salt: str  # not empty: this engine's blocks are its own, since its weights may have changed


def check_version(version: str) -> None:
    """Raises: InvalidRequest, unless this version of vLLM is supported."""
    if ".".join(version.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise InvalidRequest(
            f"vLLM: expected a version of {', '.join(SUPPORTED_VERSIONS)}, got {version}; another may lay out its "
            "blocks differently, so run a supported one, or without this connector"
        )


def check_config(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises: InvalidRequest, if this engine keeps or computes blocks in a way that cannot be shared; it says which."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    unfit = [
        reason
        for reason, applies in {
            f"prefix_caching_hash_algo {cache.prefix_caching_hash_algo!r}, which has a random seed in each process "
            "or collides (use sha256 or sha256_cbor)": cache.prefix_caching_hash_algo not in HASH_SCHEMES,
            f"kv_load_failure_policy {transfer.kv_load_failure_policy!r}, which fails requests that could be "
            'computed (add "kv_load_failure_policy": "recompute" to the KV transfer configuration)': (
                transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute"
            ),
            **unfit_groups(kv_cache_config, prefix_match_unit=getattr(cache, "prefix_match_unit", None)),
            "speculative decoding": vllm_config.speculative_config is not None,
            "pipeline parallelism": parallel.pipeline_parallel_size != 1,
            "context parallelism": (
                getattr(parallel, "decode_context_parallel_size", 1) != 1
                or getattr(parallel, "prefill_context_parallel_size", 1) != 1
            ),
            "KV scales that are measured at run time": bool(getattr(cache, "calculate_kv_scales", False)),
            "an attention backend chosen by itself, whose layout other engines need not share (name one with "
            "--attention-backend)": (
                vllm_config.device_config.device_type != "cpu" and vllm_config.attention_config.backend is None
            ),
        }.items()
        if applies
    ]
    if unfit:
        raise InvalidRequest(f"vLLM: the store cannot share blocks of an engine with {'; '.join(unfit)}")


def spec_of(
    vllm_config: Any, kv_cache_config: Any, *, version: str, isa: str, identity: Identity, tenant: str
) -> KVSpec:
    """The spec of this engine's blocks: one part for each layer, and for each rank that holds a piece of its own.

    `isa`: of the kernels that pack keys on a CPU; empty elsewhere.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = groups_of(kv_cache_config)
    ranks = num_ranks(vllm_config, kv_cache_config)
    (block_tokens,) = {layer.block_tokens for layer in groups.layers}
    backend = vllm_config.attention_config.backend
    layout = (
        f"vllm-{version}",
        vllm_config.device_config.device_type,
        kv_cache_config.kv_cache_layout or "unknown",
        backend.name if backend is not None else "auto",
        isa or "-",
        groups.kinds,
    )
    return KVSpec(
        model=(model.hf_config.architectures or ["unknown"])[0],
        revision=_digest_of(identity.revision, _effective_config(model)),
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        layers=len(groups.layers),
        ranks=ranks,
        part_bytes=tuple(layer.part_bytes for layer in groups.layers for _ in range(ranks)),
        layout="/".join(layout),
        quantisation=f"weights={model.quantization},kv={cache.cache_dtype}",
        hash_scheme=HASH_SCHEMES[cache.prefix_caching_hash_algo],
        tenant=tenant,
        salt=identity.salt,
    )


def num_ranks(vllm_config: Any, kv_cache_config: Any) -> int:
    """How many ranks hold a piece of their own of each block; ranks that hold the same one count as one."""
    tensor_parallel: int = vllm_config.parallel_config.tensor_parallel_size
    replicas: int = kv_cache_config.kv_tp_replicas
    return tensor_parallel // replicas


def weights_revision(model_config: Any, load_format: str, *, find_commit: Callable[[str, str | None], str]) -> str:
    """What stands for the weights: the hub commit, where the model is a snapshot of one, else a digest of its files.

    `find_commit(model, revision)` looks into the hub's cache; empty: it is not there.

    Raises: InvalidRequest, if neither can be had.
    """
    from kvstore_client.adapters.transformers.spec import revision_digest

    if load_format == "dummy":
        raise InvalidRequest(
            "load_format: expected weights from files, got 'dummy', which no file vouches for; give the option "
            "revision, if all engines have the same"
        )
    folder = Path(model_config.model)
    if folder.is_dir():
        if snapshot := _SNAPSHOT.search(str(folder)):
            return snapshot.group(1)
        _log.info("kvstore: reading all weights in %s for their digest; the option revision saves that", folder)
        return revision_digest(folder)
    commit = find_commit(model_config.model, model_config.revision)
    if not commit:
        raise InvalidRequest(
            f"model {model_config.model!r:.200}: expected a folder, or a model in the hub's cache, got neither; give "
            "the option revision: the hub commit, or another name that means these weights for ever"
        )
    return commit


def with_adapter(hashes: Sequence[bytes], digest: bytes) -> list[BlockHash]:
    """The hashes of the same tokens under a LoRA adapter whose weights have this digest.

    vLLM's own hashes cover only its name and path, and files at a path may change.
    """
    return [BlockHash(hashlib.sha256(_LORA_TAG + digest + each).digest()) for each in hashes]


def adapter_digest(folder: str) -> bytes:
    """SHA-256 over the files of a LoRA adapter: names and content. Raises: OSError, if it cannot be read."""
    total = hashlib.sha256()
    paths = sorted(path for path in Path(folder).iterdir() if path.suffix in (".json", ".safetensors", ".bin", ".pt"))
    if not paths:
        raise FileNotFoundError(f"{folder}: expected the files of a LoRA adapter, got none")
    for path in paths:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        name = path.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + content)
    return total.digest()


def _effective_config(model_config: Any) -> str:
    """The model's configuration as it runs, overrides included."""
    config: dict[str, Any] = model_config.hf_config.to_dict()
    kept: dict[str, Any] = {key: value for key, value in config.items() if key not in _PROVENANCE}
    rope = getattr(model_config.hf_text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _MOVING_ROPES:
        kept["max_model_len"] = model_config.max_model_len
    return json.dumps(kept, sort_keys=True, default=str)


def _digest_of(*texts: str) -> str:
    total = hashlib.sha256()
    for text in texts:
        data = text.encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()
