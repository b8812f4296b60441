"""Settings of a training run that contradict each other are refused in one line, before any engine starts."""

from pathlib import Path

import pytest

from a3po_megatron.errors import exit_on_user_error
from recipes import actor as recipe

MODEL = Path(__file__).parents[2] / "configs/models/arithmetic_qwen3"
BASE = {"rollout.max_model_len": 64, "rollout.max_response_tokens": 4}


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{path: {MODEL}}}\nrun: {{dir: {tmp_path / 'run'}}}\n")
    return str(path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["algorithm.method=sync"], "algorithm.method=sync needs controller.schedule=lockstep and controller.max_st"),
        (["algorithm.num_minibatches=0"], "algorithm.num_minibatches=0: must be at least 1"),
        (["algorithm.num_minibatches=500"], "algorithm.num_minibatches=500: a batch has only 256 samples"),
        (["algorithm.clip_low=0"], "algorithm.clip_low=0.0: above 0 and at most 1"),
        (["algorithm.clip_high=-0.1"], "algorithm.clip_high=-0.1: must be above 0"),
        (["algorithm.behavior_weight.cap=0.5"], "algorithm.behavior_weight.cap=0.5: at least 1"),
        (["algorithm.methd=sync"], "did you mean 'algorithm.method'?"),
        (["model.init=random"], "model.init=random: the rollout servers load the weights of model.path"),
        (["rollout.dtype=bfloat16"], "rollout.dtype=bfloat16 differs from actor.dtype=float32"),
        (["rollout.float32_head=true"], "rollout.float32_head=True differs from actor.float32_head=False"),
        (["rollout.tensor_parallel=3"], "rollout.tensor_parallel=3 does not divide the model's 4 query heads"),
        (["rollout.max_model_len=65"], "rollout.max_model_len=65: "),
        (["rollout.max_response_tokens=64"], "rollout.max_model_len=64 leaves no room for a prompt"),
        (["actor.max_tokens_per_microbatch=60"], "actor.max_tokens_per_microbatch=60: a response may reach"),
        (
            ["actor.max_tokens_per_microbatch=64", "rollout.max_model_len=63", "actor.context_parallel=9"],
            "which no microbatch could hold; use at least 72",
        ),
        (
            ["actor.expert_parallel=2"],
            "actor.expert_parallel=2, actor.expert_tensor_parallel=1: the model has no experts",
        ),
        (["actor.tensor_parallel=3"], "actor.tensor_parallel=3 does not divide"),
        (
            ["actor.data_parallel=2", "actor.timeout_s=10"],
            "actor.timeout_s=10.0 is below rollout.transfer_timeout_s=300.0",
        ),
        (
            ["rollout.transfer_timeout_s=1200"],
            "controller.publication_timeout_s=900: weights may take 2460 s to arrive",
        ),
        (
            ["rollout.in_flight=drain", "rollout.drain_timeout_s=300"],
            "controller.publication_timeout_s=900: weights may take 960 s to arrive",
        ),
        (["controller.samples_per_prompt=1"], "controller.samples_per_prompt=1"),
        (["run.resume=true"], "run.resume=true: a reinforcement learning run cannot be resumed yet"),
        (["model.path=nowhere"], "model.path: nowhere is not a folder"),
        ([], "no weights: expected model.safetensors"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value else None,
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], config_file: str, overrides: list[str], line: str
) -> None:
    arguments = [config_file, *(f"{name}={value}" for name, value in BASE.items()), *overrides]
    assert exit_on_user_error(lambda: recipe.main(arguments)) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
