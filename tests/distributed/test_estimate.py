"""What estimate/ computes against the tensors that real ranks hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from a3po_megatron.actor import parallel
from a3po_megatron.actor.actor import Actor
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import ModelConfig
from a3po_megatron.estimate.activations import layer_bytes_per_token
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


def kept_bytes(shape: ModelShape, settings: ActorConfig) -> int:
    """Return the bytes of what one microbatch of 256 tokens keeps when its backward pass begins, parameters aside."""
    actor = Actor(shape, ModelConfig(init="random"), settings, OptimizerConfig(), seed=0)
    parameters = {p.untyped_storage().data_ptr() for model in actor.models for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    is_forward = True

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if is_forward and storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    def use(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal is_forward
        is_forward = False  # what backward computes again is not kept over the step
        return tensor

    tokens = np.random.default_rng(0).integers(0, shape.vocab_size, 64)
    sequences = [TokenSequence(tokens, np.arange(64) > 3)] * (4 * settings.data_parallel)
    with torch.autograd.graph.saved_tensors_hooks(keep, use):
        actor.train_step(sequences, SupervisedLoss())
    actor.close()
    return sum(storage.nbytes() for storage in kept.values())


SHAPE = ModelShape("qwen3", 2, 64, 160, 4, 2, 16, 500, 512, 1e-6, 1e6, False)


def layer_kept(settings: ActorConfig) -> float:
    """Return what one layer more keeps, a token."""
    two, one = (kept_bytes(replace(SHAPE, num_layers=n), settings) for n in (2, 1))
    return (two - one) / 256


def test_a_layer_keeps_what_is_computed_and_plain_layers_about_half_as_much_again() -> None:
    """The formula is that of fused kernels. Plain ones keep the norm before its weight and the parts of the gated product too.

    Sequence parallelism splits all of it: rotary tables, which every rank has whole, are the 5 % that are allowed.
    """
    settings = [
        layout.config(max_tokens_per_microbatch=256, packed=False) for layout in (Layout(), Layout(tp=2, sp=True))
    ]
    one, two = (layer_kept(actor) for actor in settings)
    for kept, actor in zip((one, two), settings, strict=True):
        assert 1.4 < kept / layer_bytes_per_token(SHAPE, actor).total < 1.75
    assert two == pytest.approx(one / 2, rel=0.05)


def test_a_recomputed_layer_keeps_its_input_only() -> None:
    actor = Layout().config(max_tokens_per_microbatch=256, packed=False, recompute_granularity="full")
    assert layer_kept(actor) == pytest.approx(4 * SHAPE.hidden_size, rel=0.05)
