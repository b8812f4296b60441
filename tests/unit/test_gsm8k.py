"""GSM8K rows -> problems, and the torch-free tokenizer against transformers' own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from a3po_megatron.data.gsm8k import data_folder, load_gsm8k, read_gsm8k
from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.errors import UserError

CHECKOUT = Path(__file__).resolve().parents[2]
CHAT = [{"role": "user", "content": "What is 1,234 + 5?\n  Réponse: <|im_end|> 中"}]


@pytest.fixture
def shared_data() -> Path:
    try:
        return data_folder()
    except UserError as error:
        pytest.skip(str(error))


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "count", "negative"), [("train", 7473, 3), ("test", 1319, 2)])
def test_published_files_are_read_whole(shared_data: Path, name: str, count: int, negative: int) -> None:
    path = shared_data / "gsm8k" / f"{name}.jsonl"
    rows = read_gsm8k(path)
    assert len(rows) == count
    assert sum(row.answer.startswith("-") for row in rows) == negative
    sources = [json.loads(line)["answer"].rsplit("#### ", 1)[1] for line in path.open(encoding="utf-8")]
    assert [row.answer for row in rows] == [source.replace(",", "") for source in sources]


@pytest.mark.parametrize(("written", "answer"), [("42", "42"), ("1,234,000", "1234000"), ("-10", "-10")])
def test_answer_is_plain_decimal_text(tmp_path: Path, written: str, answer: str) -> None:
    path = write_rows(tmp_path / "train.jsonl", {"question": "How many?", "answer": f"6*7=42 #### no\n#### {written}"})
    assert [(row.line, row.question, row.answer) for row in read_gsm8k(path)] == [(1, "How many?", answer)]


GOOD = {"question": "How many?", "answer": "#### 1"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": \n', "line 2: not valid JSON"),
        ("\n", "line 2: not valid JSON"),
        ("[1]\n", "line 2: expected an object"),
        ({"question": "How many?"}, "line 2: 'answer' is missing"),
        ({"question": " ", "answer": "#### 1"}, "line 2: 'question' is missing, empty"),
        ({"question": "How many?", "answer": "about 42"}, "line 2: the answer ends with 'about 42'"),
        ({"question": "How many?", "answer": "#### many"}, "line 2: the answer ends with '#### many'"),
        ({"question": "How many?", "answer": "#### nan"}, "line 2: the answer ends with '#### nan'"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GOOD, row)
    with pytest.raises(UserError) as error:
        read_gsm8k(path)
    assert str(error.value).startswith(f"{path}, {message}")
    assert "\n" not in str(error.value)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: cannot read the GSM8K file: No such file"):
        read_gsm8k(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"binary\.jsonl: not UTF-8"):
        read_gsm8k(tmp_path / "binary.jsonl")
    with pytest.raises(UserError, match="is empty"):
        read_gsm8k(write_rows(tmp_path / "empty.jsonl"))


def test_missing_data_folder_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A3PO_DATA", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"none is not there; set A3PO_DATA"):
        data_folder()


def test_line_separator_inside_a_question_does_not_split_the_row(tmp_path: Path) -> None:
    row = json.dumps({"question": "One\u2028two?", "answer": "#### 2"}, ensure_ascii=False) + "\n"
    assert [r.question for r in read_gsm8k(write_rows(tmp_path / "rows.jsonl", row))] == ["One\u2028two?"]


def test_problem_is_the_question_in_the_models_own_chat_template(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(shared_data / "qwen3_tokenizer")
    path = write_rows(tmp_path / "train.jsonl", GOOD, {"question": "And then?", "answer": "#### 1,000"})
    first, second = load_gsm8k(path, tokenizer, instruction="Be brief.")
    assert (first.id, second.id, second.answer) == ("gsm8k/train/1", "gsm8k/train/2", "1000")
    text = tokenizer.decode(second.prompt_ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nAnd then?\nBe brief.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_chat_ids_equal_transformers(shared_data: Path, options: dict[str, bool]) -> None:
    from transformers import AutoTokenizer

    folder = shared_data / "qwen3_tokenizer"
    reference = AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False, **options)
    tokenizer = ChatTokenizer(folder)
    assert tokenizer.chat_ids(CHAT, **options).tolist() == expected
    assert tokenizer.decode(expected) == reference.decode(expected, skip_special_tokens=True)


def test_folder_without_tokenizer_or_template_is_named(tmp_path: Path, shared_data: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: not found"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((shared_data / "qwen3_tokenizer" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    plain = ChatTokenizer(tmp_path)
    assert plain.decode(plain.encode("1+2=3")) == "1+2=3"
    with pytest.raises(UserError, match="no chat template"):
        plain.chat_ids(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only a system message') }}")
    with pytest.raises(UserError, match="refuses these messages: only a system message"):
        ChatTokenizer(tmp_path).chat_ids(CHAT)


def test_loading_problems_and_scoring_import_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, a3po_megatron.data.gsm8k, a3po_megatron.data.tokenizer, a3po_megatron.reward.numeric\n"
        "print(sorted({'torch', 'transformers', 'vllm', 'megatron'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr
