"""The settings of problems and prompts, `data.*`. What the sets are: docs/data.md."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ArithmeticTaskConfig:
    """Questions `a+b=` with 0 <= a, b <= max_operand; answers are digits and an end token."""

    max_operand: int = 99
    num_heldout: int = 1000
    split_seed: int = 1234  # of the shuffle that separates train from held-out questions


@dataclass(frozen=True)
class ProblemSetConfig:
    """One set of problems of `data.train` or `data.evaluation`, which name it."""

    # generated: by reasoning-gym; columns: any file, by the columns below; empty: the set's name is its kind
    kind: Literal["", "gsm8k", "dapo", "math500", "aime24", "aime25", "generated", "columns"] = ""
    path: str = ""  # .jsonl or .parquet file, Hugging Face folder or hub id; empty: the kind's file in the data folder
    subset: str = ""  # of a Hugging Face data set that has several, for example `main`
    # of a Hugging Face data set, and of gsm8k's files; empty: train in data.train, test in data.evaluation
    split: str = ""
    limit: int = 0  # rows read, from the front; 0: all. Of `kind: generated`: how many are made
    problem_column: str = ""  # dotted path such as `prompt.0.content`; empty: the kind's own
    answer_column: str = ""
    id_column: str = ""  # of `kind: columns` empty: the row's number
    generator: str = ""  # of `kind: generated`: reasoning-gym's name, for example leg_counting
    seed: int = 0  # of `kind: generated`: problem i comes from seed + i, so keep the seeds of two sets far apart


@dataclass(frozen=True)
class PromptConfig:
    """How a problem becomes what the model reads: instruction, system prompt, chat template."""

    style: Literal["chat", "plain"] = "chat"  # plain: the text as it is, for base models without a chat template
    # own: that of the problem's set; dapo, gsm8k, boxed: as those sets are published; custom: `prefix` and `suffix`
    instruction: Literal["own", "dapo", "gsm8k", "boxed", "none", "custom"] = "own"
    prefix: str = ""  # of `instruction: custom`, with its own line breaks
    suffix: str = ""
    system: str = ""  # system prompt of the chat; empty: none, or what the template writes by itself
    # `enable_thinking` of the chat template; template: the template's own default
    thinking: Literal["template", "enabled", "disabled"] = "template"


@dataclass(frozen=True)
class DataConfig:
    """Which problems are trained on and which are held out."""

    task: Literal["arithmetic", "problems"] = "arithmetic"
    arithmetic: ArithmeticTaskConfig = field(default_factory=ArithmeticTaskConfig)  # of `task: arithmetic`
    # The rest is of `task: problems`. Sets by name: `train: {dapo: {}}`, `evaluation: {math500: {}, aime24: {}}`
    train: dict[str, ProblemSetConfig] = field(default_factory=dict)
    evaluation: dict[str, ProblemSetConfig] = field(default_factory=dict)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    # Training problems that also stand in an evaluation set are left out. exact: the same letters and digits;
    # ngrams: also those that hold `ngram_share` of an evaluation problem's runs of `ngram` words (not of generated sets)
    decontaminate: Literal["ngrams", "exact", "off"] = "ngrams"
    ngram: int = 10
    ngram_share: float = 0.5
