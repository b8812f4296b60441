"""Cleaning on small files, every count by hand; decontamination; what a changed file does to a saved cursor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from a3po_megatron.config.data import DataConfig, ProblemSetConfig, PromptConfig
from a3po_megatron.config.schema import ModelConfig
from a3po_megatron.data.check import check_data
from a3po_megatron.data.load import load_clean, load_task
from a3po_megatron.data.overlap import EvaluationTexts, grams_of
from a3po_megatron.data.source import PromptSource
from a3po_megatron.errors import UserError
from tests.unit.data.conftest import WriteRows

COLUMNS = ProblemSetConfig(kind="columns", problem_column="p", answer_column="a")
ARITHMETIC = ModelConfig(str(Path(__file__).parents[3] / "configs/models/arithmetic_qwen3"))
LONG = "the quick brown fox jumps over the lazy dog and then sleeps until noon"  # 14 words


def pairs(*rows: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"p": problem, "a": answer} for problem, answer in rows]


def test_repeated_conflicting_and_contaminated_rows_are_left_out_and_counted(write_rows: WriteRows) -> None:
    first = write_rows(
        "first.jsonl",
        *pairs(
            ("What is 1 + 1?", 2.0),  # kept
            ("what is $1+1$?", "2"),  # repeated
            ("What is 1 - 1?", "0"),  # kept: another sign
            ("How many?", "3"),  # conflicting
            ("How many?", "4"),
            ("Evaluate x^2 at 3", "9"),  # contaminated, by its letters
            (f"Tell me: {LONG}?\nPlease reason step by step, and put your final answer within \\boxed{{}}.", "5"),
        ),
    )
    second = write_rows("second.jsonl", *pairs(("What is 1 + 1?", "02"), ("HOW MANY?", 3), ("New?", "1")))
    tests = write_rows("tests.jsonl", *pairs(("Evaluate $x^{2}$ at 3.", "9"), (f"{LONG}. Why?", "0"), ("Other?", "1")))
    config = DataConfig(
        task="problems",
        train={"one": replace(COLUMNS, path=first), "two": replace(COLUMNS, path=second)},
        evaluation={"tests": replace(COLUMNS, path=tests)},
    )
    check_data(config)
    data = load_clean(config)
    assert [(row.id, row.problem, row.answer) for row in data.train["one"].rows] == [
        ("one/1", "What is 1 + 1?", "2"),
        ("one/3", "What is 1 - 1?", "0"),
    ]
    assert [row.id for row in data.train["two"].rows] == ["two/3"]
    one, two = data.report.train
    assert (one.rows, one.different_texts, one.texts_in_conflict) == (7, 6, 1)
    assert (one.repeated, one.conflicting, one.contaminated_exact, one.contaminated_ngrams, one.kept) == (1, 2, 1, 1, 2)
    assert (one.instructions_removed, one.answers_rewritten) == (1, 1)
    assert (two.repeated, two.conflicting, two.answers_rewritten, two.kept) == (1, 1, 1, 1)
    (report,) = data.report.evaluation
    assert (report.rows, report.in_training_exact, report.in_training_ngrams) == (3, 1, 1)
    assert next(data.report.lines()) == (
        f"train one: 2 problems of 7 rows ({first}); "
        "left out: 1 repeated, 2 with conflicting answers, 2 in an evaluation set"
    )
    kept = {way: len(load_clean(replace(config, decontaminate=way)).train["one"].rows) for way in ("exact", "off")}
    assert kept == {"exact": 3, "off": 4}


def test_one_common_phrase_is_no_contamination_and_a_short_problem_must_stand_there_whole() -> None:
    evaluation = [LONG, "Compute sin 60"]
    texts = EvaluationTexts(evaluation, n=5, share=0.5)
    assert len(grams_of(LONG.split(), 5)) == 10
    assert texts.find("the quick brown fox jumps over the lazy dog") == texts.find(f"so {LONG}")  # 5 of 10 runs
    assert texts.find("the quick brown fox jumps over the lazy cat") is None  # 4 of 10
    assert texts.find("Now compute $\\sin 60$ twice") is not None
    assert texts.find("Compute sin 600") is None
    assert texts.find(f"so {LONG}", ngrams=False) is None
    assert EvaluationTexts(evaluation, 5, 0.5, ngrams=False).find(f"so {LONG}") is None
    both = EvaluationTexts([LONG, LONG.upper() + "!"], 5, 0.5).find(LONG)
    assert both is not None
    assert (both.exact, both.positions) == (True, (0, 1))


def test_generated_problems_are_the_same_for_the_same_seed_and_share_their_words() -> None:
    legs = ProblemSetConfig(kind="generated", generator="leg_counting", limit=20, seed=1)
    config = DataConfig(task="problems", train={"legs": legs}, evaluation={"legs": replace(legs, limit=5, seed=999)})
    check_data(config)
    data = load_clean(config)
    assert len(data.train["legs"].rows) == 20
    assert data.train["legs"].rows == load_clean(config).train["legs"].rows
    assert (
        data.train["legs"].rows
        != load_clean(replace(config, train={"legs": replace(legs, seed=30)})).train["legs"].rows
    )
    near = load_clean(replace(config, evaluation={"legs": replace(legs, limit=5, seed=4)}))  # 4..8 are among 1..20
    assert near.report.train[0].contaminated_exact == 5
    with pytest.raises(UserError, match=r"generator='leg_count': .* did you mean leg_counting"):
        load_clean(replace(config, train={"legs": replace(legs, generator="leg_count")}))
    with pytest.raises(UserError, match=r"generator='composite': reasoning-gym refuses"):
        load_clean(replace(config, train={"legs": replace(legs, generator="composite")}))
    with pytest.raises(UserError, match=r"rubiks_cube \(seed 1\), problem 1: the answer \(answer\) is empty"):
        load_clean(replace(config, train={"legs": replace(legs, generator="rubiks_cube")}))


def test_prompts_that_are_too_long_are_counted_and_left_out(write_rows: WriteRows) -> None:
    path = write_rows("sums.jsonl", *pairs(("1+1=", 2), ("12+12=", 24), ("123+123=", 246)))
    config = DataConfig(
        task="problems",
        train={"sums": replace(COLUMNS, path=path)},
        prompt=PromptConfig(style="plain", instruction="none"),
    )
    data = load_task(config, ARITHMETIC, max_prompt_tokens=6)
    assert [(p.id, p.prompt_ids.tolist(), p.answer, p.source) for p in data.train] == [
        ("sums/1", [3, 12, 3, 13], "2", "sums"),
        ("sums/2", [3, 4, 12, 3, 4, 13], "24", "sums"),
    ]
    assert data.report is not None
    assert (data.report.train[0].too_long, data.report.train[0].kept) == (1, 2)
    with pytest.raises(UserError, match=r"no problem is left to train on; train sums: 0 .* left out: 3 too long"):
        load_task(config, ARITHMETIC, max_prompt_tokens=3)


def test_a_file_that_changed_is_refused_on_resume_unless_the_change_does_not_matter(write_rows: WriteRows) -> None:
    rows = pairs(*((f"{i}+1=", i + 1) for i in range(10)))

    def source(*changed: dict[str, Any]) -> PromptSource:
        config = DataConfig(
            task="problems",
            train={"sums": replace(COLUMNS, path=write_rows("sums.jsonl", *changed))},
            prompt=PromptConfig(style="plain", instruction="none"),
        )
        return PromptSource(load_task(config, ARITHMETIC, 64).train, seed=5)

    original = source(*rows)
    for _ in range(13):
        original.draw()
    state = original.state()
    resumed = source(*({**row, "comment": "new"} for row in rows))
    resumed.restore(state)
    assert [resumed.draw().problem.id for _ in range(30)] == [original.draw().problem.id for _ in range(30)]
    for changed in ([*rows[:9], {"p": "9+1=", "a": 11}], [{"p": "0+2=", "a": 1}, *rows[1:]], rows[:9], rows[::-1]):
        with pytest.raises(UserError, match=r"resume: the data's fingerprint is \w+, the saved cursor's is \w+"):
            source(*changed).restore(state)


def test_an_id_that_two_rows_have_is_refused(write_rows: WriteRows) -> None:
    path = write_rows("rows.jsonl", {"p": "a", "a": 1, "n": 7}, {"p": "b", "a": 1, "n": 7})
    config = DataConfig(task="problems", train={"rows": replace(COLUMNS, path=path, id_column="n")})
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: the id 'rows/7' stands further up too"):
        load_clean(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "data.train is empty"),
        ({"train": {"mine": ProblemSetConfig()}}, "data.train.mine: no kind is called 'mine'"),
        ({"train": {"mine": replace(COLUMNS, path="")}}, "data.train.mine.path is empty"),
        ({"train": {"mine": replace(COLUMNS, path="x", answer_column="")}}, "data.train.mine.answer_column is empty"),
        ({"train": {"dapo": ProblemSetConfig(limit=-1)}}, "data.train.dapo.limit=-1"),
        ({"train": {"dapo": ProblemSetConfig(seed=1)}}, "data.train.dapo: generator and seed are of kind=generated"),
        ({"train": {"dapo": ProblemSetConfig(path="a.parquet", split="x")}}, "a.parquet is a file, which has no split"),
        ({"train": {"dapo": ProblemSetConfig(split="test")}}, "data.train.dapo.split=test: dapo is one file"),
        (
            {"train": {"gsm8k": ProblemSetConfig(subset="main")}},
            "data.train.gsm8k.subset=main: gsm8k of the data folder",
        ),
        ({"train": {"g": ProblemSetConfig(kind="generated", limit=1)}}, "data.train.g.generator is empty"),
        ({"train": {"g": ProblemSetConfig(kind="generated", generator="x")}}, "data.train.g.limit=0: say how many"),
        (
            {"train": {"g": ProblemSetConfig(kind="generated", generator="x", limit=1, path="y")}},
            "data.train.g.path=y: a generated set has none",
        ),
        ({"evaluation": {"aime26": ProblemSetConfig()}}, "data.evaluation.aime26: no kind is called 'aime26'"),
        ({"prompt": PromptConfig(suffix="x")}, "data.prompt.prefix and suffix are of data.prompt.instruction=custom"),
        ({"prompt": PromptConfig(style="plain", thinking="disabled")}, "data.prompt.style=plain: system and thinking"),
        ({"ngram": 0}, "data.ngram=0"),
        ({"ngram_share": 0.0}, "data.ngram_share=0.0"),
    ],
)
def test_contradictory_settings_are_named(changes: dict[str, Any], message: str) -> None:
    train = {"gsm8k": ProblemSetConfig()} if changes else {}
    with pytest.raises(UserError) as error:
        check_data(DataConfig(task="problems", **{"train": train, **changes}))
    assert message in str(error.value)


def test_the_split_that_a_files_name_says_may_be_stated() -> None:
    check_data(DataConfig(task="problems", train={"gsm8k": ProblemSetConfig(split="test")}))
    check_data(
        DataConfig(
            task="problems", train={"gsm8k": ProblemSetConfig()}, evaluation={"aime24": ProblemSetConfig(split="test")}
        )
    )
