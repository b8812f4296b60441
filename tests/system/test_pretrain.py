"""The warm start as a user runs it: whole processes, real ranks."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.system.pretraining import command, ended, pretrain
from tests.system.runs import ROOT

TP2PP2 = ["actor.tensor_parallel=2", "actor.pipeline_parallel=2", "actor.sequence_parallel=true"]


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_warm_start_reaches_its_accuracy_and_writes_a_folder_that_transformers_loads(trained: Path) -> None:
    last = rows(trained)[-1]
    assert last["eval/accuracy"] >= 0.54
    assert last["step"] < 400
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == 396_032
    right = 0
    for a in range(10, 60):
        prompt = tokenizer(f"{a}+{a + 7}=", return_tensors="pt")
        answer = model.generate(prompt["input_ids"], max_new_tokens=4, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ]
        right += tokenizer.decode(answer) == f"{2 * a + 7}<eos>"
    # 0.54 of all questions come out right by greedy decoding in transformers too; fewer than 13 of 50 would be 4 sigma off.
    assert right >= 13


@pytest.mark.timeout(360)
def test_four_ranks_learn_alike(trained: Path, tmp_path: Path) -> None:
    """TP2 x PP2 with sequence parallelism: the first losses and gradients are those of one rank.

    Nothing is answered right so early: tests/distributed/test_token_output.py compares what greedy decoding gives.
    """
    folder = tmp_path / "run"
    run = pretrain(f"run.dir={folder}", *TP2PP2, "run.num_steps=12", "eval_every=0", timeout_s=300)
    assert run.returncode == 0, run.stderr
    for row, other in zip(rows(folder), rows(trained)[:12], strict=True):
        # The layouts add float32 in another order, and twelve steps of Adam enlarge that: here to 5e-8 in the loss and 3e-7 of
        # the norm.
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4), row["step"]
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), row["step"]
    AutoModelForCausalLM.from_pretrained(folder / "model")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_four_ranks_reach_the_accuracy_of_one(tmp_path: Path) -> None:
    """A sweep, because it takes a minute more than its first twelve steps, which `test_four_ranks_learn_alike` compares."""
    run = pretrain(f"run.dir={tmp_path / 'run'}", *TP2PP2, timeout_s=500)
    assert run.returncode == 0, run.stderr
    assert rows(tmp_path / "run")[-1]["eval/accuracy"] >= 0.54


@pytest.mark.timeout(240)
def test_a_run_killed_while_it_saves_resumes_from_the_checkpoint_before_at_another_layout(
    trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    settings = [
        f"run.dir={folder}",
        "eval_every=0",
        "stop_at_accuracy=1.0",
        "run.checkpoint_every=1",
        "run.keep_last=2",
    ]
    killed_at = kill_during_a_save(folder, *settings, "run.checkpoint_async=true", "actor.pipeline_parallel=2")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # what a killed run may leave
    last = killed_at + 2
    resumed = pretrain(*settings, f"run.num_steps={last}", "run.resume=true")
    assert resumed.returncode == 0, resumed.stderr
    (note,) = [line for line in resumed.stderr.splitlines() if line.startswith("note: ")]
    half, used = f"step_{killed_at:06d}.incomplete", f"step_{killed_at - 1:06d}"
    assert note == f"note: {folder}/checkpoints/{half}: removed, the save did not finish; {used} is used"
    kept = [f"step_{step:06d}" for step in (last - 1, last)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == kept
    assert [row["step"] for row in rows(folder)] == list(range(1, last + 1))
    for row, other in zip(rows(folder), rows(trained), strict=False):
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4), row["step"]


def kill_during_a_save(folder: Path, *settings: str) -> int:
    """Kill a run's processes (SIGKILL) while a checkpoint after the first three is half written; return its step."""
    with subprocess.Popen(command(*settings), cwd=ROOT, stderr=PIPE, text=True) as run, ended(run):
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline, "no save was seen half done"
            assert run.poll() is None, run.stderr.read() if run.stderr else ""
            if not half_written(folder):
                time.sleep(0.002)
                continue
            processes = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
            for process in processes:
                process.suspend()
            if half := half_written(folder):  # still so, now that nothing moves
                break
            for process in processes:
                process.resume()
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=10)
    return int(half[0].name.removeprefix("step_").removesuffix(".incomplete"))


def half_written(folder: Path) -> list[Path]:
    """Return the folder of a save, not the first three, that has begun and lacks its marker."""
    halves = (folder / "checkpoints").glob("step_*.incomplete")
    return [half for half in halves if half.name > "step_000004" and not (half / "complete.json").exists()]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.num_stepz=3"], "unknown key 'run.num_stepz'; did you mean 'run.num_steps'?"),
        (["actor.tensor_parallel=3"], "actor.tensor_parallel=3 does not divide the model's 4 query heads"),
        (["actor.pipeline_parallel=4"], "makes 4 chunks, more than the model's 2 layers; use at most 2"),
        (["model.path=nowhere"], "model.path: nowhere is not a folder"),
        (["model.init=pretrained"], "no weights: expected model.safetensors"),
        (["run.resume=true"], "run.resume=true: no complete checkpoint below"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(overrides: list[str], message: str, tmp_path: Path) -> None:
    run = pretrain(f"run.dir={tmp_path / 'run'}", *overrides)
    assert run.returncode == 2
    assert message in run.stderr
    assert len(run.stderr.splitlines()) == 1, run.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that must not be there")
def test_a_mistake_that_only_ranks_can_see_is_one_line_too(tmp_path: Path) -> None:
    run = pretrain(f"run.dir={tmp_path / 'run'}", *TP2PP2, "actor.device=cuda")
    assert run.returncode == 2
    (line,) = run.stderr.splitlines()
    assert line.startswith("error: actor.device=cuda: local rank")
    assert "has no GPU, torch finds 0 on this machine" in line


@pytest.mark.timeout(240)
def test_heads_that_tensor_parallel_does_not_divide_are_refused(tmp_path: Path) -> None:
    """SmolLM2's 9 query and 3 key/value heads at TP2; virtual stages with batched p2p on a model of four layers."""
    config = json.loads((ROOT / "configs/models/arithmetic_qwen3/config.json").read_text())
    smollm2 = config | {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(smollm2))
    run = pretrain(f"model.path={tmp_path}", "actor.tensor_parallel=2")
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert "does not divide the model's 9 query heads; use 1 or 3" in run.stderr
    virtual = ["actor.pipeline_parallel=2", "actor.virtual_pipeline_parallel=2", "actor.p2p_communication=batched"]
    run = pretrain(f"model.path={tmp_path}", *virtual)
    assert (run.returncode, len(run.stderr.splitlines())) == (2, 1)
    assert "trains silently wrong on megatron-core" in run.stderr


@pytest.mark.timeout(360)
def test_a_run_is_not_written_over_and_a_damaged_checkpoint_is_named(trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained, tmp_path / "run")
    run = pretrain(f"run.dir={folder}")
    assert run.returncode == 2
    assert "already holds a run; name another, remove it, or set run.resume=true" in run.stderr
    (checkpoint,) = (folder / "checkpoints").iterdir()
    data = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:1000])
    run = pretrain(f"run.dir={folder}", "run.resume=true")
    assert run.returncode == 2
    assert f"{data.name}: damaged checkpoint" in run.stderr
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    run = pretrain(f"run.dir={tmp_path / 'other'}", "model.init=pretrained", f"model.path={folder / 'model'}")
    assert run.returncode == 2
    assert "model.safetensors: damaged weights file" in run.stderr


@pytest.mark.timeout(200)
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM], ids=lambda end: end.name)
def test_an_interrupted_run_leaves_no_process(end: signal.Signals, tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path / 'run'}", "run.num_steps=100000", "eval_every=0", "actor.pipeline_parallel=2"]
    with subprocess.Popen(command(*settings), cwd=ROOT, stderr=PIPE, text=True) as run, ended(run):
        deadline = time.monotonic() + 90
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert time.monotonic() < deadline, "the ranks did not start training"
            assert run.poll() is None
            time.sleep(0.2)
        ranks = psutil.Process(run.pid).children(recursive=True)
        assert len(ranks) >= 2
        run.send_signal(end)
        assert run.wait(timeout=60) == 130
        assert run.stderr is not None
        assert "interrupted; its 2 ranks have been ended" in run.stderr.read()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive


def test_settings_are_printed_without_starting_anything() -> None:
    run = pretrain("--print-config", "run.num_steps=3")
    assert run.returncode == 0
    assert "num_steps: 3" in run.stdout
