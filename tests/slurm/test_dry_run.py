"""Every shipped job script's plan, and what a user's mistake looks like. Needs no SLURM, no GPU and no weights."""

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError

ROOT = Path(__file__).parents[2]
BYTES = 2  # of a bfloat16
MODELS = {
    "qwen2_5_1p5b_gsm8k": "Qwen2.5-1.5B-Instruct",
    "qwen3_8b_dapo": "Qwen3-8B",
    "qwen3_14b_dapo": "Qwen3-14B",
    "qwen3_32b_dapo": "Qwen3-32B",
    "qwen3_30b_a3b_dapo": "Qwen3-30B-A3B",
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return name -> model folder: real shapes, the tokenizer of Qwen3, and weights that are a hole in a file."""
    root = tmp_path_factory.mktemp("models")
    try:
        data_folder()
    except UserError as error:
        pytest.skip(str(error))

    @cache
    def folder_of(name: str) -> str:
        folder = root / name
        shutil.copytree(data_folder() / "qwen3_tokenizer", folder, copy_function=shutil.copyfile)
        folder.chmod(0o755)
        shutil.copyfile(data_folder() / "hf_configs" / f"{name}.json", folder / "config.json")
        header, end = {}, 0
        for tensor, shape in hf_shapes(read_model_shape(str(folder))).items():
            start = end
            end += BYTES * math.prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        return str(folder)

    return folder_of


def dry_run(script: str, arguments: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
    return subprocess.run(
        ["bash", f"slurm/{script}.sh", "--dry-run", *arguments],
        cwd=ROOT,
        env={**clean, "DATA_DIR": str(data_folder()), **variables},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_there_is_a_model_for_every_job_script() -> None:
    scripts = {path.stem for path in (ROOT / "slurm").glob("*.sh") if "#SBATCH" in path.read_text()}
    assert scripts - {"test_distributed"} == set(MODELS)


@pytest.mark.parametrize("script", MODELS)
def test_the_plan_of_every_script_adds_up(models: Callable[[str], str], script: str) -> None:
    done = dry_run(script, MODEL_PATH=models(MODELS[script]))
    assert done.returncode == 0, done.stdout + done.stderr
    text = (ROOT / "slurm" / f"{script}.sh").read_text()
    (nodes,) = (int(line.split("=")[1]) for line in text.splitlines() if line.startswith("#SBATCH --nodes="))
    assert f"node{nodes} " in done.stdout
    assert f"node{nodes + 1} " not in done.stdout
    assert "loglinear" in done.stdout
    assert re.search(r"memory of an actor GPU\s+│ \d+\.\d of 80 GB", done.stdout)


@pytest.mark.parametrize(
    ("method", "says"), [("sync", "sync, staleness up to 0"), ("recompute", "recompute, staleness up to 4")]
)
def test_the_method_is_a_variable(models: Callable[[str], str], method: str, says: str) -> None:
    done = dry_run("qwen3_8b_dapo", MODEL_PATH=models("Qwen3-8B"), METHOD=method)
    assert says in done.stdout, done.stdout + done.stderr


MISTAKES = {
    "no model": ({"MODEL_PATH": ""}, (), "MODEL_PATH is not set"),
    "model not there": ({"MODEL_PATH": "nowhere"}, (), "MODEL_PATH=nowhere: no config.json there"),
    "no config": ({"CONFIG": "nowhere.yaml"}, (), "CONFIG=nowhere.yaml: cannot read it"),
    "no data": ({"DATA_DIR": "nowhere"}, (), "DATA_DIR=nowhere: no such folder"),
    "split": (
        {"TP": "2"},
        (),
        "ACTOR_NODES=2 x ACTOR_RANKS_PER_NODE=8 make 16 ranks, but TP=2 x PP=1 x CP=1 x DP=4 need 8; set DP=8",
    ),
    "too many GPUs": ({"REPLICAS_PER_NODE": "9"}, (), "ROLLOUT_TP=1 need 9 GPUs of a node, but GPUS_PER_NODE=8"),
    "memory": ({"GPU_MEMORY_GB": "40"}, (), "actor: a rank of pipeline stage 0 needs"),
    "heads": ({"TP": "16", "DP": "1"}, (), "actor.tensor_parallel=16 does not divide"),
    "method": ({"METHOD": "ppo"}, (), "METHOD=ppo: sync, recompute or loglinear"),
    "number": ({"ACTOR_NODES": "two"}, (), "ACTOR_NODES=two: expected a whole number"),
    "setting": ({}, ("run.numsteps=3",), "unknown key 'run.numsteps'; did you mean 'run.num_steps'?"),
    "option": ({}, ("--help-me",), "--help-me: not an option"),
    "port": ({}, ("controller.port=80",), "controller.port=80: the job chooses addresses and ports itself"),
    "python": ({"PYTHON": "nowhere/python"}, (), "PYTHON=nowhere/python: no such program"),
    "site file": ({"SITE_ENV": "nowhere.env"}, (), "SITE_ENV=nowhere.env: cannot read it"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_the_variable(models: Callable[[str], str], mistake: str) -> None:
    variables, arguments, says = MISTAKES[mistake]
    done = dry_run("qwen3_8b_dapo", arguments, **{"MODEL_PATH": models("Qwen3-8B"), **variables})
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert says in done.stderr


def test_outside_a_job_the_script_says_how_to_submit(models: Callable[[str], str]) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run(
        ["bash", "slurm/qwen3_8b_dapo.sh"],
        cwd=ROOT,
        env={**clean, "MODEL_PATH": models("Qwen3-8B")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "error: no SLURM job: submit with 'sbatch slurm/qwen3_8b_dapo.sh', or add --dry-run to see the plan\n"
    )
