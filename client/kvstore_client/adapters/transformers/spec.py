"""The spec of a Hugging Face model's blocks, and the digest that stands for its weights."""

import hashlib
from pathlib import Path
from typing import Any, Final

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstore.errors import InvalidRequest
from kvstore.spec import KVSpec

LAYOUT: Final = "hf-dynamic-cache/KV,H,T,D"
DEFAULT_BLOCK_TOKENS: Final = 16

_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf")
# Rotary embeddings whose factors depend on how long the whole sequence is: a prefix's keys are not its own.
_MOVING_ROPES: Final = frozenset({"dynamic", "longrope"})


def revision_digest(folder: str | Path) -> str:
    """SHA-256, in hex, over config.json and the weight files of a model folder: names, sizes and content.

    Reads every byte each time (about a second a GB), because a name or a date does not vouch for content.

    Raises: InvalidRequest, if there is no config.json, or there are no weights.
    """
    files = sorted(path for pattern in ("config.json", *_WEIGHTS) for path in Path(folder).glob(pattern))
    if len(files) < 2 or not any(path.name == "config.json" for path in files):
        raise InvalidRequest(
            f"{folder}: expected config.json and weights ({', '.join(_WEIGHTS)}), got {len(files)} files"
        )
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        name = path.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + path.stat().st_size.to_bytes(8, "little") + content)
    return total.hexdigest()


def spec_for(
    model: Any,
    *,
    revision: str,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
    adapter: str | None = None,
    adapter_revision: str | None = None,
    quantisation: str | None = None,
    tenant: str = "default",
    salt: str = "",
) -> KVSpec:
    """The spec of this model's blocks: one part a layer, of `2 * heads * block_tokens * dim` elements.

    `revision` is `revision_digest` of the folder it was loaded from, or the hub commit.

    Raises: InvalidRequest, if the model keeps anything but plain keys and values for every token (sliding
    windows, linear or latent attention, layers that share), or keys that depend on the sequence's length.
    """
    config = model.config.get_text_config(decoder=True)
    layers: int = config.num_hidden_layers
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    rope = getattr(config, "rope_parameters", None) or {}
    unfit = [
        reason
        for reason, applies in {
            f"cache layers {sorted(kinds)}": kinds != {DynamicLayer.__name__},
            "latent attention": getattr(config, "kv_lora_rank", None) is not None,
            "layers that share keys and values": bool(getattr(config, "num_kv_shared_layers", 0)),
            f"rope type {rope.get('rope_type')!r}": rope.get("rope_type") in _MOVING_ROPES,
            "a LoRA adapter that is not named": adapter is None and getattr(model, "_hf_peft_config_loaded", False),
        }.items()
        if applies
    ]
    if unfit:
        raise InvalidRequest(
            f"model: expected plain keys and values for every token, got {'; '.join(unfit)}; run it without the store"
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVSpec.uniform(
        model=type(model).__name__,
        revision=revision,
        dtype=str(model.dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        layers=layers,
        bytes_per_part=2 * heads * block_tokens * dim * model.dtype.itemsize,
        layout=LAYOUT,
        adapter=adapter,
        adapter_revision=adapter_revision,
        quantisation=quantisation,
        tenant=tenant,
        salt=salt,
    )
