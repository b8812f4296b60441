"""What estimate/ computes of parameters, gradients and optimizer against the tensors that real ranks hold, byte for byte."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from a3po_megatron.actor import parallel
from a3po_megatron.actor.actor import Actor
from a3po_megatron.estimate.memory import actor_memory
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, build_actor, random_sequences, save_model

OVERLAPPED = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def state_bytes(actor: Actor) -> int:
    """Return the bytes of main parameters and moments on this rank; Adam's step counts aside."""
    total = 0
    for part in actor.optimizer.chained_optimizers:
        held = {id(p): p for group in part.param_groups for p in group["params"]}
        moments = [
            v for state in part.optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()
        ]
        if actor.settings.dtype == "bfloat16":
            moments += held.values()  # the float32 main parameters
        total += sum(tensor.nbytes for tensor in moments)
    return total


@pytest.mark.parametrize(
    ("layout", "model", "dtype"),
    [
        (Layout(tp=2, pp=2), Model(tied=True), "bfloat16"),
        (Layout(tp=2, sp=True, options=OVERLAPPED), Model(), "bfloat16"),
        (Layout(pp=2, options=OVERLAPPED | {"num_layers_in_last_pipeline_stage": 1}), Model("qwen2"), "float32"),
        (Layout(tp=2, sp=True, ep=2, options=OVERLAPPED), Model("qwen3_moe"), "bfloat16"),
    ],
    ids=str,
)
def test_parameters_gradients_and_optimizer_take_the_bytes_that_are_computed(
    layout: Layout, model: Model, dtype: str, shared_folder: Path
) -> None:
    """Exactly; but a rank's part of the distributed optimizer, where Megatron cuts its padded buffer, only over all parts."""
    actor = build_actor(save_model(model.build(), shared_folder), layout.config(dtype=dtype))
    actor.train_step(random_sequences(), SupervisedLoss())
    expected = actor_memory(actor.shape, actor.settings, actor.place.pp_rank)
    parameters = [parameter for module in actor.models for parameter in module.parameters()]
    assert sum(parameter.nbytes for parameter in parameters) == expected.parameters
    assert sum(parameter.main_grad.nbytes for parameter in parameters) == expected.gradients
    measured = torch.tensor(state_bytes(actor))
    ranks = actor.place.dp_size if actor.settings.distributed_optimizer else 1
    if ranks > 1:
        padding = 12 * (64 * len(parameters) + 128 * 2)  # Megatron aligns parameters to 64 elements, buckets to 128
        assert abs(int(measured) - expected.optimizer) <= padding
        dist.all_reduce(measured, group=parallel.dp_cp_group())
    assert int(measured) == expected.optimizer * ranks
    actor.close()
