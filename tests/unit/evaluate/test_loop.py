"""The loop over problems and samples, with a fake fleet: order, bounds, deadline, versions; and what is written of it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from a3po_megatron.data.arithmetic import EOS_ID, decode_ids, encode_text
from a3po_megatron.errors import UserError, first_cause
from a3po_megatron.evaluate.check import OF_COMMAND, OF_RUN, check_samples, ks_of
from a3po_megatron.evaluate.loop import EvaluationPlan, answer_problems
from a3po_megatron.evaluate.report import table_of, versions_line, write_files
from a3po_megatron.evaluate.result import Result, result_of
from a3po_megatron.records import Int32, Problem
from a3po_megatron.reward.base import Part, WeightedSum
from a3po_megatron.reward.exact import judge_exact
from a3po_megatron.rollout.client import Generation, PartialGeneration
from a3po_megatron.rollout.sampling import SamplingSettings

pytestmark = pytest.mark.timeout(60)
REWARD = WeightedSum([Part("answer", 1.0, judge_exact)])
GREEDY = EvaluationPlan(
    SamplingSettings(0.0, 4, evaluation=True), 1, max_concurrent=4, timeout_s=30, timeout_setting="limit"
)
SAMPLED = replace(GREEDY, sampling=SamplingSettings(0.7, 4, evaluation=True), num_samples=3, seed=5)


class Sums:
    """Answers `a+b=` right when a is even; later requests come back first. Counts what is in flight."""

    def __init__(self) -> None:
        self.in_flight = self.most_in_flight = 0
        self.requests: dict[str, tuple[str, int | None]] = {}  # id -> (prompt, seed)
        self.version = 0
        self.hangs = False

    async def generate(
        self,
        prompt_ids: Sequence[int] | Int32,
        sampling: SamplingSettings,
        request_id: str,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        assert request_id not in self.requests
        self.requests[request_id] = decode_ids(prompt_ids), sampling.seed
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(3600 if self.hangs else 0.001 * (100 - len(self.requests)) / 100)
        finally:
            self.in_flight -= 1
        a, b = decode_ids(prompt_ids).rstrip("=").split("+")
        tokens = [*encode_text(str(int(a) + int(b) + int(a) % 2)), EOS_ID]
        versions = [self.version] * len(tokens)
        self.version += 1
        versions[-1] = self.version
        return Generation(
            np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), np.array(versions, np.int32), "stop"
        )


def problems(first: int, count: int, name: str) -> list[Problem]:
    return [Problem(f"{name}/{a}", encode_text(f"{a}+1="), str(a + 1), name) for a in range(first, first + count)]


TWO_SETS = [*problems(0, 5, "small"), *problems(10, 2, "big")]


def ask(fleet: Any, plan: EvaluationPlan, progress: list[tuple[int, int]] | None = None) -> Result:
    heard: list[tuple[int, int]] = [] if progress is None else progress
    answers = asyncio.run(
        answer_problems(fleet, TWO_SETS, REWARD, plan, "test", lambda done, of: heard.append((done, of)))
    )
    return result_of(answers, ks_of((), plan.num_samples))


def test_answers_come_in_the_order_of_the_problems_and_no_more_than_allowed_are_in_flight() -> None:
    fleet = Sums()
    heard: list[tuple[int, int]] = []
    result = ask(fleet, SAMPLED, heard)
    assert [one.problem.id for one in result.answers] == [problem.id for problem in TWO_SETS]
    assert all(len(one.samples) == len(one.verdicts) == 3 for one in result.answers)
    assert fleet.most_in_flight == 4
    assert heard == [(done, 21) for done in range(1, 22)]


def test_every_sample_has_a_seed_of_its_own_that_is_the_same_next_time_and_greedy_ones_have_none() -> None:
    first, second, greedy, other = Sums(), Sums(), Sums(), Sums()
    ask(first, SAMPLED)
    ask(second, SAMPLED)
    ask(greedy, GREEDY)
    ask(other, replace(SAMPLED, seed=6))
    assert first.requests == second.requests
    assert len({seed for _, seed in first.requests.values()}) == 21
    assert {seed for _, seed in greedy.requests.values()} == {None}
    assert first.requests != other.requests


def test_figures_are_by_set_and_overall() -> None:
    result = ask(Sums(), GREEDY)
    rows = {name: one.row() for name, one in result.sets.items()}
    assert list(rows) == ["small", "big"]
    assert rows["small"]["pass@1"]["value"] == pytest.approx(3 / 5)
    assert rows["big"]["avg@1"]["value"] == pytest.approx(1 / 2)
    assert result.overall.row()["pass@1"]["value"] == pytest.approx(4 / 7)
    assert (rows["small"]["truncated"], result.overall.row()["num_problems"]) == (0.0, 7)


def test_versions_of_every_answer_are_kept() -> None:
    result = ask(Sums(), replace(GREEDY, max_concurrent=1))
    assert (result.oldest_version, result.newest_version) == (0, 7)
    assert result.responses_by_versions == {(v, v + 1): 1 for v in range(7)}
    assert versions_line(result).startswith("responses: 1 by versions 0 to 1, 1 by versions 1 to 2")


def test_the_deadline_names_its_setting_and_how_far_it_came() -> None:
    fleet = Sums()
    fleet.hangs = True
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s \(limit\) for 21 responses to 7 problems; 0 came"):
        ask(fleet, replace(SAMPLED, timeout_s=0.1))
    assert fleet.in_flight == 0


def test_a_failure_ends_the_evaluation_with_its_own_words() -> None:
    class Broken(Sums):
        async def generate(self, *arguments: Any, **options: Any) -> Generation:
            raise RuntimeError("replica melted")

    with pytest.raises(ExceptionGroup) as caught:
        ask(Broken(), SAMPLED)
    assert str(first_cause(caught.value)) == "replica melted"


def test_report_table_and_samples_say_all_that_was_found(tmp_path: Path) -> None:
    result = ask(Sums(), SAMPLED)
    write_files(tmp_path, result, {"target": "somewhere", "temperature": 0.7}, decode_ids)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["target"] == "somewhere"
    assert report["sets"]["small"]["pass@3"]["value"] == pytest.approx(3 / 5)
    assert report["overall"]["num_samples"] == 3
    assert sum(entry["responses"] for entry in report["responses_by_versions"]) == 21
    head, *rows = table_of(result)
    assert head[:6] == ["set", "problems", "samples", "pass@1", "pass@3", "avg@3"]
    assert [row[:3] for row in rows] == [["small", "5", "15"], ["big", "2", "6"], ["overall", "7", "21"]]
    assert "| small | 5 | 15 | 0.600 +- 0.245 |" in (tmp_path / "report.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["problem"], line["sample"]) for line in lines[:4]] == [
        ("small/0", 0), ("small/0", 1), ("small/0", 2), ("small/1", 0),
    ]  # fmt: skip
    line = lines[3]
    assert (line["set"], line["prompt"], line["response"], line["answer"]) == ("small", "1+1=", "3<eos>", "2")
    assert (line["reward"], line["reason"]) == (0.0, "not the truth and the end token")
    assert (line["tokens"], line["finish_reason"]) == (2, "stop")
    assert sum(count for _, count in line["versions"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0, 1.0, []), "num_samples=0: must be at least 1"),
        (
            (4, 0.0, []),
            "num_samples=4 with temperature=0: greedy responses .* use num_samples=1, or a temperature above 0",
        ),
        ((1, -0.5, []), r"temperature=-0\.5: 0 \(greedy\) or a number above it"),
        ((1, float("nan"), []), "temperature=nan"),
        ((4, 1.0, [1, 8]), r"pass_k=\[1, 8\]: pass@8 needs k between 1 and num_samples=4"),
        ((4, 1.0, [0]), r"pass_k=\[0\]: pass@0 needs k"),
    ],
)
def test_samples_temperature_and_k_must_fit(settings: tuple[int, float, list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_samples(*settings, OF_COMMAND)
    with pytest.raises(UserError, match=r"controller\.eval_"):
        check_samples(*settings, OF_RUN)


def test_k_is_one_and_the_number_of_samples_unless_said_otherwise() -> None:
    assert ks_of((), 1) == (1,)
    assert ks_of((), 16) == (1, 16)
    assert ks_of((8, 2, 8), 16) == (2, 8)
