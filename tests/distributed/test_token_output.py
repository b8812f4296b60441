"""Log-probabilities and entropy over tensor-parallel ranks, against whole logits and plain autograd."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from a3po_megatron.actor.token_head import TokenHead, VocabularyPart, is_greedy, logprobs_and_entropy
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, OracleTrainer, build_actor, random_sequences, save_model
from tests.distributed.test_parity import BFLOAT16, TOLERANCE

QWEN, TIED = Model("qwen3"), Model("qwen3", tied=True)
ENTROPY_WEIGHT = 0.3


class EntropyLoss(SupervisedLoss):
    """Maximum likelihood with an entropy bonus."""

    needs_entropy = True

    def __call__(
        self, logprobs: Tensor, trainable: Tensor, fields: Mapping[str, Tensor], entropy: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        assert entropy is not None
        return super().__call__(logprobs + ENTROPY_WEIGHT * entropy, trainable, fields)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(("rows", "vocab_size"), [(10, 40), (10, 33), (10, 27)], ids=["full", "padded", "empty-rank"])
def test_ranks_that_share_the_vocabulary_agree_with_whole_logits(
    rows: int, vocab_size: int, with_entropy: bool
) -> None:
    """Four ranks of ten columns each. Of 33 tokens the last rank holds three, of 27 none."""
    generator = torch.Generator().manual_seed(3)
    options = {"generator": generator, "dtype": torch.float64}
    hidden = torch.randn(13, 8, **options).requires_grad_()
    weight = torch.randn(rows * 4, 8, **options).requires_grad_()
    labels = torch.randint(vocab_size, (13,), generator=generator)
    log_p = (hidden @ weight[:vocab_size].T / 1.3).log_softmax(-1)
    expected = log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    factors = torch.randn(2, 13, **options)

    first = dist.get_rank() * rows
    own = weight[first : first + rows].detach().requires_grad_()
    part = VocabularyPart(first, min(max(vocab_size - first, 0), rows), dist.group.WORLD)
    head = TokenHead(temperature=1.3, chunk_tokens=5)
    found = logprobs_and_entropy(hidden, own, labels, part, head, with_entropy)

    used = range(2 if with_entropy else 1)
    for index in used:
        torch.testing.assert_close(found[index], expected[index], atol=1e-10, rtol=0)
    ours = torch.autograd.grad(sum((factors[i] * found[i]).sum() for i in used), (hidden, own))
    theirs = torch.autograd.grad(sum((factors[i] * expected[i]).sum() for i in used), (hidden, weight))
    dist.all_reduce(ours[0])
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-10, rtol=0)
    torch.testing.assert_close(ours[1], theirs[1][first : first + rows], atol=1e-10, rtol=0)
    greedy = is_greedy(hidden, own, labels, part, head)
    assert torch.equal(greedy, log_p.argmax(-1) == labels)


LAYOUTS = [
    (QWEN, Layout(tp=2)),
    (TIED, Layout(tp=2)),
    (QWEN, Layout(tp=2, sp=True)),
    (TIED, Layout(tp=2, sp=True, options={"distributed_optimizer": True})),
    (TIED, Layout(tp=2, pp=2)),
    (QWEN, Layout(tp=2, pp=2, sp=True, options={"packed": False})),
    (TIED, Layout(tp=2, pp=2, vpp=2, sp=True)),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_a_step_with_entropy_bonus_equals_plain_autograd(model: Model, layout: Layout, shared_folder: Path) -> None:
    sequences, oracle = random_sequences(), model.build()
    actor = build_actor(save_model(oracle, shared_folder), layout.config(logprob_chunk_tokens=5))
    trainer = OracleTrainer(oracle)
    count = sum(int(sequence.trainable.sum()) for sequence in sequences)
    total = torch.zeros(())
    for sequence in sequences:
        tokens = torch.tensor(sequence.tokens)[None]
        log_p = oracle(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        logprobs, entropy = log_p.gather(-1, tokens[0, 1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        total = total - (logprobs + ENTROPY_WEIGHT * entropy)[torch.tensor(sequence.trainable[1:])].sum() / count
    total.backward()

    result = actor.train_step(sequences, EntropyLoss())
    assert result.loss == pytest.approx(total.item(), abs=TOLERANCE)
    assert result.grad_norm == pytest.approx(trainer.step(), abs=TOLERANCE)
    parameters = dict(oracle.named_parameters())
    for name, tensor in actor.export_weights():
        torch.testing.assert_close(tensor.cpu(), parameters[name].detach(), atol=TOLERANCE, rtol=0, msg=name)
    actor.close()


def test_float32_head_of_a_bfloat16_actor(shared_folder: Path) -> None:
    """Rounding the logits is one of several roundings of a bfloat16 model, so only the bound of all of them is claimed."""
    folder, sequences, found = save_model(QWEN.build(), shared_folder), random_sequences(), []
    for changes in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "float32_head": True}):
        actor = build_actor(folder, Layout(tp=2, pp=2, sp=True).config(**changes))
        found.append({index: torch.tensor(values) for index, values in actor.logprobs(sequences).items()})
        actor.train_step(sequences, EntropyLoss())
        actor.close()
    exact, rounded, unrounded = found
    for index, expected in exact.items():
        torch.testing.assert_close(unrounded[index], expected, atol=BFLOAT16[0], rtol=0)
        assert not torch.equal(rounded[index], unrounded[index])


def test_what_ddp_hangs_before_the_output_layer_is_run(shared_folder: Path) -> None:
    """Under overlap_param_gather it waits for the layer's weight; the layer's forward, which would run it, is not called."""
    options = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    actor = build_actor(save_model(QWEN.build(), shared_folder), Layout(pp=2, options=options).config())
    calls = []
    if actor.place.is_last_stage:
        layer = actor.models[-1].output_layer
        assert len(layer._forward_pre_hooks) == 1, "DDP registers its hook differently: see logprobs.py"
        layer.register_forward_pre_hook(lambda module, inputs: calls.append(module))
    actor.logprobs(random_sequences())
    assert bool(calls) == actor.place.is_last_stage
    actor.close()
