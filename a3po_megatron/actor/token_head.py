"""Log-probability and entropy of given tokens from hidden states and the output weight, a chunk of tokens at a time.

    z = hidden @ weight.T / temperature        lse = log sum_j e^z_j        p_j = e^(z_j - lse)
    logprob = z_label - lse                    d logprob / d z_j = [j = label] - p_j
    entropy = - sum_j p_j log p_j              d entropy / d z_j = - p_j (log p_j + entropy)

The logits of a chunk exist while it is worked on: forward keeps lse and the entropy of each token, backward multiplies the logits
out again and adds up the gradients. So no [tokens, vocabulary] tensor ever exists, and training does 4/3 of the multiplications.

Each tensor-parallel rank r holds some columns and has its own lse_r and entropy_r over them; with w_r = e^(lse_r - lse) they
join as  lse = log sum_r e^lse_r  and  entropy = sum_r w_r (entropy_r - log w_r), in two collectives for all tokens together.

torch's `linear_cross_entropy` chunks too, but knows one rank's vocabulary only, no entropy, and returns bfloat16 for bfloat16.

Letters: n tokens, c tokens of a chunk, h hidden size, v vocabulary columns of this tensor-parallel rank.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Kernel = Literal["auto", "plain", "compiled"]
# On a CPU by tools/bench_logprobs.py: smaller chunks multiply slower. A GPU wants fewer, larger ones; not measured yet.
CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 384, 2048
# log of the sum over no column, for a rank that holds only padding: finite, so that 0 times its difference is 0.
EMPTY_LOGSUMEXP = -1e30
# Of a bfloat16 weight's gradient, whose float32 products need a place before they are added.
WEIGHT_ROWS_AT_ONCE = 16384


@dataclass(frozen=True)
class TokenHead:
    """How the logits are made."""

    temperature: float = 1.0
    float32: bool = False  # logits of bfloat16 hidden states and weights are not rounded to bfloat16
    chunk_tokens: int = 0  # 0: CPU_CHUNK_TOKENS or GPU_CHUNK_TOKENS
    kernel: Kernel = "auto"  # of what follows the multiplication; auto: compiled on a GPU, plain on a CPU

    def chunks(self, hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the n tokens, each with its logits [c, v] before temperature; the next ones take their memory."""
        size = self.chunk_tokens or (GPU_CHUNK_TOKENS if hidden.is_cuda else CPU_CHUNK_TOKENS)
        dtype = _sum_dtype(weight) if self.float32 else weight.dtype
        memory = torch.empty((min(size, len(hidden)), len(weight)), dtype=dtype, device=weight.device)
        for start in range(0, len(hidden), size):
            chunk = slice(start, min(start + size, len(hidden)))
            yield chunk, _product(hidden[chunk], weight.T, out=memory[: chunk.stop - start])

    def maths(self, function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return `function`, one of the two below that work on a chunk's logits, compiled or as it is."""
        compiled = self.kernel == "compiled" or (self.kernel == "auto" and device.type == "cuda")
        return _compiled(function) if compiled else function


@dataclass(frozen=True)
class VocabularyPart:
    """Which columns of the vocabulary this rank's weight holds; the last ones may only pad the vocabulary."""

    first: int  # token id of the weight's first row
    rows: int  # rows of the weight that are tokens; those behind take no probability
    group: dist.ProcessGroup | None = None  # the ranks that hold the whole vocabulary together; None: this one alone

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's column of each label, in range anyway, and whether the label is here."""
        columns = labels - self.first
        return columns.clamp(0, max(self.rows - 1, 0)), (columns >= 0) & (columns < self.rows)

    def all_reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `values` in place over the ranks of the vocabulary."""
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)


def logprobs_and_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, part: VocabularyPart, head: TokenHead, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return float32 [n] log-probabilities and, if asked for, [n] entropies in nats, both with gradient.

    `hidden` [n, h] and `weight` [v, h] of one dtype (float64 in tests gives float64), `labels` int64 [n]. The gradient of
    `hidden` is that through this rank's columns; the caller adds it up over tensor-parallel ranks.
    """
    return _TokenHeadFunction.apply(hidden, weight, labels, part, head, with_entropy)


@torch.no_grad()
def is_greedy(hidden: Tensor, weight: Tensor, labels: Tensor, part: VocabularyPart, head: TokenHead) -> Tensor:
    """Return bool [n]: whether each label has the largest logit. Arguments as above."""
    columns, here = part.local(labels)
    found = torch.full((2, len(hidden)), -torch.inf, dtype=_sum_dtype(hidden), device=hidden.device)
    if part.rows:
        for chunk, logits in head.chunks(hidden, weight[: part.rows]):
            found[0, chunk] = logits.amax(-1)
            found[1, chunk] = _pick(logits, columns[chunk])
    found[1].masked_fill_(~here, -torch.inf)
    part.all_reduce(found, dist.ReduceOp.MAX)
    return found[0] == found[1]


class _TokenHeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        part: VocabularyPart,
        head: TokenHead,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        columns, here = part.local(labels)
        found = torch.zeros((3, len(hidden)), dtype=_sum_dtype(hidden), device=hidden.device)
        lse, label_logits, entropies = found  # [n] each, over this rank's columns
        lse.fill_(EMPTY_LOGSUMEXP)
        maths = head.maths(chunk_statistics, hidden.device)
        if part.rows:
            for chunk, logits in head.chunks(hidden, weight[: part.rows]):
                statistics = maths(logits, columns[chunk], head.temperature, with_entropy)
                for whole, values in zip(found, statistics, strict=True):
                    whole[chunk] = values
        label_logits.masked_fill_(~here, 0.0)
        if part.group is not None:
            lse, label_logits, entropies = _join_ranks(found, part)

        entropy = entropies if with_entropy else None
        ctx.save_for_backward(hidden, weight, columns, here, lse, entropy)
        ctx.part, ctx.head = part, head
        ctx.set_materialize_grads(False)
        return label_logits - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, columns, here, lse, entropy = ctx.saved_tensors
        part, head = ctx.part, ctx.head
        grad_logprobs, grad_entropy = (grad / head.temperature if grad is not None else None for grad in grads)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(lse)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight)) if needs_weight else None

        maths = head.maths(chunk_gradient, hidden.device)
        for chunk, logits in head.chunks(hidden, weight[: part.rows]) if part.rows else ():
            entropy_terms = None if grad_entropy is None else (grad_entropy[chunk], entropy[chunk])
            label = (columns[chunk], here[chunk])
            grad_logits = maths(
                logits, label, lse[chunk], grad_logprobs[chunk], entropy_terms, head.temperature, weight.dtype
            )
            if grad_hidden is not None:
                _product(grad_logits, weight[: part.rows], out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight[: part.rows], grad_logits.T, hidden[chunk])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def chunk_statistics(
    logits: Tensor, columns: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse, the label's logit and the entropy (0 unless asked for), [c] each, of `logits` [c, v]; overwrites them."""
    z = _scaled(logits, temperature)
    label_logits, largest = _pick(z, columns), z.amax(-1)
    z.sub_(largest[:, None])
    e = z.exp() if with_entropy else z.exp_()
    total = e.sum(-1)
    entropy = total.log() - e.mul_(z).sum(-1) / total if with_entropy else torch.zeros_like(total)
    return largest + total.log(), label_logits, entropy


def chunk_gradient(
    logits: Tensor,
    label: tuple[Tensor, Tensor],
    lse: Tensor,
    grad_logprobs: Tensor,
    entropy_terms: tuple[Tensor, Tensor] | None,
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    """Return the gradient of the logits [c, v] in `dtype`; overwrites them.

    `label`: its column and whether it is here; `grad_logprobs` [c], and in `entropy_terms` the gradient of the entropy and the
    entropy, both gradients already divided by the temperature.
    """
    columns, here = label
    log_p = _scaled(logits, temperature).sub_(lse[:, None])
    if entropy_terms is None:
        gradient = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        grad_entropy, entropy = (values[:, None] for values in entropy_terms)
        p = log_p.exp()
        gradient = log_p.add_(entropy).mul_(grad_entropy).add_(grad_logprobs[:, None]).mul_(p).neg_()
    gradient.scatter_add_(1, columns[:, None], torch.where(here, grad_logprobs, 0.0)[:, None])
    return gradient.to(dtype)


def _join_ranks(found: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor, Tensor]:
    """Return lse, label logit and entropy [n] over the whole vocabulary from those over each rank's columns."""
    lse, label_logits, entropies = found
    largest = lse.clone()
    part.all_reduce(largest, dist.ReduceOp.MAX)
    weights = (lse - largest).exp()
    sums = torch.stack([weights, label_logits, weights * (entropies + largest - lse)])
    part.all_reduce(sums)
    return largest + sums[0].log(), sums[1], sums[2] / sums[0] + sums[0].log()


def _pick(logits: Tensor, columns: Tensor) -> Tensor:
    return logits.gather(-1, columns[:, None])[:, 0]


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return z: at least float32, in the memory of the logits where that is their dtype."""
    z = logits.to(_sum_dtype(logits))
    return z if temperature == 1.0 else z.div_(temperature)


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write a @ b to `out`; unrounded where that is float32 and the factors are bfloat16."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out.dtype, out=out)  # without float32 copies; CUDA only
    return torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`, which is float32 for bfloat16 factors: rounding does not grow with the number of chunks."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
        return
    for part, rows in zip(total.split(WEIGHT_ROWS_AT_ONCE), a.split(WEIGHT_ROWS_AT_ONCE), strict=True):
        part += _product(rows, b, out=torch.empty_like(part))


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` through torch.compile, which device.py switches off for megatron's own small functions."""
    switch = os.environ.pop("TORCHDYNAMO_DISABLE", None)  # read when a function is wrapped
    try:
        return torch.compile(function)
    finally:
        if switch is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = switch
