"""One batch -> N optimizer steps, one a minibatch -> the actor's part of the step's row."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from a3po_megatron.actor.actor import Actor, StepReport
from a3po_megatron.actor.nonfinite import NonFiniteError
from a3po_megatron.batching.minibatches import TrainingBatch, split_minibatches, training_batch, with_proximal
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.config.schema import AlgorithmConfig
from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import BehaviorProximal, LogLinearProximal, Proximal, RecomputedProximal
from a3po_megatron.records import Batch

Row = dict[str, float | int | None]


class BatchStep:
    """Trains one batch after another. Every method is collective over all ranks, which all pass the same batch."""

    def __init__(self, actor: Actor, algorithm: AlgorithmConfig, max_staleness: int, seed: int) -> None:
        self._actor, self._algorithm, self._max_staleness, self._seed = actor, algorithm, max_staleness, seed
        self._proximal_time = TimedProximal(build_proximal(algorithm))
        self._loss = PolicyLoss(
            self._proximal_time, algorithm.clip_low, algorithm.clip_high, algorithm.behavior_weight_cap
        )

    def train(self, batch: Batch, version: int) -> Row:
        """Train `batch` from weights `version`; return the metrics, the same on every rank but for times.

        A minibatch without a trainable token takes no optimizer step. Raises NonFiniteError, after which the weights
        are those of the last good optimizer step and must not be published.
        """
        began, passes_before = time.monotonic(), self._actor.num_forward_passes
        whole = training_batch(batch, version, self._max_staleness)
        if self._algorithm.method == "sync" and (whole.num_overdue or (whole.staleness > 0).any()):
            raise RuntimeError(f"algorithm.method=sync: the batch of version {version} holds tokens of older versions")
        minibatches = split_minibatches(whole.sequences, self._algorithm.num_minibatches, self._seed, version)
        minibatches = [m for m in minibatches if any(sequence.trainable.any() for sequence in m)]

        if self._algorithm.method == "recompute":
            proximal_began = time.monotonic()
            minibatches = self._with_proximal(minibatches)
            proximal_s = time.monotonic() - proximal_began
        reports = [self._step(minibatch, index, version) for index, minibatch in enumerate(minibatches)]
        if self._algorithm.method != "recompute":
            proximal_s = self._actor.add_up(self._proximal_time.take_s()) / self._actor.place.dp_size
        return {
            **batch_metrics(reports, whole),
            "forward_passes": self._actor.num_forward_passes - passes_before,
            "time/prox_s": proximal_s,  # of one data-parallel rank, of `time/step_s`
            "time/step_s": time.monotonic() - began,
        }

    def _with_proximal(self, minibatches: Sequence[Sequence[TokenSequence]]) -> list[list[TokenSequence]]:
        """Do one forward-only pass, in the microbatches of the steps to come: no rank needs another's results."""
        found = self._actor.logprobs_by_step(minibatches)
        return [
            [with_proximal(sequence, logprobs.get(index)) for index, sequence in enumerate(minibatch)]
            for minibatch, logprobs in zip(minibatches, found, strict=True)
        ]

    def _step(self, minibatch: Sequence[TokenSequence], index: int, version: int) -> StepReport:
        try:
            return self._actor.train_step(minibatch, self._loss)
        except NonFiniteError as error:
            raise NonFiniteError(f"batch of version {version}, minibatch {index}: {error}; not published") from error


def build_proximal(algorithm: AlgorithmConfig) -> Proximal:
    """Return the proximal policy that `algorithm.method` names."""
    match algorithm.method:
        case "loglinear":
            return LogLinearProximal(algorithm.fresh_anchor)
        case "recompute":
            return RecomputedProximal()
        case "sync" | "behavior":
            return BehaviorProximal()


def batch_metrics(reports: Sequence[StepReport], whole: TrainingBatch) -> Row:
    """Combine the optimizer steps of a batch: `loss` and `grad_norm` are means over steps, policy means over tokens.

    `parity/logprob_max_abs` is from the first step, where the weights are still those that sampled the fresh tokens;
    None where there are none. Without any step, what would be a mean is None or left out.
    """
    staleness, num_tokens = whole.staleness, sum(report.num_tokens for report in reports)
    row: Row = {
        "optimizer_steps": len(reports),
        "tokens": num_tokens,
        "samples/empty": whole.num_empty,
        "samples/filtered": whole.num_filtered,
        "staleness/masked_tokens": whole.num_overdue,
    }
    if not reports:
        return {**row, "loss": None, "grad_norm": None, "lr": None, "parity/logprob_max_abs": None}
    gap = "policy/fresh_logprob_gap_max"
    for name in reports[0].metrics.keys() - {gap}:
        if name.endswith("max"):
            row[name] = max(report.metrics[name] for report in reports)
        else:
            row[name] = sum(report.metrics[name] * report.num_tokens for report in reports) / num_tokens
    first_gap = reports[0].metrics[gap]
    return {
        **row,
        "loss": sum(report.loss for report in reports) / len(reports),
        "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "lr": reports[-1].lr,
        "parity/logprob_max_abs": None if first_gap == -math.inf else first_gap,
        "staleness/trained_mean": float(staleness.mean()),
        "staleness/trained_max": int(staleness.max()),
    }


class TimedProximal:
    """A proximal policy that counts the seconds it takes; on a GPU those of launching its kernels."""

    def __init__(self, proximal: Proximal) -> None:
        self._proximal, self._time_s = proximal, 0.0

    @torch.no_grad()
    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""
        began = time.perf_counter()
        proximal = self._proximal(policy_logprobs, fields)
        self._time_s += time.perf_counter() - began
        return proximal

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        time_s, self._time_s = self._time_s, 0.0
        return time_s
