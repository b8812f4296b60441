"""Break the code on purpose, one place at a time, and see which test notices.

    python tools/mutations.py                   every mutation: a table, and exit code 1 where one went unnoticed
    python tools/mutations.py --only NAME ...   some of them
    python tools/mutations.py --list            what there is
    python tools/mutations.py --write           every mutation, and the table of docs/testing.md anew

tools/mutations.toml holds the mutations: a text that stands exactly once in a file, what replaces it, what that breaks, and the
tests that are to notice. They are made in a copy of this checkout, in a temporary folder. In the end every test that noticed one
must pass on the unbroken copy: otherwise it noticed nothing.
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
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # of this checkout, from whichever folder it is started
from a3po_megatron.errors import exit_on_user_error
from tools.page_part import PagePart

ROOT = Path(__file__).parents[1]
MUTATIONS = Path(__file__).with_suffix(".toml")
PAGE_PART = PagePart(ROOT / "docs" / "testing.md", "mutations")
UNNOTICED = "**nothing**"
DEADLINE_S = 300.0  # of one run of pytest; the slowest takes half a minute on a quiet core
# The same examples of hypothesis in every run; nothing is kept from one run for the next.
PYTEST = ("-m", "pytest", "-x", "-q", "--hypothesis-seed=0", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Mutation:
    """One way to break the code."""

    name: str
    file: str  # from the root of the repository
    old: str  # stands exactly once in the file
    new: str
    breaks: str  # in words
    tests: tuple[str, ...]  # files, or pytest's ids where only a few tests of a slow file can notice

    def mutated(self, text: str) -> str:
        """Return the file's text with the mutation in it. Raises ValueError unless there is one place for it."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{MUTATIONS.name}: {self.name}: its text stands {found} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="mutations.py", description=(__doc__ or "").splitlines()[0])
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", metavar="NAME", help="run these alone")
    chosen.add_argument("--list", action="store_true", help="print names and what each breaks")
    chosen.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE_PART.page.name}")
    options = parser.parse_args(arguments)
    mutations = read_mutations()
    if options.write:
        PAGE_PART.read()  # raises now, not after all the tests
    if options.list:
        print(*(f"{mutation.name:32}  {mutation.breaks}" for mutation in mutations), sep="\n")
        return 0
    if options.only:
        if unknown := set(options.only) - {mutation.name for mutation in mutations}:
            parser.error(f"no mutation is called {', '.join(sorted(unknown))}; --list names them")
        mutations = [mutation for mutation in mutations if mutation.name in options.only]
    with tempfile.TemporaryDirectory(prefix="mutations_") as folder:
        copy = copy_checkout(Path(folder) / "checkout")
        caught = {mutation: _run(mutation, copy) for mutation in mutations}
        noticed = {test for test in caught.values() if test is not None}
        lines = table(caught)
        print("", *lines, sep="\n")
        fails_anyway = next(filter(None, (first_failure(copy, [test]) for test in sorted(noticed))), None)
    if fails_anyway:
        print(f"mutations.py: {fails_anyway} fails on the unbroken code too", file=sys.stderr)
        return 1
    if options.write:
        PAGE_PART.write("\n".join(lines))
    return int(None in caught.values())


def read_mutations(path: Path = MUTATIONS) -> list[Mutation]:
    """Return the mutations of a file, in its order."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copy_checkout(target: Path) -> Path:
    """Copy what git tracks, or would track, as it lies there now; return `target`."""
    command = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    return target


def first_failure(copy: Path, tests: Sequence[str]) -> str | None:
    """Run `tests` in `copy`; return the first that failed, without its parameters, None where all passed.

    Raises RuntimeError where they could not be run, or not within the deadline: then nothing is known.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(copy),  # for processes that tests start: an installed package may be another checkout
        "PYTHONDONTWRITEBYTECODE": "1",  # a cached module of the same second and length would be taken for the mutated one
    }
    command = [sys.executable, *PYTEST, "--basetemp", str(copy.parent / "pytest"), *tests]
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = f"it was ended after {DEADLINE_S:g} s"
    if process.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::\w+)", said, re.MULTILINE)
    if process.returncode != 1 or failed is None:
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {process.returncode}:\n{said[-3000:]}")
    return failed[1]


@contextmanager
def applied(mutation: Mutation, copy: Path) -> Iterator[None]:
    """Have the mutation in `copy` for a while."""
    file = copy / mutation.file
    text = file.read_text(encoding="utf-8")
    file.write_text(mutation.mutated(text), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(text, encoding="utf-8")


def _run(mutation: Mutation, copy: Path) -> str | None:
    began = time.monotonic()
    with applied(mutation, copy):
        test = first_failure(copy, mutation.tests)
    print(f"{mutation.name}: {test or 'NOT NOTICED'}  ({time.monotonic() - began:.0f} s)", flush=True)
    return test


def table(caught: dict[Mutation, str | None]) -> list[str]:
    """Return the lines of the table in markdown."""
    lines = ["| mutation | file | what it breaks | noticed by |", "|---|---|---|---|"]
    for mutation, test in caught.items():
        file = mutation.file.removeprefix("a3po_megatron/")
        noticed = f"`{test.removeprefix('tests/')}`" if test else UNNOTICED
        lines.append(f"| {mutation.name} | `{file}` | {mutation.breaks} | {noticed} |")
    return lines


if __name__ == "__main__":
    sys.exit(exit_on_user_error(main))
