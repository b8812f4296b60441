"""The tool that times `make test`: what it reads from real output, what it writes and leaves, and what ends it.

A stand-in for this repository is a git repository of one small test a part, whose Makefile has this one's target `test`.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from a3po_megatron.errors import UserError
from tools import time_tests
from tools.page_part import PagePart
from tools.time_tests import BUDGET_MINUTES, Part, Run, read_parts, read_slowest, tables, what_failed

ROOT = Path(__file__).parents[2]
PASSES = "import time\n\ndef test_a():\n    time.sleep(0.6)\n"
FAILS = "def test_b():\n    assert False, 'a - b'\n"
HANGS = "import time\n\ndef test_c():\n    time.sleep(100)\n"
AS_A_PROGRAM = """
import signal, sys
from pathlib import Path
from tools import time_tests
time_tests.ROOT = Path(sys.argv[1])
signal.signal(signal.SIGTERM, time_tests.exit_at_sigterm)
time_tests.main(["--from-clone"])
"""
OUTPUT = """\
== tests/unit
============================= test session starts ==============================
collected 2495 items / 5 deselected / 2490 selected

tests/unit/test_wire.py ...s                                             [100%]
============================== slowest durations ===============================
22.67s call     tests/unit/reward/test_tools.py::test_a_gold[1-a box in a sentence]
1.50s setup    tests/unit/test_wire.py::test_b
0.75s call     tests/unit/test_wire.py::test_b
(7 durations < 0.5s hidden.  Use -vv to show these durations.)
=========================== short test summary info ============================
SKIPPED [1] tests/unit/test_wire.py:3: 100 passed, 3 failed in 9.0s says this reason
========== 2489 passed, 1 skipped, 5 deselected, 4 warnings in 280.10s (0:04:40) ===========
== tests/system
=========================== short test summary info ============================
FAILED tests/system/test_a.py::test_b[x y] - assert 1 == 2 - 1
ERROR tests/system/test_a.py::test_c
======= 1 failed, 33 passed, 1 error, 4 deselected in 891.96s (0:14:51) =======
== tests/slurm
tests/slurm/test_jobs.py .
"""
TIMED_OUT = """\
tests/unit/test_wire.py .+++++++++++++++ Timeout ++++++++++++++++
~~~~~~~~~~~~~~~~~~~~ Stack of MainThread (140069428800384) ~~~~~~~~~~~~~~~~~~~~~
  File "/there/.venv/lib/python3.12/site-packages/_pytest/python.py", line 166, in pytest_pyfunc_call
    result = testfunction(**testargs)
  File "/there/tests/unit/test_wire.py", line 3, in test_d
    time.sleep(30)
"""


def test_each_part_that_ended_is_read_with_its_counts() -> None:
    assert read_parts(OUTPUT) == {"unit": Part(280.10, 2489, 1), "system": Part(891.96, 33, 0)}


def test_set_up_counts_towards_a_test_and_the_slowest_comes_first() -> None:
    assert read_slowest(OUTPUT) == [
        (22.67, "tests/unit/reward/test_tools.py::test_a_gold[1-a box in a sentence]"),
        (2.25, "tests/unit/test_wire.py::test_b"),
    ]


def test_what_failed_is_named_or_else_the_file_that_was_at_work() -> None:
    assert what_failed(OUTPUT) == "2 failed: tests/system/test_a.py::test_b[x y], tests/system/test_a.py::test_c"
    assert what_failed(TIMED_OUT) == "timed out: tests/unit/test_wire.py::test_d"
    assert what_failed(OUTPUT.split("== tests/system")[0]).endswith("last file that began: tests/unit/test_wire.py")
    assert what_failed("error: no C compiler found") == "no test had begun"


def test_the_tables_hold_every_run_against_the_budgets_and_the_slowest_tests() -> None:
    runs = [Run(dict.fromkeys(BUDGET_MINUTES, Part(seconds, 30, 2)), wall_s=60.0) for seconds in (280.1, 599.6)]
    rows = tables(runs, [(22.67, "tests/unit/test_a.py::test[a|b]")], "head").splitlines()
    assert rows[2] == "| part | run 1 | run 2 | budget | passed | skipped |"
    assert rows[4:11] == [
        "| unit | 4:40 | 10:00 | 6:00 | 30 | 2 |",
        "| distributed | 4:40 | 10:00 | 8:00 | 30 | 2 |",
        "| engine | 4:40 | 10:00 | 8:00 | 30 | 2 |",
        "| system | 4:40 | 10:00 | 10:00 | 30 | 2 |",
        "| slurm | 4:40 | 10:00 | 8:00 | 30 | 2 |",
        "| all | 23:20 | 49:58 | 40:00 | 150 | 10 |",
        "| with set-up | 1:00 | 1:00 | | | |",
    ]
    assert rows[-1] == r"| 22.7 | `tests/unit/test_a.py::test[a\|b]` |"


def test_the_parts_and_their_budgets_are_those_of_the_makefile_and_the_page() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.findall(r"^PARTS := (.*)$", makefile, re.MULTILINE) == [" ".join(BUDGET_MINUTES)]
    page = time_tests.PAGE.read_text(encoding="utf-8")
    budgets = re.findall(r"^\| `tests/(\w+)` \|.* (\d+) minutes \|$", page, re.MULTILINE)
    assert [(part, int(minutes)) for part, minutes in budgets] == list(BUDGET_MINUTES.items())
    PagePart(time_tests.PAGE, time_tests.NAME_OF_PART).read()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the stand-in, committed; temporary folders are made beside it."""
    (recipe,) = re.findall(r"^test: .*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    folder = tmp_path / "repository"
    for part in BUDGET_MINUTES:
        (folder / "tests" / part).mkdir(parents=True)
        (folder / "tests" / part / f"test_{part}.py").write_text(PASSES)
    variables = "PYTHONDONTWRITEBYTECODE=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"  # the second: a start of half the time
    python = f'{variables} "{sys.executable}" -m pytest -ra -p no:cacheprovider'
    (folder / "Makefile").write_text(
        f'PRESENT := {" ".join(BUDGET_MINUTES)}\nPYTEST := {python}\ntest:\n\t@echo set-up; test -z "$$VIRTUAL_ENV"\n\t{recipe}\n'
    )
    commit(folder)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(time_tests, "ROOT", folder)
    monkeypatch.setenv("VIRTUAL_ENV", "another checkout's")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return folder


def commit(folder: Path) -> None:
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "all"], check=True)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "page.md").write_text("head\n<!-- timed runs -->\n<!-- end of timed runs -->\n")
    return tmp_path / "page.md"


def test_two_real_runs_from_a_clone_end_in_the_page_and_leave_logs_only_where_they_are_asked_for(
    repository: Path, page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = tmp_path / "logs"
    arguments = ["--runs", "2", "--from-clone", "--log-dir", str(logs), "--write", str(page)]
    assert time_tests.main(arguments) == 0
    written = PagePart(page, "timed runs").read()
    rows = written.splitlines()
    assert re.fullmatch(r"Minutes of pytest at commit [0-9a-f]+, \d{4}-\d\d-\d\d, \d+ cores\.", rows[0])
    assert [re.sub(r"\d+:\d\d", "t", row) for row in rows[2:11]] == [
        "| part | run 1 | run 2 | budget | passed | skipped |",
        "|---|---|---|---|---|---|",
        *(f"| {part} | t | t | t | 1 | 0 |" for part in BUDGET_MINUTES),
        "| all | t | t | t | 5 | 0 |",
        "| with set-up | t | t | | | |",
    ]
    slowest = {f"tests/{part}/test_{part}.py::test_a" for part in BUDGET_MINUTES}
    assert {row.split("`")[1] for row in rows[14:]} == slowest
    assert all(float(row.split()[1]) >= 0.6 for row in rows[14:])
    said = capsys.readouterr().out
    assert written in said
    assert said.count("== tests/slurm") == 2, "what make says is shown"
    assert sorted(log.name for log in logs.iterdir()) == ["run_1.log", "run_2.log"]
    assert all((logs / f"run_{number}.log").read_text() in said for number in (1, 2))
    assert list(Path(tempfile.gettempdir()).iterdir()) == [], "neither a clone nor logs of its own"


def test_the_first_run_that_fails_ends_it_with_the_name_of_the_test(
    repository: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "tests" / "distributed" / "test_b.py").write_text(FAILS)
    commit(repository)
    with pytest.raises(SystemExit) as ended:
        time_tests.main(["--from-clone", "--write", str(page)])
    assert ended.value.code == 2, "as make ends"
    said = capsys.readouterr()
    failed = "tests/distributed/test_b.py::test_b"
    assert f"error: run 1 of make test ended with exit code 2: 1 failed: {failed}\n" in said.err
    assert "== tests/engine" not in said.out
    (logs,) = Path(tempfile.gettempdir()).iterdir()
    assert f"logs: {logs}\n" in said.err
    assert f"FAILED {failed} - " in (logs / "run_1.log").read_text()
    assert "part" not in page.read_text()


def test_a_part_that_was_not_run_is_no_good_run(repository: Path, tmp_path: Path) -> None:
    makefile = repository / "Makefile"
    makefile.write_text(re.sub("PRESENT := .*", "PRESENT := slurm", makefile.read_text()).replace("test -z", "test -n"))
    with pytest.raises(UserError, match=r"run_1\.log: summaries of the parts slurm; BUDGET_MINUTES has unit"):
        time_tests.main(["--log-dir", str(tmp_path)])


def test_sigterm_ends_the_tests_too_and_removes_the_clone(repository: Path, tmp_path: Path) -> None:
    (repository / "tests" / "unit" / "test_unit.py").write_text(f"open({str(tmp_path / 'begun')!r}, 'w')\n{HANGS}")
    commit(repository)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": tempfile.gettempdir()}
    tool = subprocess.Popen(
        [sys.executable, "-c", AS_A_PROGRAM, str(repository)], env=environment, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    tool.send_signal(signal.SIGTERM)
    assert tool.wait(60) == 143
    (logs,) = Path(tempfile.gettempdir()).iterdir()
    assert "KeyboardInterrupt" in (logs / "run_1.log").read_text(), "pytest ended in its own way"


def test_a_run_beyond_its_deadline_is_ended(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "tests" / "unit" / "test_unit.py").write_text(HANGS)
    monkeypatch.delenv("VIRTUAL_ENV")
    monkeypatch.setattr(time_tests, "DEADLINE_S", 3.0)
    with pytest.raises(UserError, match=r"make test did not end within 3 s; its log: .*run_1\.log"):
        time_tests.main(["--log-dir", str(tmp_path)])


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_tests, "run_once", lambda *_: pytest.fail("something ran"))
    (tmp_path / "page.md").write_text("no marks")
    with pytest.raises(UserError, match=r"page\.md: no place for the table"):
        time_tests.main(["--write", str(tmp_path / "page.md")])
    with pytest.raises(UserError, match="--runs 0: at least 1"):
        time_tests.main(["--runs", "0"])
    with pytest.raises(UserError, match=r"--log-dir .*page\.md: cannot write there: File exists"):
        time_tests.main(["--log-dir", str(tmp_path / "page.md")])
