"""The judge against published labels and truths: GSM8K's model solutions, math-verify's own cases, DAPO, MATH500, AIME."""

from typing import Any

import pytest

from a3po_megatron.records import Verdict
from a3po_megatron.reward.base import RewardError
from a3po_megatron.reward.compare import Comparison
from a3po_megatron.reward.judge import MathSettings
from a3po_megatron.reward.pool import WorkerPool
from a3po_megatron.reward.worker import Request
from tests.unit.reward.conftest import Judge, data_file, json_rows

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
# math-verify's cases that convention `auto` judges otherwise than they expect, by row of the file.
UNMARKED = "the text has no mark of a final answer, and `auto` does not guess"
DECIMAL_COMMA = "a decimal comma: `1,22` is read as the list 1, 22"
AUTO_DIFFERS = {
    **dict.fromkeys((5, 6, 7, 17), DECIMAL_COMMA),
    **dict.fromkeys((13, 14, 16), "the sentence denies one number and names another; `auto` does not read denials"),
    15: "two numbers in one sentence without a mark",
    31: "expected 0, because a formula in single dollars may not span lines; we take it",
    32: "expected 0, because a formula in \\(...\\) may not span lines; we take it",
    62: "broken LaTeX: dollars inside the box, and escaped quotes around the answer",
    **dict.fromkeys((98, 100, 101, 114, 115), "a chain such as `x = 5+5+1 = 7 = 11` is false, whatever its end says"),
    **dict.fromkeys((119, 120, 121, 122, 123, 124, 143, 163), UNMARKED),
    130: "a form feed in the answer, from an unescaped \\frac in the test's source",
    214: "the truth is a broken box",
}


def test_every_label_of_the_published_gsm8k_solutions_is_reproduced(judge: Judge) -> None:
    rows = [
        (row["ground_truth"], row[model])
        for row in json_rows("gsm8k/example_model_solutions.jsonl")
        for model in MODELS
    ]
    verdicts = judge([(truth, labelled["solution"]) for truth, labelled in rows])
    wrong = [
        (truth[-20:], labelled["solution"][-60:], verdict)
        for (truth, labelled), verdict in zip(rows, verdicts, strict=True)
        if verdict.reward != float(labelled["is_correct"])
    ]
    assert wrong == []
    assert (len(rows), sum(verdict.reward for verdict in verdicts)) == (5276, 2001)


def case_request(case: dict[str, Any], convention: str) -> Request:
    comparison = Comparison(
        case.get("precision", 6), case.get("strict", True), case.get("allow_set_relation_comp", False)
    )
    return Request("math", case["gold"], case["pred"], MathSettings(convention, comparison, tuple(case["match_types"])))


def differing(cases: list[dict[str, Any]], verdicts: list[Verdict]) -> list[int]:
    return [row for row, (case, v) in enumerate(zip(cases, verdicts, strict=True)) if v.reward != case["expected"]]


def test_all_254_cases_of_math_verify_hold_through_the_pool(pool: WorkerPool) -> None:
    cases = json_rows("graders/math_verify/cases.jsonl")
    verdicts = pool.judge_now([case_request(case, "anywhere") for case in cases])
    assert len(cases) == 254
    assert differing(cases, verdicts) == []


def test_the_cases_that_auto_judges_otherwise_are_the_listed_ones(pool: WorkerPool) -> None:
    cases = json_rows("graders/math_verify/cases.jsonl")
    verdicts = []
    for case in cases:
        try:
            verdicts += pool.judge_now([case_request(case, "auto")])
        except RewardError:
            verdicts.append(Verdict(0.0, "the truth cannot be judged"))
    assert differing(cases, verdicts) == sorted(AUTO_DIFFERS)


def dapo_verdicts(judge: Judge, every: int) -> tuple[list[tuple[str, int, str]], int]:
    """Judge truth, truth + 1 and truth - 1 of every `every`-th row in both forms; return what is wrong, and how many."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(data_file("dapo/dapo_math_17k.svs.parquet"), columns=["reward_model"])
    truths = [row["ground_truth"] for row in table["reward_model"].to_pylist()][::every]
    pairs = [
        (truth, offset, form)
        for truth in truths
        for offset in (0, 1, -1)
        for form in ("So that is it.\n\nAnswer: {}", "So that is it: $\\boxed{{{}}}$.")
    ]
    verdicts = judge([(truth, form.format(int(truth) + offset)) for truth, offset, form in pairs])
    wrong = [pair for pair, v in zip(pairs, verdicts, strict=True) if v.reward != float(pair[1] == 0)]
    return wrong, len(truths)


def test_of_a_tenth_of_dapo_the_truth_scores_1_and_its_neighbours_0(judge: Judge) -> None:
    assert dapo_verdicts(judge, every=10) == ([], 1792)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_of_all_of_dapo_the_truth_scores_1_and_its_neighbours_0(judge: Judge) -> None:
    assert dapo_verdicts(judge, every=1) == ([], 17917)


def test_every_truth_of_math500_equals_itself_in_every_form_and_no_other_one(judge: Judge) -> None:
    truths = [row["answer"] for row in json_rows("math500/test.jsonl")]
    for form in ("Answer: {}", "so $\\boxed{{{}}}$.", "Answer: ${}$"):
        verdicts = judge([(truth, form.format(truth)) for truth in truths])
        assert [(t, v) for t, v in zip(truths, verdicts, strict=True) if v.reward != 1.0] == []
    others = list(zip(truths, truths[1:] + truths[:1], strict=True))
    verdicts = judge([(truth, f"\\boxed{{{other}}}") for truth, other in others])
    taken = {pair for pair, verdict in zip(others, verdicts, strict=True) if verdict.reward}
    assert {pair for pair in taken if pair[0] != pair[1]} == {("5", "x=5")}


@pytest.mark.parametrize("name", ["aime24/test.jsonl", "aime25/test.jsonl", "aime25/other_copy.jsonl"])
def test_aime_answers_are_judged_with_their_zeros_and_points(judge: Judge, name: str) -> None:
    truths = [str(row["answer"]) for row in json_rows(name)]
    for offset in (0, 1):
        verdicts = judge([(truth, f"\\boxed{{{int(float(truth)) + offset}}}") for truth in truths])
        assert [v.reward for v in verdicts] == [1.0 - offset] * 30
