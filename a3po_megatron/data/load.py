"""The problems of a run, and how its token ids read as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from a3po_megatron.config.schema import DataConfig, ModelConfig
from a3po_megatron.data.arithmetic import ArithmeticTask, decode_ids
from a3po_megatron.data.gsm8k import data_folder, load_gsm8k
from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.records import Problem


@dataclass(frozen=True)
class TaskData:
    """Made once at the start of a run."""

    train: Sequence[Problem]
    heldout: Sequence[Problem]
    decode: Callable[[Sequence[int]], str]  # with special tokens spelt out, as people should see them
    decode_answer: Callable[[Sequence[int]], str]  # without special tokens, as a reward reads it


def load_task(config: DataConfig, model: ModelConfig) -> TaskData:
    """Return the problems that `config` names, tokenized for `model`. Raises UserError naming what cannot be read."""
    if config.task == "arithmetic":
        task = ArithmeticTask(config.arithmetic)
        return TaskData(
            task.problems(task.train_questions), task.problems(task.heldout_questions), decode_ids, decode_ids
        )
    tokenizer = ChatTokenizer(model.path)
    train_file = Path(config.train_file) if config.train_file else data_folder() / "gsm8k" / "train.jsonl"
    heldout_file = Path(config.heldout_file) if config.heldout_file else data_folder() / "gsm8k" / "test.jsonl"
    return TaskData(
        load_gsm8k(train_file, tokenizer),
        load_gsm8k(heldout_file, tokenizer),
        partial(tokenizer.decode, skip_special_tokens=False),
        tokenizer.decode,
    )
