"""Tiny checkpoints with real random weights, made on the spot and the same every time.

vLLM's own ``load_format="dummy"`` will not do: its logits come out uniform, so that damaged KV
cache goes unseen.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)

VOCAB = 2048
MAX_TOKENS = 4096
STD = 0.07


def llama() -> PretrainedConfig:
    """Full attention, everything divisible by 2 for tensor parallelism."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
    )


def gemma3() -> PretrainedConfig:
    """Two groups of sliding windows (256 tokens) and one of full attention."""
    return Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=MAX_TOKENS,
        sliding_window=256,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
    )


def mistral() -> PretrainedConfig:
    """Sliding windows (256 tokens) in every layer: most of a prefix is never read again."""
    return MistralConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        sliding_window=256,
        tie_word_embeddings=False,
    )


def gpt_oss() -> PretrainedConfig:
    """Windows of one block and full attention in turns, attention sinks, experts."""
    return GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=MAX_TOKENS,
        sliding_window=128,
    )


def deepseek_v2() -> PretrainedConfig:
    """MLA: one latent for all heads. On the CPU results depend on the batch, bytes do not."""
    return DeepseekV2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=MAX_TOKENS,
    )


def qwen3_next() -> PretrainedConfig:
    """Three recurrent layers for each one of full attention."""
    return Qwen3NextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        max_position_embeddings=MAX_TOKENS,
    )


KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    make.__name__: make for make in (llama, gemma3, mistral, gpt_oss, deepseek_v2, qwen3_next)
}


def build(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint ``kind`` (see ``KINDS``) into ``folder`` unless it is there."""
    if not (folder / "config.json").exists():
        config = KINDS[kind]()
        model = AutoModelForCausalLM.from_config(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.randn(weight.shape, generator=generator) * STD
                weight.copy_(noise + weight if "norm" in name else noise)
        model.to(torch.bfloat16).save_pretrained(folder)
    return folder
