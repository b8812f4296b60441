"""What slurm/lib.sh and slurm/node.sh do with their steps. SLURM's commands and Python are stand-ins (stubs/), the scripts real."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "stubs"
DEADLINE_S = 100.0


class StubbedJob:
    """A job script that runs on this machine alone."""

    def __init__(self, folder: Path, nodes: str = "n1,n2,n3,n4", gpus: int = 8, **variables: str) -> None:
        self.folder = folder
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text("{}")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "CUDA"))}
        environment = {
            **clean,
            "PATH": f"{STUBS}:{os.environ['PATH']}",
            "STUB": str(folder),
            "PYTHON": str(STUBS / "python"),
            "A3PO_HOME": str(ROOT),
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NAME": "stubbed",
            "SLURM_JOB_NODELIST": nodes,
            "SLURM_JOB_NUM_NODES": str(nodes.count(",") + 1),
            "SLURM_GPUS_PER_NODE": str(gpus),
            "GPUS_PER_NODE": str(gpus),
            "MODEL_PATH": str(folder / "model"),
            "RUN_DIR": str(folder / "a run"),  # with a space, as people have them
            "STOP_S": "5",
            **variables,
        }
        script = "qwen2_5_1p5b_gsm8k" if "," not in nodes else "qwen3_8b_dapo"
        self.out = (folder / "out").open("w")
        self.process = subprocess.Popen(
            ["bash", f"slurm/{script}.sh"],
            cwd=ROOT,
            env=environment,
            stdout=self.out,
            stderr=self.out,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def calls(self) -> str:
        path = self.folder / "calls"
        return path.read_text() if path.exists() else ""

    def end(self) -> int:
        try:
            return self.process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"the job did not end: {self.output}") from None
        finally:
            self.out.close()

    def wait_for_call(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.calls:
            assert time.monotonic() < deadline, f"waited for {text}: {self.calls} {self.output}"
            time.sleep(0.05)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., StubbedJob]:
    return lambda **variables: StubbedJob(tmp_path, **variables)


def test_each_role_starts_where_it_belongs_and_a_good_end_ends_the_servers(job: Callable[..., StubbedJob]) -> None:
    done = job()
    assert done.end() == 0, done.output
    assert "done: model in " in done.output
    actors = re.findall(r"python\[(n\d)\].* recipes.actor .*actor.host=10.0.0.9 --node-rank (\d)", done.calls)
    assert sorted(actors) == [("n1", "0"), ("n2", "1")]
    servers = re.findall(r"python\[(n\d)\].* recipes.rollout .*--node (n\d) .*rollout.host=10.0.0.9", done.calls)
    assert sorted(servers) == [("n3", "n3"), ("n4", "n4")]
    assert re.findall(r"python\[(n\d)\].* recipes.controller ", done.calls) == ["n1"]
    everywhere = "controller.host=10.0.0.1 controller.port=12000"
    assert done.calls.count(everywhere) == 4 + 5  # sruns, and tasks of them
    assert "--master 10.0.0.1:12001" in done.calls
    assert "rollout.base_port=12002" in done.calls
    assert sorted(re.findall(r"told (\S+)", done.calls)) == ["rollout-n3", "rollout-n4"]


@pytest.mark.parametrize(
    ("shown", "actor", "rollout"),
    [
        ("", "0,1,2,3", "4,5"),
        ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f", "GPU-a,GPU-b,GPU-c,GPU-d", "GPU-e,GPU-f"),
        ("2,3,4,5,6,7", "2,3,4,5", "6,7"),
    ],
)
def test_roles_that_share_a_node_see_gpus_of_their_own(
    job: Callable[..., StubbedJob], shown: str, actor: str, rollout: str
) -> None:
    done = job(nodes="n1", **({"CUDA_VISIBLE_DEVICES": shown} if shown else {}))
    assert done.end() == 0, done.output
    assert re.search(rf"gpus={actor} .*recipes.actor .*actor.host=127.0.0.1", done.calls)
    (seen,) = re.findall(r"gpus=(\S*) .*recipes.rollout ", done.calls)
    assert seen.startswith(rollout)
    assert not set(seen.split(",")) & set(actor.split(","))


def test_a_failing_actor_ends_the_job_with_its_own_reason_in_order(job: Callable[..., StubbedJob]) -> None:
    actor = 'if [ "$SLURMD_NODENAME" = n2 ]; then sleep 1; echo "error: the loss is NaN"; exit 3; else serve; fi'
    done = job(STUB_ACTOR=actor, STUB_CONTROLLER="serve")
    done.wait_for_call("recipes.actor")
    assert done.end() == 3, done.output
    lines = done.output.splitlines()
    assert "failed: actor ended with exit code 3" in lines[-2]
    assert lines[-1] == "error: the loss is NaN"
    told = re.findall(r"told (\S+)", done.calls)
    assert told[-1] == "controller"
    assert set(told[-3:-1]) == {"rollout-n3", "rollout-n4"}


def test_the_loss_of_a_rollout_node_is_said_and_the_job_goes_on(job: Callable[..., StubbedJob]) -> None:
    servers = 'if [ "$SLURMD_NODENAME" = n3 ]; then exit 1; else serve; fi'
    done = job(STUB_ROLLOUT=servers, STUB_ACTOR="sleep 2", STUB_CONTROLLER="sleep 2")
    assert done.end() == 0, done.output
    assert "rollout-n3 ended with exit code 1; 1 rollout nodes are left" in done.output


def test_the_loss_of_the_last_rollout_node_ends_the_job_with_its_words(job: Callable[..., StubbedJob]) -> None:
    servers = 'echo "error: server 0 failed 4 times"; exit 1'
    done = job(STUB_ROLLOUT=servers, STUB_ACTOR="serve", STUB_CONTROLLER="serve")
    assert done.end() == 1, done.output
    assert "no rollout node is left" in done.output
    assert done.output.splitlines()[-1] == "error: server 0 failed 4 times"


def test_a_role_that_does_not_end_is_killed(job: Callable[..., StubbedJob]) -> None:
    deaf = "trap '' TERM; while :; do sleep 0.1; done"
    done = job(STUB_ROLLOUT=deaf, STOP_S="1")
    assert done.end() == 0, done.output
    assert "rollout-n3 did not end within 1 s and is killed" in done.output


def test_an_srun_that_hangs_does_not_hold_up_the_end(job: Callable[..., StubbedJob]) -> None:
    deaf = "trap '' TERM; while [ ! -e $STUB/over ]; do sleep 0.1; done"
    done = job(STUB_ROLLOUT=deaf, STUB_SRUN_HANGS="1", STOP_S="1", SRUN_END_S="1")
    try:
        assert done.end() == 0, done.output
    finally:
        (done.folder / "over").touch()
    assert "rollout-n4 did not end within 1 s and is killed" in done.output


def test_the_second_of_actor_and_controller_has_a_deadline(job: Callable[..., StubbedJob]) -> None:
    done = job(STUB_CONTROLLER="serve", LAST_ROLE_S="1")
    assert done.end() == 1, done.output
    assert "the other did not within LAST_ROLE_S=1 s" in done.output


def test_the_warning_before_the_time_limit_ends_the_job_in_order(job: Callable[..., StubbedJob]) -> None:
    done = job(STUB_ACTOR="serve", STUB_CONTROLLER="serve")
    for role in ("actor", "controller", "rollout"):
        done.wait_for_call(f"serves {role}")  # its trap is set
    done.process.send_signal(signal.SIGUSR1)
    assert done.end() == 1, done.output
    assert "failed: the job's time is nearly over" in done.output
    assert re.findall(r"told (\w+)", done.calls)[0] == "actor"


def test_a_cancelled_job_ends_in_order_although_the_signal_reaches_all_of_its_script(
    job: Callable[..., StubbedJob],
) -> None:
    done = job(STUB_ACTOR="serve", STUB_CONTROLLER="serve")
    for role in ("actor", "controller", "rollout"):
        done.wait_for_call(f"serves {role}")  # its trap is set
    children = psutil.Process(done.process.pid).children()
    for process in [child for child in children if child.name() == "sleep"]:
        process.send_signal(signal.SIGTERM)  # SLURM signals every process of the batch script
    done.process.send_signal(signal.SIGTERM)
    assert done.end() == 143, done.output
    assert "failed: stopped by SIGTERM" in done.output


def test_the_warning_during_the_checks_is_said(job: Callable[..., StubbedJob]) -> None:
    done = job(STUB_JOB="sleep 30")
    done.wait_for_call("recipes.job plan")
    done.process.send_signal(signal.SIGUSR1)
    assert done.end() == 1, done.output
    assert "failed: the job's time is nearly over during the check 'plan'; nothing was started" in done.output


def test_a_check_that_hangs_has_a_deadline(job: Callable[..., StubbedJob]) -> None:
    done = job(STUB_JOB='if [ "$3" = node ]; then sleep 60; fi', PREFLIGHT_S="2")
    assert done.end() == 2, done.output
    assert "error: the check 'nodes' did not end within PREFLIGHT_S=2 s; nothing was started" in done.output


def test_a_check_that_fails_ends_the_job_with_its_line(job: Callable[..., StubbedJob]) -> None:
    done = job(STUB_JOB='if [ "$3" = open ]; then echo "error: n3 has 7 GPUs, GPUS_PER_NODE=8"; exit 2; fi')
    assert done.end() == 2, done.output
    assert "error: n3 has 7 GPUs, GPUS_PER_NODE=8\n" in done.output
    assert "recipes.actor" not in done.calls


def test_what_srun_itself_refuses_is_shown(job: Callable[..., StubbedJob]) -> None:
    done = job(STUB_SRUN_FAILS="Unable to create step: Invalid generic resource (gres) specification")
    assert done.end() == 1, done.output
    assert "Invalid generic resource" in done.output
    assert "the check 'plan' ended with exit code 1; nothing was started" in done.output


def test_gpus_that_the_job_does_not_have_are_refused(job: Callable[..., StubbedJob]) -> None:
    done = job(gpus=8, SLURM_GPUS_PER_NODE="h100:4")
    assert done.end() == 2, done.output
    assert "error: GPUS_PER_NODE=8, but the job has h100:4 a node" in done.output


def test_the_gpus_of_a_sites_nodes_are_set_in_its_file(job: Callable[..., StubbedJob], tmp_path: Path) -> None:
    site = tmp_path / "site.env"
    site.write_text(': "${GPUS_PER_NODE:=4}"\n')
    done = job(SITE_ENV=str(site), GPUS_PER_NODE="", SLURM_GPUS_PER_NODE="4")
    assert done.end() == 0, done.output
    assert "--gpus-per-node=4" in done.calls
    assert "--actor-ranks-per-node 4" in done.calls


def test_a_sites_file_reaches_every_srun_and_every_role(job: Callable[..., StubbedJob], tmp_path: Path) -> None:
    site = tmp_path / "site.env"
    site.write_text(
        "SRUN_ARGS=(--container-image=/images/a3po.sqsh '--comment=two words')\n"
        "CONTAINER=(env STUB_EXTRA=inside)\n"
        "site_setup() { export PATH=$PATH:$NOT_SET; false; }\n"  # as module and conda do
    )
    done = job(SITE_ENV=str(site))
    assert done.end() == 0, done.output
    sruns = [line for line in done.calls.splitlines() if line.startswith("srun ")]
    assert len(sruns) == 3 + 4
    assert all("--container-image=/images/a3po.sqsh --comment=two words" in line for line in sruns)
    assert all("--export=ALL" in line and "--overlap" in line and "--gpus-per-node=8" in line for line in sruns)
    pythons = [line for line in done.calls.splitlines() if line.startswith("python[n")]
    assert pythons
    assert all("extra=inside" in line for line in pythons)


def test_a_python_inside_a_container_is_not_looked_for_outside(job: Callable[..., StubbedJob], tmp_path: Path) -> None:
    site = tmp_path / "site.env"
    site.write_text("SRUN_ARGS=(--container-image=/images/a3po.sqsh)\n")
    done = job(SITE_ENV=str(site), PYTHON="/opt/a3po/bin/python", STUB_SRUN_FAILS="no such image")
    assert done.end() == 1
    assert "no such image" in done.output
