"""The actor against transformers and plain autograd, in every basic layout."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from a3po_megatron.actor import pipeline
from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.hf_weights import export_weights
from a3po_megatron.actor.logprobs import token_logprobs
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import (
    Layout,
    Model,
    OracleTrainer,
    build_actor,
    oracle_logprobs,
    random_sequences,
    save_model,
)

# float32 sums in another order differ by a few 1e-7 here; 1e-5 leaves room for other machines, a real fault is far above it.
TOLERANCE = 1e-5

QWEN, TIED, LLAMA = Model("qwen3"), Model("qwen3", tied=True), Model("llama")
DISTRIBUTED = {"distributed_optimizer": True}
OVERLAP = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ONE_SEQUENCE_A_MICROBATCH = 12  # tokens: the longest sequence
CASES = [
    (QWEN, Layout(), {}),
    (TIED, Layout(options=DISTRIBUTED), {}),
    (QWEN, Layout(tp=2), {}),
    (TIED, Layout(tp=2, sp=True), {}),
    (QWEN, Layout(tp=2, sp=True, options=DISTRIBUTED), {}),
    (TIED, Layout(tp=2, options=OVERLAP), {}),
    (QWEN, Layout(pp=2), {}),
    (TIED, Layout(pp=2, options=DISTRIBUTED), {}),
    (QWEN, Layout(pp=2, options=OVERLAP), {"max_tokens_per_microbatch": 16}),
    (QWEN, Layout(tp=2, pp=2), {}),
    (TIED, Layout(tp=2, pp=2), {}),
    (QWEN, Layout(tp=2, pp=2, sp=True), {}),
    (TIED, Layout(tp=2, pp=2, sp=True), {}),
    (QWEN, Layout(tp=2, pp=2, sp=True, options={"packed": False}), {}),
    (TIED, Layout(options={"packed": False}), {}),
    (QWEN, Layout(pp=4), {}),
    (TIED, Layout(pp=4), {"max_tokens_per_microbatch": 16}),
    (QWEN, Layout(pp=4, options={"packed": False}), {"max_tokens_per_microbatch": 24}),
    (QWEN, Layout(pp=2, vpp=2), {}),
    (TIED, Layout(tp=2, pp=2, vpp=2, sp=True), {"max_tokens_per_microbatch": 16}),
    (LLAMA, Layout(tp=2, pp=2, sp=True), {}),
    (LLAMA, Layout(pp=4), {}),
]


def _name(value: object) -> str:
    if isinstance(value, dict):
        return "-".join(f"{key}={item}" for key, item in value.items()) or "whole"
    return str(value)


@pytest.mark.parametrize(("model", "layout", "changes"), CASES, ids=_name)
def test_two_steps_equal_plain_autograd(model: Model, layout: Layout, changes: dict, shared_folder: Path) -> None:
    _check_two_steps(model, layout, changes, shared_folder)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("model", [QWEN, TIED, LLAMA], ids=str)
def test_two_steps_equal_plain_autograd_on_one_rank(model: Model, shared_folder: Path) -> None:
    _check_two_steps(model, Layout(), {}, shared_folder)


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True), Layout(pp=2)], ids=str)
@pytest.mark.parametrize(("tokens", "microbatches_on_one_rank"), [(64, 1), (32, 2), (16, 4)])
def test_gradients_do_not_depend_on_the_microbatch_split(
    layout: Layout, tokens: int, microbatches_on_one_rank: int, shared_folder: Path
) -> None:
    sequences = random_sequences()
    actor = build_actor(save_model(QWEN.build(), shared_folder), layout.config(max_tokens_per_microbatch=tokens))
    report = actor.train_step(sequences, SupervisedLoss())
    if actor.place.dp_size == 1:
        assert report.num_microbatches == microbatches_on_one_rank
    trainer = OracleTrainer(QWEN.build())
    loss, _ = trainer.gradients(sequences)
    assert report.loss == pytest.approx(loss, abs=TOLERANCE)
    assert report.grad_norm == pytest.approx(trainer.step(), abs=TOLERANCE)
    actor.close()


def test_a_rank_without_sequences_still_takes_part(shared_folder: Path) -> None:
    """Two sequences over four data-parallel ranks: counts over ranks are unequal, two of them zero."""
    sequences = random_sequences(lengths=(9, 4))
    actor = build_actor(save_model(QWEN.build(), shared_folder), Layout().config())
    report = actor.train_step(sequences, SupervisedLoss())
    trainer = OracleTrainer(QWEN.build())
    loss, _ = trainer.gradients(sequences)
    assert report.loss == pytest.approx(loss, abs=TOLERANCE)
    assert report.grad_norm == pytest.approx(trainer.step(), abs=TOLERANCE)
    actor.close()


def _check_two_steps(model: Model, layout: Layout, changes: dict, folder: Path) -> None:
    """Log-probs before, gradients, gradient norm and loss of each step, and parameters after two."""
    oracle = model.build()
    actor = build_actor(save_model(oracle, folder), layout.config(**changes))
    trainer = OracleTrainer(oracle)
    for step in range(2):
        sequences = random_sequences(seed=step)
        with torch.no_grad():
            for index, logprobs in actor.logprobs(sequences).items():
                expected = oracle_logprobs(oracle, sequences[index])
                torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)
        expected_loss, expected_gradients = trainer.gradients(sequences)
        _assert_all_close(_gradients(actor, sequences), expected_gradients)
        report = actor.train_step(sequences, SupervisedLoss())
        assert report.loss == pytest.approx(expected_loss, abs=TOLERANCE)
        assert report.grad_norm == pytest.approx(trainer.step(), abs=TOLERANCE)
    _assert_all_close(dict(actor.export_weights()), dict(oracle.named_parameters()))
    actor.close()


def _gradients(actor: Actor, sequences: list[TokenSequence]) -> dict[str, torch.Tensor]:
    """Return whole gradients under Hugging Face names, as they are before clipping; the parameters stay."""
    actor._zero_gradients()
    pipeline.forward_backward(
        actor.chunks, actor._microbatches(sequences), token_logprobs, actor.shape.vocab_size, SupervisedLoss()
    )
    if (
        actor.settings.distributed_optimizer
    ):  # each data-parallel rank has reduced one shard of each bucket: put them together
        for buffer in (buffer for chunk in actor.chunks for buffer in chunk.buffers):
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.chunk(actor.place.dp_size))
                dist.all_gather(shards, shards[actor.place.dp_rank].clone(), group=buffer.data_parallel_group)
    return dict(export_weights(actor.models, actor.shape, actor.place, value=lambda parameter: parameter.main_grad))


def _assert_all_close(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(
            tensor.cpu(), expected[name].detach(), atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
