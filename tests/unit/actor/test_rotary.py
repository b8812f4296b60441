"""Rotary frequencies against transformers', bit for bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from a3po_megatron.actor.model import _scale_rotary_frequencies
from a3po_megatron.config.model_shape import Llama3Rope

SCALINGS = [
    Llama3Rope(8.0, 1.0, 4.0, 8192),  # Llama 3.1
    Llama3Rope(32.0, 1.0, 4.0, 8192),  # Llama 3.2
    Llama3Rope(4.0, 1.5, 3.0, 2048),  # what megatron's own argument does not take
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: f"factor{scaling.factor:g}")
def test_llama_3_scaling_equals_transformers(scaling: Llama3Rope) -> None:
    rope: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 5e5, **vars(scaling)}
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, head_dim=128, rope_parameters=rope)
    rotary = RotaryEmbedding(128, 1.0, rotary_base=5e5, use_cpu_initialization=True)  # type: ignore[arg-type]
    plain = rotary.inv_freq
    _scale_rotary_frequencies(SimpleNamespace(rotary_pos_emb=rotary), scaling)  # type: ignore[arg-type]
    expected = LlamaRotaryEmbedding(config)
    assert expected.attention_scaling == 1.0
    assert torch.equal(rotary.inv_freq, expected.inv_freq)
    kept, divided = rotary.inv_freq == plain, torch.isclose(rotary.inv_freq, plain / scaling.factor)
    assert kept.any()
    assert divided.any()
    assert not (kept | divided).all()  # some lie between
