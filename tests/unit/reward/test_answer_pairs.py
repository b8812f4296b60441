"""The judge on our own table of answers, each with its reason."""

import pytest

from a3po_megatron.records import Verdict
from a3po_megatron.reward.pool import WorkerPool
from tests.references.answer_pairs import MATCH, MISMATCH
from tests.unit.reward.conftest import Judge

PAIRS = [(1.0, *pair) for pair in MATCH] + [(0.0, *pair) for pair in MISMATCH]


@pytest.fixture(scope="module")
def verdicts(judge: Judge) -> list[Verdict]:
    return judge([(gold, response) for _, gold, response, _ in PAIRS])


def test_the_table_is_large_and_without_repetition() -> None:
    assert len(MATCH) >= 100
    assert len(MISMATCH) >= 100
    assert len({(gold, response) for _, gold, response, _ in PAIRS}) == len(PAIRS)
    assert all(why for *_, why in PAIRS)


@pytest.mark.parametrize("index", range(len(PAIRS)), ids=[f"{expected:.0f}-{why}" for expected, _, _, why in PAIRS])
def test_the_judge_agrees_with_the_table(verdicts: list[Verdict], index: int) -> None:
    expected, gold, response, why = PAIRS[index]
    verdict = verdicts[index]
    assert verdict.reward == expected, f"{why}: {gold!r} and {response[:80]!r}: {verdict}"
    assert verdict.reason


def test_every_truth_of_the_table_can_be_judged_and_no_worker_was_lost(pool: WorkerPool) -> None:
    assert pool.restarts == 0
