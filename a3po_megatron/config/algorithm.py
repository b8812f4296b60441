"""The settings of the objective, `algorithm.*`. Equations, advice and evidence: docs/objective.md.

A section of a choice that is not taken (`alpha` under recompute, `alpha.rate` of another kind) is not read; what is read
and cannot go together is refused by `check_algorithm.py`. Imports no torch.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class AdaptiveAlphaConfig:
    """The rule that steers `alpha.kind: adaptive`, once a batch. Its state is in the checkpoint."""

    # clip_fraction: share of clipped tokens; behavior_kl: KL(behaviour, policy) per token
    measure: Literal["clip_fraction", "behavior_kl"] = "clip_fraction"
    target: float = 0.02  # of the measure
    gain: float = 0.2  # the strength changes by a factor of at most e^gain a batch
    initial_strength: float = 1.0  # alpha = min(1, strength / d): 1 is the paper's schedule
    min_strength: float = 0.25
    max_strength: float = 16.0


@dataclass(frozen=True)
class AlphaConfig:
    """The share of the behaviour policy in the proximal policy, by staleness d; of methods loglinear and metrics."""

    # inverse: 1/d, the paper's; constant: `value`; exponential: exp(-rate d); shifted: 1/(1+d);
    # minibatch: j/(dN+j) at optimizer step j of the batch's N; adaptive: min(1, strength/d), steered
    kind: Literal["inverse", "constant", "exponential", "shifted", "minibatch", "adaptive"] = "inverse"
    fresh_anchor: Literal["behavior", "target"] = "behavior"  # of inverse: the anchor of tokens of staleness 0
    value: float = 0.5  # of constant
    rate: float = 1.0  # of exponential
    adaptive: AdaptiveAlphaConfig = field(default_factory=AdaptiveAlphaConfig)


@dataclass(frozen=True)
class BehaviorWeightConfig:
    """What becomes of pi_prox / pi_behav, which weighs a token for having been sampled by another policy."""

    cap: float = 5.0  # largest weight; 0: no cap
    mode: Literal["truncate", "mask"] = "truncate"  # beyond the cap: use the cap, or drop the token
    # sequence: the geometric mean over the response's tokens; auto: sequence under surrogate gspo, else token
    level: Literal["auto", "token", "sequence"] = "auto"


@dataclass(frozen=True)
class TotalWeightConfig:
    """What becomes of pi_theta / pi_behav, the whole weight of a token's gradient."""

    bound: float = 0.0  # c, above 1; 0: none
    mode: Literal["truncate", "mask"] = "truncate"  # at most c, or drop the token outside [1/c, c]


@dataclass(frozen=True)
class KLConfig:
    """Penalties for moving away from another policy, per token."""

    reference_coefficient: float = 0.0  # towards the model that the run started from; 0: no reference model
    reference_estimator: Literal["k1", "k2", "k3"] = "k3"
    behavior_coefficient: float = 0.0  # beta of beta/2 (log w)^2, w = pi_theta / pi_behav
    behavior_clamp: float = 5.0  # largest |log w| that still pulls


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective: which proximal policy, which surrogate, how weights are bounded and tokens added up."""

    # loglinear: A-3PO, interpolated between behaviour and current policy; recompute: an extra forward pass a batch;
    # metrics: trains as loglinear, does recompute's pass too, and reports the approximation error;
    # behavior: the behaviour policy itself (PPO on stale data); sync: the same, on data of staleness 0 only
    method: Literal["loglinear", "recompute", "metrics", "sync", "behavior"] = "loglinear"
    alpha: AlphaConfig = field(default_factory=AlphaConfig)
    # of recompute: the first optimizer step of a batch takes its own training forward for the extra pass
    reuse_first_forward: bool = False
    num_minibatches: int = 4  # optimizer steps an epoch over a batch
    num_epochs: int = 1  # passes over a batch
    newer_tokens: Literal["train", "mask"] = "train"  # of tokens newer than the actor's weights, after a resume

    # ppo: clipped token ratio; gspo: clipped ratio of the whole response; cispo: detached, clipped total weight
    surrogate: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: float = 0.2  # the ratio to the proximal policy is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2  # above clip_low: clip-higher
    dual_clip: float = 0.0  # c, above 1: a token of advantage A < 0 counts at most c A; 0: none
    behavior_weight: BehaviorWeightConfig = field(default_factory=BehaviorWeightConfig)
    total_weight: TotalWeightConfig = field(default_factory=TotalWeightConfig)
    m2po_threshold: float = 0.0  # largest mean of (log pi_prox / pi_behav)^2; tokens above are dropped; 0: no M2PO

    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coefficient: float = 0.0  # of the entropy bonus
    # token: every token alike; sequence: every response alike; fixed_length: sum over `fixed_length`, a mean over responses
    aggregation: Literal["token", "sequence", "fixed_length"] = "token"
    fixed_length: int = 0  # of aggregation fixed_length: tokens, for example rollout.max_response_tokens
