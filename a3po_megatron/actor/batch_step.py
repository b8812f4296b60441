"""One batch -> optimizer steps, one a minibatch and epoch -> the actor's part of the step's row.

    batch -> sequences -> minibatches -> (what the loss needs of other policies) -> steps -> figures

What other policies say of the tokens is asked once a batch, in forward-only passes through the pipeline: the policy at the
start of the batch (recompute, metrics), the reference policy. A-3PO's own method needs neither.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from a3po_megatron.actor import parallel
from a3po_megatron.actor.actor import Actor, StepResult
from a3po_megatron.actor.nonfinite import NonFiniteError
from a3po_megatron.actor.objective import build_adaptive, build_policy_loss, build_proximal
from a3po_megatron.actor.reference import ReferenceWeights
from a3po_megatron.batching.m2po import correction_masks
from a3po_megatron.batching.minibatches import (
    TrainingBatch,
    split_minibatches,
    training_batch,
    with_correction,
    with_logprobs,
)
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.config.algorithm import AlgorithmConfig
from a3po_megatron.objective.adaptive import AdaptiveState
from a3po_megatron.objective.alpha import StepContext
from a3po_megatron.objective.metrics import FRESH_GAP, FRESH_GAP_MAX, FRESH_KL, add_up, figures
from a3po_megatron.objective.policy_loss import PolicyLoss
from a3po_megatron.objective.proximal import START, Proximal
from a3po_megatron.records import Batch

Row = dict[str, float | int | None]
Minibatches = list[list[TokenSequence]]


class BatchStep:
    """Trains one batch after another. Every method is collective over all ranks, which all pass the same batch."""

    def __init__(self, actor: Actor, algorithm: AlgorithmConfig, max_staleness: int, seed: int) -> None:
        """The actor's weights of this moment are those of the reference policy, where the loss asks for one.

        So this comes before a checkpoint is loaded, which `restore` then follows.
        """
        self._actor, self._algorithm, self._max_staleness, self._seed = actor, algorithm, max_staleness, seed
        self._proximal_time = TimedProximal(build_proximal(algorithm))
        self._loss = build_policy_loss(algorithm, self._proximal_time, parallel.sum_over_cp)
        self._reference = ReferenceWeights(actor) if self._loss.reference_kl else None
        self._adaptive = build_adaptive(algorithm)

    def train(self, batch: Batch, version: int) -> Row:
        """Train `batch` from weights `version`; return the metrics, the same on every rank but for times.

        A minibatch without a trainable token takes no optimizer step. Raises NonFiniteError, after which the weights
        are those of the last good optimizer step and must not be published.
        """
        began, passes_before = time.monotonic(), self._actor.num_forward_passes
        whole = training_batch(batch, version, self._max_staleness, self._algorithm.newer_tokens == "mask")
        if self._algorithm.method == "sync" and (whole.num_overdue or (whole.staleness > 0).any()):
            raise RuntimeError(
                f"algorithm.method=sync: the batch of version {version} holds tokens up to {whole.staleness.max(initial=0)} "
                f"versions older, and {whole.num_overdue} beyond controller.max_staleness: the controller broke its promise"
            )
        minibatches = split_minibatches(whole.sequences, self._algorithm.num_minibatches, self._seed, version)
        minibatches = [m for m in minibatches if any(sequence.trainable.any() for sequence in m)]
        losses = self._losses(len(minibatches))

        minibatches, pass_s = self._with_other_policies(minibatches, losses)
        results = [
            self._step(minibatches[index % len(minibatches)], loss, version) for index, loss in enumerate(losses)
        ]
        interpolation_s = self._actor.add_up(self._proximal_time.take_s()) / self._actor.place.dp_size
        row: Row = {
            **trained_metrics(results, whole),
            "forward_passes": self._actor.num_forward_passes - passes_before,
            # of one data-parallel rank, of `time/step_s`
            "time/prox_s": pass_s.get("proximal_logprobs", interpolation_s),
            "time/reference_s": pass_s.get("reference_logprobs", 0.0),
            "time/step_s": time.monotonic() - began,
        }
        return row | self._steer(row)

    def state(self) -> dict[str, float]:
        """Return what the next batch depends on, beside the actor: plain values for a checkpoint."""
        return asdict(self._adaptive[1]) if self._adaptive else {}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from what `state` returned."""
        if self._adaptive:
            self._adaptive = (self._adaptive[0], AdaptiveState(**state))

    def _losses(self, num_minibatches: int) -> list[PolicyLoss]:
        """Return the loss of each optimizer step of the batch: every epoch has the same minibatches in the same order."""
        num_steps = num_minibatches * self._algorithm.num_epochs
        strength = self._adaptive[1].strength if self._adaptive else 1.0
        return [self._loss.at(StepContext(index, num_steps, strength)) for index in range(num_steps)]

    def _with_other_policies(
        self, minibatches: Minibatches, losses: Sequence[PolicyLoss]
    ) -> tuple[Minibatches, dict[str, float]]:
        """Give the tokens the fields that the losses need; return the seconds of each forward-only pass by field."""
        count = max(len(minibatches), 1)
        pass_s = {}
        for field in ("proximal_logprobs", "reference_logprobs"):
            asking = sorted({index % count for index, loss in enumerate(losses) if field in loss.needs})
            if asking:
                began = time.monotonic()
                filled = self._logprobs([minibatches[index] for index in asking], field)
                minibatches = [filled.pop(0) if index in asking else m for index, m in enumerate(minibatches)]
                pass_s[field] = time.monotonic() - began
        if self._loss.correction and minibatches:
            minibatches = self._with_correction(minibatches)
        return minibatches, pass_s

    def _logprobs(self, minibatches: Minibatches, field: str) -> Minibatches:
        """Do one forward-only pass, in the microbatches of the steps to come: no rank needs another's results."""
        with self._reference.in_place() if field == "reference_logprobs" and self._reference else nullcontext():
            found = self._actor.logprobs_by_step(minibatches)
        self._check_finite(minibatches, found, field)
        return [
            [with_logprobs(sequence, field, logprobs.get(index)) for index, sequence in enumerate(minibatch)]
            for minibatch, logprobs in zip(minibatches, found, strict=True)
        ]

    def _check_finite(
        self, minibatches: Minibatches, found: Sequence[Mapping[int, NDArray[np.float32]]], field: str
    ) -> None:
        """Raise NonFiniteError on every rank, naming the sample, where a trainable token's log-probability is not finite."""
        sequences = [sequence for minibatch in minibatches for sequence in minibatch]
        known = [logprobs.get(index) for m, logprobs in zip(minibatches, found, strict=True) for index in range(len(m))]
        bad = [
            0.0 if values is None else float((~np.isfinite(values) & sequence.trainable[1:]).sum())
            for sequence, values in zip(sequences, known, strict=True)
        ]
        for sequence, count in zip(sequences, self._actor.add_up_each(np.array(bad)), strict=True):
            if count:
                raise NonFiniteError(f"{field}: {count:g} of {sequence.name} are not finite; nothing was trained")

    def _with_correction(self, minibatches: Minibatches) -> Minibatches:
        """Mark the tokens that M2PO keeps. It judges the whole batch, so the ranks first tell each other what they know."""
        sequences = [sequence for minibatch in minibatches for sequence in minibatch]
        known = np.concatenate([sequence.fields["proximal_logprobs"] for sequence in sequences]).astype(np.float64)
        known = self._actor.add_up_each(np.where(np.isnan(known), 0.0, known))
        masks = iter(correction_masks(sequences, known, self._algorithm.m2po_threshold))
        return [[with_correction(sequence, next(masks)) for sequence in minibatch] for minibatch in minibatches]

    def _step(self, minibatch: Sequence[TokenSequence], loss: PolicyLoss, version: int) -> StepResult:
        try:
            return self._actor.train_step(minibatch, loss)
        except NonFiniteError as error:
            where = f"batch of version {version}, optimizer step {loss.context.index}"
            raise NonFiniteError(f"{where}: {error}; not published") from error

    def _steer(self, row: Row) -> Row:
        """Move the adaptive alpha for the next batch; return the strength that this one was trained with."""
        if self._adaptive is None:
            return {}
        control, state = self._adaptive
        self._adaptive = (control, control.next(state, row.get(control.figure)))
        return {"alpha/strength": state.strength}


def trained_metrics(results: Sequence[StepResult], whole: TrainingBatch) -> Row:
    """Combine the optimizer steps of a batch: `loss` and `grad_norm` are means over steps, the rest is over tokens.

    `parity/...` compares trainer and rollout engine on fresh tokens. It is from the first step, where the weights are
    still those that sampled them; None where there are none. Without any step, what would be a mean is None or left out.
    """
    staleness, num_tokens = whole.staleness, sum(result.num_tokens for result in results)
    row: Row = {
        "optimizer_steps": len(results),
        "tokens": num_tokens,
        "samples/empty": whole.num_empty,
        "samples/filtered": whole.num_filtered,
        "staleness/masked_tokens": whole.num_overdue,
        "staleness/masked_newer_tokens": whole.num_newer,
    }
    if not results:
        return {**row, "loss": None, "grad_norm": None, "lr": None, "parity/logprob_max_abs": None}
    first = figures(results[0].totals, results[0].num_tokens)
    policy = figures(add_up([result.totals for result in results]), num_tokens)
    return {
        **row,
        **{name: value for name, value in policy.items() if name not in (FRESH_GAP_MAX, FRESH_GAP, FRESH_KL)},
        "loss": sum(result.loss for result in results) / len(results),
        "grad_norm": sum(result.grad_norm for result in results) / len(results),
        "lr": results[-1].lr,
        "parity/logprob_max_abs": first[FRESH_GAP_MAX],
        "parity/logprob_mean_abs": first[FRESH_GAP],
        "parity/kl": first[FRESH_KL],
        "staleness/trained_mean": float(staleness.mean()),
        "staleness/trained_max": int(staleness.max()),
    }


class TimedProximal:
    """A proximal policy that counts the seconds it takes; on a GPU those of launching its kernels."""

    def __init__(self, proximal: Proximal) -> None:
        self._proximal, self._time_s = proximal, 0.0

    def needs(self, context: StepContext) -> frozenset[str]:
        """Return the fields that this optimizer step needs beside the usual ones."""
        return self._proximal.needs(context)

    @torch.no_grad()
    def __call__(self, policy_logprobs: Tensor, fields: Mapping[str, Tensor], context: StepContext = START) -> Tensor:
        """Return log pi_prox [b, s], without gradient."""
        began = time.perf_counter()
        proximal = self._proximal(policy_logprobs, fields, context)
        self._time_s += time.perf_counter() - began
        return proximal

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        time_s, self._time_s = self._time_s, 0.0
        return time_s
