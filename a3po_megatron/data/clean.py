"""Rows of training sets -> problems that are worth training on: each once, with one answer, none of an evaluation set.

All sets of a run are cleaned together, so a problem that stands in two of them is kept once. The order is that of the
sets and of their rows.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from a3po_megatron.data.overlap import EvaluationTexts, Match
from a3po_megatron.data.report import TrainSetReport
from a3po_megatron.data.sets import Row
from a3po_megatron.data.text import problem_key

Digest = bytes


@dataclass(frozen=True)
class CleanSet:
    """What is kept of one training set, and the counts of the rest (in which no prompt is too long yet)."""

    rows: tuple[Row, ...]
    report: TrainSetReport


@dataclass
class _Tally:
    """What has been counted of one set while it is read."""

    counts: Counter[str] = field(default_factory=Counter)
    answers_of_text: dict[Digest, set[str]] = field(default_factory=lambda: defaultdict(set))


@dataclass
class _Known:
    """One problem by its key: where it stood first, and everything that was claimed about its answer."""

    first: Row
    set_name: str
    answers: set[str]
    repeated: Counter[str] = field(default_factory=Counter)  # further rows, by set


def clean_sets(
    sets: Mapping[str, tuple[str, Iterable[Row]]],
    evaluation: EvaluationTexts,
    without_ngrams: frozenset[str] = frozenset(),
) -> tuple[dict[str, CleanSet], list[Match]]:
    """Return what is kept of each of `sets` (source and rows, by name), and how evaluation problems were met.

    The sets in `without_ngrams` are compared with evaluation problems by the exact test only.
    """
    tallies = {name: _Tally() for name in sets}
    problems = _by_problem({name: rows for name, (_, rows) in sets.items()}, tallies)
    kept: dict[str, list[Row]] = {name: [] for name in sets}
    matches: list[Match] = []
    for known in problems.values():
        counts = tallies[known.set_name].counts
        if len(known.answers) > 1:
            counts["conflicting"] += 1
            for name, repeated in known.repeated.items():
                tallies[name].counts["conflicting"] += repeated
            continue
        for name, repeated in known.repeated.items():
            tallies[name].counts["repeated"] += repeated
        match = evaluation.find(known.first.problem, ngrams=known.set_name not in without_ngrams)
        if match is None:
            kept[known.set_name].append(known.first)
            continue
        matches.append(match)
        counts["contaminated_exact" if match.exact else "contaminated_ngrams"] += 1
    reports = {name: _report(name, source, tallies[name], len(kept[name])) for name, (source, _) in sets.items()}
    return {name: CleanSet(tuple(kept[name]), reports[name]) for name in sets}, matches


def _by_problem(sets: Mapping[str, Iterable[Row]], tallies: Mapping[str, _Tally]) -> dict[Digest, _Known]:
    problems: dict[Digest, _Known] = {}
    for name, rows in sets.items():
        tally = tallies[name]
        for row in rows:
            tally.counts["rows"] += 1
            tally.counts["instructions_removed"] += row.had_instruction
            tally.counts["answers_rewritten"] += row.answer_rewritten
            tally.answers_of_text[_digest(row.published)].add(row.answer)
            key = _digest(problem_key(row.problem))
            if key not in problems:
                problems[key] = _Known(row, name, {row.answer})
            else:
                problems[key].answers.add(row.answer)
                problems[key].repeated[name] += 1
    return problems


def _report(name: str, source: str, tally: _Tally, kept: int) -> TrainSetReport:
    return TrainSetReport(
        name=name,
        source=source,
        rows=tally.counts["rows"],
        different_texts=len(tally.answers_of_text),
        texts_in_conflict=sum(len(answers) > 1 for answers in tally.answers_of_text.values()),
        instructions_removed=tally.counts["instructions_removed"],
        answers_rewritten=tally.counts["answers_rewritten"],
        repeated=tally.counts["repeated"],
        conflicting=tally.counts["conflicting"],
        contaminated_exact=tally.counts["contaminated_exact"],
        contaminated_ngrams=tally.counts["contaminated_ngrams"],
        too_long=0,
        kept=kept,
    )


def repeated_id(rows: Sequence[Row]) -> Row | None:
    """Return the first row whose id an earlier one has, if there is one."""
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            return row
        seen.add(row.id)
    return None


def _digest(text: str) -> Digest:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
