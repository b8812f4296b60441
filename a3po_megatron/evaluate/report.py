"""What an evaluation leaves: report.json, report.md with the table for people, samples.jsonl."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from a3po_megatron.evaluate.loop import Answers
from a3po_megatron.evaluate.result import Result, SetResult
from a3po_megatron.reward.base import Decoder

MANY_VERSIONS = 8

Table = list[list[str]]  # rows of cells; the first is the head


def table_of(result: Result) -> Table:
    """Return the figures, a row a set and one for all of them where there are several."""
    columns = list(result.overall.figures.columns())
    rows = [["set", "problems", "samples", *columns, "cut off", "tokens a response"]]
    sets = {**result.sets, "overall": result.overall} if len(result.sets) > 1 else result.sets
    return rows + [_table_row(name, one) for name, one in sets.items()]


def _table_row(name: str, one: SetResult) -> list[str]:
    figures = one.figures
    estimates = [str(estimate) for estimate in figures.columns().values()]
    counts = [str(figures.num_problems), str(figures.num_problems * figures.num_samples)]
    return [name, *counts, *estimates, f"{one.truncated:.1%}", f"{one.response_tokens_mean:.0f}"]


def versions_line(result: Result) -> str:
    """Return which weight versions answered, for people: one by one where they are few."""
    if len(result.responses_by_versions) > MANY_VERSIONS:
        several = sum(count for (oldest, newest), count in result.responses_by_versions.items() if oldest != newest)
        total = sum(result.responses_by_versions.values())
        span = f"{result.oldest_version} to {result.newest_version}"
        return f"responses: {total} by versions {span}, {several} of them by more than one"
    parts = [
        f"{count} by version {oldest}" if oldest == newest else f"{count} by versions {oldest} to {newest}"
        for (oldest, newest), count in result.responses_by_versions.items()
    ]
    return f"responses: {', '.join(parts)}"


def report_row(result: Result) -> dict[str, Any]:
    """Return the figures as report.json has them."""
    return {
        "overall": result.overall.row(),
        "sets": {name: one.row() for name, one in result.sets.items()},
        "responses_by_versions": [
            {"oldest": oldest, "newest": newest, "responses": count}
            for (oldest, newest), count in result.responses_by_versions.items()
        ],
    }


def markdown(table: Table) -> str:
    """Return a table as Markdown."""
    head, *rows = table
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def sample_lines(answers: Sequence[Answers], decode: Decoder) -> Iterator[bytes]:
    """Yield every response as a line of JSON, problem by problem. `decode` spells special tokens out."""
    for one in answers:
        prompt = decode(one.problem.prompt_ids.tolist())
        for index, (sample, verdict) in enumerate(zip(one.samples, one.verdicts, strict=True)):
            line = {
                "problem": one.problem.id,
                "set": one.problem.source,
                "sample": index,
                "prompt": prompt,
                "response": decode(sample.response_ids.tolist()),
                "answer": one.problem.answer,
                "extracted": verdict.extracted,
                "reward": float(verdict.reward),
                "reason": verdict.reason,
                "tokens": len(sample.response_ids),
                "finish_reason": sample.finish_reason,
                "versions": version_spans(sample.versions.tolist()),
            }
            yield msgspec.json.encode(line) + b"\n"


def version_spans(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Return (version, number of tokens) of each stretch: [7, 7, 8] becomes [(7, 2), (8, 1)]."""
    return [(version, len(list(stretch))) for version, stretch in itertools.groupby(versions)]


def write_files(folder: Path, result: Result, about: dict[str, Any], decode: Decoder) -> None:
    """Write the three files into `folder`; `about` says what was evaluated, and how."""
    with (folder / "samples.jsonl").open("wb") as file:
        file.writelines(sample_lines(result.answers, decode))
    lines = [f"- {name}: {value}" for name, value in about.items()]
    text = "\n".join([f"# {about['target']}", "", markdown(table_of(result)), versions_line(result), "", *lines, ""])
    (folder / "report.md").write_text(text, encoding="utf-8")
    row = msgspec.json.format(msgspec.json.encode(about | report_row(result)), indent=2)
    (folder / "report.json").write_bytes(row + b"\n")
