"""Runs microbatches through Megatron's pipeline schedule, forward only or forward and backward.

Knows tensors and the schedule; which sequences are in a microbatch is decided in `batching/packing.py`, what the loss is by the
caller. The schedule comes from megatron/core/pipeline_parallel/schedules.py.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from a3po_megatron.actor.logprobs import LabelContext, TokenOutput
from a3po_megatron.batching.packing import Microbatch

# Scalars of a microbatch: sums over its tokens, or, under a name that ends in `max`, the largest.
Metrics = dict[str, Tensor]


class Loss(Protocol):
    """A loss from `objective/`."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics it returns, the same on every rank."""

    @property
    def needs_entropy(self) -> bool:
        """Whether it must be called with the entropy of each token's distribution."""

    @property
    def counts(self) -> Literal["tokens", "sequences"]:
        """What the denominator counts."""

    def __call__(
        self, logprobs: Tensor, trainable: Tensor, fields: Mapping[str, Tensor], entropy: Tensor | None
    ) -> tuple[Tensor, Metrics]:
        """Return the scalar loss, a sum over trainable tokens, and the metrics; all arguments are [b, s]."""


def forward_backward(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[Microbatch], processor: Any, vocab_size: int, loss: Loss
) -> list[Metrics]:
    """Accumulate the gradient of `loss` over the microbatches and divide it, once, by the count of the step.

    `processor` returns a TokenOutput, with entropy where the loss needs it. The count is of trainable tokens or of sequences
    (`loss.counts`), over all microbatches and ranks: each reports its own, megatron adds up and divides. Returns each
    microbatch's metrics on the last pipeline stage, `loss` among them, and nothing on the other stages.
    """

    def finish(microbatch: Microbatch, output: TokenOutput) -> tuple[Tensor, Tensor, Metrics]:
        to = partial(_to_device, device=output.logprobs.device)
        trainable = to(microbatch.trainable)
        fields = {name: to(values) for name, values in microbatch.fields.items()}
        total, metrics = loss(output.logprobs, trainable, fields, output.entropy)
        count = torch.tensor(
            microbatch.num_tokens if loss.counts == "tokens" else microbatch.num_sequences,
            dtype=torch.int32,
            device=total.device,
        )
        return total, count, {"loss": total.detach(), **metrics}

    return _run(chunks, microbatches, processor, vocab_size, finish, forward_only=False)


@torch.no_grad()
def forward_only(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[Microbatch], processor: Any, vocab_size: int
) -> list[Tensor]:
    """Return the output processor's [b, s] result of each microbatch on the last pipeline stage, nothing on the others."""

    def finish(microbatch: Microbatch, output: Tensor, non_loss_data: bool = True) -> Tensor:
        return output

    return _run(chunks, microbatches, processor, vocab_size, finish, forward_only=True)


def _run(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[Microbatch],
    processor: Any,
    vocab_size: int,
    finish: Callable[..., Any],
    forward_only: bool,
) -> list[Any]:
    def forward_step(iterator: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        return _forward_step(next(iterator), chunk, processor, vocab_size, finish)

    iterators = [iter(microbatches) for _ in chunks]  # every chunk walks through all microbatches
    schedule = get_forward_backward_func()
    return schedule(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=1,  # with variable_seq_lengths the stages exchange the true shape
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward_step(
    microbatch: Microbatch, chunk: torch.nn.Module, processor: Any, vocab_size: int, finish: Callable[..., Any]
) -> tuple[Tensor, Callable[..., Any]]:
    device = next(chunk.parameters()).device
    to = partial(_to_device, device=device)
    output = chunk(
        to(microbatch.tokens),
        to(microbatch.positions),
        None,
        packed_seq_params=_packed_seq_params(microbatch, device),
        output_processor=processor,
        output_processor_context=LabelContext(to(microbatch.labels), vocab_size),
    )
    return output, partial(finish, microbatch)


def _packed_seq_params(microbatch: Microbatch, device: torch.device) -> PackedSeqParams | None:
    if microbatch.cu_seqlens is None:
        return None
    boundaries = _to_device(microbatch.cu_seqlens, device)
    longest = int((microbatch.cu_seqlens[1:] - microbatch.cu_seqlens[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _to_device(array: Any, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)
