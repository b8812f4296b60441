"""From a problem to token ids: instructions, system prompt, thinking, templates, base models."""

import json
from pathlib import Path

import pytest

from a3po_megatron.config.data import DataConfig, ProblemSetConfig, PromptConfig
from a3po_megatron.config.load import load_config
from a3po_megatron.config.schema import ModelConfig, TrainConfig
from a3po_megatron.controller.build import build_controller, check_controller
from a3po_megatron.data.load import load_task
from a3po_megatron.data.prompts import PromptWriter
from a3po_megatron.data.rows import read_rows
from a3po_megatron.data.sets import INSTRUCTIONS
from a3po_megatron.data.text import Instruction
from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.errors import UserError

THINKING = "<|im_start|>assistant\n"
NO_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def qwen3(published: Path) -> ChatTokenizer:
    return ChatTokenizer(published / "qwen3_tokenizer")


def test_the_published_prompts_of_dapo_come_out_token_for_token(published: Path, qwen3: ChatTokenizer) -> None:
    """The 14 published rows lose prefix and suffix on reading and get them back: the ids are those of the published text.

    That these are transformers' ids too is in test_tokenizer.py.
    """
    official = str(published / "dapo" / "official_format_sample14.jsonl")
    expected = {values["extra_info"]["index"]: values["prompt"] for _, _, values in read_rows(official, "", "")}
    train = {"dapo": ProblemSetConfig(path=official)}
    data = load_task(DataConfig(task="problems", train=train), ModelConfig(str(published / "qwen3_tokenizer")), 2048)
    assert len(data.train) == len(expected) == 14
    assert data.report is not None
    assert data.report.train[0].instructions_removed == 14
    for problem in data.train:
        (message,) = expected[problem.id.removeprefix("dapo/")]
        text = f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
        assert data.decode(problem.prompt_ids.tolist()) == text
        assert problem.prompt_ids.tolist() == qwen3.encode(text).tolist()


@pytest.mark.parametrize(
    ("thinking", "end"), [("template", THINKING), ("enabled", THINKING), ("disabled", NO_THINKING)]
)
def test_thinking_and_system_prompt(qwen3: ChatTokenizer, thinking: str, end: str) -> None:
    config = PromptConfig(system="Be brief.", thinking=thinking, instruction="boxed")
    ids = PromptWriter(config, qwen3).ids("What is $1+1$?", INSTRUCTIONS["dapo"])
    assert qwen3.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is $1+1$?\n"
        f"Please reason step by step, and put your final answer within \\boxed{{}}.<|im_end|>\n{end}"
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (PromptConfig(instruction="none"), "Q"),
        (PromptConfig(instruction="custom", prefix="Solve: ", suffix="\n\nGo."), "Solve: Q\n\nGo."),
        (PromptConfig(), "own Q"),
        (PromptConfig(instruction="gsm8k"), INSTRUCTIONS["gsm8k"].around("Q")),
    ],
)
def test_the_instruction_is_the_sets_own_or_the_stated_one(
    qwen3: ChatTokenizer, config: PromptConfig, text: str
) -> None:
    assert PromptWriter(config, qwen3).text("Q", Instruction(prefix="own ")) == text


def test_a_base_model_without_template_is_refused_unless_the_style_is_plain(published: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((published / "qwen3_tokenizer" / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    base = ChatTokenizer(tmp_path)
    with pytest.raises(UserError, match=r"has no chat template; use an instruct model, or data\.prompt\.style=plain"):
        PromptWriter(PromptConfig(), base)
    ids = PromptWriter(PromptConfig(style="plain"), base).ids("What is 1+1?", INSTRUCTIONS["gsm8k"])
    assert base.decode(ids) == INSTRUCTIONS["gsm8k"].around("What is 1+1?")


def test_a_template_that_knows_no_thinking_is_refused_when_thinking_is_set(published: Path, tmp_path: Path) -> None:
    """Qwen2.5's template ignores enable_thinking: the setting would silently do nothing."""
    for name, copy in (("tokenizer.json", "tokenizer.json"), ("qwen2.5_chat_template.jinja", "chat_template.jinja")):
        (tmp_path / copy).write_bytes((published / "qwen3_tokenizer" / name).read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    qwen25 = ChatTokenizer(tmp_path)
    with pytest.raises(
        UserError, match=r"data\.prompt\.thinking=disabled: the chat template of .* has no enable_thinking"
    ):
        PromptWriter(PromptConfig(thinking="disabled"), qwen25)
    text = qwen25.decode(PromptWriter(PromptConfig(), qwen25).ids("Q", INSTRUCTIONS["none"]), skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nYou are Qwen, created by Alibaba Cloud.")
    assert text.endswith("<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n")


def test_a_controller_is_built_on_dapo_with_the_real_tokenizer(published: Path, tmp_path: Path) -> None:
    """Everything before the first server: sets by name, room for responses, report beside the run's other files."""
    model = tmp_path / "model"
    model.mkdir()
    for file in (published / "qwen3_tokenizer").iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").symlink_to(published / "hf_configs" / "Qwen3-8B.json")
    config = load_config(
        TrainConfig,
        None,
        [
            f"run.dir={tmp_path / 'run'}",
            f"model.path={model}",
            "data.task=problems",
            "reward.kind=math",
            "data.train.dapo.limit=40",
            "data.evaluation.math500={}",
            "data.evaluation.aime24={}",
            "data.prompt.thinking=disabled",
            "controller.max_eval_problems=3",
            "rollout.max_model_len=300",
            "rollout.max_response_tokens=100",
        ],
    )
    check_controller(config)
    controller = build_controller(config, "a-token")
    assert [problem.source for problem in controller.parts.heldout] == ["math500"] * 3 + ["aime24"] * 3
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    dapo = report["train"][0]
    assert dapo["rows"] == 40
    assert 0 < dapo["too_long"] == 40 - dapo["kept"]
    draws = [controller.parts.source.draw() for _ in range(dapo["kept"] + 1)]
    assert [draw.epoch for draw in draws] == [0] * dapo["kept"] + [1]
    assert max(len(draw.problem.prompt_ids) for draw in draws) <= 200
