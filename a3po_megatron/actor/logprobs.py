"""What the last pipeline stage makes of its hidden states: log-probabilities of given tokens, or whether they are greedy.

Both are output processors of megatron's GPTModel (`output_processor` in megatron/core/models/gpt/gpt_model.py): they get the
hidden states and the output layer, and their result is what the model returns.

Letters: b rows, s tokens a row, v vocabulary columns of this tensor-parallel rank.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_logprobs(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: "LabelContext",
    temperature: float = 1.0,
    **unused: Any,
) -> Tensor:
    """Return float32 [b, s]: log-probability of `context.labels` under softmax(logits / temperature), with gradient."""
    logits = _logits(hidden_states, output_layer, output_weight, context)  # [s, b, v]
    if temperature != 1.0:
        logits = logits / temperature
    return -vocab_parallel_cross_entropy(logits, context.labels.T.contiguous()).T


def token_is_greedy(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, context: "LabelContext", **unused: Any
) -> Tensor:
    """Return bool [b, s]: whether `context.labels` is the most probable token; no gradient."""
    with torch.no_grad():
        logits = _logits(hidden_states, output_layer, output_weight, context)  # [s, b, v]
        highest = logits.max(dim=-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        local = context.labels.T - first  # [s, b] column of the label on this rank, if it is here
        here = (local >= 0) & (local < logits.shape[-1])
        own = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[..., None])[..., 0]
        own = own.masked_fill(~here, -torch.inf)
        dist.all_reduce(own, op=dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
        return (own == highest).T


class LabelContext:
    """What an output processor needs beside the hidden states."""

    def __init__(self, labels: Tensor, vocab_size: int) -> None:
        self.labels = labels  # int64 [b, s]
        self.vocab_size = vocab_size  # without padding


def _logits(hidden: Tensor, output_layer: Any, output_weight: Tensor | None, context: LabelContext) -> Tensor:
    """Return float32 [s, b, v]; columns that only pad the vocabulary are -inf, so they take no probability."""
    logits, _ = output_layer(hidden, weight=output_weight)
    logits = logits.float()
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
    if first + logits.shape[-1] > context.vocab_size:
        logits = logits.masked_fill(columns >= context.vocab_size, -torch.inf)
    return logits
