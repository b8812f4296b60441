"""The real files: their counts, and what cleaning leaves of them. Skipped, saying so, where they are not."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from a3po_megatron.config.data import DataConfig, ProblemSetConfig
from a3po_megatron.data.load import CleanData, load_clean
from a3po_megatron.data.rows import read_rows
from a3po_megatron.data.sets import Row, read_set

ROOT = Path(__file__).parents[3]
PUBLISHED = ProblemSetConfig()
SETS = ("gsm8k", "math500", "aime24", "aime25")


@pytest.fixture(scope="module")
def dapo(published: Path) -> list[Row]:
    return list(read_set("dapo", PUBLISHED, "train"))


@pytest.fixture(scope="module")
def cleaned(published: Path) -> CleanData:
    train = {"dapo": PUBLISHED, "gsm8k": PUBLISHED}
    return load_clean(DataConfig(task="problems", train=train, evaluation=dict.fromkeys(SETS, PUBLISHED)))


@pytest.mark.parametrize(
    ("name", "split", "count"),
    [
        ("gsm8k", "train", 7473),
        ("gsm8k", "test", 1319),
        ("math500", "test", 500),
        ("aime24", "test", 30),
        ("aime25", "test", 30),
    ],
)
def test_every_row_of_the_published_files_is_read(published: Path, name: str, split: str, count: int) -> None:
    rows = list(read_set(name, PUBLISHED, split))
    assert len(rows) == len({row.id for row in rows}) == count
    assert not any(row.had_instruction for row in rows)


def test_the_answers_of_gsm8k_are_plain_numbers(published: Path) -> None:
    commas = negative = 0
    for split in ("train", "test"):
        path = published / "gsm8k" / f"{split}.jsonl"
        sources = [json.loads(line)["answer"].rsplit("#### ", 1)[1] for line in path.open(encoding="utf-8")]
        answers = [row.answer for row in read_set("gsm8k", PUBLISHED, split)]
        assert answers == [source.replace(",", "") for source in sources]
        commas += sum("," in source for source in sources)
        negative += sum(answer.startswith("-") for answer in answers)
    assert (commas, negative) == (93, 5)


def test_dapo_is_what_it_is_known_to_be(dapo: list[Row]) -> None:
    texts = {row.published for row in dapo}
    assert (len(dapo), len(texts)) == (17917, 17290)
    assert sum(row.answer.startswith("-") for row in dapo) == 366
    assert sum(bool(re.search("[\u4e00-\u9fff]", text)) for text in texts) == 3242
    assert all(re.fullmatch(r"-?\d+", row.answer) for row in dapo)


def test_both_forms_of_dapo_hold_the_same_problems(published: Path, dapo: list[Row]) -> None:
    official = list(
        read_set("dapo", ProblemSetConfig(path=str(published / "dapo" / "official_format_sample14.jsonl")), "train")
    )
    assert len(official) == 14
    assert all(row.had_instruction for row in official)
    stripped = {(row.problem, row.answer) for row in dapo}
    assert {(row.problem, row.answer) for row in official} <= stripped


def test_the_two_copies_of_aime25_agree_once_floats_and_instructions_are_gone(published: Path) -> None:
    other = ProblemSetConfig(path=str(published / "aime25" / "other_copy.jsonl"))
    ours, theirs = list(read_set("aime25", PUBLISHED, "test")), list(read_set("aime25", other, "test"))
    assert [row.answer for row in ours] == [row.answer for row in theirs]
    assert all(row.answer.isdecimal() for row in ours)
    assert all(row.answer_rewritten and not row.had_instruction for row in ours)
    assert all(row.had_instruction and not row.answer_rewritten for row in theirs)
    assert not any("boxed" in row.problem for row in theirs)


def test_cleaning_counts_every_row(cleaned: CleanData) -> None:
    dapo, gsm8k = cleaned.report.train
    assert (dapo.rows, dapo.different_texts, dapo.texts_in_conflict) == (17917, 17290, 11)
    assert (dapo.repeated, dapo.conflicting, dapo.kept) == (1303, 44, 16542)
    assert (dapo.contaminated_exact, dapo.contaminated_ngrams, dapo.instructions_removed) == (7, 21, 20)
    assert (gsm8k.rows, gsm8k.contaminated_ngrams, gsm8k.kept) == (7473, 2, 7471)
    met = {e.name: (e.in_training_exact, e.in_training_ngrams) for e in cleaned.report.evaluation}
    assert met == {"gsm8k": (0, 1), "math500": (7, 16), "aime24": (0, 0), "aime25": (0, 0)}
    assert {name: len(rows) for name, rows in cleaned.evaluation.items()} == {
        "gsm8k": 1319,
        "math500": 500,
        "aime24": 30,
        "aime25": 30,
    }


def test_prepare_data_writes_what_a_run_reads_back(published: Path, tmp_path: Path) -> None:
    out = tmp_path / "clean.jsonl"
    command = [sys.executable, "tools/prepare_data.py", str(out), "train.dapo.limit=300", "evaluation.math500={}"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "A3PO_DATA": str(published)}, timeout=90, **TEXT
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.with_suffix(".report.json").read_text())
    rows = [values for _, _, values in read_rows(str(out), "", "")]
    assert len(rows) == report["train"][0]["kept"] > 250
    assert done.stdout.splitlines()[-1].startswith(f"{out}: {len(rows)} problems")
    assert [set(row) for row in rows] == [{"id", "problem", "answer", "source"}] * len(rows)
    columns = {"problem_column": "problem", "answer_column": "answer", "id_column": "id"}
    again = read_set("clean", ProblemSetConfig(kind="columns", path=str(out), **columns), "train")
    assert [(row.id, row.problem, row.answer) for row in again] == [
        (f"clean/{row['id']}", row["problem"], row["answer"]) for row in rows
    ]
    second = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, timeout=90, **TEXT)
    assert second.returncode == 2
    assert "is there already" in second.stderr


TEXT = {"capture_output": True, "text": True}
