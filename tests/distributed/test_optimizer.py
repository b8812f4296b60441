"""AdamW, its learning rate and what is decayed, against a reference written by hand on autograd's gradients."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from a3po_megatron.actor.optimizer import build_scheduler
from a3po_megatron.config.actor import OptimizerConfig
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import (
    Layout,
    Model,
    OracleTrainer,
    build_actor,
    hf_tensors,
    random_sequences,
    save_model,
)

# As in test_parity.py: sums in another order; eps is large so that rounding of tiny gradients is not a step of its own.
TOLERANCE = 1e-5
SETTINGS = OptimizerConfig(
    lr=1e-2,
    min_lr=1e-3,
    lr_decay="cosine",
    lr_warmup_steps=2,
    lr_decay_steps=5,
    weight_decay=0.3,
    beta2=0.99,
    eps=1e-3,
    clip_grad=0.5,
)


def learning_rate(settings: OptimizerConfig, step: int) -> float:
    """Return the rate of the step-th step, counted from 1."""
    if step <= settings.lr_warmup_steps:
        return settings.lr * step / settings.lr_warmup_steps
    if settings.lr_decay == "constant":
        return settings.lr
    done = min(1.0, (step - settings.lr_warmup_steps) / (settings.lr_decay_steps - settings.lr_warmup_steps))
    left = 1 - done if settings.lr_decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return settings.min_lr + (settings.lr - settings.min_lr) * left


class HandWrittenAdamW:
    """Clipping by the global norm, Adam with bias correction, decoupled decay of matrices only."""

    def __init__(self, settings: OptimizerConfig, parameters: dict[str, torch.Tensor]) -> None:
        self.settings, self.parameters, self.steps = settings, parameters, 0
        self.mean = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.square = {name: torch.zeros_like(p) for name, p in parameters.items()}

    def step(self, gradients: dict[str, torch.Tensor]) -> float:
        """Update the parameters; return the norm of the gradients."""
        s, self.steps = self.settings, self.steps + 1
        lr = learning_rate(s, self.steps)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        for name, parameter in self.parameters.items():
            gradient = gradients[name] * min(1.0, s.clip_grad / (norm + 1e-6))
            self.mean[name] = s.beta1 * self.mean[name] + (1 - s.beta1) * gradient
            self.square[name] = s.beta2 * self.square[name] + (1 - s.beta2) * gradient**2
            mean = self.mean[name] / (1 - s.beta1**self.steps)
            square = self.square[name] / (1 - s.beta2**self.steps)
            decay = s.weight_decay if parameter.dim() > 1 else 0.0
            parameter.data -= lr * (mean / (square.sqrt() + s.eps) + decay * parameter.data)
        return norm


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (Model("qwen2"), Layout(tp=2, pp=2, sp=True)),  # biases
        (Model("qwen3", tied=True), Layout(tp=2, pp=2, options={"distributed_optimizer": True})),
        (Model("qwen3_moe"), Layout(ep=2, options={"distributed_optimizer": True})),
    ],
    ids=str,
)
def test_steps_with_warm_up_decay_of_rate_and_of_weights_equal_the_reference(
    model: Model, layout: Layout, shared_folder: Path
) -> None:
    actor = build_actor(save_model(model.build(), shared_folder), layout.config(), SETTINGS)
    oracle = OracleTrainer(model.build())
    reference = HandWrittenAdamW(SETTINGS, dict(oracle.model.named_parameters()))
    for step in range(1, 7):
        report = actor.train_step(random_sequences(step), SupervisedLoss())
        loss, gradients = oracle.gradients(random_sequences(step))
        assert report.loss == pytest.approx(loss, abs=TOLERANCE)
        assert report.grad_norm == pytest.approx(reference.step(gradients), abs=TOLERANCE)
        assert report.lr == pytest.approx(learning_rate(SETTINGS, step), rel=1e-12)
    expected = hf_tensors({name: p.detach() for name, p in reference.parameters.items()})
    for name, tensor in actor.export_weights():
        torch.testing.assert_close(
            tensor.cpu(), expected[name], atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    actor.close()


@pytest.mark.parametrize("lr_decay", ["constant", "cosine", "linear"])
@pytest.mark.parametrize(("warmup", "decay"), [(0, 4), (3, 7)])
def test_the_learning_rate_follows_its_formula_and_stays_at_its_end(lr_decay: str, warmup: int, decay: int) -> None:
    settings = OptimizerConfig(
        lr=1e-3, min_lr=1e-4, lr_decay=lr_decay, lr_warmup_steps=warmup, lr_decay_steps=decay, weight_decay=0.1
    )
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    scheduler = build_scheduler(optimizer, settings)
    for step in range(1, 12):
        scheduler.step(1)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([learning_rate(settings, step)] * 2, rel=1e-12)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
