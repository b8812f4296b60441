"""One batch -> N optimizer steps, one a minibatch -> the actor's part of the step's row."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from a3po_megatron.actor.actor import Actor, StepReport
from a3po_megatron.actor.nonfinite import NonFiniteError
from a3po_megatron.actor.objective import build_policy_loss, build_proximal
from a3po_megatron.batching.minibatches import TrainingBatch, split_minibatches, training_batch, with_proximal
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.config.schema import AlgorithmConfig
from a3po_megatron.objective.alpha import StepContext
from a3po_megatron.objective.metrics import FRESH_GAP, FRESH_GAP_MAX, FRESH_KL, add_up, figures
from a3po_megatron.objective.proximal import START, Proximal
from a3po_megatron.records import Batch

Row = dict[str, float | int | None]


class BatchStep:
    """Trains one batch after another. Every method is collective over all ranks, which all pass the same batch."""

    def __init__(self, actor: Actor, algorithm: AlgorithmConfig, max_staleness: int, seed: int) -> None:
        self._actor, self._algorithm, self._max_staleness, self._seed = actor, algorithm, max_staleness, seed
        self._proximal_time = TimedProximal(build_proximal(algorithm))
        self._loss = build_policy_loss(algorithm, self._proximal_time)

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

        extra_pass = self._algorithm.method in ("recompute", "metrics")
        if extra_pass:
            proximal_began = time.monotonic()
            minibatches = self._with_proximal(minibatches)
            proximal_s = time.monotonic() - proximal_began
        steps = [StepContext(index, len(minibatches)) for index in range(len(minibatches))]
        reports = [self._step(minibatch, step, version) for minibatch, step in zip(minibatches, steps, strict=True)]
        if not extra_pass:
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

    def _step(self, minibatch: Sequence[TokenSequence], step: StepContext, version: int) -> StepReport:
        try:
            return self._actor.train_step(minibatch, self._loss.at(step))
        except NonFiniteError as error:
            raise NonFiniteError(
                f"batch of version {version}, minibatch {step.index}: {error}; not published"
            ) from error


def batch_metrics(reports: Sequence[StepReport], whole: TrainingBatch) -> Row:
    """Combine the optimizer steps of a batch: `loss` and `grad_norm` are means over steps, the rest is over tokens.

    `parity/...` compares trainer and rollout engine on fresh tokens. It is from the first step, where the weights are
    still those that sampled them; None where there are none. Without any step, what would be a mean is None or left out.
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
    first = figures(reports[0].totals, reports[0].num_tokens)
    policy = figures(add_up([report.totals for report in reports]), num_tokens)
    return {
        **row,
        **{name: value for name, value in policy.items() if name not in (FRESH_GAP_MAX, FRESH_GAP, FRESH_KL)},
        "loss": sum(report.loss for report in reports) / len(reports),
        "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "lr": reports[-1].lr,
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
