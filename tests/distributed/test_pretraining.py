"""The supervised warm start on several ranks, where it fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from a3po_megatron.actor import parallel
from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.nonfinite import NonFiniteError
from a3po_megatron.actor.pretraining import pretrain
from a3po_megatron.config.data import ArithmeticTaskConfig
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.config.schema import ModelConfig, PretrainConfig, RunConfig
from tests.distributed.layouts import Layout

MODEL = Path(__file__).parents[2] / "configs/models/arithmetic_qwen3"


def test_a_loss_that_is_not_finite_ends_the_run_after_the_save_under_way(shared_folder: Path) -> None:
    train_step, taken = Actor.train_step, []

    def fails_at_the_second(*arguments: Any) -> Any:
        taken.append(1)
        if len(taken) == 2:
            raise NonFiniteError("the loss is nan")
        return train_step(*arguments)

    config = replace(
        PretrainConfig(),
        run=RunConfig(dir=str(shared_folder), num_steps=3, checkpoint_every=1, checkpoint_async=True),
        model=ModelConfig(path=str(MODEL), init="random"),
        actor=Layout(tp=2).config(),
        task=ArithmeticTaskConfig(max_operand=9, num_heldout=10),
        num_questions=20,
        batch_size=4,
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Actor, "train_step", fails_at_the_second)
        with pytest.raises(NonFiniteError):
            pretrain(config, read_model_shape(str(MODEL)))
    assert [path.name for path in (shared_folder / "checkpoints").iterdir()] == ["step_000001"]
    parallel.destroy()
