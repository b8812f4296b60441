"""Log-probabilities and entropy by chunks against plain autograd on whole logits, in float64.

Over several ranks: tests/distributed/test_token_output.py.
"""

import os
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from a3po_megatron.actor import token_head
from a3po_megatron.actor.token_head import TokenHead, VocabularyPart, is_greedy, logprobs_and_entropy

TOKENS, HIDDEN, ROWS, PADDED = 23, 16, 50, 53
EXACT = 1e-10  # float64: sums of a few hundred terms of size 1 differ by about 1e-14
# bfloat16 keeps 8 bits: a logit of size 4 is rounded by up to 2^-7, its log-probability by about twice that, and a gradient, whose
# factors are rounded too, by a percent or two of its largest entry.
BFLOAT16_LOGPROBS, BFLOAT16_GRADIENT = 0.03, 0.03


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64) * 0.5
    labels = torch.randint(ROWS, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def reference(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight[:ROWS].T / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def loss_of(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """A loss whose gradient differs from token to token and has both signs."""
    factors = torch.linspace(-1, 2, len(logprobs), dtype=logprobs.dtype)
    loss = (factors * logprobs).sum()
    return loss if entropy is None else loss + (factors.flip(0) * entropy).sum()


def assert_equals_reference(head: TokenHead, with_entropy: bool, tokens: int = TOKENS, atol: float = EXACT) -> None:
    hidden, weight, labels = inputs(tokens=tokens)
    expected = reference(hidden, weight, labels, head.temperature)
    found = logprobs_and_entropy(hidden, weight, labels, VocabularyPart(0, ROWS), head, with_entropy)
    torch.testing.assert_close(found[0], expected[0], atol=atol, rtol=0)
    if with_entropy:
        torch.testing.assert_close(found[1], expected[1], atol=atol, rtol=0)
    else:
        assert found[1] is None
        expected = expected[0], None
    gradients = torch.autograd.grad(loss_of(*found), (hidden, weight))
    for ours, theirs in zip(gradients, torch.autograd.grad(loss_of(*expected), (hidden, weight)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
    assert not gradients[1][ROWS:].any(), "padding has a gradient"


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("chunk_tokens", [0, 1, 7, 22, 23, 24], ids="chunks of {}".format)
def test_values_and_gradients_are_those_of_whole_logits(
    chunk_tokens: int, temperature: float, with_entropy: bool
) -> None:
    assert_equals_reference(TokenHead(temperature, chunk_tokens=chunk_tokens), with_entropy)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_one_token(with_entropy: bool) -> None:
    assert_equals_reference(TokenHead(), with_entropy, tokens=1)


@pytest.mark.full
@pytest.mark.timeout(600)  # a C++ compiler runs four times
def test_the_compiled_path_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU here. Also where device.py has switched torch.compile off for everybody else."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for temperature, with_entropy in product([1.0, 1.7], [False, True]):
        assert_equals_reference(TokenHead(temperature, chunk_tokens=8, kernel="compiled"), with_entropy)
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert hasattr(token_head._compiled(token_head.chunk_gradient), "_torchdynamo_orig_callable")


def test_float32_is_near_float64() -> None:
    hidden, weight, labels = inputs(torch.float32)
    found = logprobs_and_entropy(hidden, weight, labels, VocabularyPart(0, ROWS), TokenHead(chunk_tokens=7), True)
    expected = reference(hidden.double(), weight.double(), labels)
    gradients = torch.autograd.grad(loss_of(*found), (hidden, weight))
    exact = torch.autograd.grad(loss_of(*expected), (hidden, weight))
    for ours, theirs in zip((*found, *gradients), (*expected, *exact), strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_bfloat16_gives_float32_logprobs_and_bfloat16_gradients(with_entropy: bool) -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    part, head = VocabularyPart(0, ROWS), TokenHead(chunk_tokens=7)
    found = logprobs_and_entropy(hidden, weight, labels, part, head, with_entropy)
    expected = reference(hidden.double(), weight.double(), labels)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), expected[0], atol=BFLOAT16_LOGPROBS, rtol=0)
    gradients = torch.autograd.grad(loss_of(*found), (hidden, weight))
    exact = torch.autograd.grad(loss_of(expected[0], expected[1] if with_entropy else None), (hidden, weight))
    for ours, theirs in zip(gradients, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).abs().max() < BFLOAT16_GRADIENT * theirs.abs().max()


def test_a_float32_head_does_not_round_the_logits_of_bfloat16() -> None:
    """The factors are bfloat16, so only their products and sums are compared: float32 is as good as float64 then."""
    hidden, weight, labels = inputs(torch.bfloat16)
    expected = reference(hidden.double(), weight.double(), labels)
    errors = []
    for head in (TokenHead(float32=True, chunk_tokens=7), TokenHead(chunk_tokens=7)):
        found = logprobs_and_entropy(hidden, weight, labels, VocabularyPart(0, ROWS), head, True)
        errors.append(max((ours - theirs).abs().max().item() for ours, theirs in zip(found, expected, strict=True)))
    assert errors[0] < 1e-5
    assert errors[1] > 100 * errors[0]


def test_no_tensor_of_all_tokens_by_the_vocabulary_is_ever_made() -> None:
    tokens, chunk_tokens = 200, 8
    hidden, weight, labels = inputs(torch.float32, tokens)
    head, part = TokenHead(temperature=0.7, chunk_tokens=chunk_tokens), VocabularyPart(0, ROWS)
    with _LargestTensor() as made:
        loss_of(*logprobs_and_entropy(hidden, weight, labels, part, head, True)).backward()
        is_greedy(hidden, weight, labels, part, head)
    assert made.numel <= max(tokens * HIDDEN, PADDED * HIDDEN, chunk_tokens * PADDED) < tokens * ROWS / 3
    with _LargestTensor() as made:  # and the plain version is found out
        loss_of(*reference(hidden, weight, labels))
    assert made.numel == tokens * ROWS


class _LargestTensor(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation returns, forward or backward."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, Tensor):
                self.numel = max(self.numel, item.numel())
        return result


def test_logits_far_beyond_the_range_of_exp_do_no_harm() -> None:
    hidden, weight, labels = inputs(torch.float32)
    scaled = (hidden.detach() * 1e4).requires_grad_()
    found = logprobs_and_entropy(scaled, weight, labels, VocabularyPart(0, ROWS), TokenHead(chunk_tokens=7), True)
    expected = reference(scaled, weight, labels)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-5)
    for gradient in torch.autograd.grad(loss_of(*found), (scaled, weight)):
        assert gradient.isfinite().all()


def test_a_logit_that_is_not_a_number_is_not_hidden() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        weight[3, 0] = torch.nan
    logprobs, _ = logprobs_and_entropy(hidden, weight, labels, VocabularyPart(0, ROWS), TokenHead())
    assert logprobs.isnan().all()


def test_only_wanted_gradients_are_computed() -> None:
    hidden, weight, labels = inputs()
    part = VocabularyPart(0, ROWS)
    logprobs, entropy = logprobs_and_entropy(hidden, weight.detach(), labels, part, TokenHead(), True)
    (entropy_alone,) = torch.autograd.grad(entropy.sum(), hidden, retain_graph=True)
    torch.testing.assert_close(
        entropy_alone, torch.autograd.grad(reference(hidden, weight, labels)[1].sum(), hidden)[0], atol=EXACT, rtol=0
    )
    (logprobs_alone,) = torch.autograd.grad(logprobs.sum(), hidden)
    torch.testing.assert_close(
        logprobs_alone, torch.autograd.grad(reference(hidden, weight, labels)[0].sum(), hidden)[0], atol=EXACT, rtol=0
    )
    with torch.no_grad():
        assert not logprobs_and_entropy(hidden, weight, labels, part, TokenHead())[0].requires_grad


@pytest.mark.parametrize("chunk_tokens", [0, 7])
def test_greedy_tokens_are_those_with_the_largest_logit(chunk_tokens: int) -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.no_grad():
        weight[ROWS:] = 100.0  # padding, which would win
        best = (hidden @ weight[:ROWS].T).argmax(-1)
    labels[::2] = best[::2]
    found = is_greedy(hidden, weight, labels, VocabularyPart(0, ROWS), TokenHead(chunk_tokens=chunk_tokens))
    assert torch.equal(found, labels == best)
    assert found.sum() >= TOKENS // 2
