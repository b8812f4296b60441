"""Settings become the loss that they name."""

from dataclasses import replace

import pytest

from a3po_megatron.actor.objective import build_adaptive, build_policy_loss
from a3po_megatron.config.algorithm import (
    AdaptiveAlphaConfig,
    AlgorithmConfig,
    AlphaConfig,
    BehaviorWeightConfig,
    KLConfig,
    TotalWeightConfig,
)
from a3po_megatron.objective.adaptive import AdaptiveControl, AdaptiveState
from a3po_megatron.objective.aggregation import Aggregation
from a3po_megatron.objective.alpha import (
    AdaptiveAlpha,
    ConstantAlpha,
    ExponentialAlpha,
    InverseAlpha,
    MinibatchAlpha,
    ShiftedAlpha,
    StepContext,
)
from a3po_megatron.objective.corrections import BehaviorWeight, TotalWeight
from a3po_megatron.objective.penalties import BehaviorKL, ReferenceKL
from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import BehaviorProximal, LogLinearProximal, RecomputedProximal
from a3po_megatron.objective.surrogate import CispoSurrogate, ClippedSurrogate


def test_the_defaults_are_the_papers_loss_with_a_cap_of_5() -> None:
    expected = PolicyLoss(
        LogLinearProximal(InverseAlpha("behavior")),
        ClippedSurrogate(0.2, 0.2),
        BehaviorWeight(5.0, "truncate", "token"),
    )
    assert build_policy_loss(AlgorithmConfig()) == expected


@pytest.mark.parametrize(
    ("method", "proximal"),
    [
        ("loglinear", LogLinearProximal()),
        ("metrics", LogLinearProximal()),
        ("recompute", RecomputedProximal()),
        ("sync", BehaviorProximal()),
        ("behavior", BehaviorProximal()),
    ],
)
def test_the_method_names_the_proximal_policy(method: str, proximal: object) -> None:
    loss = build_policy_loss(AlgorithmConfig(method=method))
    assert loss.proximal == proximal
    assert (loss.true_proximal is not None) == (method == "metrics")
    assert loss.needs == ({"proximal_logprobs"} if method in ("metrics", "recompute") else frozenset())


@pytest.mark.parametrize(
    ("alpha", "schedule"),
    [
        (AlphaConfig(fresh_anchor="target"), InverseAlpha("target")),
        (AlphaConfig("constant", value=0.35), ConstantAlpha(0.35)),
        (AlphaConfig("exponential", rate=2.0), ExponentialAlpha(2.0)),
        (AlphaConfig("shifted"), ShiftedAlpha()),
        (AlphaConfig("minibatch"), MinibatchAlpha()),
        (AlphaConfig("adaptive"), AdaptiveAlpha()),
    ],
    ids=lambda value: value.kind if isinstance(value, AlphaConfig) else None,
)
def test_the_kind_of_alpha_names_the_schedule(alpha: AlphaConfig, schedule: object) -> None:
    assert build_policy_loss(AlgorithmConfig(alpha=alpha)).proximal == LogLinearProximal(schedule)


def test_every_option_arrives() -> None:
    loss = build_policy_loss(
        AlgorithmConfig(
            method="recompute", reuse_first_forward=True, surrogate="gspo", clip_low=0.1, clip_high=0.15, dual_clip=3.0,
            behavior_weight=BehaviorWeightConfig(2.0, "mask"), total_weight=TotalWeightConfig(4.0, "mask"),
            kl=KLConfig(0.1, "k2", 0.2, 3.0), entropy_coefficient=0.01, aggregation="fixed_length", fixed_length=9,
        )
    )  # fmt: skip
    assert loss == PolicyLoss(
        RecomputedProximal(True), ClippedSurrogate(0.1, 0.15, 3.0, "sequence"), BehaviorWeight(2.0, "mask", "sequence"),
        TotalWeight(4.0, "mask"), False, ReferenceKL(0.1, "k2"), BehaviorKL(0.2, 3.0), 0.01, Aggregation("fixed_length", 9),
    )  # fmt: skip
    assert "proximal_logprobs" not in loss.needs
    assert "proximal_logprobs" in loss.at(StepContext(1, 4)).needs
    cispo = build_policy_loss(AlgorithmConfig(method="recompute", surrogate="cispo", m2po_threshold=0.04))
    assert cispo.surrogate == CispoSurrogate(0.2, 0.2)
    assert cispo.needs == {"proximal_logprobs", "correction"}


def test_only_an_adaptive_alpha_has_something_to_steer() -> None:
    steering = AdaptiveAlphaConfig("behavior_kl", 0.01, 0.3, 2.0, 0.5, 9.0)
    algorithm = AlgorithmConfig(alpha=AlphaConfig("adaptive", adaptive=steering))
    assert build_adaptive(algorithm) == (AdaptiveControl("behavior_kl", 0.01, 0.3, 0.5, 9.0), AdaptiveState(2.0))
    assert build_adaptive(replace(algorithm, method="recompute")) is None
    assert build_adaptive(AlgorithmConfig()) is None
