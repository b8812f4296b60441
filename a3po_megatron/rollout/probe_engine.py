"""The probe inside a vLLM worker: the model's log-probabilities of a fixed prompt, while the server is paused.

A request would have to wait for `resume`, behind everything that was in flight, and tokens of the new weights would be drawn
before its answer. So the model is called here directly, with plain causal attention that needs no cache.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from a3po_megatron.rollout.probe import probe_ids


@torch.inference_mode()
def probe_logprobs(model: Any, vllm_config: VllmConfig, device: torch.device) -> list[float | None] | None:
    """Return the log-probability of each token but the first; None stands for NaN and infinities.

    All workers of a server call it together; those that see no logits return None.
    """
    ids = torch.tensor(probe_ids(vllm_config.model_config.get_vocab_size()), device=device)
    context = set_forward_context(None, vllm_config, num_tokens=len(ids), skip_compiled=True)
    with plain_attention(model), context:
        hidden = model(ids, torch.arange(len(ids), device=device))
        logits = model.compute_logits(hidden)
    if logits is None:
        return None
    picked = logits[:-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return [value if abs(value) < float("inf") else None for value in picked.tolist()]


@contextmanager
def plain_attention(model: torch.nn.Module) -> Iterator[None]:
    """Let every attention layer attend within the batch, as one sequence, instead of reading and writing the cache."""
    layers = [layer for layer in model.modules() if isinstance(layer, Attention)]
    for layer in layers:
        layer.forward = _causal(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _causal(layer: Attention) -> Callable[..., torch.Tensor]:
    def forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        q, k, v = (
            part.reshape(len(part), heads, -1).transpose(0, 1)
            for part, heads in ((query, layer.num_heads), (key, layer.num_kv_heads), (value, layer.num_kv_heads))
        )
        mixed = scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=layer.impl.scale, enable_gqa=True
        )
        return mixed[0].transpose(0, 1).reshape(len(query), -1)

    return forward
