"""Prefixes of Hugging Face causal language models, saved and loaded layer by layer.

    spec = spec_for(model, revision=revision_digest(folder))
    with KVClient("unix:/run/kvstore/kvstore.sock", spec) as client, PrefixCache(client, model) as prefixes:
        prefill = prefixes.prefill(input_ids)        # logits of the last token, and a cache to decode with

Both directions hang on `DynamicCache.update`, which each layer calls once its keys and values are known and
before its attention runs: there layer i waits for its own part of the load, and hands its part of the save to
a thread. A store that is absent, slow, full or failing costs recomputation and nothing else.

Keys and values of a layer are `[1, heads, tokens, dim]` in a cache; its part of a block is, contiguous,
`[2, heads, block_tokens, dim]`, keys first.
"""

from kvstore_client.adapters.transformers.prefix import Prefill, PrefixCache
from kvstore_client.adapters.transformers.spec import DEFAULT_BLOCK_TOKENS, LAYOUT, revision_digest, spec_for

__all__ = ["DEFAULT_BLOCK_TOKENS", "LAYOUT", "Prefill", "PrefixCache", "revision_digest", "spec_for"]
