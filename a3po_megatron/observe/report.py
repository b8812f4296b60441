"""What a finished run leaves to look at: a table of its main figures and one picture, from the run's files alone."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from a3po_megatron.observe.progress import accuracy_text
from a3po_megatron.observe.rows import Row, read_rows


@dataclass(frozen=True)
class Report:
    """The rows of one run. Every figure is derived from them."""

    rows: Sequence[Row]  # of metrics.jsonl, one a step
    evaluations: Sequence[Row]  # of evals.jsonl

    @staticmethod
    def read(run_dir: Path) -> "Report":
        """Read a run's folder; a run without a step gives an empty report."""
        return Report(read_rows(run_dir / "metrics.jsonl"), read_rows(run_dir / "evals.jsonl"))

    def total(self, key: str) -> float:
        """Return the sum of a column over the steps; rows without it count as 0."""
        return sum(row.get(key) or 0.0 for row in self.rows)

    def average(self, key: str) -> float | None:
        """Return the mean of a column over the steps that have it."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        return statistics.fmean(values) if values else None

    def median(self, key: str) -> float | None:
        """Return the median of a column over the steps that have it."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        return statistics.median(values) if values else None

    def largest(self, key: str) -> float | None:
        """Return the largest value of a column."""
        return max((row[key] for row in self.rows if row.get(key) is not None), default=None)

    def share_of_step(self, key: str) -> float | None:
        """Return the time in column `key` as a share of all steps' time."""
        step_s = self.total("time/step_s")
        return self.total(key) / step_s if step_s else None

    def lines(self) -> list[tuple[str, str]]:
        """Return (what, figure) for each line of the table; a figure that the run does not have is a dash."""
        lines = []
        if self.evaluations:
            lines.append(("held-out accuracy before", accuracy_text(self.evaluations[0])))
        if len(self.evaluations) > 1:
            lines.append(("held-out accuracy after", accuracy_text(self.evaluations[-1])))
        return [
            *lines,
            ("steps", f"{len(self.rows)}"),
            ("time, start of the engines included", _number(self.total("time/row_s"), "{:.0f} s")),
            ("time of a step, median", _number(self.median("time/row_s"), "{:.2f} s")),
            ("reward, mean of first and last 5 steps", self._reward()),
            ("staleness, mean", _number(self.average("staleness/mean"), "{:.2f} versions")),
            ("staleness, max", _number(self.largest("staleness/max"), "{:.0f} versions")),
            ("samples of several versions", f"{self.total('rollout/samples_of_several_versions'):.0f}"),
            ("proximal step, share of training time", _number(self.share_of_step("time/prox_s"), "{:.2%}")),
            (
                "generation running while the actor trains",
                _number(self.average("rollout/generating_while_training"), "{:.0%} of the time"),
            ),
            ("response tokens a second, mean of the steps", _number(self.average("rollout/tokens_per_s"), "{:.0f}")),
            (
                "log-probabilities, actor against vLLM, max difference",
                _number(self.largest("parity/logprob_max_abs"), "{:.1e}"),
            ),
        ]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        return "\n".join(["| | |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in self.lines()), ""])

    def draw(self, path: Path) -> None:
        """Write the picture: accuracy and reward over the steps, staleness below."""
        import matplotlib  # half a second that only a report pays

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
        steps = [row["step"] for row in self.rows]
        upper.plot(steps, [row["reward/mean"] for row in self.rows], color="tab:gray", label="reward (sampled)")
        upper.errorbar(
            [evaluation["version"] for evaluation in self.evaluations],
            [evaluation["accuracy"] for evaluation in self.evaluations],
            yerr=[evaluation["standard_error"] or 0.0 for evaluation in self.evaluations],
            marker="o",
            capsize=3,
            label="held-out accuracy",
        )
        upper.set_ylabel("share of right answers")
        upper.legend()
        lower.plot(steps, [row["staleness/mean"] for row in self.rows], label="mean")
        lower.plot(steps, [row["staleness/max"] for row in self.rows], linestyle=":", label="max")
        lower.set_ylabel("staleness (versions)")
        lower.set_xlabel("step")
        lower.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def write(self, run_dir: Path) -> tuple[Path, Path]:
        """Write report.md and report.png into the run's folder; return their paths."""
        table, picture = run_dir / "report.md", run_dir / "report.png"
        table.write_text(f"# {run_dir.name}\n\n{self.markdown()}\n![the run]({picture.name})\n")
        self.draw(picture)
        return table, picture

    def _reward(self) -> str:
        rewards = [row["reward/mean"] for row in self.rows]
        return f"{statistics.fmean(rewards[:5]):.3f} -> {statistics.fmean(rewards[-5:]):.3f}" if rewards else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
