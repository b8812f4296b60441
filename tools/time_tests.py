"""Time `make test`: run it several times one after another, the minutes of each part against its budget, the slowest tests.

    python tools/time_tests.py [--runs 3] [--from-clone] [--log-dir FOLDER] [--write [docs/testing.md]]

A quiet machine of two cores gives figures that compare with the budgets. The first run that fails ends it, with that run's exit
code and the names of the tests that failed. `--write` puts the tables between the marks of the page once all runs are through.
`--from-clone` times the last commit in a temporary clone, set-up included, which is removed in the end. Logs go to `--log-dir`;
without it they are kept only where a run did not end well.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))  # of this checkout, from whichever folder it is started
from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError, exit_on_user_error
from tools.page_part import PagePart

ROOT = Path(__file__).parents[1]
PAGE, NAME_OF_PART = ROOT / "docs" / "testing.md", "timed runs"
BUDGET_MINUTES = {"unit": 6, "distributed": 8, "engine": 8, "system": 10, "slurm": 8}
NUM_SLOWEST = 10
# Every phase of a test above half a second is reported: sums of set-up, call and tear-down lack less than 1.5 s.
PYTEST_OPTIONS = "--durations=0 --durations-min=0.5 --color=no"
DEADLINE_S = 3 * 3600.0  # of one run with its set-up: four times the budgets
ENDING_S = 60.0  # that pytest may take to end its tests' processes after Ctrl-C
POLL_S = 0.2
PART = re.compile(r"^== tests/(\w+)$", re.MULTILINE)
SUMMARY = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in ([\d.]+)s", re.MULTILINE)
DURATION = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(tests/\S.*)$", re.MULTILINE)
FAILURE = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
TIMED_OUT = re.compile(r'\+{9,} Timeout .*?/(tests/\S+\.py)", line \d+, in (test_\w+)$', re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^tests/\S+\.py\b", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """What pytest said of one part at its end."""

    seconds: float
    passed: int
    skipped: int


@dataclass(frozen=True)
class Run:
    """One `make test` that passed: its parts by name, and the seconds of all of it, set-up included."""

    parts: Mapping[str, Part]
    wall_s: float


def read_parts(output: str) -> dict[str, Part]:
    """Read the parts from the output of `make test`. One without a summary did not end, and is not there."""
    names = list(PART.finditer(output))
    ends = [*(match.start() for match in names[1:]), len(output)]
    parts = {}
    for name, end in zip(names, ends, strict=True):
        summaries = SUMMARY.findall(output, name.end(), end)
        if summaries:
            counts, seconds = summaries[-1]
            number = {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", counts)}
            parts[name[1]] = Part(float(seconds), number.get("passed", 0), number.get("skipped", 0))
    return parts


def read_slowest(output: str) -> list[tuple[float, str]]:
    """Return the slowest tests of all parts, slowest first: seconds with set-up and tear-down, and the test's name."""
    seconds: dict[str, float] = {}
    for took, test in DURATION.findall(output):
        seconds[test] = seconds.get(test, 0.0) + float(took)
    return sorted(((took, test) for test, took in seconds.items()), reverse=True)[:NUM_SLOWEST]


def what_failed(output: str) -> str:
    """Return the names of the tests that failed; where pytest came to name none, that or the file that it was at."""
    if failures := list(dict.fromkeys(FAILURE.findall(output))):
        return f"{len(failures)} failed: {', '.join(failures)}"
    if timed_out := TIMED_OUT.search(output):
        return f"timed out: {timed_out[1]}::{timed_out[2]}"
    files = FILE.findall(output)
    return f"no test is named as failed; the last file that began: {files[-1]}" if files else "no test had begun"


def tables(runs: Sequence[Run], slowest: Sequence[tuple[float, str]], head: str) -> str:
    """Return `head` and two markdown tables: a row a part, with the counts of the last run; and its slowest tests."""
    numbers = "".join(f" run {number} |" for number in range(1, len(runs) + 1))
    lines = [head, "", f"| part |{numbers} budget | passed | skipped |", "|---|" + "---|" * (len(runs) + 3)]
    last = runs[-1].parts
    for name, budget in BUDGET_MINUTES.items():
        taken = " | ".join(_minutes(run.parts[name].seconds) for run in runs)
        lines.append(f"| {name} | {taken} | {budget}:00 | {last[name].passed} | {last[name].skipped} |")
    taken = " | ".join(_minutes(sum(part.seconds for part in run.parts.values())) for run in runs)
    passed, skipped = (sum(getattr(part, word) for part in last.values()) for word in ("passed", "skipped"))
    lines.append(f"| all | {taken} | {sum(BUDGET_MINUTES.values())}:00 | {passed} | {skipped} |")
    lines.append(f"| with set-up | {' | '.join(_minutes(run.wall_s) for run in runs)} | | | |")
    lines += ["", f"| seconds | the slowest tests of run {len(runs)}, with set-up and tear-down |", "|---|---|"]
    return "\n".join([*lines, *(f"| {took:.1f} | `{test.replace('|', '\\|')}` |" for took, test in slowest)])


def run_once(tree: Path, log: Path, environment: Mapping[str, str]) -> int:
    """Run `make test` in `tree`, its output to `log` and from there to the screen; return its exit code.

    It writes into a file: a pipe would be open for as long as anything that the tests left behind. UserError at the deadline.
    """
    began = time.monotonic()
    with log.open("wb") as file, log.open(errors="replace") as shown:
        process = subprocess.Popen(
            ["make", "test"],
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if time.monotonic() - began > DEADLINE_S:
                    raise UserError(f"make test did not end within {DEADLINE_S:g} s; its log: {log}")
                time.sleep(POLL_S)
                print(shown.read(), end="", flush=True)
        finally:
            _end(process)
            print(shown.read(), end="", flush=True)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    """End make and pytest if they live: as Ctrl-C does, so that the tests end what they started, and after a time by force."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                print(f"make test did not end within {ENDING_S:g} s of {number.name}", file=sys.stderr)


def time_runs(tree: Path, logs: Path, count: int, environment: Mapping[str, str]) -> list[Run]:
    """Return `count` runs. The first that fails says so and ends this program with its exit code."""
    runs = []
    for number in range(1, count + 1):
        log, began = logs / f"run_{number}.log", time.monotonic()
        code = run_once(tree, log, environment)
        took, output = time.monotonic() - began, log.read_text(errors="replace")
        if code != 0:
            print(
                f"error: run {number} of make test ended with exit code {code}: {what_failed(output)}", file=sys.stderr
            )
            sys.exit(code)
        parts = read_parts(output)
        if parts.keys() != BUDGET_MINUTES.keys():
            expected = " ".join(BUDGET_MINUTES)
            raise UserError(f"{log}: summaries of the parts {' '.join(parts)}; BUDGET_MINUTES has {expected}")
        runs.append(Run(parts, took))
        print(f"run {number}: {_minutes(took)} with set-up", flush=True)
    return runs


def main(arguments: Sequence[str]) -> int:
    """Parse, run, print, write; return the exit code."""
    parser = argparse.ArgumentParser(prog="time_tests.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="how many times (default: %(default)s)")
    parser.add_argument("--from-clone", action="store_true", help="run a clean clone of the last commit, not this tree")
    parser.add_argument("--log-dir", type=Path, help="where the output of each run is kept")
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, help="page to write into (default: %(const)s)")
    options = parser.parse_args(arguments)
    if options.runs < 1:
        raise UserError(f"--runs {options.runs}: at least 1")
    part = PagePart(options.write, NAME_OF_PART) if options.write else None
    if part:
        part.read()  # raises now, not after all the runs
    with _folder_of_logs(options.log_dir) as logs, _tree(options.from_clone) as (tree, environment):
        head = _head(tree)
        runs = time_runs(tree, logs, options.runs, environment)
        text = tables(runs, read_slowest((logs / f"run_{len(runs)}.log").read_text(errors="replace")), head)
        print(text, flush=True)
        if part:
            part.write(text)
    return 0


@contextmanager
def _folder_of_logs(chosen: Path | None) -> Iterator[Path]:
    """Have a folder for the logs. One of our own is removed after a good end, and named after any other."""
    logs = chosen or Path(tempfile.mkdtemp(prefix="time-tests-"))
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--log-dir {logs}: cannot write there: {error.strerror}") from None
    try:
        yield logs
    except BaseException:
        print(f"logs: {logs}", file=sys.stderr)
        raise
    if chosen is None:
        shutil.rmtree(logs)


@contextmanager
def _tree(from_clone: bool) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Have what is timed, this tree or a clone, and the environment of `make` in it. A clone must not see another checkout."""
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} {PYTEST_OPTIONS}".strip()
    environment = os.environ | {"PYTEST_ADDOPTS": options}
    if not from_clone:
        yield ROOT, environment
        return
    with tempfile.TemporaryDirectory(prefix="time-tests-clone-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        others = ("PYTHONPATH", "VIRTUAL_ENV", "VENV")
        with suppress(UserError):  # without data, tests are skipped here as they are in this checkout
            environment["A3PO_DATA"] = str(data_folder().resolve())
        yield clone, {name: value for name, value in environment.items() if name not in others}


def exit_at_sigterm(number: int, _: FrameType | None) -> None:
    """Turn SIGTERM into an exception: the tests are ended and the clone is removed on the way out."""
    sys.exit(128 + number)


def _minutes(seconds: float) -> str:
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def _head(tree: Path) -> str:
    """Return what is timed: the commit, marked where the tree differs from it, the day and the cores."""
    git = ["git", "-C", str(tree)]
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True).stdout
    note = ", with changes" if changed else ""
    cores = len(os.sched_getaffinity(0))
    return f"Minutes of pytest at commit {commit.strip()}{note}, {datetime.now(UTC):%Y-%m-%d}, {cores} cores."


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_at_sigterm)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background a shell lets it be ignored, in children too
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
