"""What the last pipeline stage makes of its hidden states: log-probabilities of given tokens, or whether they are greedy.

These are output processors of megatron's GPTModel (`output_processor` in megatron/core/models/gpt/gpt_model.py): they get the
hidden states and the output layer, and their result is what the model returns. The mathematics is in token_head.py; here is what
megatron's output layer does around its multiplication: hooks, sequence and tensor parallelism.

Letters: b rows, s tokens a row, h hidden size.
"""

from typing import Any, NamedTuple

from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from a3po_megatron.actor import token_head
from a3po_megatron.actor.token_head import TokenHead, VocabularyPart
from a3po_megatron.config.actor import ActorConfig


class TokenOutput(NamedTuple):
    """What a loss is made of; megatron's schedules hand it on as it is."""

    logprobs: Tensor  # float32 [b, s], with gradient
    entropy: Tensor | None  # float32 [b, s] in nats, with gradient; None where the loss does not ask for it


class LabelContext:
    """What an output processor needs beside the hidden states."""

    def __init__(self, labels: Tensor, vocab_size: int) -> None:
        self.labels = labels  # int64 [b, s]
        self.vocab_size = vocab_size  # without padding


def make_head(actor: ActorConfig, temperature: float) -> TokenHead:
    """Return how the logits are made, from the actor's settings; they are divided by `temperature`."""
    return TokenHead(temperature, actor.float32_head, actor.logprob_chunk_tokens, actor.logprob_kernel)


def token_output(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: LabelContext,
    head: TokenHead,
    with_entropy: bool = False,
    **unused: Any,
) -> TokenOutput:
    """Return the log-probabilities of `context.labels` under softmax(logits / temperature), and the entropy if asked for."""
    hidden, weight, part = _inputs(hidden_states, output_layer, output_weight, context)
    labels = context.labels.T.reshape(-1)
    logprobs, entropy = token_head.logprobs_and_entropy(hidden, weight, labels, part, head, with_entropy)
    return TokenOutput(_rows(logprobs, context), None if entropy is None else _rows(entropy, context))


def token_logprobs(*, head: TokenHead, **arguments: Any) -> Tensor:
    """Return the float32 [b, s] log-probabilities of `token_output` alone."""
    return token_output(head=head, **arguments).logprobs


def token_is_greedy(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: LabelContext,
    head: TokenHead,
    **unused: Any,
) -> Tensor:
    """Return bool [b, s]: whether `context.labels` is the most probable token; no gradient."""
    hidden, weight, part = _inputs(hidden_states, output_layer, output_weight, context)
    return _rows(token_head.is_greedy(hidden, weight, context.labels.T.reshape(-1), part, head), context)


def _inputs(
    hidden: Tensor, output_layer: Any, output_weight: Tensor | None, context: LabelContext
) -> tuple[Tensor, Tensor, VocabularyPart]:
    """Return hidden states [s * b, h] of all tokens, this rank's weight and which part of the vocabulary that is.

    `hidden` is [s, b, h], or [s/tp, b, h] under sequence parallelism. Backward adds its gradient up over tensor-parallel ranks,
    and scatters it again under sequence parallelism.
    """
    _run_forward_pre_hooks(output_layer)
    weight = output_layer.weight if output_weight is None else output_weight  # [v, h]; given where it is the embedding
    group = parallel_state.get_tensor_model_parallel_group()
    if output_layer.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, group=group)
    elif group.size() > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    first = group.rank() * len(weight)
    rows = min(max(context.vocab_size - first, 0), len(weight))
    part = VocabularyPart(first, rows, group if group.size() > 1 else None)
    return hidden.reshape(-1, hidden.shape[-1]), weight, part


def _run_forward_pre_hooks(output_layer: Any) -> None:
    """Run what megatron's DDP has hung before the layer's forward, which is not called: waiting for its gathered parameters.

    They are registered in megatron/core/distributed/distributed_data_parallel.py under overlap_param_gather.
    """
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())


def _rows(values: Tensor, context: LabelContext) -> Tensor:
    """Return [b, s] of values [s * b]."""
    rows, tokens = context.labels.shape
    return values.view(tokens, rows).T
