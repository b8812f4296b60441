"""What a person sees while a run goes on: one line that lives at a terminal, a line a step elsewhere."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from a3po_megatron.observe.rows import Row, RowTail


class Progress:
    """Follows `metrics.jsonl` and `evals.jsonl` of a run's folder. A context: the live line ends with it."""

    def __init__(self, run_dir: Path, num_steps: int, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._num_steps = num_steps
        self._rows, self._evaluations = RowTail(run_dir / "metrics.jsonl"), RowTail(run_dir / "evals.jsonl")
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total} steps"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._first: tuple[float, int] | None = None  # (time, step) of the first row seen

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def phase(self, what: str) -> None:
        """Say what is being waited for, until the next step says more."""
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(f"... {what}", soft_wrap=True)

    def update(self) -> None:
        """Show what was written since the last call."""
        for evaluation in self._evaluations.new_rows():
            self._console.print(evaluation_line(evaluation), soft_wrap=True)
        for row in self._rows.new_rows():
            line = step_line(row, self._left_s(row))
            self._bar.update(self._task, completed=row["step"] + 1, description=line)
            if not self._console.is_terminal:
                self._console.print(f"step {row['step'] + 1}/{self._num_steps}  {line}", soft_wrap=True)

    def _left_s(self, row: Row) -> float | None:
        """Return the time that the remaining steps will take if they go as those seen so far; None at the first."""
        now = time.monotonic()
        if self._first is None:
            self._first = now, row["step"]
            return None
        began, first_step = self._first
        if row["step"] == first_step:
            return None
        return (now - began) / (row["step"] - first_step) * (self._num_steps - 1 - row["step"])


def step_line(row: Row, left_s: float | None) -> str:
    """Return one row as people follow it."""
    left = "" if left_s is None else f"  {round(left_s) // 60} min {round(left_s) % 60:02d} s left"
    return (
        f"reward {row['reward/mean']:.3f}  staleness {row['staleness/mean']:.2f} (max {row['staleness/max']})  "
        f"{row['rollout/tokens_per_s']:.0f} tokens/s{left}"
    )


def evaluation_line(row: Row) -> str:
    """Return one evaluation as people follow it."""
    newest = row["newest_version"]
    versions = f"version {row['version']}" if newest == row["version"] else f"versions {row['version']} to {newest}"
    return (
        f"held-out accuracy {accuracy_text(row)} at {versions} ({row['num_problems']} problems, {row['time_s']:.1f} s)"
    )


def accuracy_text(evaluation: Row) -> str:
    """Return the accuracy of one evaluation with its standard error; one problem has none."""
    error = evaluation["standard_error"]
    return f"{evaluation['accuracy']:.3f}" + ("" if error is None else f" +- {error:.3f}")
