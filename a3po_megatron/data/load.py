"""The problems of a run, and how its token ids read as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from a3po_megatron.config.data import DataConfig, ProblemSetConfig
from a3po_megatron.config.schema import ModelConfig
from a3po_megatron.data.arithmetic import ArithmeticTask, decode_ids
from a3po_megatron.data.clean import CleanSet, clean_sets, repeated_id
from a3po_megatron.data.overlap import EvaluationTexts, Match
from a3po_megatron.data.prompts import PromptWriter
from a3po_megatron.data.report import DataReport, EvaluationSetReport
from a3po_megatron.data.sets import Row, format_of, kind_of, read_set, source_of
from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.errors import UserError
from a3po_megatron.records import Problem


@dataclass(frozen=True)
class TaskData:
    """Made once at the start of a run."""

    train: Sequence[Problem]
    evaluation: Mapping[str, Sequence[Problem]]  # by name of the set
    decode: Callable[[Sequence[int]], str]  # with special tokens spelt out, as people should see them
    decode_answer: Callable[[Sequence[int]], str]  # without special tokens, as a reward reads it
    report: DataReport | None = None  # None for the arithmetic task

    def heldout(self, max_problems: int | None) -> list[Problem]:
        """Return the first `max_problems` problems (None: all) of every evaluation set, end to end."""
        return [problem for problems in self.evaluation.values() for problem in problems[:max_problems]]


@dataclass(frozen=True)
class CleanData:
    """All sets as text: the training sets cleaned, the evaluation sets whole."""

    train: Mapping[str, CleanSet]
    evaluation: Mapping[str, Sequence[Row]]
    report: DataReport


def load_task(config: DataConfig, model: ModelConfig, max_prompt_tokens: int) -> TaskData:
    """Return the problems that `config` names, tokenized for `model`.

    Training problems whose prompt has more than `max_prompt_tokens` are left out and counted in the report. Raises
    UserError naming what cannot be read, and when nothing is left to train on.
    """
    if config.task == "arithmetic":
        task = ArithmeticTask(config.arithmetic)
        heldout = {"arithmetic": task.problems(task.heldout_questions)}
        return TaskData(task.problems(task.train_questions), heldout, decode_ids, decode_ids)
    tokenizer = ChatTokenizer(model.path)
    writer = PromptWriter(config.prompt, tokenizer)
    data = load_clean(config)
    train: list[Problem] = []
    reports = []
    for name, clean in data.train.items():
        problems = _problems(name, config.train[name], clean.rows, writer)
        fitting = [problem for problem in problems if len(problem.prompt_ids) <= max_prompt_tokens]
        too_long = len(problems) - len(fitting)
        reports.append(replace(clean.report, too_long=too_long, kept=len(fitting)))
        train += fitting
    report = DataReport(tuple(reports), data.report.evaluation)
    if not train:
        raise UserError(f"data.train: no problem is left to train on; {'; '.join(report.lines())}")
    evaluation = _evaluation_problems(config, data.evaluation, writer)
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return TaskData(train, evaluation, decode, tokenizer.decode, report)


def load_evaluation(config: DataConfig, model_path: str) -> TaskData:
    """Return the evaluation sets that `config` names, tokenized for the model at `model_path`, and nothing to train on.

    Raises UserError naming what cannot be read.
    """
    if config.task == "arithmetic":
        return replace(load_task(config, ModelConfig(model_path), 0), train=())
    tokenizer = ChatTokenizer(model_path)
    writer = PromptWriter(config.prompt, tokenizer)
    data = load_clean(replace(config, train={}, decontaminate="off"))
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    return TaskData((), _evaluation_problems(config, data.evaluation, writer), decode, tokenizer.decode)


def load_clean(config: DataConfig) -> CleanData:
    """Read all sets, clean the training sets, and report what became of every row.

    Raises UserError for a row that cannot be read, and for an id that two rows have: ids seed the sampling.
    """
    evaluation = {name: tuple(read_set(name, one, "test")) for name, one in config.evaluation.items()}
    compared = [row.problem for rows in evaluation.values() for row in rows] if config.decontaminate != "off" else []
    train, matches = clean_sets(
        {name: (source_of(name, one, "train"), read_set(name, one, "train")) for name, one in config.train.items()},
        EvaluationTexts(compared, config.ngram, config.ngram_share, ngrams=config.decontaminate == "ngrams"),
        # Every problem of a generator shares most of its words with every other.
        frozenset(name for name, one in config.train.items() if kind_of(name, one) == "generated"),
    )
    for rows in [*evaluation.values(), *(clean.rows for clean in train.values())]:
        if (row := repeated_id(rows)) is not None:
            raise UserError(f"{row.where}: the id {row.id!r} stands further up too; ids must be different")
    reports = (*_evaluation_reports(config, evaluation, matches),)
    return CleanData(train, evaluation, DataReport(tuple(clean.report for clean in train.values()), reports))


def _evaluation_reports(
    config: DataConfig, evaluation: Mapping[str, Sequence[Row]], matches: Sequence[Match]
) -> Iterator[EvaluationSetReport]:
    exact = {position for match in matches if match.exact for position in match.positions}
    ngrams = {position for match in matches for position in match.positions} - exact
    end = 0
    for name, rows in evaluation.items():
        begin, end = end, end + len(rows)
        yield EvaluationSetReport(
            name=name,
            source=source_of(name, config.evaluation[name], "test"),
            rows=len(rows),
            instructions_removed=sum(row.had_instruction for row in rows),
            answers_rewritten=sum(row.answer_rewritten for row in rows),
            in_training_exact=len(exact & set(range(begin, end))),
            in_training_ngrams=len(ngrams & set(range(begin, end))),
        )


def _evaluation_problems(
    config: DataConfig, rows_of: Mapping[str, Sequence[Row]], writer: PromptWriter
) -> dict[str, list[Problem]]:
    return {name: _problems(name, config.evaluation[name], rows, writer) for name, rows in rows_of.items()}


def _problems(name: str, config: ProblemSetConfig, rows: Sequence[Row], writer: PromptWriter) -> list[Problem]:
    own = format_of(name, config).instruction
    return [Problem(row.id, writer.ids(row.problem, own), row.answer, name) for row in rows]
