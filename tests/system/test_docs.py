"""The commands of the documentation do what the pages say: they are run as written, page by page, in a copy of the repository."""

import json
import os
import shutil
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError
from tests.references.published_models import PUBLISHED_MODELS
from tests.system.runs import ROOT
from tests.unit.docs.pages import PAGES, Command, commands, shows

EVALUATE, CONVERT = "python recipes/evaluate.py", "python tools/convert_checkpoint.py"
SECONDS = (  # each takes seconds
    "source .venv/bin/activate",
    "python recipes/run_local.py configs/demo.yaml --print-config",
    "python recipes/run_local.py configs/demo.yaml",
    "python -m recipes.export runs/demo/*",
    f"{CONVERT} * runs/as_megatron*",
    "python tools/plan_cluster.py configs/qwen3_8b_dapo.yaml *",
    "GPUS_PER_NODE=0 * --dry-run",
    "python tools/config_reference.py",
    "python tools/third_party_notices.py",
    "python tools/mutations.py --list",
    "python tools/prepare_data.py *",
    "python tools/judge_answers.py *",
    "cp slurm/site.env.example slurm/site.env",
    "source slurm/site.env",
)
MINUTES = (  # only with -m full, each after those above it on its page
    "make demo",
    "make smollm2",
    "make lint",
    "ls runs/demo",
    "head *",
    "tail *",
    "python recipes/run_local.py configs/demo.yaml run.dir=*",
    f"{EVALUATE} runs/demo/checkpoints/*",
    f"{EVALUATE} runs/exported *",
    f"{EVALUATE} configs/evaluate_smollm2_gsm8k_cpu.yaml *",
    "python tools/fetch_smollm2.py",
    f"{CONVERT} * runs/smol*",
)
MEASUREMENTS = (  # only with -m full, each by itself
    "python tools/bench_*",
    "python tools/probe_noise.py",
    "python tools/check_gpu.py --toy *",
)
NOT_RUN = {
    "make setup": "made the environment that this runs in",
    "make setup *=*": "a placeholder; installs 6 GB",
    "make lock": "asks the package index, and changes with it",
    "make test*": "calls the test suite",
    "python -m pytest *": "calls the test suite",
    "OMP_NUM_THREADS=1 .venv/bin/python -m pytest *": "calls the test suite",
    "python tools/time_tests.py *": "calls the test suite",
    "python tools/mutations.py": "calls the test suite",
    "python tools/mutations.py --only *": "calls the test suite",
    "python tools/mutations.py --write": "calls the test suite",
    "torchrun *": "calls the test suite; tests/system/test_torchrun.py",
    "python -m tests.golden.record *": "overwrites what tests/distributed/test_golden.py compares with",
    "git clone *": "a placeholder",
    "tools/setup_gpu.sh": "needs a GPU node",
    "python tools/check_gpu.py": "needs a GPU",
    "*sbatch *": "needs a cluster; tests/slurm",
    "scancel JOB": "needs a cluster; tests/slurm",
    "slurm/status.sh JOB": "needs a cluster; tests/slurm",
    "bash slurm/qwen3_8b_dapo.sh --dry-run": "needs a model of the user's; tests/slurm/test_dry_run.py",
    "MODEL_PATH=* --dry-run": "needs a model of the user's; tests/slurm/test_dry_run.py",
    "python -m a3po_megatron.reward.worker": "started by the reward pool, not by hand",
    f"{EVALUATE} runs/demo": "needs a run that goes on; tests/system/test_export.py",
    f"{EVALUATE} runs/models/SmolLM2-135M-Instruct *": "1319 problems: hours without a GPU",
    f"{EVALUATE} configs/evaluate_math.yaml target=FOLDER *": "a placeholder",
    "python -m recipes.export RUN/* FOLDER": "a placeholder",
    "python tools/plan_cluster.py configs/NAME.yaml *": "a placeholder",
    f"{CONVERT} * DST*": "a placeholder",
    "python tools/routing_mismatch.py FOLDER *": "a placeholder; tests/engine/test_routing_mismatch.py",
    f"{CONVERT} inspect PATH *": "a placeholder",
    f"{CONVERT} verify A B *": "a placeholder",
}
NEED_DATA = ("python tools/prepare_data.py *", "*smol*")
README, TUTORIAL = "README.md", "tutorial.md"


def of(*kinds: tuple[str, ...]) -> list[Command]:
    """Return the commands of these kinds, each where it stands first: README, tutorial, then the other pages."""
    patterns = [pattern for kind in kinds for pattern in kind]
    found: dict[str, Command] = {}
    for command in sorted(commands(), key=lambda command: (command.page != README, command.page != TUTORIAL)):
        if any(fnmatchcase(command.text, pattern) for pattern in patterns):
            found.setdefault(command.text, command)
    return list(found.values())


def test_every_command_is_run_or_it_is_said_why_not() -> None:
    kinds = (SECONDS, MINUTES, MEASUREMENTS, tuple(NOT_RUN))
    every = {command.text for command in commands()}
    places = {text: [p for kind in kinds for p in kind if fnmatchcase(text, p)] for text in every}
    assert {text: found for text, found in places.items() if len(found) != 1} == {}
    assert {pattern for kind in kinds for pattern in kind} == {found[0] for found in places.values()}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the repository as in a clean clone after `make setup`, with the files that pages take to be there."""
    folder = tmp_path / "a3po_megatron"
    not_tracked = [Path(line).name for line in (ROOT / ".gitignore").read_text().split()]
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".git", *not_tracked))
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        (folder / ".venv" / path.name).symlink_to(path)
    (folder / ".venv" / ".ready").unlink(missing_ok=True)
    (folder / ".venv" / ".ready").touch()  # of its own: make would otherwise install this copy into the environment
    (folder / "Qwen3-8B").mkdir()
    (folder / "Qwen3-8B" / "config.json").write_text(json.dumps(PUBLISHED_MODELS["Qwen3-8B"][0]))
    pq.write_table(pa.table({"prompt": ["What is 17 minus 4?"], "gold": ["13"]}), folder / "rows.parquet")
    (folder / "ROWS.jsonl").write_text(json.dumps({"gold": "42", "response": r"So it is \boxed{42}."}) + "\n")
    for name in ("CONFIG_FOLDER", "TOKENIZER_FOLDER"):  # the model that `make smollm2` makes
        (folder / name).symlink_to("runs/models/SmolLM2-135M-Instruct")
    return folder


def walk(todo: list[Command], folder: Path, deadline_s: int) -> None:
    """Run the commands in order. One may end with exit code 2 where its page shows below it what it then says."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    environment |= {"PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(folder)}
    environment |= {"OMP_NUM_THREADS": "1"}
    no_data = ""
    try:
        environment["A3PO_DATA"] = str(data_folder().resolve())
    except UserError as error:
        no_data = str(error)
    for command in todo:
        if no_data and any(fnmatchcase(command.text, pattern) for pattern in NEED_DATA):
            continue
        began = time.monotonic()
        done = subprocess.run(
            ["timeout", "--kill-after=60", str(deadline_s), "bash", "-o", "pipefail", "-c", command.line],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(f"{time.monotonic() - began:6.1f} s  {command}")
        page = next(page for page in PAGES if page.name == command.page).read_text(encoding="utf-8")
        is_shown = done.returncode == 2 and shows(page, command, done.stdout)
        assert done.returncode == 0 or is_shown, f"{command}\nexit code {done.returncode}\n{done.stdout[-4000:]}"
    if no_data:
        pytest.skip(f"all others passed, but those that need data were left out: {no_data}")


@pytest.mark.timeout(1800)
def test_the_commands_that_take_seconds_run(copy: Path, model: Path) -> None:
    """The demo's warm start is cut short here, and stands for its run too: another model in the same kind of folder."""
    for name in ("demo_warmstart", "demo"):
        shutil.copytree(model.parent, copy / "runs" / name)
    newest = max((copy / "runs" / "demo" / "checkpoints").glob("step_*"))
    newest.rename(newest.with_name("step_000100"))
    walk(of(SECONDS), copy, deadline_s=300)


@pytest.mark.full
@pytest.mark.timeout(6 * 3600)
def test_all_commands_run_in_the_order_of_the_pages(copy: Path) -> None:
    walk(of(SECONDS, MINUTES), copy, deadline_s=3600)


@pytest.mark.full
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("command", of(MEASUREMENTS), ids=lambda command: command.text)
def test_every_measurement_of_a_page_can_be_repeated(copy: Path, command: Command) -> None:
    walk([command], copy, deadline_s=3600)
