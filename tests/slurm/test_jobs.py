"""The job script that users submit, on four nodes: a tiny model on CPUs, chosen through environment variables alone."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from a3po_megatron.launch.node_facts import candidate_ports
from tests.slurm.cluster import FINAL, Cluster
from tests.system.runs import SMALL, Finished, run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm" / "qwen3_8b_dapo.sh"
START_S = 400.0  # of vLLM and the actor on a busy machine
RUN_S = 500.0
FAILURE_S = 60.0  # from the death of a rank to the end of its job; the other one's collective would wait for 120
TINY = {
    "GPUS_PER_NODE": "0",
    "ACTOR_RANKS_PER_NODE": "1",
    "TP": "2",
    "DP": "1",
    "MIN_FREE_GB": "1",
    "PYTHON": sys.executable,
}
LOCKSTEP = ("controller.schedule=lockstep", "controller.max_staleness=1")


@dataclass
class Job:
    """A submitted job, where it runs and what it printed."""

    cluster: Cluster
    number: str
    run_dir: Path

    @property
    def output(self) -> str:
        path = self.run_dir.with_suffix(".out")
        return path.read_text() if path.exists() else ""

    @property
    def logs(self) -> Path:
        return self.run_dir / "logs" / f"job-{self.number}.0"

    def processes(self) -> list[psutil.Process]:
        """Return every process of the job, wherever it went: its environment names the run's folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("RUN_DIR") == str(self.run_dir):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def wait_for_log(self, role_and_node: str, text: str) -> None:
        path = self.logs / f"{role_and_node}.log"
        wait_until(
            lambda: path.exists() and text in path.read_text(), START_S, lambda: f"{text} in {path}: {self.output}"
        )

    def wait_for_ranks(self) -> list[psutil.Process]:
        """Return the actor's ranks, once both exist."""
        wait_until(lambda: len(self._ranks()) == 2, START_S, lambda: f"two ranks: {self.output}")
        return self._ranks()

    def end(self, timeout_s: float = RUN_S) -> str:
        return self.cluster.wait_for(self.number, FINAL, timeout_s)

    def _ranks(self) -> list[psutil.Process]:
        return [process for process in self.processes() if "LOCAL_RANK" in _environment(process)]


@pytest.fixture
def submit(cluster: Cluster, model: Path, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []
    config = tmp_path / "tiny.yaml"
    OmegaConf.save(
        OmegaConf.merge(OmegaConf.load(ROOT / "configs" / "demo.yaml"), OmegaConf.from_dotlist([*SMALL, *LOCKSTEP])),
        config,
    )

    def make(name: str, *settings: str, options: tuple[str, ...] = (), **variables: str) -> Job:
        run_dir = tmp_path / name
        out = f"--output={run_dir.with_suffix('.out')}"
        number = cluster.submit(
            SCRIPT,
            {**TINY, "CONFIG": str(config), "MODEL_PATH": str(model), "RUN_DIR": str(run_dir), **variables},
            [out, "--gpus-per-node=0", "--cpus-per-task=1", *options],
            settings,
        )
        jobs.append(Job(cluster, number, run_dir))
        return jobs[-1]

    yield make
    for job in jobs:
        cluster.run("scancel", job.number, check=False)
        job.end(60)


@pytest.mark.timeout(1200)
def test_a_job_over_four_nodes_trains_as_a_run_on_one_machine_whatever_happens_beside_it(
    submit: Callable[..., Job], cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    job = submit("lockstep", options=("--hold",))
    first_port = candidate_ports(int(job.number), 3)[0]
    with Listener(cluster.namespace(3), first_port + 2):  # where the first server would listen
        cluster.run("scontrol", "release", job.number)
        # Other jobs on the same nodes come and go meanwhile: one loses a rank, one is cancelled.
        failing = submit("failing", ROLLOUT_NODES="1", options=("--nodes=3",))
        cancelled = submit("cancelled", ROLLOUT_NODES="1", options=("--nodes=3",))
        (rank,) = (process for process in failing.wait_for_ranks() if _environment(process)["RANK"] == "1")
        rank.kill()
        killed = time.monotonic()
        assert failing.end(START_S) == "FAILED"
        assert time.monotonic() - killed < FAILURE_S
        lines = failing.output.strip().splitlines()
        assert any("failed: actor ended with exit code 1" in line for line in lines[-3:]), failing.output
        assert re.fullmatch(r"error: rank 1 \(process \d+\) was killed by SIGKILL", lines[-1]), failing.output
        assert failing.processes() == []

        cancelled.wait_for_ranks()
        cluster.run("scancel", cancelled.number)
        assert cancelled.end(60) == "CANCELLED"
        wait_until(lambda: "failed: stopped by SIGTERM" in cancelled.output, 45, lambda: cancelled.output)
        wait_until(lambda: not cancelled.processes(), 45, lambda: f"still there: {cancelled.processes()}")

        assert job.end() == "COMPLETED", job.output
    assert f":{first_port}" not in job.output
    assert job.processes() == []
    servers = "".join((job.logs / f"rollout-node{number}.log").read_text() for number in (3, 4))
    assert "http://10.77.0.3:" in servers
    assert "http://10.77.0.4:" in servers
    on_cluster = Finished(job.run_dir, 0, job.output)
    here = run(tmp_path / "here", model, *LOCKSTEP, "actor.tensor_parallel=2", "rollout.num_servers=2")
    assert on_cluster.samples == here.samples
    for name in ("loss", "grad_norm", "reward/mean", "staleness/mean"):
        assert on_cluster.column(name) == pytest.approx(
            here.column(name), abs=1e-5
        )  # vLLM batches requests as they come


def test_status_shows_a_job_by_its_number(submit: Callable[..., Job], cluster: Cluster) -> None:
    job = submit("wrong", "run.num_steps=0")
    assert job.end(120) == "FAILED"
    shown = cluster.run("bash", str(ROOT / "slurm" / "status.sh"), job.number)
    assert f"job {job.number}: FAILED" in shown
    assert "run.num_steps=0" in shown


@pytest.mark.parametrize(
    ("variables", "options", "says"),
    [
        (
            {"ROLLOUT_NODES": "3"},
            (),
            "the job has 4 nodes, but ACTOR_NODES=2 + ROLLOUT_NODES=3 need 5; sbatch --nodes=5",
        ),
        ({"GPUS_PER_NODE": "8"}, (), "GPUS_PER_NODE=8, but the job has 0 a node"),
        ({"MIN_FREE_GB": "9000000"}, (), "MIN_FREE_GB=9e+06 are asked for"),
        ({"INTERFACE": "ib0"}, (), "INTERFACE=ib0: node1 has no such interface"),
    ],
)
def test_a_job_that_cannot_work_ends_before_any_role_starts(
    submit: Callable[..., Job], variables: dict[str, str], options: tuple[str, ...], says: str
) -> None:
    job = submit("wrong", options=options, **variables)
    assert job.end(120) == "FAILED"
    assert job.cluster.field(job.number, "ExitCode") == "2:0"
    assert says in job.output
    assert not list(job.run_dir.glob("logs/*/controller*"))


@pytest.mark.timeout(600)
def test_a_server_that_dies_is_started_again_and_the_job_completes(submit: Callable[..., Job]) -> None:
    job = submit("restarted", ROLLOUT_NODES="1", options=("--nodes=3",))
    job.wait_for_log("rollout-node3", "generates at")
    shown = job.cluster.run("bash", str(ROOT / "slurm" / "status.sh"), job.number)
    assert f"job {job.number}: RUNNING" in shown
    assert f"run folder: {job.run_dir}" in shown
    assert "controller" in shown
    assert "generates at" in shown
    server = next(process for process in job.processes() if "vllm.entrypoints.openai.api_server" in process.cmdline())
    server.kill()
    job.wait_for_log("rollout-node3", "starting it again (1 of 3)")
    assert job.end() == "COMPLETED", job.output
    assert (job.logs / "rollout-node3.log").read_text().count("generates at") == 2


@pytest.mark.timeout(300)
def test_the_distributed_tests_run_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """A newcomer's first job, on CPUs: two ranks on each of two nodes, and one of the tests."""
    variables = {"GPUS_PER_NODE": "0", "CHOOSE": "test_weights and llama-tied", "PYTHON": sys.executable}
    variables |= {"RUN_DIR": str(tmp_path / "run"), "PYTEST_ADDOPTS": ""}  # whatever this pytest was told
    options = [f"--output={tmp_path}/out", "--gpus-per-node=0", "--cpus-per-task=1", "--nodes=2"]
    job = cluster.submit(ROOT / "slurm" / "test_distributed.sh", variables, options, [])
    assert cluster.wait_for(job, FINAL, 250) == "COMPLETED", (tmp_path / "out").read_text()
    assert (tmp_path / "out").read_text().count("passed") == 4  # each rank says so


def wait_until(condition: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what()}"
        time.sleep(0.2)


class Listener:
    """Something that listens on a port of a node."""

    def __init__(self, namespace: str, port: int) -> None:
        program = (
            f"import socket, time; s = socket.create_server(('', {port})); print('on', flush=True); time.sleep(9999)"
        )
        self._process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", program], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"on\n"

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return {}
