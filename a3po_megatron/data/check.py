"""Refuses data settings that cannot work, before any file is opened, and prompts that are too long, once they are read."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from a3po_megatron.config.data import DataConfig, ProblemSetConfig, PromptConfig
from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.data.rows import SUFFIXES
from a3po_megatron.data.sets import FORMATS, kind_of
from a3po_megatron.errors import UserError
from a3po_megatron.records import Problem

OF_COLUMNS = ("problem_column", "answer_column")
NOT_GENERATED = ("path", "subset", "split", *OF_COLUMNS, "id_column")


def check_data(config: DataConfig) -> None:
    """Check the sets, the prompt and the decontamination. Raises UserError naming the setting."""
    check_evaluation_data(config)
    if config.task == "arithmetic":
        if config.train:
            raise UserError("data.train: sets of problems need data.task=problems; it is arithmetic")
        return
    if not config.train:
        raise UserError("data.train is empty: name at least one set, for example data.train.gsm8k={}")
    _check_sets("data.train", config.train)
    if config.ngram < 1:
        raise UserError(f"data.ngram={config.ngram}: must be at least 1; 8 to 13 words are usual")
    if not 0 < config.ngram_share <= 1:
        raise UserError(
            f"data.ngram_share={config.ngram_share}: above 0 and at most 1; for no such test decontaminate=exact"
        )


def check_evaluation_data(config: DataConfig) -> None:
    """Check the evaluation sets and the prompt. Raises UserError naming the setting."""
    if config.task == "arithmetic":
        if config.evaluation:
            raise UserError("data.evaluation: sets of problems need data.task=problems; it is arithmetic")
        return
    _check_sets("data.evaluation", config.evaluation)
    _check_prompt(config.prompt)


def check_lengths(problems: Sequence[Problem], rollout: RolloutConfig) -> None:
    """Refuse a prompt that leaves no room for the response, before anything is generated. Raises UserError.

    Of the training problems, those of `task: problems` that are too long have been left out and counted before.
    """
    longest = max(problems, key=lambda problem: len(problem.prompt_ids))
    needed = len(longest.prompt_ids) + rollout.max_response_tokens
    if needed > rollout.max_model_len:
        raise UserError(
            f"rollout.max_model_len={rollout.max_model_len}: problem {longest.id!r} has {len(longest.prompt_ids)} prompt tokens, "
            f"with rollout.max_response_tokens={rollout.max_response_tokens} that is {needed}; raise rollout.max_model_len or "
            "lower rollout.max_response_tokens"
        )


def _check_sets(section: str, sets: Mapping[str, ProblemSetConfig]) -> None:
    for name, config in sets.items():
        where, kind = f"{section}.{name}", kind_of(name, config)
        if kind not in (*FORMATS, "generated", "columns"):
            raise UserError(
                f"{where}: no kind is called {kind!r}; set {where}.kind to {', '.join(FORMATS)}, generated or columns"
            )
        if config.limit < 0:
            raise UserError(f"{where}.limit={config.limit}: must be at least 0, which means all rows")
        if kind == "generated":
            _check_generated(where, config)
        elif config.generator or config.seed:
            raise UserError(f"{where}: generator and seed are of kind=generated; it is {kind}")
        if kind == "columns":
            for column in ("path", *OF_COLUMNS):
                if not getattr(config, column):
                    raise UserError(
                        f"{where}.{column} is empty: kind=columns needs path, problem_column and answer_column"
                    )
        _check_split(where, kind, config)


def _check_split(where: str, kind: str, config: ProblemSetConfig) -> None:
    """Refuse a split or subset that nothing would read."""
    if config.path.endswith(SUFFIXES) and (config.split or config.subset):
        raise UserError(f"{where}.path={config.path} is a file, which has no split and no subset; leave those empty")
    if config.path or kind not in FORMATS:
        return
    if config.subset:
        raise UserError(
            f"{where}.subset={config.subset}: {kind} of the data folder has none; set path or leave it empty"
        )
    file = Path(FORMATS[kind].file)
    if config.split not in ("", file.stem) and "{split}" not in str(file):
        raise UserError(
            f"{where}.split={config.split}: {kind} is one file of the data folder, {file}; leave it empty, or set "
            "path to a Hugging Face data set"
        )


def _check_generated(where: str, config: ProblemSetConfig) -> None:
    if not config.generator:
        raise UserError(f"{where}.generator is empty: name a generator of reasoning-gym, for example leg_counting")
    if config.limit < 1:
        raise UserError(f"{where}.limit={config.limit}: say how many problems are generated")
    for name in NOT_GENERATED:
        if getattr(config, name):
            raise UserError(f"{where}.{name}={getattr(config, name)}: a generated set has none; leave it empty")


def _check_prompt(prompt: PromptConfig) -> None:
    if prompt.instruction != "custom" and (prompt.prefix or prompt.suffix):
        raise UserError(
            f"data.prompt.prefix and suffix are of data.prompt.instruction=custom; it is {prompt.instruction}"
        )
    if prompt.style == "plain" and (prompt.system or prompt.thinking != "template"):
        raise UserError("data.prompt.style=plain: system and thinking are written by a chat template; leave them unset")
