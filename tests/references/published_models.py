"""What the config.json of published models say of their shape, and how many parameters the models have.

The fields are those of the files on the Hugging Face hub; what does not change shape or arithmetic is left out.
`tests/unit/actor/test_published_models.py` compares them with the files where the data folder is there.
"""

from typing import Any

QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = QWEN | {"model_type": "qwen2", "num_key_value_heads": 2, "attention_dropout": 0.0}
QWEN3 = QWEN | {
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
}
QWEN2_1B5 = QWEN2 | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, tied: bool, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
        **more,
    }


# name -> fields of config.json, parameters (shared ones once)
PUBLISHED_MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.1-8B": (
        {
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": LLAMA3_ROPE,
            "rope_theta": 5e5,
            "vocab_size": 128256,
        }
        | _sizes(4096, 14336, 32, 32, False),
        8_030_261_248,
    ),
    "Qwen2.5-1.5B": (QWEN2_1B5 | {"max_position_embeddings": 131072, "use_mrope": False}, 1_543_714_304),
    "Qwen2.5-1.5B-Instruct": (QWEN2_1B5 | {"max_position_embeddings": 32768}, 1_543_714_304),
    "Qwen2.5-3B": (QWEN2 | _sizes(2048, 11008, 36, 16, True, max_position_embeddings=32768), 3_085_938_688),
    "Qwen2.5-7B": (
        QWEN2
        | _sizes(3584, 18944, 28, 28, False, max_position_embeddings=131072, num_key_value_heads=4, vocab_size=152064),
        7_615_616_512,
    ),
    "Qwen3-4B": (QWEN3 | _sizes(2560, 9728, 36, 32, True), 4_022_468_096),
    "Qwen3-8B": (QWEN3 | _sizes(4096, 12288, 36, 32, False), 8_190_735_360),
    "Qwen3-14B": (QWEN3 | _sizes(5120, 17408, 40, 40, False), 14_768_307_200),
    "Qwen3-32B": (QWEN3 | _sizes(5120, 25600, 64, 64, False), 32_762_123_264),
    "Qwen3-30B-A3B": (
        QWEN3 | EXPERTS | _sizes(2048, 6144, 48, 32, False, num_key_value_heads=4),
        30_532_122_624,
    ),
    "SmolLM2-135M-Instruct": (
        {
            "model_type": "llama",
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 8192,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e5,
            "vocab_size": 49152,
        }
        | _sizes(576, 1536, 30, 9, True),
        134_515_008,
    ),
}
