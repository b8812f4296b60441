"""Tiny random Qwen3 models, one with experts, in Hugging Face folders, and transformers as the reference for log-probabilities."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 96
END_TOKEN = 1
MAX_LENGTH = 4096


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "eos_token_id": END_TOKEN,
    "initializer_range": 0.1,
}


def make_model(seed: int, *, tied: bool = True) -> Qwen3ForCausalLM:
    """Return a model whose distributions are far from uniform and differ from seed to seed."""
    torch.manual_seed(seed)
    return uneven(Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=2, tie_word_embeddings=tied)))


def make_moe(seed: int) -> Qwen3MoeForCausalLM:
    """Return a model of 4 layers, each with 8 experts of which 2 are chosen."""
    torch.manual_seed(seed)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return uneven(
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts, num_hidden_layers=4, tie_word_embeddings=True))
    )


def uneven[M: PreTrainedModel](model: M) -> M:
    """Return the model in float32 with norms that differ from 1, so that one left out is noticed."""
    model = model.to(torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def save_model(model: PreTrainedModel, folder: Path) -> str:
    """Write the Hugging Face folder (no tokenizer: the server needs none) and return its path."""
    model.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def reference_logprobs(
    model: Qwen3ForCausalLM, prompt: Sequence[int], response: Sequence[int], temperature: float
) -> np.ndarray:
    """Return transformers' log-probability of each response token, shape [R]."""
    ids = torch.tensor([[*prompt, *response]])
    logprobs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    picked = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
    return picked.numpy()
