"""Warm starts through `recipes/pretrain.py`, as a user starts them."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

import psutil

from tests.system.runs import ROOT

CONFIG = "configs/demo_warmstart.yaml"
WARM_START_S = 400.0  # of a whole one on a busy machine


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "recipes.pretrain", CONFIG, *arguments]


def pretrain(*arguments: str, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    """Run to the end; a run that takes too long is ended with its ranks."""
    with (
        subprocess.Popen(command(*arguments), cwd=ROOT, stdout=PIPE, stderr=PIPE, text=True) as process,
        ended(process),
    ):
        stdout, stderr = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Leave no process of a run behind, whatever happens inside."""
    try:
        yield
    finally:
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), process]:
                one.kill()
