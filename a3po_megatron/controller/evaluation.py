"""Evaluation within a run: which versions are due, what the live fleet answers, what becomes of the result.

Training does not stop for it. Evaluation shares the servers with generation, and weights may be published while it goes on:
its answers then come from several versions, and the result says which. A publication waits where
`controller.eval_holds_publication` says so: for the evaluation of the initial weights, which all later ones are compared with,
and in lockstep, so that two runs give the same figures. The last evaluation has one version by itself: nothing is published any
more.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from a3po_megatron.config.controller import ControllerConfig
from a3po_megatron.controller.parts import Parts
from a3po_megatron.evaluate.check import ks_of
from a3po_megatron.evaluate.loop import EvaluationPlan, answer_problems
from a3po_megatron.evaluate.result import Result, result_of


@dataclass(frozen=True)
class Evaluation:
    """One line of evals.jsonl."""

    version: int  # that was live when it began
    result: Result
    time_s: float

    @property
    def accuracy(self) -> float:
        """The mean reward over all held-out problems: the share of right answers for rewards of 0 and 1."""
        return self.result.overall.figures.average.value

    def row(self) -> dict[str, Any]:
        """Return the line: what is over all sets, then set by set."""
        result, overall = self.result, self.result.overall
        return {
            "version": self.version,
            "oldest_version": result.oldest_version,  # of the weights that drew a token of an answer
            "newest_version": result.newest_version,
            "accuracy": self.accuracy,
            "standard_error": overall.figures.average.standard_error,
            **overall.row(),
            "sets": {name: one.row() for name, one in result.sets.items()},
            "time_s": self.time_s,
        }

    def metrics(self) -> dict[str, Any]:
        """Return what a row of metrics.jsonl has of it."""
        figures = self.result.overall.figures
        return {
            "eval/version": self.version,
            "eval/newest_version": self.result.newest_version,
            "eval/accuracy": self.accuracy,
            "eval/accuracy_standard_error": figures.average.standard_error,
            **{
                f"eval/{name}/{column}": estimate.value
                for name, one in self.result.sets.items()
                for column, estimate in one.figures.columns().items()
            },
        }

    def line(self) -> str:
        """Return the result as people follow it."""
        result = self.result
        newest = f" to {result.newest_version}" if result.newest_version != self.version else ""
        sets = [f"{name} {one.figures.average}" for name, one in result.sets.items()]
        return (
            f"version {self.version}{newest}  held-out accuracy {result.overall.figures.average}  "
            f"({'; '.join(sets)}; {len(result.answers)} problems, {self.time_s:.1f} s)"
        )


class Evaluations:
    """The evaluations of one run, at most one at a time."""

    def __init__(self, config: ControllerConfig, num_steps: int, seed: int, parts: Parts) -> None:
        self.config, self.num_steps, self.parts = config, num_steps, parts
        self.results: dict[int, Evaluation] = {}  # by the version that was live when each began
        self._began: int | None = None  # version of the latest, which may still go on
        self._running = False
        self._unreported: Evaluation | None = None
        self._ks = ks_of(config.eval_pass_k, config.eval_samples)
        self._plan = EvaluationPlan(
            parts.evaluation_sampling,
            config.eval_samples,
            config.max_concurrent_evals,
            config.evaluation_timeout_s,
            "controller.evaluation_timeout_s",
            seed,
        )
        holds = config.eval_holds_publication
        self._holds = holds if holds != "auto" else ("always" if config.schedule == "lockstep" else "first")

    def due(self, version: int, is_last: bool) -> bool:
        """Whether `version`, the live one, is to be evaluated as soon as no other evaluation goes on.

        Every `eval_every` versions, and the first and the last. One that is due while another goes on comes right after it, with
        the version that is live then.
        """
        if not self.parts.heldout or version == self._began:
            return False
        if self._began is None or is_last or version == self.num_steps:
            return True
        every = self.config.eval_every
        return every > 0 and version // every > self._began // every

    def hold_publication(self, version: int) -> bool:
        """Whether `version`, the live one, must stay because an evaluation of it goes on or is due."""
        if self._holds == "never" or (self._holds == "first" and self.results):
            return False
        return self._running or self.due(version, is_last=False)

    async def evaluate(self, version: int) -> None:
        """Ask the fleet, which serves `version` now, about all held-out problems, and write down what comes of it.

        One in the middle of the run that takes longer than `evaluation_timeout_s` is given up with one line; training goes
        on. The first and the last raise TimeoutError.
        """
        between = bool(self.results) and version != self.num_steps
        self._began, self._running = version, True
        started = time.monotonic()
        parts = self.parts
        try:
            answers = await answer_problems(
                parts.fleet, parts.heldout, parts.evaluation_reward, self._plan, f"eval{version}"
            )
        except TimeoutError as error:
            if not between:
                raise
            parts.say(f"evaluation of version {version} given up: {error}")
            return
        finally:
            self._running = False
        evaluation = Evaluation(version, result_of(answers, self._ks), time.monotonic() - started)
        self.results[version] = self._unreported = evaluation
        await asyncio.to_thread(parts.files.write_evaluation, evaluation.row(), answers)
        parts.say(evaluation.line())

    def new_metrics(self) -> dict[str, Any]:
        """Return the columns of the evaluation that ended since the last call; nothing if none did."""
        evaluation, self._unreported = self._unreported, None
        return evaluation.metrics() if evaluation else {}
