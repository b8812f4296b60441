"""Every option of the policy loss against a slow reference of its own; losses and gradients, float64, 1e-10."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from a3po_megatron.objective.aggregation import Aggregation
from a3po_megatron.objective.corrections import BehaviorWeight, TotalWeight
from a3po_megatron.objective.penalties import BehaviorKL, ReferenceKL
from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import LogLinearProximal, RecomputedProximal
from a3po_megatron.objective.sequences import Sequences, one_rank
from a3po_megatron.objective.surrogate import CispoSurrogate, ClippedSurrogate
from tests.references import policy_loss as reference
from tests.references.policy_loss import Response
from tests.unit.objective.cases import Case, assert_close, gradients, random_case

PLAIN = PolicyLoss(RecomputedProximal())
GSPO = ClippedSurrogate(0.1, 0.1, level="sequence")
SEQUENCE = BehaviorWeight(level="sequence")
OPTIONS: dict[str, tuple[PolicyLoss, Callable[[Response], list[Tensor]]]] = {
    "clip-higher": (replace(PLAIN, surrogate=ClippedSurrogate(0.2, 0.6)), lambda s: reference.decoupled(s, 0.2, 0.6)),
    "dual clip": (replace(PLAIN, surrogate=ClippedSurrogate(dual_clip=1.5)), lambda s: reference.dual_clip(s, 1.5)),
    "cap": (replace(PLAIN, behavior_weight=BehaviorWeight(1.3)), lambda s: reference.decoupled(s, cap=1.3)),
    "cap, mask": (
        replace(PLAIN, behavior_weight=BehaviorWeight(1.3, "mask")), lambda s: reference.behavior_masked(s, 1.3)
    ),
    "weight of the sequence": (
        replace(PLAIN, behavior_weight=SEQUENCE), lambda s: reference.behavior_sequence(s, math.inf, "truncate")
    ),
    "weight of the sequence, cap": (
        replace(PLAIN, behavior_weight=BehaviorWeight(1.05, "truncate", "sequence")),
        lambda s: reference.behavior_sequence(s, 1.05, "truncate"),
    ),
    "weight of the sequence, mask": (
        replace(PLAIN, behavior_weight=BehaviorWeight(1.05, "mask", "sequence")),
        lambda s: reference.behavior_sequence(s, 1.05, "mask"),
    ),
    "total weight": (
        replace(PLAIN, total_weight=TotalWeight(1.2)), lambda s: reference.total_truncated(s, 1.2, math.inf)
    ),
    "total weight and cap": (
        replace(PLAIN, behavior_weight=BehaviorWeight(1.1), total_weight=TotalWeight(1.2)),
        lambda s: reference.total_truncated(s, 1.2, 1.1),
    ),
    "total weight, mask": (
        replace(PLAIN, total_weight=TotalWeight(1.5, "mask")), lambda s: reference.total_masked(s, 1.5)
    ),
    "cap and total weight, mask": (
        replace(PLAIN, behavior_weight=BehaviorWeight(1.3, "mask"), total_weight=TotalWeight(1.5, "mask")),
        lambda s: reference.both_masked(s, 1.3, 1.5),
    ),
    "gspo": (
        replace(PLAIN, surrogate=GSPO, behavior_weight=SEQUENCE), lambda s: reference.gspo(s, 0.1, 0.1)
    ),
    "gspo, cap": (
        replace(PLAIN, surrogate=GSPO, behavior_weight=BehaviorWeight(1.02, level="sequence")),
        lambda s: reference.gspo(s, 0.1, 0.1, 1.02),
    ),
    "cispo": (replace(PLAIN, surrogate=CispoSurrogate(0.3, 0.4)), lambda s: reference.cispo(s, 0.3, 0.4)),
    **{
        f"reference {kind}": (
            replace(PLAIN, reference_kl=ReferenceKL(0.3, kind)), lambda s, kind=kind: reference.reference_kl(s, kind, 0.3)
        )
        for kind in ("k1", "k2", "k3")
    },
    "behavior KL": (replace(PLAIN, behavior_kl=BehaviorKL(0.1, 0.6)), lambda s: reference.behavior_kl(s, 0.1, 0.6)),
    "entropy": (replace(PLAIN, entropy_coefficient=0.05), lambda s: reference.entropy_bonus(s, 0.05)),
}  # fmt: skip
EVERY_OPTION = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS.keys())
AGGREGATIONS = {kind: Aggregation(kind, 16) for kind in ("token", "sequence", "fixed_length")}


def anchor_of(case: Case, loss: PolicyLoss) -> Tensor:
    return loss.proximal(case.logprobs, case.fields, loss.context)


def expected_of(
    case: Case, losses: Callable[[Response], list[Tensor]], kind: str, anchor: Tensor
) -> tuple[Tensor, ...]:
    total = reference.aggregated([losses(s) for s in case.responses(anchor)], kind, 16)
    return total.detach(), *gradients(total, case.logprobs, case.entropy)


@EVERY_OPTION
@pytest.mark.parametrize("anchor", [RecomputedProximal(), LogLinearProximal()], ids=["recompute", "loglinear"])
def test_an_option_equals_its_reference_under_every_aggregation(
    option: tuple[PolicyLoss, Callable[[Response], list[Tensor]]], anchor: RecomputedProximal | LogLinearProximal
) -> None:
    loss, losses = replace(option[0], proximal=anchor), option[1]
    for seed in range(3):
        case = random_case(seed)
        for kind, aggregation in AGGREGATIONS.items():
            found = case.value_and_gradients(replace(loss, aggregation=aggregation))
            assert_close(found, expected_of(case, losses, kind, anchor_of(case, loss)))


@EVERY_OPTION
def test_an_option_changes_the_loss_of_the_cases(option: tuple[PolicyLoss, Callable]) -> None:
    """Otherwise the comparison above would show nothing."""
    case = random_case(0)
    assert abs(case.call(option[0])[0] - case.call(PLAIN)[0]) > 1e-6


@EVERY_OPTION
@pytest.mark.parametrize("aggregation", AGGREGATIONS.values(), ids=AGGREGATIONS.keys())
def test_splitting_a_batch_into_microbatches_changes_no_sum(
    option: tuple[PolicyLoss, Callable], aggregation: Aggregation
) -> None:
    case, loss = random_case(4), replace(option[0], aggregation=aggregation)
    whole = case.value_and_gradients(loss)
    sequence = case.fields["sequence"][0]
    for cuts in ([2], [1, 2, 3, 4], [3]):
        starts = [0, *(int((sequence < cut).sum()) for cut in cuts), len(sequence)]
        parts = [
            case.part(slice(start, end), sequence_offset=first)
            for start, end, first in zip(starts[:-1], starts[1:], [0, *cuts], strict=True)
        ]
        total = torch.stack([part.call(loss)[0] for part in parts]).sum()
        assert_close(whole, (total.detach(), *gradients(total, case.logprobs, case.entropy)))


@EVERY_OPTION
@pytest.mark.parametrize("aggregation", AGGREGATIONS.values(), ids=AGGREGATIONS.keys())
def test_sequences_split_over_two_context_parallel_ranks_are_as_whole_ones(
    option: tuple[PolicyLoss, Callable], aggregation: Aggregation
) -> None:
    """Each rank has every second column; the sum over ranks is played by running both and adding their buffers."""
    case, loss = random_case(5), replace(option[0], aggregation=aggregation)
    whole = case.value_and_gradients(loss)
    even = case.logprobs.shape[1] // 2 * 2  # ranks have equal shapes
    assert not case.trainable[0, even:].any()
    halves = [case.part(slice(start, even, 2)) for start in (0, 1)]
    total = torch.stack([half.call(replace(loss, sum_over_cp=others(halves, loss, rank)))[0]
                         for rank, half in enumerate(halves)]).sum()  # fmt: skip
    assert_close(whole, (total.detach(), *gradients(total, case.logprobs, case.entropy)))


def others(halves: list[Case], loss: PolicyLoss, rank: int) -> Callable[[Tensor], Tensor]:
    """Return the sum over ranks for `rank`: its own buffers plus those that the other rank makes in the same order."""
    buffers: list[Tensor] = []

    def record(sums: Tensor) -> Tensor:
        buffers.append(sums)
        return sums

    halves[1 - rank].call(replace(loss, sum_over_cp=record))
    theirs = iter(buffers)
    return lambda sums: sums + next(theirs)


def test_sequence_means_ignore_what_is_masked_and_know_single_tokens_and_empty_sequences() -> None:
    trainable = torch.tensor([[True, True, False, True, False, False]])
    fields = {
        "sequence": torch.tensor([[0, 0, 0, 1, 2, 99]]), "sequence_tokens": torch.tensor([[2, 2, 2, 1, 0, -7]]).int()
    }  # fmt: skip
    values = torch.tensor([[1.0, 3.0, torch.nan, 5.0, torch.inf, torch.nan]], dtype=torch.float64, requires_grad=True)
    means = Sequences.of(trainable, fields, one_rank).mean(values)
    assert means.tolist() == [[2, 2, 0, 5, 0, 0]]
    assert gradients((means * torch.arange(6)).sum(), values)[0].tolist() == [[0.5, 0.5, 0, 3, 0, 0]]


def test_gspo_of_a_single_token_is_ppo() -> None:
    case = random_case(1, lengths=(1, 1, 1, 1))
    surrogate = replace(GSPO, level="token")
    assert_close(
        case.value_and_gradients(replace(PLAIN, surrogate=GSPO, behavior_weight=SEQUENCE)),
        case.value_and_gradients(replace(PLAIN, surrogate=surrogate)),
        atol=1e-14,
    )


@EVERY_OPTION
@pytest.mark.parametrize("aggregation", AGGREGATIONS.values(), ids=AGGREGATIONS.keys())
def test_an_all_masked_microbatch_and_one_of_empty_responses_are_zero(
    option: tuple[PolicyLoss, Callable], aggregation: Aggregation
) -> None:
    loss = replace(option[0], aggregation=aggregation)
    case = random_case(0)
    case.trainable[:] = False
    case.fields["sequence_tokens"][:] = 0
    for empty in (case, random_case(0, lengths=(0,)), random_case(0, lengths=(0, 0))):
        total, to_logprobs, to_entropy = empty.value_and_gradients(loss)
        assert total == 0
        assert (to_logprobs == 0).all()
        assert (to_entropy == 0).all()


def test_dropped_tokens_are_counted_and_leave_only_the_policy_term() -> None:
    case = random_case(6)
    loss = replace(PLAIN, correction=True, reference_kl=ReferenceKL(1.0, "k1"))
    total, metrics = case.call(loss)
    dropped = case.trainable & ~case.fields["correction"]
    assert metrics["tokens/dropped_by_second_moment"] == dropped.sum() > 0
    gradient = gradients(total, case.logprobs)[0]
    torch.testing.assert_close(gradient[dropped], torch.ones_like(gradient[dropped]), atol=1e-12, rtol=0)
    masked = replace(PLAIN, behavior_weight=BehaviorWeight(1.3, "mask"), total_weight=TotalWeight(1.5, "mask"))
    _, metrics = case.call(masked)
    (responses,) = [case.responses(anchor_of(case, masked))]
    b, w = ([f(s, t) for s in responses for t in reference.tokens(s)] for f in (reference.b, reference.w))
    assert metrics["tokens/dropped_by_behavior_weight"] == sum(value > 1.3 for value in b)
    assert metrics["tokens/dropped_by_total_weight"] == sum(not 1 / 1.5 <= value <= 1.5 for value in w)


@settings(max_examples=100, deadline=None)
@given(x=st.floats(-30, 30), kind=st.sampled_from(["k1", "k2", "k3"]))
def test_the_reference_penalty_pulls_towards_the_reference_and_never_away(x: float, kind: str) -> None:
    """k1 always pulls down; k2 and k3 towards x = 0, k3 not at all beyond e^20."""
    log_ratio = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    value = ReferenceKL(1.0, kind)(log_ratio)
    (gradient,) = torch.autograd.grad(value.sum(), log_ratio)
    assert value.isfinite().all()
    if kind != "k1":
        assert gradient.item() * x >= 0
        assert value.item() >= 0


def test_needs_and_names_are_those_of_the_settings() -> None:
    loss = replace(
        PLAIN, proximal=LogLinearProximal(), true_proximal=RecomputedProximal(), correction=True,
        reference_kl=ReferenceKL(0.1), behavior_kl=BehaviorKL(0.1), entropy_coefficient=0.1,
        total_weight=TotalWeight(2, "mask"), behavior_weight=BehaviorWeight(2, "mask"),
        surrogate=ClippedSurrogate(dual_clip=3.0),
    )  # fmt: skip
    assert loss.needs == {"proximal_logprobs", "reference_logprobs", "correction"}
    assert loss.needs_entropy
    assert PolicyLoss(LogLinearProximal()).needs == frozenset()
    assert not PLAIN.needs_entropy
    case = random_case(0)
    for one in (loss, *(option[0] for option in OPTIONS.values())):
        assert set(case.call(one)[1]) == set(one.metric_names)
        assert len(set(one.metric_names)) == len(one.metric_names)
    assert [Aggregation(kind).counts for kind in AGGREGATIONS] == ["tokens", "sequences", "sequences"]
