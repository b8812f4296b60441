"""The decoupled policy loss of A-3PO and its relatives, token by token.

    L = sum over tokens of  - b_t * min(r_t * A_t, clip(r_t, 1 - eps_low, 1 + eps_high) * A_t)

    r = pi_theta / pi_prox      carries the gradient
    b = min(pi_prox / pi_behav, cap)      does not: it corrects for who sampled the token

Every part is a choice made at construction, in a file of its own: the proximal policy (proximal.py), the surrogate
(surrogate.py), what becomes of the weights (corrections.py), penalties (penalties.py), and how tokens add up
(aggregation.py). Two masks, which are never mixed up:

    trainable    prompt, padding, overdue and filtered tokens are out of everything, the denominator too
    correction   tokens that a correction drops are out of the policy term only
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from a3po_megatron.objective.aggregation import Aggregation, Counts
from a3po_megatron.objective.alpha import StepContext
from a3po_megatron.objective.buckets import StalenessBuckets
from a3po_megatron.objective.corrections import BehaviorWeight, TotalWeight
from a3po_megatron.objective.masked import bounded_exp, keep, sum_where
from a3po_megatron.objective.metrics import (
    APPROXIMATION_METRICS,
    POLICY_METRICS,
    Metrics,
    TokenRatios,
    approximation_metrics,
    policy_metrics,
)
from a3po_megatron.objective.penalties import BehaviorKL, ReferenceKL
from a3po_megatron.objective.proximal import Proximal, RecomputedProximal
from a3po_megatron.objective.sequences import Sequences, SumOverCp, one_rank
from a3po_megatron.objective.surrogate import CLIP, ClippedSurrogate, Surrogate


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of one microbatch; `proximal` decides between A-3PO and its baselines."""

    proximal: Proximal
    surrogate: Surrogate = field(default_factory=ClippedSurrogate)
    behavior_weight: BehaviorWeight = field(default_factory=BehaviorWeight)
    total_weight: TotalWeight = field(default_factory=TotalWeight)
    correction: bool = False  # M2PO: the field `correction` says which tokens the policy term keeps
    reference_kl: ReferenceKL | None = None
    behavior_kl: BehaviorKL | None = None
    entropy_coefficient: float = 0.0
    aggregation: Aggregation = field(default_factory=Aggregation)
    true_proximal: RecomputedProximal | None = None  # report how far `proximal` is from it
    sum_over_cp: SumOverCp = one_rank
    context: StepContext = field(default_factory=StepContext)

    def at(self, context: StepContext) -> "PolicyLoss":
        """Return the loss of another optimizer step."""
        return replace(self, context=context)

    @property
    def needs(self) -> frozenset[str]:
        """The fields that this step's tokens must have beside the usual ones."""
        proximal = self.proximal.needs(self.context)
        true = self.true_proximal.needs(self.context) if self.true_proximal else frozenset()
        reference = {"reference_logprobs"} if self.reference_kl else set()
        return proximal | true | reference | ({"correction"} if self.correction else set())

    @property
    def needs_entropy(self) -> bool:
        """Whether it must be called with the entropy of each token's distribution."""
        return self.entropy_coefficient != 0

    @property
    def counts(self) -> Counts:
        """What the denominator counts."""
        return self.aggregation.counts

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics, in order; they depend on the settings only."""
        return (
            *self.surrogate.metric_names,
            *POLICY_METRICS,
            *(["tokens/dropped_by_second_moment"] if self.correction else []),
            *(["tokens/dropped_by_behavior_weight"] if self.behavior_weight.drops else []),
            *(["tokens/dropped_by_total_weight"] if self.total_weight.drops else []),
            *(["policy/reference_kl"] if self.reference_kl else []),
            *(["policy/behavior_penalty"] if self.behavior_kl else []),
            *(["policy/entropy"] if self.needs_entropy else []),
            *(APPROXIMATION_METRICS if self.true_proximal else []),
        )

    def __call__(
        self, logprobs: Tensor, trainable: Tensor, fields: Mapping[str, Tensor], entropy: Tensor | None = None
    ) -> tuple[Tensor, Metrics]:
        """Return the scalar sum and the metrics: sums over trainable tokens, or maxima under names that end in `max`.

        `logprobs`: log pi_theta [b, s] with gradient. `trainable`: bool [b, s]. `entropy`: [b, s] with gradient, where
        `needs_entropy`. Fields, [b, s] each: `advantages`, `behavior_logprobs`, `staleness`, `sequence`,
        `sequence_tokens` (aggregation.py, sequences.py), and what `needs` names. Masked positions may hold anything.
        """
        logprobs = keep(trainable, logprobs)
        fields = {
            name: keep(trainable, values) if values.is_floating_point() else values for name, values in fields.items()
        }
        behavior = fields["behavior_logprobs"]
        proximal = self.proximal(logprobs, fields, self.context)
        buckets = StalenessBuckets.of(fields["staleness"], trainable)

        ratios = self._ratios(logprobs, proximal, behavior, trainable, fields)
        objective, hits, dropped = self._policy_term(logprobs, ratios, trainable, fields)
        penalty, penalties = self._penalties(logprobs, behavior, trainable, fields, entropy)
        loss = self.aggregation(penalty - objective, trainable, fields)

        metrics = {name: sum_where(trainable, mask.double()) for name, mask in hits.items()}
        metrics |= policy_metrics(ratios, hits[CLIP], trainable, buckets)
        metrics |= {name: sum_where(trainable, mask.double()) for name, mask in dropped.items()} | penalties
        if self.true_proximal:
            true = self.true_proximal(logprobs, fields, self.context)
            metrics |= approximation_metrics(logprobs, proximal, true, behavior, buckets)
        return loss, metrics

    def _ratios(
        self, logprobs: Tensor, proximal: Tensor, behavior: Tensor, trainable: Tensor, fields: Mapping[str, Tensor]
    ) -> TokenRatios:
        """Return r (with gradient), b and w, each of the token or of its sequence."""
        log_ratio, log_weight = logprobs - proximal, (proximal - behavior).detach()
        levels = self.surrogate.level, self.behavior_weight.level
        if "sequence" in levels:
            sequences = Sequences.of(trainable, fields, self.sum_over_cp)
            log_ratio = sequences.mean(log_ratio) if levels[0] == "sequence" else log_ratio
            log_weight = sequences.mean(log_weight) if levels[1] == "sequence" else log_weight
        total = bounded_exp((log_ratio + log_weight).detach())
        log_w = (logprobs - behavior).detach()
        return TokenRatios(bounded_exp(log_ratio), bounded_exp(log_weight), total, log_w)

    def _policy_term(
        self, logprobs: Tensor, ratios: TokenRatios, trainable: Tensor, fields: Mapping[str, Tensor]
    ) -> tuple[Tensor, Metrics, Metrics]:
        """Return what is maximised [b, s], 0 where masked or dropped; the surrogate's hits; the dropped tokens by cause."""
        weight, over_cap = self.behavior_weight(ratios.weight)
        weight, out_of_bound = self.total_weight(ratios.total, ratios.ratio, weight)
        value, hits = self.surrogate(logprobs, ratios.ratio, weight, fields["advantages"])
        dropped = {}
        if self.correction:
            dropped["tokens/dropped_by_second_moment"] = ~fields["correction"]
        if self.behavior_weight.drops:
            dropped["tokens/dropped_by_behavior_weight"] = over_cap
        if self.total_weight.drops:
            dropped["tokens/dropped_by_total_weight"] = out_of_bound
        kept = trainable
        for mask in dropped.values():
            kept = kept & ~mask
        return keep(kept, value), hits, dropped

    def _penalties(
        self,
        logprobs: Tensor,
        behavior: Tensor,
        trainable: Tensor,
        fields: Mapping[str, Tensor],
        entropy: Tensor | None,
    ) -> tuple[Tensor, Metrics]:
        """Return what is added to the loss of each token [b, s], 0 where masked, and its parts as metrics."""
        penalty, metrics = torch.zeros_like(logprobs), {}
        if self.reference_kl:
            value = keep(trainable, self.reference_kl(logprobs - fields["reference_logprobs"]))
            penalty = penalty + self.reference_kl.coefficient * value
            metrics["policy/reference_kl"] = sum_where(trainable, value.detach())
        if self.behavior_kl:
            value = keep(trainable, self.behavior_kl(logprobs - behavior))
            penalty = penalty + self.behavior_kl.coefficient * value
            metrics["policy/behavior_penalty"] = sum_where(trainable, value.detach())
        if self.needs_entropy:
            assert entropy is not None, "the loss was asked for an entropy bonus and called without the entropy"
            value = keep(trainable, entropy)
            penalty = penalty - self.entropy_coefficient * value
            metrics["policy/entropy"] = sum_where(trainable, value.detach())
        return penalty, metrics
