"""Answers -> the result of an evaluation: figures by set and overall, and which weight versions answered."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from a3po_megatron.evaluate.figures import RewardFigures, reward_figures
from a3po_megatron.evaluate.loop import Answers
from a3po_megatron.records import Sample


@dataclass(frozen=True)
class SetResult:
    """One set of problems, or all of them."""

    figures: RewardFigures
    truncated: float  # share of the responses that were cut off at the token limit
    response_tokens_mean: float

    def row(self) -> dict[str, Any]:
        """Return the result as JSON has it."""
        figures = self.figures
        estimates = {
            name: {"value": estimate.value, "standard_error": estimate.standard_error}
            for name, estimate in figures.columns().items()
        }
        return {
            "num_problems": figures.num_problems,
            "num_samples": figures.num_samples,
            **estimates,
            "truncated": self.truncated,
            "response_tokens_mean": self.response_tokens_mean,
        }


@dataclass(frozen=True)
class Result:
    """One evaluation. Made here, read by `report.py` and the controller."""

    answers: Sequence[Answers]
    sets: dict[str, SetResult]  # by name, in the order of the problems
    overall: SetResult  # all problems in one pot, so a large set weighs more
    responses_by_versions: dict[tuple[int, int], int]  # (oldest, newest version of its tokens) -> responses

    @property
    def oldest_version(self) -> int:
        """The oldest version that drew a token."""
        return min(oldest for oldest, _ in self.responses_by_versions)

    @property
    def newest_version(self) -> int:
        """The newest version that drew a token."""
        return max(newest for _, newest in self.responses_by_versions)


def result_of(answers: Sequence[Answers], ks: Sequence[int]) -> Result:
    """Return the result of `answers`; a problem's set is its `source`. `ks`: of pass@k."""
    by_set: dict[str, list[Answers]] = {}
    for one in answers:
        by_set.setdefault(one.problem.source, []).append(one)
    sets = {name: set_result(of_set, ks) for name, of_set in by_set.items()}
    versions = Counter(version_range(sample) for one in answers for sample in one.samples)
    return Result(answers, sets, set_result(answers, ks), dict(sorted(versions.items())))


def set_result(answers: Sequence[Answers], ks: Sequence[int]) -> SetResult:
    """Return the result of one set."""
    samples = [sample for one in answers for sample in one.samples]
    return SetResult(
        reward_figures([[verdict.reward for verdict in one.verdicts] for one in answers], ks),
        statistics.fmean(sample.finish_reason == "length" for sample in samples),
        statistics.fmean(len(sample.response_ids) for sample in samples),
    )


def version_range(sample: Sample) -> tuple[int, int]:
    """Return the oldest and newest version of a sample's tokens; vLLM answers with at least one token."""
    return int(sample.versions.min()), int(sample.versions.max())
