"""A small random checkpoint of every family that the native executor runs, as transformers makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers as t
from transformers import PreTrainedModel

from tests.executors.tiny import VOCAB, save

Make: TypeAlias = Callable[..., PreTrainedModel]
"""Given sizes in place of the usual ones."""

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_THETA = {"rope_theta": 10000.0}


def _like(model: type[Any], config: type[Any], **changes: Any) -> Make:
    def make(**sizes: Any) -> PreTrainedModel:
        settings = {key: value for key, value in (_SMALL | changes).items() if value != "absent"}
        settings |= {key: sizes[key] for key in settings.keys() & sizes.keys()}
        if "word_embed_proj_dim" in settings:  # OPT's embeddings, as wide as the rest
            settings["word_embed_proj_dim"] = settings["hidden_size"]
        made: PreTrainedModel = model(config(**({"attn_implementation": "eager"} | settings)))
        return made

    return make


def _mistral(**changes: Any) -> Make:
    return _like(t.MistralForCausalLM, t.MistralConfig, **({"sliding_window": 37, "head_dim": 16} | changes))


def _llama(**rope: Any) -> Make:
    return _like(t.LlamaForCausalLM, t.LlamaConfig, rope_parameters=_THETA | rope)


_GEMMA3 = {
    "sliding_window": 24,
    "head_dim": 16,
    "query_pre_attn_scalar": 32,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}

_FALCON: dict[str, Any] = {"num_key_value_heads": "absent", "intermediate_size": "absent"}

_DEEPSEEK = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "rope_parameters": _THETA
    | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.707,
       "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip

_DEEPSEEK_V3 = _DEEPSEEK | {"routed_scaling_factor": 2.5, "norm_topk_prob": True}


def _corrected(**changes: Any) -> Make:
    """Corrections as great as the scores' differences, so that both say which experts are best."""
    plain = _like(t.DeepseekV3ForCausalLM, t.DeepseekV3Config, **changes)

    def make(**sizes: Any) -> PreTrainedModel:
        made = plain(**sizes)
        for name, buffer in made.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.03)
        return made

    return make


_BLOOM: dict[str, Any] = dict.fromkeys(
    ("intermediate_size", "num_key_value_heads", "max_position_embeddings", "num_hidden_layers", "num_attention_heads"),
    "absent",
)
_MPT: dict[str, Any] = dict.fromkeys([key for key in _SMALL if not key.endswith(("_id", "vocab_size"))], "absent")
_MPT |= {"d_model": 128, "n_layers": 3, "n_heads": 2, "max_seq_len": 256}

# Of Falcon, transformers' eager attention takes the slopes twice; of MPT it passes over `alibi_bias_max`.
_SLOPES = _FALCON | {"alibi": True, "attn_implementation": "sdpa"}

FAMILIES: dict[str, Make] = {
    "mistral, sliding": _mistral(),
    "mistral, full": _mistral(sliding_window=None),
    "qwen2": _like(t.Qwen2ForCausalLM, t.Qwen2Config),
    "qwen2, window switched off": _like(
        t.Qwen2ForCausalLM, t.Qwen2Config, use_sliding_window=False, sliding_window=20, max_window_layers=0
    ),
    "qwen2, window from layer 2 on": _like(
        t.Qwen2ForCausalLM, t.Qwen2Config, use_sliding_window=True, sliding_window=20, max_window_layers=2
    ),
    "qwen3": _like(t.Qwen3ForCausalLM, t.Qwen3Config, head_dim=24),
    "gemma": _like(t.GemmaForCausalLM, t.GemmaConfig, head_dim=16),
    "gemma2": _like(
        t.Gemma2ForCausalLM, t.Gemma2Config, head_dim=16, sliding_window=24, query_pre_attn_scalar=20,
        attn_logit_softcapping=5.0, final_logit_softcapping=8.0,
    ),
    "gemma3": _like(t.Gemma3ForCausalLM, t.Gemma3TextConfig, **_GEMMA3),
    "phi3": _like(t.Phi3ForCausalLM, t.Phi3Config, original_max_position_embeddings=512),
    "phi3, rotated in part": _like(
        t.Phi3ForCausalLM, t.Phi3Config, original_max_position_embeddings=512, hidden_size=96,
        rope_parameters=_THETA | {"rope_type": "default", "partial_rotary_factor": 0.75}, sliding_window=60,
    ),
    "smollm3": _like(t.SmolLM3ForCausalLM, t.SmolLM3Config),
    "gpt_neox": _like(t.GPTNeoXForCausalLM, t.GPTNeoXConfig, num_key_value_heads="absent", hidden_size=96),
    "gpt_neox, one after the other": _like(
        t.GPTNeoXForCausalLM, t.GPTNeoXConfig, num_key_value_heads="absent", hidden_size=96, use_parallel_residual=False
    ),
    "gpt2": _like(
        t.GPT2LMHeadModel, t.GPT2Config, n_embd=48, n_layer=3, n_head=6, n_positions=256,
        **dict.fromkeys(_SMALL.keys() - {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}, "absent"),
    ),
    "mixtral": _like(t.MixtralForCausalLM, t.MixtralConfig, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": _like(
        t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=40,
        norm_topk_prob=True, head_dim=16,
    ),
    "qwen3_moe, weights as they are": _like(
        t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=40,
        norm_topk_prob=False, head_dim=16,
    ),
    "deepseek_v2": _like(t.DeepseekV2ForCausalLM, t.DeepseekV2Config, **_DEEPSEEK),
    "deepseek_v2, queries of low rank, groups of experts": _like(
        t.DeepseekV2ForCausalLM, t.DeepseekV2Config,
        **(_DEEPSEEK | {"q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
                        "routed_scaling_factor": 1.7, "first_k_dense_replace": 0, "rope_parameters": _THETA}),
    ),
    "deepseek_v3": _corrected(
        **(_DEEPSEEK_V3 | {"n_group": 4, "topk_group": 2, "q_lora_rank": 40, "attention_bias": True})
    ),
    "deepseek_v3, experts in one group": _corrected(
        **(_DEEPSEEK_V3 | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_parameters": _THETA}),
    ),
    "falcon, of groups": _like(
        t.FalconForCausalLM, t.FalconConfig, **_FALCON, new_decoder_architecture=True, num_kv_heads=2, hidden_size=96
    ),
    "falcon, one key head": _like(t.FalconForCausalLM, t.FalconConfig, **_FALCON, hidden_size=96),
    "falcon, one after the other": _like(
        t.FalconForCausalLM, t.FalconConfig, **_FALCON, multi_query=False, parallel_attn=False, bias=True,
        hidden_size=96,
    ),
    "bloom": _like(t.BloomForCausalLM, t.BloomConfig, **_BLOOM, n_layer=3, n_head=6),
    "bloom, heads that are no power of two": _like(
        t.BloomForCausalLM, t.BloomConfig, **_BLOOM, n_layer=2, n_head=3, hidden_size=192,
    ),
    "mpt": _like(t.MptForCausalLM, t.MptConfig, **_MPT),
    "mpt, capped": _like(
        t.MptForCausalLM, t.MptConfig, **_MPT, attn_config={"clip_qkv": 1.5, "softmax_scale": 0.2}
    ),
    "falcon with slopes": _like(
        t.FalconForCausalLM, t.FalconConfig, **_SLOPES, multi_query=False, parallel_attn=False, bias=True
    ),
    "falcon with slopes, side by side": _like(t.FalconForCausalLM, t.FalconConfig, **_SLOPES),
    "starcoder2": _like(t.Starcoder2ForCausalLM, t.Starcoder2Config, sliding_window=30),
    "gpt_bigcode": _like(
        t.GPTBigCodeForCausalLM, t.GPTBigCodeConfig, n_embd=48, n_layer=2, n_head=6, n_positions=256,
        **dict.fromkeys(_SMALL.keys() - {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}, "absent"),
    ),
    "gpt_bigcode, keys for each head": _like(
        t.GPTBigCodeForCausalLM, t.GPTBigCodeConfig, n_embd=48, n_layer=2, n_head=6, n_positions=256, multi_query=False,
        **dict.fromkeys(_SMALL.keys() - {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"}, "absent"),
    ),
    "phi": _like(t.PhiForCausalLM, t.PhiConfig, num_key_value_heads=6, hidden_size=96),
    "phi, tied": _like(
        t.PhiForCausalLM, t.PhiConfig, num_key_value_heads=2, hidden_size=96, tie_word_embeddings=True
    ),
    "stablelm": _like(t.StableLmForCausalLM, t.StableLmConfig, hidden_size=96),
    "stablelm, side by side": _like(
        t.StableLmForCausalLM, t.StableLmConfig, hidden_size=96, use_parallel_residual=True, use_qkv_bias=True
    ),
    "opt": _like(
        t.OPTForCausalLM, t.OPTConfig, intermediate_size="absent", num_key_value_heads="absent", ffn_dim=80,
        word_embed_proj_dim=48,
    ),
    "seed_oss": _like(t.SeedOssForCausalLM, t.SeedOssConfig, head_dim=16),
    "ministral": _like(t.MinistralForCausalLM, t.MinistralConfig, sliding_window=37, head_dim=16),
    "linear rope": _llama(rope_type="linear", factor=4.0),
    "llama3 rope": _llama(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
    "yarn rope": _llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=128),
}  # fmt: skip


def save_family(name: str, folder: Path, **sizes: Any) -> PreTrainedModel:
    """With other `sizes` where its config has such keys."""
    torch.manual_seed(0)
    return save(FAMILIES[name](**sizes), folder)
