"""What became of every row: counted set by set, printed, and saved with the run."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainSetReport:
    """The rows of one training set. `rows` is the sum of the counts from `repeated` on; made by `clean.py`."""

    name: str
    source: str
    rows: int
    different_texts: int  # of the problem's field, as it stands in the file
    texts_in_conflict: int  # of these, those that stand there with different answers
    instructions_removed: int  # rows whose problem's field held an instruction
    answers_rewritten: int  # rows whose answer's field was spelt otherwise, such as 70.0
    repeated: int  # left out: the same problem stands further up, perhaps in another set
    conflicting: int  # left out: the same problem has another answer elsewhere
    contaminated_exact: int  # left out: the letters and digits are those of an evaluation problem
    contaminated_ngrams: int  # left out: too much of an evaluation problem's text
    too_long: int  # left out: the prompt leaves no room for the response
    kept: int

    def __post_init__(self) -> None:
        left_out = self.repeated + self.conflicting + self.contaminated_exact + self.contaminated_ngrams + self.too_long
        assert self.rows == self.kept + left_out, f"{self.name}: {self.rows} rows, but the counts do not add up"


@dataclass(frozen=True)
class EvaluationSetReport:
    """The rows of one evaluation set, which all stay."""

    name: str
    source: str
    rows: int
    instructions_removed: int
    answers_rewritten: int
    in_training_exact: int  # problems that also stand in the training data, which loses them
    in_training_ngrams: int  # further problems of which too much stands in the training data


@dataclass(frozen=True)
class DataReport:
    """All sets of a run."""

    train: tuple[TrainSetReport, ...]
    evaluation: tuple[EvaluationSetReport, ...]

    def lines(self) -> Iterator[str]:
        """Yield the report as people read it, a line a set."""
        for s in self.train:
            counts = {
                "repeated": s.repeated,
                "with conflicting answers": s.conflicting,
                "in an evaluation set": s.contaminated_exact + s.contaminated_ngrams,
                "too long": s.too_long,
            }
            left_out = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
            yield f"train {s.name}: {s.kept} problems of {s.rows} rows ({s.source}); left out: {left_out or 'none'}"
        for e in self.evaluation:
            met = e.in_training_exact + e.in_training_ngrams
            yield f"evaluation {e.name}: {e.rows} problems ({e.source}); {met} of them stood in the training data"

    def save(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
