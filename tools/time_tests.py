"""Time `make test`: run it several times one after another and print the minutes of each part against its budget.

    python tools/time_tests.py [--runs 3] [--from-clone] [--write [docs/testing.md]]

A quiet machine of two cores gives figures that compare with the budgets. Ends at the first run that fails, with its exit code,
and keeps its log. `--write` puts the table between the two marks of the page.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET_MINUTES = {"unit": 6, "distributed": 8, "engine": 8, "system": 10, "slurm": 8}
BEGIN, END = "<!-- timed runs -->", "<!-- end of timed runs -->"
NUM_SLOWEST = 10
PART = re.compile(r"^== tests/(\w+)$", re.MULTILINE)
SUMMARY = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in ([\d.]+)s", re.MULTILINE)
DURATION = re.compile(r"^([\d.]+)s (call|setup|teardown) +(tests/\S.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """What pytest said of one part: its seconds and how many tests passed, failed (errors too) and were skipped."""

    name: str
    seconds: float
    passed: int
    failed: int
    skipped: int


def read_parts(output: str) -> list[Part]:
    """Read the parts from the output of `make test`. A part without a summary, which did not end, is left out."""
    names = list(PART.finditer(output))
    ends = [*(match.start() for match in names[1:]), len(output)]
    parts = []
    for name, end in zip(names, ends, strict=True):
        summaries = SUMMARY.findall(output, name.end(), end)
        if summaries:
            counts, seconds = summaries[-1]
            number = {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", counts)}
            failed = sum(number.get(word, 0) for word in ("failed", "error", "errors"))
            parts.append(Part(name[1], float(seconds), number.get("passed", 0), failed, number.get("skipped", 0)))
    return parts


def read_slowest(output: str) -> list[tuple[float, str]]:
    """Return the slowest tests of all parts, slowest first: seconds with set-up and tear-down, and the test's name."""
    seconds: dict[str, float] = {}
    for took, _, test in DURATION.findall(output):
        seconds[test] = seconds.get(test, 0.0) + float(took)
    return sorted(((took, test) for test, took in seconds.items()), reverse=True)[:NUM_SLOWEST]


def table(runs: Sequence[Sequence[Part]], head: str) -> str:
    """Return `head` and a markdown table: a row a part with its minutes in each run, its budget and the last run's counts."""
    numbers = "".join(f" run {number} |" for number in range(1, len(runs) + 1))
    lines = [head, "", f"| part |{numbers} budget | passed | failed | skipped |", "|---|" + "---|" * (len(runs) + 4)]
    for last in runs[-1]:
        taken = [next(part.seconds for part in run if part.name == last.name) for run in runs]
        cells = [_minutes(seconds) for seconds in taken] + [f"{BUDGET_MINUTES[last.name]}:00"]
        lines.append(f"| {last.name} | {' | '.join(cells)} | {last.passed} | {last.failed} | {last.skipped} |")
    totals = [_minutes(sum(part.seconds for part in run)) for run in runs] + [f"{sum(BUDGET_MINUTES.values())}:00"]
    counts = [sum(getattr(part, word) for part in runs[-1]) for word in ("passed", "failed", "skipped")]
    lines.append(f"| all | {' | '.join([*totals, *map(str, counts)])} |")
    return "\n".join(lines)


def insert(page: str, text: str) -> str:
    """Return `page` with `text` between its two marks. Raises ValueError where they are not there, once and in order."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"expected one {BEGIN} and after it one {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def run_once(tree: Path, log: Path) -> int:
    """Run `make test` in `tree`, its output to the screen and to `log`; return its exit code."""
    durations = f"{os.environ.get('PYTEST_ADDOPTS', '')} --durations={NUM_SLOWEST} --durations-min=0"
    environment = os.environ | {"PYTEST_ADDOPTS": durations.strip()}
    with (
        log.open("w") as file,
        subprocess.Popen(
            ["make", "test"], cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            file.write(line)
            file.flush()
    return process.returncode


def main(arguments: Sequence[str]) -> int:
    """Parse, run, print, write; return the exit code."""
    parser = argparse.ArgumentParser(prog="time_tests.py", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="how many times (default: %(default)s)")
    parser.add_argument("--from-clone", action="store_true", help="run a clean clone of the last commit, not this tree")
    parser.add_argument("--log-dir", type=Path, help="where the runs' output goes (default: a new temporary folder)")
    parser.add_argument("--write", nargs="?", type=Path, const=ROOT / "docs/testing.md", help="page to write into")
    options = parser.parse_args(arguments)
    if options.write:
        try:
            insert(options.write.read_text(), "")  # before the hours that the runs take
        except (OSError, ValueError) as error:
            print(f"error: --write {options.write}: {error}", file=sys.stderr)
            return 2
    logs = options.log_dir or Path(tempfile.mkdtemp(prefix="time-tests-"))
    logs.mkdir(parents=True, exist_ok=True)
    tree = ROOT
    if options.from_clone:
        tree = logs / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    runs, output = [], ""
    for number in range(1, options.runs + 1):
        log, began = logs / f"run_{number}.log", time.monotonic()
        code = run_once(tree, log)
        output = log.read_text()
        runs.append(read_parts(output))
        if code != 0 or any(part.failed for part in runs[-1]):
            print(f"error: run {number} of make test failed with exit code {code}; its log: {log}", file=sys.stderr)
            return code or 1
        print(f"run {number}: {_minutes(time.monotonic() - began)} with set-up; log: {log}", flush=True)
    text = table(runs, _head(tree))
    print(text, *(f"{took:7.1f} s  {test}" for took, test in read_slowest(output)), sep="\n")
    if options.write:
        options.write.write_text(insert(options.write.read_text(), text))
    return 0


def _minutes(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def _head(tree: Path) -> str:
    """Return what was timed: the commit, marked where the tree differs from it, the day and the cores."""
    git = ["git", "-C", str(tree)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True).stdout
    note = ", with changes" if changed else ""
    cores = len(os.sched_getaffinity(0))
    return f"Minutes of pytest at commit {commit.strip()}{note}, {datetime.now(UTC):%Y-%m-%d}, {cores} cores."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
