"""The settings of the objective -> the loss that the actor trains with. The only place that knows both."""

from a3po_megatron.config.algorithm import AlgorithmConfig, AlphaConfig
from a3po_megatron.objective.adaptive import AdaptiveControl, AdaptiveState
from a3po_megatron.objective.aggregation import Aggregation
from a3po_megatron.objective.alpha import (
    AdaptiveAlpha,
    AlphaSchedule,
    ConstantAlpha,
    ExponentialAlpha,
    InverseAlpha,
    MinibatchAlpha,
    ShiftedAlpha,
)
from a3po_megatron.objective.corrections import BehaviorWeight, TotalWeight
from a3po_megatron.objective.penalties import BehaviorKL, ReferenceKL
from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import BehaviorProximal, LogLinearProximal, Proximal, RecomputedProximal
from a3po_megatron.objective.sequences import SumOverCp, one_rank
from a3po_megatron.objective.surrogate import CispoSurrogate, ClippedSurrogate, Surrogate


def build_policy_loss(
    algorithm: AlgorithmConfig, proximal: Proximal | None = None, sum_over_cp: SumOverCp = one_rank
) -> PolicyLoss:
    """Return the loss of a batch's first optimizer step; `at` makes those of the others.

    `proximal`: what `build_proximal` returned, wrapped by the caller; built here if None. `sum_over_cp`: adds a tensor up
    over the context-parallel ranks, gradients too.
    """
    weight, total, kl = algorithm.behavior_weight, algorithm.total_weight, algorithm.kl
    level = weight.level
    if level == "auto":
        level = "sequence" if algorithm.surrogate == "gspo" else "token"
    return PolicyLoss(
        proximal=proximal or build_proximal(algorithm),
        surrogate=build_surrogate(algorithm),
        behavior_weight=BehaviorWeight(weight.cap, weight.mode, level),
        total_weight=TotalWeight(total.bound, total.mode),
        correction=algorithm.m2po_threshold > 0,
        reference_kl=ReferenceKL(kl.reference_coefficient, kl.reference_estimator)
        if kl.reference_coefficient
        else None,
        behavior_kl=BehaviorKL(kl.behavior_coefficient, kl.behavior_clamp) if kl.behavior_coefficient else None,
        entropy_coefficient=algorithm.entropy_coefficient,
        aggregation=Aggregation(algorithm.aggregation, algorithm.fixed_length),
        true_proximal=RecomputedProximal() if algorithm.method == "metrics" else None,
        sum_over_cp=sum_over_cp,
    )


def build_proximal(algorithm: AlgorithmConfig) -> Proximal:
    """Return the proximal policy that `algorithm.method` names."""
    match algorithm.method:
        case "loglinear" | "metrics":
            return LogLinearProximal(build_schedule(algorithm.alpha))
        case "recompute":
            return RecomputedProximal(algorithm.reuse_first_forward)
        case "sync" | "behavior":
            return BehaviorProximal()


def build_schedule(alpha: AlphaConfig) -> AlphaSchedule:
    """Return the schedule that `algorithm.alpha.kind` names."""
    match alpha.kind:
        case "inverse":
            return InverseAlpha(alpha.fresh_anchor)
        case "constant":
            return ConstantAlpha(alpha.value)
        case "exponential":
            return ExponentialAlpha(alpha.rate)
        case "shifted":
            return ShiftedAlpha()
        case "minibatch":
            return MinibatchAlpha()
        case "adaptive":
            return AdaptiveAlpha()


def build_adaptive(algorithm: AlgorithmConfig) -> tuple[AdaptiveControl, AdaptiveState] | None:
    """Return the rule that steers alpha and the state to start from; None where alpha is not adaptive."""
    if algorithm.method not in ("loglinear", "metrics") or algorithm.alpha.kind != "adaptive":
        return None
    steering = algorithm.alpha.adaptive
    control = AdaptiveControl(
        steering.measure, steering.target, steering.gain, steering.min_strength, steering.max_strength
    )
    return control, AdaptiveState(steering.initial_strength)


def build_surrogate(algorithm: AlgorithmConfig) -> Surrogate:
    """Return the surrogate that `algorithm.surrogate` names."""
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.surrogate:
        case "ppo":
            return ClippedSurrogate(low, high, algorithm.dual_clip, "token")
        case "gspo":
            return ClippedSurrogate(low, high, algorithm.dual_clip, "sequence")
        case "cispo":
            return CispoSurrogate(low, high)
