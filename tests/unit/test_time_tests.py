"""The tool that times `make test`: what it reads from pytest's output, what it writes, and that a failing run ends it."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tools import time_tests
from tools.time_tests import BEGIN, END, Part, insert, read_parts, read_slowest, table

OUTPUT = """\
== tests/unit
============================= test session starts ==============================
collected 2495 items / 5 deselected / 2490 selected

tests/unit/test_wire.py ...s                                             [100%]
============================= slowest 10 durations =============================
22.67s call     tests/unit/reward/test_tools.py::test_a_gold[1-a box in a sentence]
1.50s setup    tests/unit/test_wire.py::test_b
0.25s call     tests/unit/test_wire.py::test_b
(7 durations < 0.005s hidden.  Use -vv to show these durations.)
=========================== short test summary info ============================
SKIPPED [1] tests/unit/test_wire.py:3: 100 passed, 3 failed in 9.0s says this reason
========== 2489 passed, 1 skipped, 5 deselected, 4 warnings in 280.10s (0:04:40) ===========
== tests/system
======= 1 failed, 33 passed, 2 errors, 4 deselected in 891.96s (0:14:51) =======
== tests/slurm
tests/slurm/test_jobs.py .
"""
PARTS = [Part("unit", 280.10, 2489, 0, 1), Part("system", 891.96, 33, 3, 0)]


def test_each_part_that_ended_is_read_with_its_counts():
    assert read_parts(OUTPUT) == PARTS


def test_set_up_counts_towards_a_test_and_the_slowest_comes_first():
    assert read_slowest(OUTPUT) == [
        (22.67, "tests/unit/reward/test_tools.py::test_a_gold[1-a box in a sentence]"),
        (1.75, "tests/unit/test_wire.py::test_b"),
    ]


def test_the_table_holds_every_run_against_the_budgets():
    faster = [Part("unit", 60.0, 2490, 0, 0), Part("system", 599.6, 36, 0, 0)]
    rows = [line.split(" | ") for line in table([PARTS, faster], "head").splitlines()[4:]]
    assert rows == [
        ["| unit", "4:40", "1:00", "6:00", "2490", "0", "0 |"],
        ["| system", "14:52", "10:00", "10:00", "36", "0", "0 |"],
        ["| all", "19:32", "11:00", "40:00", "2526", "0", "0 |"],
    ]


def test_only_what_is_between_the_marks_is_replaced():
    assert insert(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\nnew\n{END}\nb\n"


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_page_without_its_marks_is_refused_before_anything_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_tests, "run_once", lambda *_: pytest.fail("something ran"))
    (tmp_path / "page.md").write_text(page)
    assert time_tests.main(["--write", str(tmp_path / "page.md")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --write {tmp_path / 'page.md'}: expected one {BEGIN}")


def test_the_first_failing_run_ends_it_and_its_log_is_kept(tmp_path, monkeypatch, capsys):
    """A run that succeeds, then one whose tests fail: the third does not begin, and the page stays as it was."""
    outputs = iter([(OUTPUT.replace("1 failed, ", "").replace("2 errors, ", ""), 0), (OUTPUT, 2)])

    def run_once(_, log):
        output, code = next(outputs)
        log.write_text(output)
        return code

    monkeypatch.setattr(time_tests, "run_once", run_once)
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert time_tests.main(["--log-dir", str(tmp_path), "--write", str(page)]) == 2
    assert "run 2 of make test failed with exit code 2" in capsys.readouterr().err
    assert (tmp_path / "run_2.log").read_text() == OUTPUT
    assert page.read_text() == f"{BEGIN}\n{END}\n"


def test_good_runs_end_in_the_page(tmp_path, monkeypatch):
    good = OUTPUT.replace("1 failed, ", "").replace("2 errors, ", "")
    monkeypatch.setattr(time_tests, "run_once", lambda _, log: log.write_text(good) * 0)
    monkeypatch.setattr(time_tests, "ROOT", repository(tmp_path / "tree"))
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert time_tests.main(["--runs", "2", "--log-dir", str(tmp_path), "--write", str(page)]) == 0
    assert "| system | 14:52 | 14:52 | 10:00 | 33 | 0 | 0 |" in page.read_text()
    assert re.search(
        r"^Minutes of pytest at commit [0-9a-f]{7,}, \d{4}-\d\d-\d\d, \d+ cores\.$", page.read_text(), re.MULTILINE
    )


def test_the_head_says_where_the_tree_differs_from_its_commit(tmp_path):
    tree = repository(tmp_path / "tree")
    (tree / "file").write_text("another")
    assert ", with changes, " in time_tests._head(tree)


def repository(folder: Path) -> Path:
    """Make a repository of one commit, whatever git's settings are here."""
    folder.mkdir()
    (folder / "file").write_text("one")
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "file"), (*who, "commit", "-q", "-m", "one")):
        subprocess.run(["git", *command], cwd=folder, env=environment, check=True)
    return folder
