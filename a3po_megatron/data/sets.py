"""The sets of problems that can be named, and how a row of each becomes (problem, answer, id)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from a3po_megatron.config.data import ProblemSetConfig
from a3po_megatron.data import gsm8k
from a3po_megatron.data.folder import data_folder
from a3po_megatron.data.generated import generate_rows
from a3po_megatron.data.rows import read_rows, value_at
from a3po_megatron.data.text import (
    BOXED_SUFFIX,
    DAPO_PREFIX,
    DAPO_SUFFIX,
    Instruction,
    normalized_answer,
    strip_instruction,
)
from a3po_megatron.errors import UserError

BOXED = Instruction(suffix=BOXED_SUFFIX)
INSTRUCTIONS = {
    "dapo": Instruction(DAPO_PREFIX, DAPO_SUFFIX),
    "gsm8k": gsm8k.INSTRUCTION,
    "boxed": BOXED,
    "none": Instruction(),
}


@dataclass(frozen=True)
class Row:
    """One problem of a set, before any cleaning. Made here, read by `clean.py`."""

    where: str  # file and line, for messages
    id: str
    published: str  # the problem's field as it stands in the file
    problem: str  # without known instructions
    answer: str
    had_instruction: bool
    answer_rewritten: bool  # the answer's field was spelt otherwise, such as 70.0


@dataclass(frozen=True)
class Format:
    """How a published set is written. A column is a dotted path; the first of several that a row has counts."""

    problem: tuple[str, ...]
    answer: tuple[str, ...]
    id: tuple[str, ...] = ()  # none: the number of the line or row
    file: str = ""  # in the data folder; {split} is train or test
    instruction: Instruction = BOXED
    parse_answer: Callable[[str], str] | None = None  # raises ValueError for what is no answer of the set


def aime_answer(answer: str) -> str:
    """Return an answer of the AIME. Raises ValueError for what is none."""
    if not (answer.isdecimal() and int(answer) <= 999):
        raise ValueError(f"the answer {answer!r} is not a whole number from 0 to 999, as every answer of the AIME is")
    return answer


AIME = Format(problem=("problem", "question"), answer=("answer",), id=("id",), parse_answer=aime_answer)
FORMATS = {
    "gsm8k": Format(
        problem=("question",),
        answer=("answer",),
        file="gsm8k/{split}.jsonl",
        instruction=gsm8k.INSTRUCTION,
        parse_answer=gsm8k.final_answer,
    ),
    "dapo": Format(
        problem=("prompt.0.content",),
        answer=("reward_model.ground_truth",),
        id=("extra_info.index",),
        file="dapo/dapo_math_17k.svs.parquet",
        instruction=INSTRUCTIONS["dapo"],
    ),
    "math500": Format(problem=("problem",), answer=("answer",), id=("unique_id",), file="math500/test.jsonl"),
    "aime24": replace(AIME, file="aime24/test.jsonl"),
    "aime25": replace(AIME, file="aime25/test.jsonl"),
}


def kind_of(name: str, config: ProblemSetConfig) -> str:
    """Return the kind of the set called `name`: its own name where none is stated."""
    return config.kind or name


def format_of(name: str, config: ProblemSetConfig) -> Format:
    """Return how the set's rows are written; a stated column comes before those of the kind."""
    kind = kind_of(name, config)
    if kind == "generated":
        return Format(("question",), ("answer",))
    known = FORMATS.get(kind, Format(problem=(), answer=()))
    return replace(
        known,
        problem=(config.problem_column,) if config.problem_column else known.problem,
        answer=(config.answer_column,) if config.answer_column else known.answer,
        id=(config.id_column,) if config.id_column else known.id,
    )


def source_of(name: str, config: ProblemSetConfig, default_split: str) -> str:
    """Return where the set comes from: the generator, or the path of its file, folder or hub id.

    `default_split`: train or test, where the settings state none.
    """
    if kind_of(name, config) == "generated":
        return f"reasoning-gym {config.generator}, seed {config.seed}"
    return config.path or str(data_folder() / format_of(name, config).file.format(split=config.split or default_split))


def read_set(name: str, config: ProblemSetConfig, default_split: str) -> Iterator[Row]:
    """Yield the rows of one set, at most `config.limit`. `default_split`: train or test, where the settings state none.

    Raises UserError naming file and line of the first row without a problem or an answer.
    """
    style = format_of(name, config)
    if kind_of(name, config) == "generated":
        rows = generate_rows(config.generator, config.limit, config.seed)
    else:
        rows = read_rows(source_of(name, config, default_split), config.subset, config.split or default_split)
    for where, number, values in rows:
        if config.limit and number > config.limit:
            return
        yield _row(style, name, where, number, values)


def _row(style: Format, name: str, where: str, number: int, values: Mapping[str, Any]) -> Row:
    published = _value(where, values, style.problem)
    if not isinstance(published, str) or not published.strip():
        raise UserError(f"{where}: the problem ({style.problem[0]}) is empty or not text: {published!r}")
    given = _value(where, values, style.answer)
    spelt = normalized_answer(given)
    if spelt is None:
        raise UserError(f"{where}: the answer ({style.answer[0]}) is empty, or neither text nor a number: {given!r}")
    try:
        answer = style.parse_answer(spelt) if style.parse_answer else spelt
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    problem, had_instruction = strip_instruction(published)
    row_id = _value(where, values, style.id, default=number)
    return Row(
        where, f"{name}/{row_id}", published, problem, answer, had_instruction, answer_rewritten=spelt != str(given)
    )


def _value(where: str, values: Mapping[str, Any], columns: tuple[str, ...], default: Any = None) -> Any:
    for column in columns:
        try:
            return value_at(values, column)
        except KeyError:
            pass
    if default is not None:
        return default
    raise UserError(f"{where}: no column {' or '.join(map(repr, columns))}; the row has {', '.join(map(str, values))}")
