"""Hugging Face -> actor -> Hugging Face, bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from a3po_megatron.actor.export import export_hf_folder
from a3po_megatron.actor.hf_weights import random_source
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, build_actor, hf_tensors, random_sequences, save_model

MOE = Model("qwen3_moe")
MODELS = [Model("qwen3"), Model("qwen3", tied=True), Model("llama"), Model("llama", tied=True)]
FAMILIES = ["qwen2", "qwen3", "llama", "llama3", "qwen3_moe"]
LAYOUTS = [Layout(tp=2, pp=2), Layout(tp=2, pp=2, vpp=2, sp=True), Layout(pp=4), Layout()]
MOE_LAYOUTS = [
    Layout(ep=2),
    Layout(tp=2, sp=True, ep=2),
    Layout(tp=2, sp=True, ep=2, etp=2),
    Layout(pp=2, vpp=2, ep=2),
    Layout(cp=2, ep=4),
]
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS]
CASES += [(MOE, layout) for layout in MOE_LAYOUTS] + [(Model("qwen3_moe", tied=True), Layout(pp=2, ep=2))]
# every family, tied and untied, with padding of the vocabulary (131) and without (132)
CASES += [
    (Model(family, tied, vocab=vocab), Layout(tp=2, pp=2, sp=True))
    for family in FAMILIES
    for tied in (False, True)
    for vocab in (131, 132)
]
UNEVEN = {"num_layers_in_first_pipeline_stage": 1}
CASES += [
    (Model("qwen2", tied=True, layers=5), Layout(tp=2, pp=2, options=UNEVEN)),
    (Model("llama3", layers=5), Layout(pp=4, options={"num_layers_in_last_pipeline_stage": 2})),
    (Model("qwen3_moe", layers=6), Layout(pp=2, vpp=2, ep=2, options={"num_layers_in_first_pipeline_stage": 4})),
]


@pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
def test_export_returns_every_tensor_bit_for_bit(model: Model, layout: Layout, shared_folder: Path) -> None:
    expected = hf_tensors(model.build().state_dict())
    if model.tied:
        del expected["lm_head.weight"]  # transformers' second name of the embedding; not in the checkpoint
    actor = build_actor(save_model(model.build(), shared_folder), layout.config())
    exported = dict(actor.export_weights())
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor.cpu(), expected[name]), name
    rooms = {name: torch.empty_like(tensor) for name, tensor in list(exported.items())[::2]}
    for name, tensor in actor.export_weights(to_first_rank=True, room=rooms.get):
        assert dist.get_rank() > 0 or torch.equal(tensor.cpu(), expected[name]), name
    actor.close()


@pytest.mark.parametrize(
    ("tiny", "layout"), [(Model("qwen3", tied=True), Layout(tp=2, pp=2)), (MOE, Layout(pp=2, ep=2))], ids=str
)
def test_exported_folder_loads_in_transformers_with_the_same_weights(
    tiny: Model, layout: Layout, shared_folder: Path
) -> None:
    source, model = shared_folder / "source", tiny.build()
    actor = build_actor(save_model(model, source), layout.config())
    export_hf_folder(actor, source, shared_folder / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(shared_folder / "exported")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name]), name
    actor.close()


def test_export_is_fresh_while_the_parameter_gather_is_still_overlapped(shared_folder: Path) -> None:
    """After a step under overlap_param_gather a rank holds new values of its own shard only, until the next forward pass."""
    folder, sequences, exported = save_model(Model().build(), shared_folder), random_sequences(), []
    options = {"distributed_optimizer": True, "overlap_grad_reduce": True}
    for overlap in (False, True):
        actor = build_actor(folder, Layout(options=options | {"overlap_param_gather": overlap}).config())
        actor.train_step(sequences, SupervisedLoss())
        exported.append(dict(actor.export_weights()))
        actor.close()
    for name, tensor in exported[0].items():
        torch.testing.assert_close(exported[1][name], tensor, atol=1e-7, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (Model(), Layout(tp=2, pp=2)),
        (Model(), Layout(pp=4)),
        (MOE, Layout(tp=2, sp=True, ep=4)),
        (Model("qwen2"), Layout(tp=2, pp=2)),
    ],
    ids=str,
)
def test_random_weights_do_not_depend_on_the_layout(model: Model, layout: Layout, shared_folder: Path) -> None:
    folder = save_model(model.build(), shared_folder)
    source = random_source(read_model_shape(folder), seed=3, std=0.05)
    actor = build_actor(folder, layout.config(), init="random", init_seed=3, init_std=0.05)
    for name, tensor in actor.export_weights():
        assert torch.equal(tensor.cpu(), source(name)), name
        assert not (name.endswith(".bias") and tensor.any()), name
    actor.close()
    dist.barrier()
