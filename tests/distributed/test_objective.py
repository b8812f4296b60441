"""Every method and option of the objective in every layout: two batches against transformers and the papers' equations.

The reference takes log-probabilities from transformers in float32, sequence by sequence, and the losses of the tokens in float64
from tests/references/policy_loss.py, and divides once by the count of the step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from a3po_megatron.actor.batch_step import BatchStep
from a3po_megatron.actor.checkpoint import read_objective
from a3po_megatron.actor.checkpoint_writer import save_checkpoint
from a3po_megatron.actor.nonfinite import NonFiniteError
from a3po_megatron.batching.minibatches import split_minibatches, training_batch
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.config.algorithm import (
    AdaptiveAlphaConfig,
    AlgorithmConfig,
    AlphaConfig,
    BehaviorWeightConfig,
    KLConfig,
)
from a3po_megatron.config.check_algorithm import check_algorithm
from tests.distributed.batches import MAX_STALENESS, SEED, TOKENS, make_batch
from tests.distributed.layouts import Layout, Model, OracleTrainer, build_actor, hf_tensors, save_model
from tests.references import policy_loss as papers
from tests.references.policy_loss import Response

TOLERANCE = 1e-5  # as in test_parity.py
QWEN, TIED, MOE = Model("qwen3"), Model("qwen3", tied=True), Model("qwen3_moe")
LAYOUTS = [
    (QWEN, Layout()),
    (QWEN, Layout(tp=2, pp=2, sp=True)),
    (QWEN, Layout(pp=4)),
    (TIED, Layout(tp=2, pp=2, vpp=2, sp=True)),
    (TIED, Layout(tp=2, options={"distributed_optimizer": True})),
    (QWEN, Layout(pp=2, options={"packed": False})),
    (QWEN, Layout(cp=2)),
    (MOE, Layout(ep=2)),
]
CAP = 1.3
DECOUPLED = partial(papers.decoupled, cap=CAP)


@dataclass(frozen=True)
class Case:
    """Settings and what they mean: the losses of a response's tokens, and alpha where it is not 1/d."""

    settings: dict[str, Any]
    losses: Callable[[Response], list[Tensor]] = DECOUPLED
    alpha: dict[str, Any] = field(default_factory=dict)

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The settings, checked as a run's would be."""
        weight = {"num_minibatches": 3, "behavior_weight": BehaviorWeightConfig(cap=CAP)}
        algorithm = AlgorithmConfig(**(weight | self.settings))
        check_algorithm(algorithm)
        return algorithm


METHODS = {name: Case({"method": name}) for name in ("loglinear", "recompute", "behavior", "metrics", "sync")}
OPTIONS = {
    "recompute, first forward reused": Case({"method": "recompute", "reuse_first_forward": True}),
    "minibatch alpha, two epochs": Case(
        {"alpha": AlphaConfig("minibatch"), "num_epochs": 2}, alpha={"kind": "minibatch"}
    ),
    "gspo, sequence mean": Case(
        {"surrogate": "gspo", "aggregation": "sequence", "clip_low": 0.1, "clip_high": 0.15},
        partial(papers.gspo, low=0.1, high=0.15, cap=CAP),
    ),
    "recomputed gspo, two epochs": Case(
        {"method": "recompute", "surrogate": "gspo", "num_epochs": 2}, partial(papers.gspo, low=0.2, high=0.2, cap=CAP)
    ),
    "cispo, sequence mean": Case(
        {"surrogate": "cispo", "aggregation": "sequence", "behavior_weight": BehaviorWeightConfig(cap=0)},
        partial(papers.cispo, low=0.2, high=0.2),
    ),
    "constant alpha, sequence weight masked": Case(
        {
            "alpha": AlphaConfig("constant", value=0.35),
            "behavior_weight": BehaviorWeightConfig(cap=CAP, mode="mask", level="sequence"),
        },
        partial(papers.behavior_sequence, cap=CAP, mode="mask"),
        alpha={"kind": "constant", "value": 0.35},
    ),
    "reference KL, fixed length": Case(
        {
            "kl": KLConfig(reference_coefficient=0.3, reference_estimator="k3"),
            "aggregation": "fixed_length",
            "fixed_length": 7,
            "behavior_weight": BehaviorWeightConfig(cap=0),
        },
        partial(papers.reference_kl, estimator="k3", coefficient=0.3),
    ),
    "entropy bonus": Case(
        {"entropy_coefficient": 0.4, "behavior_weight": BehaviorWeightConfig(cap=0)},
        partial(papers.entropy_bonus, coefficient=0.4),
    ),
    "M2PO": Case({"method": "recompute", "m2po_threshold": 0.05}),
}


class Reference:
    """Trains with plain autograd."""

    def __init__(self, case: Case, trainer: OracleTrainer) -> None:
        self.case, self.settings, self.trainer, self.model = case, case.algorithm, trainer, trainer.model
        self.at_start = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def train(self, batch: Any, version: int) -> dict[str, float]:
        """Train one batch; return loss and gradient norm as means over the optimizer steps."""
        settings = self.settings
        whole = training_batch(batch, version, MAX_STALENESS)
        minibatches = split_minibatches(whole.sequences, settings.num_minibatches, SEED, version)
        start = {id(s): self.policy(s)[0].detach() for s in whole.sequences}
        reference = self.of_the_first_weights(whole.sequences)
        kept = self.second_moment_kept(whole.sequences, start)
        num_steps, losses, norms = settings.num_minibatches * settings.num_epochs, [], []
        for step in range(num_steps):
            self.trainer.optimizer.zero_grad()
            minibatch = [s for s in minibatches[step % len(minibatches)] if s.trainable.any()]
            responses = [self.response(s, start[id(s)], reference[id(s)], step, num_steps) for s in minibatch]
            terms = [
                [loss if keep else 0 * loss for loss, keep in zip(self.case.losses(r), kept[id(s)], strict=True)]
                for r, s in zip(responses, minibatch, strict=True)
            ]
            count = sum(len(part) for part in terms) if settings.aggregation == "token" else len(terms)
            total = papers.aggregated(terms, settings.aggregation, settings.fixed_length) / count
            (total + 0 * torch.cat([r.logp for r in responses]).sum()).backward()  # all may be clipped
            losses.append(total.item())
            norms.append(self.trainer.step())
        return {"loss": float(np.mean(losses)), "grad_norm": float(np.mean(norms))}

    def policy(self, sequence: TokenSequence) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies [trainable tokens], with gradient."""
        tokens = torch.tensor(sequence.tokens)[None]
        distribution = self.model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        here = torch.tensor(sequence.trainable[1:])
        entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(-1, tokens[0, 1:, None])[:, 0][here].double(), entropy[here].double()

    def of_the_first_weights(self, sequences: Any) -> dict[int, Tensor]:
        """Return the log-probabilities of the model that training began with."""
        now = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.model.load_state_dict(self.at_start, strict=False)
        found = {id(s): self.policy(s)[0].detach() for s in sequences}
        self.model.load_state_dict(now, strict=False)
        return found

    def response(self, s: TokenSequence, start: Tensor, reference: Tensor, step: int, num_steps: int) -> Response:
        here = s.trainable
        behavior, advantages = (torch.tensor(s.fields[n][here]).double() for n in ("behavior_logprobs", "advantages"))
        staleness = s.fields["staleness"][here].tolist()
        policy, entropy = self.policy(s)
        table = {"kind": "inverse", "value": 0.0, "rate": 0.0, "strength": 1.0, "j": step, "n": num_steps}
        alpha = torch.tensor([papers.alpha(d=d, **(table | self.case.alpha)) for d in staleness]).double()
        proximal = {
            "recompute": start,
            "behavior": behavior,
            "sync": behavior,
        }.get(self.settings.method, alpha * behavior + (1 - alpha) * policy.detach())
        return Response(policy, behavior, proximal, reference, advantages, entropy, staleness)

    def second_moment_kept(self, sequences: Any, start: dict[int, Tensor]) -> dict[int, list[bool]]:
        """Return which trainable tokens M2PO keeps: all, without it."""
        lengths = [int(s.trainable.sum()) for s in sequences]
        kept = [True] * sum(lengths)
        if self.settings.m2po_threshold:
            ratio = [x for s in sequences for x in (start[id(s)].numpy() - s.fields["behavior_logprobs"][s.trainable])]
            kept = papers.second_moment_kept([float(x) for x in ratio], self.settings.m2po_threshold)
            assert 0 < sum(kept) < len(kept)
        ends = np.cumsum([0, *lengths])
        return {id(s): kept[a:b] for s, a, b in zip(sequences, ends[:-1], ends[1:], strict=True)}


def check_two_batches(case: Case, model: Model, layout: Layout, folder: Path, **changes: Any) -> None:
    oracle = model.build()
    actor = build_actor(save_model(oracle, folder), layout.config(**(TOKENS | changes)))
    reference = Reference(case, OracleTrainer(oracle))
    batch_step = BatchStep(actor, case.algorithm, MAX_STALENESS, SEED)
    for version in (5, 6):
        batch = make_batch(oracle, version)
        if case.algorithm.method == "sync":
            batch = replace(batch, samples=tuple(replace(s, versions=0 * s.versions + version) for s in batch.samples))
        expected = reference.train(batch, version)
        row = batch_step.train(batch, version)
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, abs=TOLERANCE), name
        assert row["optimizer_steps"] == 3 * case.algorithm.num_epochs
        assert row["parity/logprob_max_abs"] is not None
        if case.algorithm.method != "sync":  # whose tokens are called fresh here, but were given other log-probs
            assert row["parity/logprob_max_abs"] < TOLERANCE
        assert 0 <= row["time/prox_s"] <= row["time/step_s"]
    trained = hf_tensors(dict(oracle.named_parameters()))
    for name, tensor in actor.export_weights():
        torch.testing.assert_close(tensor.cpu(), trained[name].detach(), atol=TOLERANCE, rtol=0)
    actor.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_a_method_in_a_layout_equals_plain_autograd(
    method: str, model: Model, layout: Layout, shared_folder: Path
) -> None:
    check_two_batches(METHODS[method], model, layout, shared_folder)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", [Layout(tp=2, cp=2), Layout(pp=2)], ids=str)
def test_an_option_equals_its_paper(option: str, layout: Layout, shared_folder: Path) -> None:
    check_two_batches(OPTIONS[option], TIED, layout, shared_folder)


@pytest.mark.full
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_an_option_in_a_layout_equals_its_paper(option: str, model: Model, layout: Layout, shared_folder: Path) -> None:
    check_two_batches(OPTIONS[option], model, layout, shared_folder)


@pytest.mark.parametrize("tokens", [16, 64])
def test_the_way_a_step_is_split_does_not_change_it(tokens: int, shared_folder: Path) -> None:
    """One sequence a microbatch, or all of a minibatch in one."""
    case = OPTIONS["gspo, sequence mean"]
    check_two_batches(case, QWEN, Layout(pp=2), shared_folder, max_tokens_per_microbatch=tokens)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("case", [*METHODS.values(), *OPTIONS.values()], ids=[*METHODS, *OPTIONS])
def test_one_rank_equals_plain_autograd(case: Case, shared_folder: Path) -> None:
    check_two_batches(case, QWEN, Layout(), shared_folder)


def test_the_reference_policy_stays_the_first_one(shared_folder: Path) -> None:
    """Once the policy has moved away, a penalty that nothing opposes brings it back to where the run started."""
    oracle = QWEN.build()
    actor = build_actor(save_model(oracle, shared_folder), Layout(tp=2).config(**TOKENS))
    algorithm = AlgorithmConfig(num_minibatches=1, kl=KLConfig(reference_coefficient=1.0, reference_estimator="k2"))
    batch_step, batch = BatchStep(actor, algorithm, MAX_STALENESS, SEED), make_batch(oracle, 5)
    kl = [batch_step.train(batch, 5)["policy/reference_kl"]]
    still = replace(batch, advantages=np.zeros(8, np.float32))
    kl += [batch_step.train(still, 5)["policy/reference_kl"] for _ in range(8)]
    values = [value for value in kl if value is not None]
    assert values[0] == pytest.approx(0, abs=1e-9)
    assert values[1] > 1e-3
    assert values[-1] < values[1] / 2
    actor.close()


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, cp=2)], ids=str)
def test_reuse_saves_the_extra_pass_of_the_first_minibatch(layout: Layout, shared_folder: Path) -> None:
    oracle = QWEN.build()
    folder, passes = save_model(oracle, shared_folder), {}
    for reuse in (False, True):
        actor = build_actor(folder, layout.config(max_tokens_per_microbatch=128))  # one microbatch a step
        algorithm = AlgorithmConfig(method="recompute", num_minibatches=4, reuse_first_forward=reuse)
        passes[reuse] = BatchStep(actor, algorithm, MAX_STALENESS, SEED).train(make_batch(oracle, 5), 5)[
            "forward_passes"
        ]
        actor.close()
    assert passes == {False: 8, True: 7}


def test_a_proximal_policy_that_is_not_finite_stops_before_anything_is_trained(shared_folder: Path) -> None:
    oracle = QWEN.build()
    actor = build_actor(save_model(oracle, shared_folder), Layout(pp=2).config(**TOKENS))
    batch_step = BatchStep(actor, OPTIONS["M2PO"].algorithm, MAX_STALENESS, SEED)
    logprobs_by_step = actor.logprobs_by_step

    def spoilt(steps: Any) -> Any:
        found = logprobs_by_step(steps)
        for values in [values for step in found for values in step.values()][:1]:
            values[-1] = np.nan
        return found

    actor.logprobs_by_step = spoilt  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError, match=r"proximal_logprobs: 1 of sample \d of the batch .* are not finite"):
        batch_step.train(make_batch(oracle, 5), 5)
    actor.close()


def test_the_adaptive_alpha_follows_its_measure_alike_on_every_rank_and_continues_from_a_checkpoint(
    shared_folder: Path,
) -> None:
    steering = AdaptiveAlphaConfig(measure="clip_fraction", target=0.01, gain=0.5)
    algorithm = AlgorithmConfig(num_minibatches=2, alpha=AlphaConfig("adaptive", adaptive=steering))
    oracle = QWEN.build()
    actor = build_actor(save_model(oracle, shared_folder / "model"), Layout(tp=2).config(**TOKENS))
    batch_step = BatchStep(actor, algorithm, MAX_STALENESS, SEED)
    rows = [batch_step.train(make_batch(oracle, version), version) for version in (5, 6)]
    assert rows[0]["alpha/strength"] == 1.0
    fraction = rows[0]["policy/clip_fraction"]
    assert fraction is not None
    assert fraction > 0.02  # twice the target: the largest step, e^-0.5
    assert rows[1]["alpha/strength"] == pytest.approx(math.exp(-0.5))
    folder = save_checkpoint(actor, shared_folder / "checkpoints", 2, batch_step.state())
    again = BatchStep(actor, algorithm, MAX_STALENESS, SEED)
    again.restore(read_objective(folder))
    assert again.state() == batch_step.state() != BatchStep(actor, algorithm, MAX_STALENESS, SEED).state()
    strengths = [torch.zeros(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(strengths, torch.tensor([batch_step.state()["strength"]], dtype=torch.float64))
    assert len({float(strength) for strength in strengths}) == 1
    actor.close()


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2, sp=True), Layout(cp=2)], ids=str)
def test_metrics_mode_measures_the_distance_to_the_policy_of_the_extra_pass(
    layout: Layout, shared_folder: Path
) -> None:
    """Fresh tokens have alpha 1 and behaviour log-probs without noise: no error. Others are off by alpha times their noise."""
    oracle = QWEN.build()
    actor = build_actor(save_model(oracle, shared_folder), layout.config(**TOKENS))
    batch = make_batch(oracle, 5)
    algorithm = AlgorithmConfig(method="metrics", num_minibatches=1)
    row = BatchStep(actor, algorithm, MAX_STALENESS, SEED).train(batch, 5)
    whole = training_batch(batch, 5, MAX_STALENESS)
    reference = Reference(METHODS["metrics"], OracleTrainer(oracle))
    errors: dict[int, list[float]] = {}
    for s in whole.sequences:
        noise = s.fields["behavior_logprobs"][s.trainable] - reference.policy(s)[0].detach().numpy()
        for d, value in zip(s.fields["staleness"][s.trainable].tolist(), noise, strict=True):
            errors.setdefault(d, []).append(abs(value) / max(d, 1))
    for d, bucket in ((0, "d0"), (1, "d1"), (2, "d2")):
        assert row[f"approximation/logprob_abs/{bucket}"] == pytest.approx(np.mean(errors[d]), abs=TOLERANCE)
        assert row[f"tokens/{bucket}"] == len(errors[d])
    everything = [value for values in errors.values() for value in values]
    assert row["approximation/logprob_abs"] == pytest.approx(np.mean(everything), abs=TOLERANCE)
    assert row["approximation/logprob_abs_max"] == pytest.approx(max(everything), abs=TOLERANCE)
    actor.close()
