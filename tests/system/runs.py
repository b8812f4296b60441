"""Whole runs through `recipes/run_local.py`, as a user starts them, and what they leave behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from a3po_megatron.rollout.process_group import shared_memory_of

ROOT = Path(__file__).parents[2]
DEADLINE_S = 400.0  # of a start or a run on a busy machine; a run takes 40 s on an idle one
SMALL = (
    "controller.prompts_per_batch=8",
    "controller.samples_per_prompt=4",
    "controller.max_concurrent_groups=16",
    "controller.max_eval_problems=0",
    "algorithm.num_minibatches=2",
    "run.num_steps=3",
)
NEAR_TIES = 2  # samples of a step of which rounding may decide; with other seeds, nearly all of its 32 would differ
FROM_VERSION_0 = 3  # steps of a lockstep run that lags by two: weights of the same bits sample them
LOOK_S = 1.0  # between two looks at all processes and what they have mapped, which cost a tenth of a second of a core


@dataclass(frozen=True)
class Finished:
    """A run that ended: its folder, exit code and what it printed."""

    folder: Path
    exit_code: int
    output: str
    shared_memory: frozenset[Path] = frozenset()  # files that its processes were seen to have mapped

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    @cached_property
    def samples(self) -> list[list[dict[str, Any]]]:
        """Samples of each step."""
        return [read_lines(path) for path in sorted((self.folder / "samples").glob("step_*.jsonl"))]

    @cached_property
    def texts(self) -> list[list[tuple[str, str, float]]]:
        """Problem, response and reward of each sample of each step."""
        return [[(s["problem"], s["response"], s["reward"]) for s in samples] for samples in self.samples]

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]

    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]


class Running:
    """A run in progress: a launcher, its roles, and all that these started. A context that leaves nothing running."""

    def __init__(self, folder: Path, *arguments: str, deadline_s: float = DEADLINE_S) -> None:
        """`arguments` are those of run_local.py; its `run.dir` must be `folder`."""
        self.folder = folder
        self._deadline_s = deadline_s
        self.shared_memory: set[Path] = set()
        self._screen = folder.with_suffix(".out")
        with self._screen.open("wb") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "recipes/run_local.py", *arguments],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.family: set[psutil.Process] = set()
        self._looked_at = time.monotonic()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._look(), *self.family]:
            if process.is_running():
                process.kill()
        self.launcher.kill()
        self.launcher.wait()

    def finish(self) -> Finished:
        """Wait for the launcher and return what it said."""
        self.wait_until(lambda: self.launcher.poll() is not None)
        return Finished(self.folder, self.launcher.wait(), self._screen.read_text(), frozenset(self.shared_memory))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._deadline_s
        while not condition():
            assert time.monotonic() < deadline, self._screen.read_text()
            if time.monotonic() - self._looked_at > LOOK_S:
                self._look()
            time.sleep(0.1)

    def wait_for_steps(self, count: int) -> None:
        path = self.folder / "metrics.jsonl"
        self.wait_until(lambda: path.exists() and len(path.read_bytes().splitlines()) >= count)

    def kill(self, name: str) -> Finished:
        """Kill the process of a role and return what the launcher said of it."""
        self._look()
        self.role(name).kill()
        return self.finish()

    def role(self, name: str) -> psutil.Process:
        """Return the process of a role."""
        children = psutil.Process(self.launcher.pid).children()
        (found,) = [process for process in children if f"recipes.{name}" in process.cmdline()]
        return found

    def has_process(self, name: str) -> bool:
        """Whether a process of the run has a name that starts like this."""
        return any(_is_alive(process) and process.name().startswith(name) for process in self._look())

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._look()
        self.launcher.send_signal(signal.SIGINT)

    def nothing_is_left(self) -> bool:
        """Check that no process, port or shared memory of the run outlived it."""
        left = [process for process in self.family if _is_alive(process)]
        assert not left, left
        assert not [path for path in self.shared_memory if path.exists()]
        for port in self._ports():
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} is still open"
        return True

    def _ports(self) -> list[int]:
        logs = "".join(path.read_text(errors="replace") for path in (self.folder / "logs").glob("*.log"))
        config = (self.folder / "config.yaml").read_text()
        return [
            int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)", logs) + re.findall(r" port: (\d+)", config)
        ]

    def _look(self) -> set[psutil.Process]:
        """Remember every process of the run that is there now."""
        self._looked_at = time.monotonic()
        if self.launcher.poll() is None:
            self.family |= set(psutil.Process(self.launcher.pid).children(recursive=True))
            self.shared_memory |= shared_memory_of(process.pid for process in self.family)
        return self.family


def start(folder: Path, model: Path, *overrides: str) -> Running:
    """Start a small run."""
    return Running(folder, "configs/demo.yaml", f"run.dir={folder}", f"model.path={model}", *SMALL, *overrides)


def run(folder: Path, model: Path, *overrides: str) -> Finished:
    """Run a small run to the end."""
    with start(folder, model, *overrides) as running:
        finished = running.finish()
        assert finished.exit_code == 0, finished.output
        assert running.nothing_is_left()
        return finished


def same_steps(found: Sequence[Sequence[Any]], expected: Sequence[Sequence[Any]]) -> int:
    """Return how many steps two lockstep runs sampled the same: all, or those before rounding once chose another token.

    Where sums were taken in another order, the last bit of a log-probability may do so, and from there the runs part. It may
    not before the weights change, nor in more than a sample or two of the step.
    """
    others = [
        [sample for sample, other in zip(samples, golden, strict=True) if sample != other]
        for samples, golden in zip(found, expected, strict=True)
    ]
    same = next((step for step, samples in enumerate(others) if samples), len(others))
    assert same == len(others) or (same >= FROM_VERSION_0 and len(others[same]) <= NEAR_TIES), (
        f"step {same} sampled otherwise: {others[same]}"
    )
    return same


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
