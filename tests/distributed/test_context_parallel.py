"""What context parallelism needs beside the parity of test_parity.py."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from a3po_megatron.actor import parallel
from tests.distributed.layouts import Layout, Model, build_actor, random_sequences, save_model

TOKENS, SEQUENCES = 12, 3


def loss(logprobs: Tensor, sequence: Tensor, total: Tensor) -> Tensor:
    """A loss in which every token of a sequence depends on the sequence's sum, as a sequence-level ratio does."""
    return ((total / 4).exp()[sequence] * torch.sin(logprobs)).sum()


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_a_sum_over_context_parallel_ranks_has_the_gradient_of_the_whole(cp: int) -> None:
    place = parallel.initialize(Layout(cp=cp).config(), seed=0)
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    sequence = torch.randint(0, SEQUENCES, (TOKENS,), generator=generator)
    zeros = torch.zeros(SEQUENCES, dtype=torch.float64)

    whole = logprobs.clone().requires_grad_()
    expected = loss(whole, sequence, zeros.index_add(0, sequence, whole))
    expected.backward()

    mine = torch.arange(TOKENS) % cp == place.cp_rank
    own = logprobs[mine].clone().requires_grad_()
    total = parallel.sum_over_cp(zeros.index_add(0, sequence[mine], own))
    part = loss(own, sequence[mine], total)
    part.backward()
    assert own.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(own.grad, whole.grad[mine], atol=1e-12, rtol=0)
    torch.testing.assert_close(
        sum(parallel.gather_over_cp(part.detach()), torch.zeros((), dtype=torch.float64)),
        expected.detach(),
        atol=1e-12,
        rtol=0,
    )
    parallel.destroy()


@pytest.mark.parametrize("layout", [Layout(cp=4), Layout(tp=2, sp=True, cp=2)], ids=str)
def test_greedy_tokens_are_found_on_every_rank_for_whole_sequences(layout: Layout, shared_folder: Path) -> None:
    oracle, sequences = Model("qwen3").build(), random_sequences()
    actor = build_actor(save_model(oracle, shared_folder), layout.config())
    greedy = actor.is_greedy(sequences)
    assert greedy.keys() == set(range(len(sequences)))  # one data-parallel rank
    for index, values in greedy.items():
        tokens = torch.tensor(sequences[index].tokens)
        with torch.no_grad():
            expected = oracle(input_ids=tokens[None]).logits[0, :-1].argmax(-1) == tokens[1:]
        assert values.tolist() == expected.tolist()
    actor.close()
