"""The actor's state saved at one layout continues at another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from a3po_megatron.actor.checkpoint import load_checkpoint
from a3po_megatron.actor.checkpoint_writer import save_checkpoint
from a3po_megatron.checkpoint_folder import newest_complete
from a3po_megatron.config.actor import OptimizerConfig
from a3po_megatron.errors import UserError
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, build_actor, random_sequences, save_model

# A small eps lets a wrong AdamW step count show; warm-up and decay let a schedule that was not restored show.
OPTIMIZER = OptimizerConfig(
    lr=1e-3, eps=1e-8, weight_decay=0.1, lr_warmup_steps=2, lr_decay="cosine", lr_decay_steps=8, clip_grad=0.5
)
SAVED_AT = Layout(tp=2, pp=2, sp=True)
ELSEWHERE = [Layout(), Layout(pp=4), Layout(tp=2), Layout(pp=2, vpp=2)]


class FourHeads(Model):
    """Four key/value heads, which TP4 can share."""

    def build(self) -> PreTrainedModel:
        small = super().build()
        torch.manual_seed(7)
        return type(small)(type(small.config)(**{**small.config.to_dict(), "num_key_value_heads": 4})).float().train()


OPTIONS = {
    "plain": {},
    "distributed": {"distributed_optimizer": True},
    "overlap": {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
}
OPTIONS["production"] = {**OPTIONS["overlap"], "dtype": "bfloat16"}
# What each is continued with: where overlap is switched off, what was saved must not wait for a gather to come.
CONTINUED_WITH = {**{name: name for name in OPTIONS}, "overlap": "distributed"}


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, "plain"),
        (True, "plain"),
        (False, "distributed"),
        (True, "distributed"),
        pytest.param(False, "overlap", marks=pytest.mark.full),
        (True, "overlap"),  # one bucket more, for the output layer
    ],
)
def test_training_continues_at_another_layout(tied: bool, options: str, shared_folder: Path) -> None:
    saved_at = Layout(tp=2) if options == "overlap" else SAVED_AT  # without data parallelism there is nothing to gather
    _check_continues(Model("qwen3", tied), saved_at, ELSEWHERE, options, shared_folder)


@pytest.mark.parametrize(
    "saved_at", [Layout(pp=2, vpp=2), pytest.param(Layout(tp=2, sp=True), marks=pytest.mark.full)], ids=str
)
def test_training_in_bfloat16_with_overlap_continues_as_it_was_and_elsewhere(
    saved_at: Layout, shared_folder: Path
) -> None:
    """Into gathers that overlap the forward pass, which must not bring the parameters of before the load."""
    _check_continues(Model("qwen3"), saved_at, [Layout()], "production", shared_folder)


def test_training_continues_at_any_pipeline_and_tensor_parallelism(shared_folder: Path) -> None:
    elsewhere = [Layout(), Layout(pp=4), Layout(tp=4, sp=True)]
    _check_continues(FourHeads("qwen3"), SAVED_AT, elsewhere, "distributed", shared_folder)


MOVES = [
    (Model("qwen3"), Layout(cp=2, tp=2, sp=True), Layout(pp=2, cp=2)),
    (Model("qwen3_moe"), Layout(ep=2), Layout(tp=2, sp=True, ep=4)),
    (Model("qwen3_moe"), Layout(pp=2, cp=2, ep=2), Layout()),
    (
        Model("qwen2", layers=5),
        Layout(tp=2, pp=2, sp=True, options={"num_layers_in_last_pipeline_stage": 2}),
        Layout(pp=4, options={"num_layers_in_first_pipeline_stage": 2}),
    ),
]
IN_SHORT = [
    (0, "plain"),
    (1, "distributed"),
    (2, "plain"),
    (3, "distributed"),
]  # the other combinations are left to the sweep


@pytest.mark.parametrize(
    ("model", "saved_at", "elsewhere", "options"),
    [
        pytest.param(*move, options, marks=[] if (index, options) in IN_SHORT else pytest.mark.full)
        for index, move in enumerate(MOVES)
        for options in ("plain", "distributed")
    ],
    ids=str,
)
def test_training_continues_at_other_context_expert_and_uneven_pipeline_parallelism(
    model: Model, saved_at: Layout, elsewhere: Layout, options: str, shared_folder: Path
) -> None:
    _check_continues(model, saved_at, [elsewhere], options, shared_folder)


def _check_continues(
    model: Model, saved_at: Layout, elsewhere: list[Layout], options: str, shared_folder: Path
) -> None:
    folder = save_model(model.build(), shared_folder / "model")
    loss = SupervisedLoss()
    actor = build_actor(folder, saved_at.config(**OPTIONS[options]), OPTIMIZER)
    for step in range(3):
        actor.train_step(random_sequences(step), loss)
    path = save_checkpoint(actor, shared_folder / "checkpoints", 3)
    uninterrupted = [actor.train_step(random_sequences(step), loss) for step in range(3, 6)]
    actor.close()

    for layout in [saved_at, *elsewhere]:
        actor = build_actor(folder, layout.config(**OPTIONS[CONTINUED_WITH[options]]), OPTIMIZER, init="random")
        assert load_checkpoint(actor, path) == 3
        resumed = [actor.train_step(random_sequences(step), loss) for step in range(3, 6)]
        actor.close()
        # The same layout repeats every sum in the same order; another one may differ in the last bits of the dtype.
        elsewhere_within = 1e-2 if OPTIONS[options].get("dtype") == "bfloat16" else 1e-6
        tolerance = 0.0 if layout == saved_at else elsewhere_within
        for one, other in zip(uninterrupted, resumed, strict=True):
            assert one.loss == pytest.approx(other.loss, abs=tolerance, rel=0), f"{layout}: {uninterrupted} {resumed}"
            assert one.lr == other.lr


def test_a_marker_is_written_last_and_a_folder_without_it_is_not_used(shared_folder: Path) -> None:
    actor = build_actor(save_model(Model().build(), shared_folder / "model"), Layout(tp=2, pp=2).config())
    actor.train_step(random_sequences(), SupervisedLoss())
    root = shared_folder / "checkpoints"
    first, second = save_checkpoint(actor, root, 1), save_checkpoint(actor, root, 2)
    assert newest_complete(root) == (second, [])
    marker = json.loads((second / "complete.json").read_text())
    assert marker["step"] == 2
    assert {*marker["files"], "complete.json"} == {path.name for path in second.iterdir()}
    dist.barrier()
    if dist.get_rank() == 0:
        (second / "complete.json").unlink()
    dist.barrier()
    assert newest_complete(root)[0] == first
    with pytest.raises(UserError, match="incomplete checkpoint"):
        load_checkpoint(actor, second)
    actor.close()


def test_a_checkpoint_of_another_model_is_refused(shared_folder: Path) -> None:
    actor = build_actor(save_model(Model("qwen3").build(), shared_folder / "qwen3"), Layout(tp=2, pp=2).config())
    actor.train_step(random_sequences(), SupervisedLoss())
    path = save_checkpoint(actor, shared_folder / "checkpoints", 1)
    actor.close()
    actor = build_actor(save_model(Model("llama").build(), shared_folder / "llama"), Layout(tp=2, pp=2).config())
    with pytest.raises(UserError, match="does not fit the model"):
        load_checkpoint(actor, path)
    actor.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distributed_optimizer": True}, r"^actor\.distributed_optimizer=True: .*step_000001 was written with False"),
        ({"dtype": "bfloat16"}, r"^actor\.dtype=bfloat16: .*step_000001 was written with float32"),
    ],
)
def test_an_optimizer_that_keeps_another_state_is_refused_by_its_setting(
    changes: dict[str, Any], message: str, shared_folder: Path
) -> None:
    folder = save_model(Model().build(), shared_folder / "model")
    actor = build_actor(folder, Layout(tp=2, pp=2).config())
    actor.train_step(random_sequences(), SupervisedLoss())
    path = save_checkpoint(actor, shared_folder / "checkpoints", 1)
    actor.close()
    actor = build_actor(folder, Layout(tp=2, pp=2).config(**changes))
    with pytest.raises(UserError, match=message):
        load_checkpoint(actor, path)
    actor.close()


@pytest.mark.parametrize("options", ["plain", "distributed"])
def test_a_resume_takes_todays_optimizer_settings(options: str, shared_folder: Path) -> None:
    folder = save_model(Model().build(), shared_folder / "model")
    actor = build_actor(folder, Layout(tp=2, pp=2).config(**OPTIONS[options]), OPTIMIZER)
    actor.train_step(random_sequences(), SupervisedLoss())
    path = save_checkpoint(actor, shared_folder / "checkpoints", 1)
    actor.close()
    today = OptimizerConfig(lr=5e-4, min_lr=1e-4, beta2=0.99, weight_decay=0.3)
    actor = build_actor(folder, Layout(tp=2, pp=2).config(**OPTIONS[options]), today)
    load_checkpoint(actor, path)
    assert actor.train_step(random_sequences(), SupervisedLoss()).lr == 5e-4
    for group in actor.optimizer.param_groups:
        assert tuple(group["betas"]) == (0.9, 0.99)
        assert isinstance(group.get("step", 1), int)  # Transformer Engine's AdamW takes no float
        assert group["weight_decay"] in (0.0, 0.3)  # 0 for norms
    actor.close()
