"""Reading files and Hugging Face folders: every row with its place, every fault named by file and line."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from a3po_megatron.config.data import ProblemSetConfig
from a3po_megatron.data.rows import read_rows, value_at
from a3po_megatron.data.sets import read_set
from a3po_megatron.errors import UserError
from tests.unit.data.conftest import WriteRows

CHECKOUT = Path(__file__).resolve().parents[3]
ROWS = [{"q": f"What is {i}?", "meta": {"a": [i]}} for i in range(2500)]  # more than are loaded at once


def read(path: object, split: str = "train") -> list[tuple[str, int, Any]]:
    return list(read_rows(str(path), "", split))


def test_a_parquet_file_a_saved_folder_and_a_folder_of_files_give_the_same_rows(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": data, "test": data.select(range(3))}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "files" / "train.parquet")
    for path in ("rows.parquet", "saved", "splits", "files"):
        rows = read(tmp_path / path)
        assert [values for _, _, values in rows] == ROWS, path
        assert [number for _, number, _ in rows] == list(range(1, 2501))
        assert rows[-1][0].endswith("row 2500")
    assert len(read(tmp_path / "splits", "test")) == 3
    with pytest.raises(UserError, match=r"splits: there is no split 'dev'; name one of train, test"):
        read(tmp_path / "splits", "dev")
    with pytest.raises(UserError, match=r"saved: a data set as `save_to_disk` writes it has no subset 'main'"):
        list(read_rows(str(tmp_path / "saved"), "main", "train"))
    with pytest.raises(UserError, match=r"files: cannot load split 'dev' of the data set: "):
        read(tmp_path / "files", "dev")


def test_lines_end_at_newlines_only(write_rows: WriteRows) -> None:
    path = write_rows("rows.jsonl", {"question": "One\u2028two\r?"}, {"question": "b"})
    assert [(where, values) for where, _, values in read(path)] == [
        (f"{path}, line 1", {"question": "One\u2028two\r?"}),
        (f"{path}, line 2", {"question": "b"}),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"question": \n', "line 2: not valid JSON"),
        (b"\n", "line 2: not valid JSON"),
        (b"[1]\n", "line 2: expected an object"),
        (b'{"q": "\xff"}\n', "line 2: not UTF-8 text"),
        (b"[" * 100_000 + b"\n", "line 2: not valid JSON"),
        ({"question": "How many?"}, "line 2: no column 'answer'; the row has question"),
        ({"question": " ", "answer": "#### 1"}, "line 2: the problem (question) is empty or not text: ' '"),
        ({"question": ["a"], "answer": "#### 1"}, "line 2: the problem (question) is empty or not text: ['a']"),
        ({"question": "How many?", "answer": "about 42"}, "line 2: the answer ends with 'about 42'"),
        (
            {"question": "How many?", "answer": None},
            "line 2: the answer (answer) is empty, or neither text nor a number",
        ),
    ],
)
def test_a_broken_row_is_named_by_file_and_line(write_rows: WriteRows, row: object, message: str) -> None:
    path = write_rows("rows.jsonl", {"question": "How many?", "answer": "#### 1"}, row)
    with pytest.raises(UserError) as error:
        list(read_set("gsm8k", ProblemSetConfig(path=path), "train"))
    assert str(error.value).startswith(f"{path}, {message}")
    assert "\n" not in str(error.value)


def test_an_unreadable_file_is_named(tmp_path: Path, write_rows: WriteRows) -> None:
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(UserError, match=rf"none\.{name[5:]}: cannot read the file: No such file"):
            read(tmp_path / name)
    with pytest.raises(UserError, match=r"rows\.txt: a file of problems ends with \.jsonl or \.parquet"):
        read(write_rows("rows.txt", {}))
    with pytest.raises(UserError, match=r"empty\.jsonl: the file is empty"):
        read(write_rows("empty.jsonl"))
    with pytest.raises(UserError, match=r"bad\.parquet: not a parquet file after row 0"):
        read(write_rows("bad.parquet", b"PAR1 no"))
    with pytest.raises(UserError, match=r"nowhere: not there; expected a file"):
        read(tmp_path / "nowhere")


def test_a_hub_id_that_cannot_be_reached_is_one_line() -> None:
    code = (
        "from a3po_megatron.data.rows import read_rows\nfrom a3po_megatron.errors import exit_on_user_error\n"
        "exit(exit_on_user_error(lambda: len(list(read_rows('openai/no-such-set', 'main', 'train')))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("error: openai/no-such-set: cannot load split 'train' of the data set: ")
    assert run.stderr.count("\n") == 1


def test_a_column_is_a_dotted_path() -> None:
    row = {"prompt": [{"content": "a"}, {"content": "b"}], "x": {"y": 0}, "name": "text"}
    assert value_at(row, "prompt.1.content") == "b"
    assert value_at(row, "x.y") == 0
    for missing in ("prompt.2.content", "prompt.content", "x.z", "name.0", "z"):
        with pytest.raises(KeyError):
            value_at(row, missing)


@pytest.mark.full  # imports of several seconds
def test_loading_problems_imports_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, datasets, reasoning_gym, a3po_megatron.data.load, a3po_megatron.data.check\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr
