"""A model small enough for tests, and a tokenizer for it."""

from pathlib import Path
from typing import Any, Final

MLA_LAYERS: Final = 3
# Of all models. So wide that the next token depends on every position that is attended to.
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "dtype": "float32",
}
HEADS: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


def write_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny Llama with wide random weights: its next token depends on every position that it attends to."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        num_hidden_layers=4,
        **SIZES,
        **HEADS,
    )
    return _saved(LlamaForCausalLM(config), folder)


def write_hybrid_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny Gemma 3, as wide: of three layers in a row, two see a window only, and the third all tokens.

    The window is one token longer than two blocks, so at the end of a block it reaches one token beyond two of them.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(seed)
    config = Gemma3TextConfig(
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=65,
        query_pre_attn_scalar=32,
        pad_token_id=0,
        **SIZES,
        **HEADS,
    )
    return _saved(Gemma3ForCausalLM(config), folder)


def write_chunked_model(folder: Path, *, seed: int = 0) -> Path:
    """A tiny Llama 4 without experts, as wide: three layers see chunks of 128 tokens, and the fourth all tokens."""
    import torch
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(seed)
    config = Llama4TextConfig(
        intermediate_size_mlp=256,
        num_hidden_layers=4,
        attention_chunk_size=128,
        moe_layers=[],
        interleave_moe_layer_step=0,
        num_local_experts=1,
        use_qk_norm=False,
        pad_token_id=0,
        **SIZES,
        **HEADS,
    )
    return _saved(Llama4ForCausalLM(config), folder)


def write_mla_model(folder: Path) -> Path:
    """A tiny DeepSeek-V2 of dense layers. Its weights are as wide as lets whole and split prompts end alike."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        moe_intermediate_size=64,
        num_hidden_layers=MLA_LAYERS,
        first_k_dense_replace=MLA_LAYERS,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,  # this and what follows: the sizes that kernels are compiled for
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        **SIZES | {"initializer_range": 0.03},
    )
    return _saved(DeepseekV2ForCausalLM(config), folder)


def _saved(model: Any, folder: Path) -> Path:
    model.float().save_pretrained(folder, safe_serialization=True)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Token n is the word "wn"."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def write_adapter(folder: Path, *, seed: int) -> Path:
    """A LoRA adapter of the tiny model, wide enough to change what it says."""
    import json

    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, width in (("q_proj", 128), ("v_proj", 64)):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{where}.lora_A.weight"] = 0.2 * torch.randn(8, 128, generator=generator)
            tensors[f"{where}.lora_B.weight"] = 0.2 * torch.randn(width, 8, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
