"""Random microbatches for the objective's tests, and the same data as single responses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from a3po_megatron.objective.policy_loss import PolicyLoss
from tests.references.policy_loss import Response

FLOATS = ("behavior_logprobs", "proximal_logprobs", "reference_logprobs", "advantages")


@dataclass
class Case:
    """Responses of different lengths, packed into one row behind their prompts, as in a microbatch."""

    logprobs: Tensor  # float64 [1, s], with gradient
    entropy: Tensor  # float64 [1, s], with gradient
    trainable: Tensor
    fields: dict[str, Tensor]

    def call(self, loss: PolicyLoss) -> tuple[Tensor, dict[str, Tensor]]:
        return loss(self.logprobs, self.trainable, self.fields, self.entropy)

    def value_and_gradients(self, loss: PolicyLoss) -> tuple[Tensor, ...]:
        total, _ = self.call(loss)
        return total.detach(), *gradients(total, self.logprobs, self.entropy)

    def responses(self, proximal: Tensor) -> list[Response]:
        """Return the trainable tokens of each sequence, with `proximal` [1, s] as the anchor."""
        found = []
        for number in range(int(self.fields["sequence"].max()) + 1):
            here = self.trainable & (self.fields["sequence"] == number)
            if here.any():
                chosen = {name: self.fields[name][here] for name in (*FLOATS, "staleness")}
                found.append(
                    Response(
                        logp=self.logprobs[here],
                        behav=chosen["behavior_logprobs"],
                        prox=proximal.detach()[here],
                        ref=chosen["reference_logprobs"],
                        adv=chosen["advantages"],
                        entropy=self.entropy[here],
                        d=chosen["staleness"].tolist(),
                    )
                )
        return found

    def part(self, where: slice, sequence_offset: int = 0) -> "Case":
        """Return some columns as a microbatch of their own; the gradient flows back into this one."""
        fields = {name: values[:, where] for name, values in self.fields.items()}
        fields["sequence"] = fields["sequence"] - sequence_offset
        return Case(self.logprobs[:, where], self.entropy[:, where], self.trainable[:, where], fields)


def gradients(total: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    found = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
    return tuple(
        torch.zeros_like(leaf) if gradient is None else gradient for gradient, leaf in zip(found, leaves, strict=True)
    )


def random_case(seed: int, lengths: tuple[int, ...] = (7, 1, 12, 4, 9), spread: float = 0.5) -> Case:
    """Return sequences of `lengths` trainable tokens; ratios go well beyond the clip range, masked places hold junk."""
    draw = torch.Generator().manual_seed(seed)
    trainable, sequence, num_tokens = [], [], []
    for number, length in enumerate(lengths):
        prompt = int(torch.randint(0, 4, (), generator=draw))
        inside = torch.rand(length, generator=draw) < 0.85
        if length:
            inside[0] = True
        trainable += [False] * prompt + inside.tolist() + [False]
        sequence += [number] * (prompt + length + 1)
        num_tokens += [max(int(inside.sum()), 1)] * (prompt + length + 1)
    size = len(trainable)

    def normal() -> Tensor:
        return torch.randn(1, size, generator=draw, dtype=torch.float64)

    logprobs = -3 * torch.rand(1, size, generator=draw, dtype=torch.float64)
    mask = torch.tensor([trainable])
    fields = {name: logprobs + spread * normal() for name in FLOATS[:3]} | {"advantages": normal()}
    for name in FLOATS:
        fields[name][~mask] = [torch.nan, torch.inf, -torch.inf, -1e30][FLOATS.index(name)]
    fields |= {
        "staleness": torch.randint(-1, 11, (1, size), generator=draw).int(),
        "sequence": torch.tensor([sequence]),
        "sequence_tokens": torch.tensor([num_tokens]).int(),
        "correction": torch.rand(1, size, generator=draw) < 0.7,
    }
    entropy = (2 * torch.rand(1, size, generator=draw, dtype=torch.float64)).requires_grad_()
    return Case(logprobs.requires_grad_(), entropy, mask, fields)


def assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float = 1e-10) -> None:
    """float64 throughout: sums of some dozen terms of size 1 differ by about 1e-15."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=0)
