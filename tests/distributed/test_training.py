"""The actor's loop on several ranks, with a fake controller, against transformers and plain autograd in float32."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from a3po_megatron.actor import parallel, publish, training
from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.batch_step import BatchStep
from a3po_megatron.actor.checkpoint import load_checkpoint
from a3po_megatron.actor.control import RunFailed
from a3po_megatron.actor.hf_folder import HFFolder
from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.actor.nonfinite import NonFiniteError
from a3po_megatron.actor.reference import ReferenceWeights
from a3po_megatron.checkpoint_folder import newest_complete
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.algorithm import AlgorithmConfig, BehaviorWeightConfig, KLConfig
from a3po_megatron.config.controller import ControllerConfig
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.config.schema import ModelConfig, RunConfig, TrainConfig
from a3po_megatron.controller.link import ControllerError, PublishAgain
from a3po_megatron.controller.messages import PublicationSent, WeightManifest
from a3po_megatron.objective.supervised import SupervisedLoss
from a3po_megatron.records import Batch
from a3po_megatron.rollout.transfer_group import GroupBroken
from a3po_megatron.rollout.transfer_messages import PublicationOutcome, Rendezvous, SendPlan
from a3po_megatron.rollout.weight_sender import Sent
from tests.distributed.batches import MAX_STALENESS, SEED, TOKENS, make_batch
from tests.distributed.layouts import (
    OPTIMIZER,
    Layout,
    Model,
    build_actor,
    oracle_logprobs,
    random_sequences,
    save_model,
)

TOLERANCE = 1e-5  # as in test_parity.py
QWEN, TIED = Model("qwen3"), Model("qwen3", tied=True)
METHODS = ["loglinear", "recompute", "behavior"]
SETTINGS = AlgorithmConfig(num_minibatches=3, behavior_weight=BehaviorWeightConfig(cap=1.3))


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True), Layout(pp=2, vpp=2)], ids=str)
def test_only_recompute_has_a_forward_pass_more_a_microbatch(layout: Layout, shared_folder: Path) -> None:
    oracle = QWEN.build()
    folder, batch, passes = save_model(oracle, shared_folder), make_batch(oracle, 0), {}
    for method in (*METHODS, "sync"):
        actor = build_actor(folder, layout.config(**TOKENS))
        fresh = replace(batch, samples=tuple(replace(s, versions=np.zeros_like(s.versions)) for s in batch.samples))
        settings = replace(SETTINGS, method=method)
        passes[method] = BatchStep(actor, settings, 0, SEED).train(fresh, 0)["forward_passes"]
        actor.close()
    assert passes["loglinear"] == passes["sync"] == passes["behavior"] >= 3
    assert passes["recompute"] == 2 * passes["loglinear"]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True), Layout(cp=2)], ids=str)
def test_the_recomputed_ratio_of_the_first_minibatch_is_exactly_one(layout: Layout, shared_folder: Path) -> None:
    """The pass has the same microbatches on the same ranks as the steps: not one bit differs."""
    oracle = QWEN.build()
    actor = build_actor(save_model(oracle, shared_folder), layout.config(**TOKENS))
    settings = replace(SETTINGS, method="recompute", num_minibatches=1)
    row = BatchStep(actor, settings, MAX_STALENESS, SEED).train(make_batch(oracle, 5), 5)
    assert row["policy/ratio_max"] == 1.0
    assert row["policy/clip_fraction"] == 0.0
    actor.close()


def test_parity_is_null_without_fresh_tokens_and_a_batch_of_overdue_tokens_takes_no_step(shared_folder: Path) -> None:
    oracle = QWEN.build()
    actor = build_actor(save_model(oracle, shared_folder), Layout(tp=2, pp=2).config(**TOKENS))
    batch_step, batch = BatchStep(actor, SETTINGS, MAX_STALENESS, SEED), make_batch(oracle, 5)
    stale = replace(batch, samples=tuple(replace(s, versions=np.full_like(s.versions, 3)) for s in batch.samples))
    row = batch_step.train(stale, 5)
    assert row["parity/logprob_max_abs"] is None
    assert (row["staleness/trained_mean"], row["staleness/trained_max"]) == (2.0, 2)
    row = batch_step.train(stale, 9)
    assert (row["optimizer_steps"], row["loss"]) == (0, None)
    assert row["staleness/masked_tokens"] == sum(len(s.response_ids) for s in stale.samples)
    actor.close()


class FakeLink:
    """A controller with some batches to give; its replica checks nothing. On rank 0 only.

    `broken_attempts`: what the ends of its publications answer, first to last: whether to begin again. `lost`: versions at
    which every replica was lost when a batch was asked for.
    """

    def __init__(
        self, batches: Sequence[Batch], broken_attempts: Sequence[bool] = (), lost: Sequence[int] = ()
    ) -> None:
        self.batches = list(batches)
        self.broken_attempts = list(broken_attempts)
        self.lost = list(lost)
        self.errors: list[str] = []
        self.epoch = 1
        self.calls: list[str] = []
        self.rows: list[dict[str, Any]] = []

    def next_batch(self, version: int) -> Batch | None:
        self.calls.append(f"batch {version}")
        if version in self.lost:
            self.lost.remove(version)
            raise PublishAgain
        return self.batches[version] if version < len(self.batches) else None

    def begin_publication(self, manifest: WeightManifest) -> SendPlan:
        self.calls.append(f"begin {manifest.version}")
        assert len(manifest.names) == len(manifest.dtypes) == len(manifest.shapes)
        rendezvous = Rendezvous(transfer="gloo", world_size=2, store="nobody joins", unique_id="")
        return SendPlan(self.epoch, rendezvous, ["r0"], bucket_bytes=1 << 16, keep_in="", unique_id_wanted=False)

    def finish_publication(self, message: PublicationSent) -> PublicationOutcome:
        self.calls.append(f"finish {message.version}")
        self.errors.append(message.error)
        again = bool(self.broken_attempts and self.broken_attempts.pop(0))
        self.epoch += again
        return PublicationOutcome(message.version, ["r0"], {}, again)

    def report_step(self, step: int, version: int, metrics: dict[str, Any]) -> None:
        self.calls.append(f"report {version}")
        self.rows.append(metrics)

    def done(self, reason: str) -> None:
        self.calls.append("done")


class FakeSender:
    """Takes the tensors that it is promised, and keeps a digest of each version."""

    made = 0
    breaks_at: list[int] = []  # noqa: RUF012  # in the next attempts, after so many tensors
    digests: dict[int, str] = {}  # noqa: RUF012

    def __init__(self, group: None) -> None:
        FakeSender.made += 1

    def room(self, name: str) -> None:
        """Name no place in a bucket: the tensors are gathered into their own."""

    def send(self, specs: Sequence[Any], tensors: Any, version: int, bucket_bytes: int, keep_in: Path | None) -> Sent:
        digest, num_bytes = hashlib.sha256(), 0
        break_at = FakeSender.breaks_at.pop(0) if FakeSender.breaks_at else -1
        for count, (spec, (name, tensor)) in enumerate(zip(specs, tensors, strict=True)):
            if count == break_at:
                list(tensors)
                return Sent(error=str(GroupBroken("a replica was killed")))
            assert (spec.name, spec.dtype, spec.shape) == (name, "float32", tuple(tensor.shape))
            digest.update(tensor.cpu().numpy().tobytes())
            num_bytes += spec.num_bytes
        FakeSender.digests[version] = digest.hexdigest()
        return Sent(num_bytes)

    def close(self) -> None:
        pass


def train_config(folder: Path, model: Path, actor: ActorConfig) -> TrainConfig:
    return TrainConfig(
        run=RunConfig(dir=str(folder / "run"), seed=SEED),
        model=ModelConfig(path=str(model)),
        actor=actor,
        optimizer=OPTIMIZER,
        algorithm=SETTINGS,
        rollout=RolloutConfig(max_response_tokens=16, max_model_len=32),
        controller=ControllerConfig(max_staleness=MAX_STALENESS),
    )


def run_loop(
    folder: Path, model: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch, batches: list[Batch], **faults: Any
) -> FakeLink | None:
    config = train_config(folder, model, layout.config(**TOKENS))
    link = FakeLink(batches, **faults) if dist.get_rank() == 0 else None
    monkeypatch.setattr(publish, "WeightSender", FakeSender)
    monkeypatch.setattr(publish, "join_group", lambda *arguments: None)
    FakeSender.made, FakeSender.digests = 0, {}
    assert training.train(config, read_model_shape(model), link) == len(batches)
    return link


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True)], ids=str)
def test_the_loop_publishes_each_version_reports_each_step_and_leaves_model_and_checkpoint(
    layout: Layout, shared_folder: Path
) -> None:
    oracle = TIED.build()
    model = save_model(oracle, shared_folder / "model")
    batches = [make_batch(oracle, version) for version in range(2)]
    losses = []
    for attempt in ("first", "second"):
        with pytest.MonkeyPatch.context() as monkeypatch:
            link = run_loop(shared_folder / attempt, model, layout, monkeypatch, batches)
        run = shared_folder / attempt / "run"
        newest, _ = newest_complete(run / "checkpoints")
        assert newest is not None
        assert newest.name == "step_000002"
        if link:
            assert link.calls == [
                *("batch 0", "begin 1", "finish 1", "report 0"),
                *("batch 1", "begin 2", "finish 2", "report 1"),
                *("batch 2", "done"),
            ]
            assert FakeSender.made == 1  # the epoch stayed the same
            assert len(set(FakeSender.digests.values())) == 2
            json.dumps(link.rows, allow_nan=False)
            losses.append([(row["loss"], row["grad_norm"]) for row in link.rows])
            folder, digest = HFFolder(run / "model", read_model_shape(run / "model")), hashlib.sha256()
            for name in hf_shapes(read_model_shape(model)):
                digest.update(folder.tensor(name).numpy().tobytes())
            assert digest.hexdigest() == FakeSender.digests[2]
    if losses:
        assert losses[0] == losses[1]


def test_a_publication_that_breaks_is_sent_again_and_a_lost_fleet_gets_the_weights_again_on_all_ranks(
    shared_folder: Path,
) -> None:
    """The other ranks gather once more for each attempt, and to the end of one that broke off."""
    oracle = TIED.build()
    model = save_model(oracle, shared_folder / "model")
    batches = [make_batch(oracle, version) for version in range(2)]
    FakeSender.breaks_at = [3, 0] if dist.get_rank() == 0 else []
    with pytest.MonkeyPatch.context() as monkeypatch:
        link = run_loop(
            shared_folder, model, Layout(tp=2, pp=2), monkeypatch, batches, broken_attempts=[True, True], lost=[1]
        )
    if link:
        attempt = ("begin 1", "finish 1")
        assert link.calls == [
            *("batch 0", *attempt, *attempt, *attempt, "report 0"),
            *("batch 1", *attempt, "batch 1", "begin 2", "finish 2", "report 1"),
            *("batch 2", "done"),
        ]
        broken = "the weight group broke: a replica was killed"
        assert link.errors == [broken, broken, "", "", ""]
        assert FakeSender.made == 3
        assert len(set(FakeSender.digests.values())) == 2


@pytest.mark.parametrize(
    "algorithm", [{}, {"method": "recompute"}, {"kl": KLConfig(reference_coefficient=0.1)}], ids=str
)
@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(pp=2)], ids=str)
def test_a_loss_that_is_not_finite_names_its_sample_and_ends_the_run_before_anything_is_published(
    layout: Layout, algorithm: dict[str, Any], shared_folder: Path
) -> None:
    """Also where each rank knows what another policy says of its own sequences only."""
    oracle = QWEN.build()
    model = save_model(oracle, shared_folder / "model")
    batch = make_batch(oracle, 0)
    spoilt = replace(batch, advantages=np.where(np.arange(8) == 5, np.nan, batch.advantages).astype(np.float32))
    config = train_config(shared_folder, model, layout.config(**TOKENS))
    config = replace(config, algorithm=replace(SETTINGS, **algorithm))
    link = FakeLink([spoilt]) if dist.get_rank() == 0 else None
    with pytest.raises(NonFiniteError) as failure:
        training.train(config, read_model_shape(model), link)
    assert re.fullmatch(
        r"batch of version 0, optimizer step \d: the loss is nan, the gradient norm (nan|inf); "
        r"so is sample 5 of the batch \(problem '5'\) alone, whose loss is computed on rank [123]; not published",
        str(failure.value),
    )
    if link:
        assert link.calls == ["batch 0"]
    parallel.destroy()


@pytest.mark.parametrize("distributed", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_step_without_a_trained_token_saves_nothing_and_a_run_that_fails_completes_the_save_before(
    distributed: bool, shared_folder: Path
) -> None:
    """A checkpoint before the first optimizer step could not be loaded."""
    oracle = QWEN.build()
    model, first = save_model(oracle, shared_folder / "model"), make_batch(oracle, 0)
    batches = [replace(first, kept=np.zeros(8, np.bool_)), make_batch(oracle, 1), make_batch(oracle, 2)]
    batches[2] = replace(batches[2], advantages=np.full(8, np.nan, np.float32))
    config = train_config(shared_folder, model, Layout(tp=2).config(distributed_optimizer=distributed, **TOKENS))
    config = replace(config, run=replace(config.run, checkpoint_every=1, checkpoint_async=True))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(publish, "WeightSender", FakeSender)
        monkeypatch.setattr(publish, "join_group", lambda *arguments: None)
        with pytest.raises(NonFiniteError, match="batch of version 2"):
            training.train(config, read_model_shape(model), FakeLink(batches) if dist.get_rank() == 0 else None)
    folder = shared_folder / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step_000002"]
    parallel.destroy()
    actor = build_actor(model, config.actor)
    assert load_checkpoint(actor, folder / "step_000002") == 2
    actor.close()


@pytest.mark.parametrize("call", ["next_batch", "finish_publication"])
def test_a_controller_that_is_lost_is_told_to_every_rank_which_complete_the_save_before(
    call: str, shared_folder: Path
) -> None:
    oracle = QWEN.build()
    model = save_model(oracle, shared_folder / "model")
    config = train_config(shared_folder, model, Layout(tp=2).config(**TOKENS))
    config = replace(config, run=replace(config.run, checkpoint_every=1, checkpoint_async=True))
    link = FakeLink([make_batch(oracle, 0)]) if dist.get_rank() == 0 else None

    def gone(argument: Any, *arguments: Any) -> Any:
        if call == "next_batch" and argument == 0:
            return link.batches[0] if link else None
        raise ControllerError("gone")

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(publish, "WeightSender", FakeSender)
        monkeypatch.setattr(publish, "join_group", lambda *arguments: None)
        if link:
            monkeypatch.setattr(link, call, gone)
        with pytest.raises(ControllerError if link else RunFailed):
            training.train(config, read_model_shape(model), link)
    assert [path.name for path in (shared_folder / "run" / "checkpoints").iterdir()] == ["step_000001"]
    parallel.destroy()


class InfiniteGradient(SupervisedLoss):
    """A loss that is finite where its gradient is not: sqrt at 0, for tokens with a mark."""

    def __call__(self, logprobs: torch.Tensor, trainable: torch.Tensor, fields: Any, entropy: Any = None) -> Any:
        zeros = (logprobs - logprobs.detach()).clamp(min=0)
        marked = trainable & (fields["marked"] > 0)
        return torch.where(trainable, logprobs + torch.where(marked, zeros, 1.0).sqrt(), 0.0).sum(), {}


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True)], ids=str)
def test_a_gradient_that_is_not_finite_stops_before_the_optimizer_and_names_its_sample(
    layout: Layout, shared_folder: Path
) -> None:
    oracle = QWEN.build()
    actor = build_actor(save_model(oracle, shared_folder), layout.config(**TOKENS))
    sequences = [
        replace(s, fields={"marked": np.full(len(s.tokens), int(i == 4))}, name=f"number {i}")
        for i, s in enumerate(random_sequences())
    ]
    with pytest.raises(NonFiniteError, match="so is number 4 alone"):
        actor.train_step(sequences, InfiniteGradient())
    for name, tensor in actor.export_weights():
        assert torch.equal(tensor.cpu(), oracle.get_parameter(name).detach())
    actor.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_weights_take_the_models_place_and_leave_it_bit_for_bit(dtype: Any, shared_folder: Path) -> None:
    """And so they leave the optimizer's own copies: a step after a visit is the step without one."""
    oracle, sequences = QWEN.build(), random_sequences()
    folder = save_model(oracle, shared_folder)
    options = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    after_two_steps = []
    for visits in (True, False):
        actor = build_actor(folder, Layout(tp=2, options=options).config(dtype=dtype, **TOKENS))
        first = {name: tensor.clone() for name, tensor in actor.export_weights()}
        reference = ReferenceWeights(actor)
        actor.train_step(sequences, SupervisedLoss())
        if visits:
            trained = {name: tensor.clone() for name, tensor in actor.export_weights()}
            with reference.in_place():
                found = actor.logprobs(sequences)
                assert all(torch.equal(tensor, first[name]) for name, tensor in actor.export_weights())
            assert all(torch.equal(tensor, trained[name]) for name, tensor in actor.export_weights())
            assert not any(torch.equal(tensor, first[name]) for name, tensor in trained.items())
        actor.train_step(sequences, SupervisedLoss())
        after_two_steps.append({name: tensor.clone() for name, tensor in actor.export_weights()})
        actor.close()
    with_visit, without = after_two_steps
    assert all(torch.equal(tensor, without[name]) for name, tensor in with_visit.items())
    if dtype == "float32":
        for index, logprobs in found.items():
            expected = oracle_logprobs(oracle, sequences[index]).detach()
            torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)


class BrokenSender(FakeSender):
    """Loses its receiver in the middle of a transfer."""

    def send(self, specs: Sequence[Any], tensors: Any, version: int, bucket_bytes: int, keep_in: Path | None) -> Sent:
        list(tensors)
        return Sent(error=str(GroupBroken("sending bucket 1 of 2: a member of the weight group failed")))


class LinkWithoutReplicas(FakeLink):
    """Hears from the receivers why the transfer failed."""

    def finish_publication(self, message: PublicationSent) -> PublicationOutcome:
        raise ControllerError(f"/publish/finish: 500: version {message.version} reached no replica: r0: killed")


@pytest.mark.ranks(1)
def test_a_failed_publication_says_where_it_stopped_and_what_the_controller_knows(shared_folder: Path) -> None:
    oracle = QWEN.build()
    model = save_model(oracle, shared_folder / "model")
    config = train_config(shared_folder, model, Layout().config(**TOKENS))
    link = LinkWithoutReplicas([make_batch(oracle, 0)])
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(publish, "WeightSender", BrokenSender)
        monkeypatch.setattr(publish, "join_group", lambda *arguments: None)
        with pytest.raises(publish.NotPublishable) as failure:
            training.train(config, read_model_shape(model), link)
    assert str(failure.value) == (
        "publication of version 1: the weight group broke: sending bucket 1 of 2: a member of the weight group failed; "
        "/publish/finish: 500: version 1 reached no replica: r0: killed"
    )
    parallel.destroy()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_of_the_distribution_at_the_rollouts_temperature(temperature: float, shared_folder: Path) -> None:
    oracle = QWEN.build()
    folder = save_model(oracle, shared_folder)
    model = ModelConfig(path=str(folder))
    actor = Actor(read_model_shape(folder), model, Layout().config(), OPTIMIZER, seed=0, temperature=temperature)
    sequences = random_sequences()
    for index, logprobs in actor.logprobs(sequences).items():
        tokens = torch.tensor(sequences[index].tokens)
        with torch.no_grad():
            expected = (oracle(input_ids=tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        expected = expected.gather(-1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=TOLERANCE, rtol=0)
    actor.close()
