"""Converted checkpoints against megatron-core itself: it loads what is written here, and what it writes is read here."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from safetensors.torch import load_file, save_file

from a3po_megatron.actor import checkpoint_writer
from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.checkpoint import load_checkpoint
from a3po_megatron.actor.checkpoint_reading import read_metadata, restricted_reading
from a3po_megatron.actor.checkpoint_writer import save_checkpoint
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.convert.megatron import hf_to_megatron, layout_of, megatron_to_hf
from a3po_megatron.convert.nemo import nemo_to_megatron
from a3po_megatron.convert.verify import compare, tokens_of
from a3po_megatron.errors import UserError
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, build_actor, hf_tensors, random_sequences, save_model

MOE = Model("qwen3_moe")


def convert(source: Path, destination: Path, tp: int, pp: int, ep: int = 1) -> Path:
    """Convert once for all ranks."""
    if dist.get_rank() == 0:
        hf_to_megatron(source, destination, layout_of(tp, pp, ep))
    dist.barrier()
    return destination


def load_by_megatron(actor: Actor, folder: Path) -> None:
    """Fill the actor's chunks by megatron's own loading, which finds every key it asks for and no other."""
    state = {f"model{index}": chunk.sharded_state_dict() for index, chunk in enumerate(actor.models)}
    with restricted_reading(folder):
        loaded, left, absent = dist_checkpointing.load(state, str(folder), strict=StrictHandling.RETURN_ALL)
    assert not left
    assert all("_extra_state" in key for key in absent), absent  # Transformer Engine's; never written
    for index, chunk in enumerate(actor.models):
        chunk.load_state_dict(loaded[f"model{index}"], strict=False)


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


def expected_of(tiny: Model) -> dict[str, torch.Tensor]:
    tensors = hf_tensors(tiny.build().state_dict())
    return {name: tensor for name, tensor in tensors.items() if not (tiny.tied and name == "lm_head.weight")}


@pytest.mark.parametrize(
    ("tiny", "written_for", "layout"),
    [
        (Model("qwen2"), (2, 2, 1), Layout(tp=2, pp=2)),  # a vocabulary of 131, padded for TP2
        (Model("llama3", tied=True), (2, 2, 1), Layout(pp=4)),
        (MOE, (1, 2, 2), Layout(pp=2, ep=2)),
        (MOE, (2, 1, 2), Layout(tp=2, sp=True, ep=2, etp=2)),
    ],
    ids=str,
)
def test_megatron_loads_a_converted_checkpoint_at_any_layout(
    tiny: Model, written_for: tuple[int, int, int], layout: Layout, shared_folder: Path
) -> None:
    source = save_model(tiny.build(), shared_folder / "hf")
    folder = convert(source, shared_folder / "megatron", *written_for)
    actor = build_actor(source, layout.config(), init="random")
    load_by_megatron(actor, folder)
    assert_same(dict(actor.export_weights()), expected_of(tiny))
    actor.close()


def test_a_run_starts_from_a_converted_checkpoint_and_does_not_resume_from_it(shared_folder: Path) -> None:
    folder = convert(save_model(Model("qwen3").build(), shared_folder / "hf"), shared_folder / "megatron", 1, 1)
    actor = build_actor(folder, Layout(tp=2, pp=2).config())
    assert_same(dict(actor.export_weights()), expected_of(Model("qwen3")))
    with pytest.raises(UserError, match="weights only: start from it with model"):
        load_checkpoint(actor, folder)
    actor.close()


@pytest.mark.parametrize(
    ("tiny", "layout", "options"),
    [
        (Model("qwen3", tied=True), Layout(tp=2, pp=2, sp=True), {"distributed_optimizer": True}),
        (Model("llama"), Layout(pp=2, vpp=2), {"dtype": "bfloat16"}),
        (MOE, Layout(tp=2, sp=True, ep=2), {"distributed_optimizer": True}),
        (MOE, Layout(pp=2, ep=2, etp=1), {}),
    ],
    ids=str,
)
def test_the_weights_of_a_run_are_read_whatever_layout_and_optimizer_wrote_them(
    tiny: Model, layout: Layout, options: dict[str, Any], shared_folder: Path
) -> None:
    source = save_model(tiny.build(), shared_folder / "hf")
    actor = build_actor(source, layout.config(**options))
    actor.train_step(random_sequences(), SupervisedLoss())
    folder = save_checkpoint(actor, shared_folder / "checkpoints", 1)
    expected = dict(actor.export_weights())
    if dist.get_rank() == 0:
        _, ignored = megatron_to_hf(folder, source, shared_folder / "exported")
        assert_same(load_file(shared_folder / "exported" / "model.safetensors"), expected)
        assert "the optimizer's state" in ignored
    actor.close()
    dist.barrier()


NEMO_SETTINGS = {
    "_target_": "nemo.collections.llm.gpt.model.llama.Llama31Config8B",
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "ffn_hidden_size": 88,
    "gated_linear_unit": True,
    "hidden_size": 48,
    "high_freq_factor": 2.0,
    "init_method": {"_target_": "megatron.core.utils.init_method_normal", "sigma": 0.02},
    "kv_channels": 20,
    "layernorm_epsilon": 1e-6,
    "low_freq_factor": 1.0,
    "normalization": "RMSNorm",
    "num_attention_heads": 4,
    "num_layers": 4,
    "num_moe_experts": None,
    "num_query_groups": 2,
    "old_context_len": 16,
    "position_embedding_type": "rope",
    "qk_layernorm": False,
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "scale_factor": 4.0,
    "seq_length": 64,
    "share_embeddings_and_output_weights": False,
    "vocab_size": 131,
}


def save_as_nemo(actor: Actor, folder: Path) -> None:
    """Write the actor's weights as NeMo 2 lays them out, by megatron itself, Transformer Engine's entries among them."""

    def nemo_state(actor: Actor, **unused: Any) -> dict[str, Any]:
        (chunk,) = actor.models
        return dict(chunk.sharded_state_dict(prefix="module."))

    with mock.patch.object(checkpoint_writer, "checkpoint_state", nemo_state):
        saved = save_checkpoint(actor, folder / "saved", 1)
    if dist.get_rank() == 0:
        for path in [saved / "complete.json", saved / "objective.json", *saved.glob("random_*")]:
            path.unlink()
        shutil.move(saved, folder / "weights")
        torch.save({"anything": 1}, folder / "weights" / "common.pt")
        (folder / "context").mkdir()
        model = {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaModel", "config": NEMO_SETTINGS}
        (folder / "context" / "model.yaml").write_text(yaml.safe_dump(model))
    dist.barrier()


def test_a_nemo_checkpoint_becomes_one_of_ours_bit_for_bit(shared_folder: Path) -> None:
    tiny = Model("llama3")
    source = save_model(tiny.build(), shared_folder / "hf")
    actor = build_actor(source, Layout(tp=2, pp=2).config())
    save_as_nemo(actor, shared_folder / "nemo")
    actor.close()
    if dist.get_rank() == 0:
        megatron, hf = shared_folder / "megatron", shared_folder / "exported"
        assert "_extra_state" in "".join(read_metadata(shared_folder / "nemo" / "weights").state_dict_metadata)
        nemo_to_megatron(shared_folder / "nemo", megatron, layout_of(2, 2))
        megatron_to_hf(megatron, megatron, hf)
        assert_same(load_file(hf / "model.safetensors"), expected_of(tiny))
        assert read_model_shape(hf) == read_model_shape(source)
    dist.barrier()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("tiny", [Model("qwen2"), MOE], ids=str)
def test_verify_tells_the_same_model_from_another(tiny: Model, shared_folder: Path) -> None:
    source = save_model(tiny.build(), shared_folder / "hf")
    folder = convert(source, shared_folder / "megatron", 2, 2)
    tokens = tokens_of(None, None, source)
    same = compare(source, folder, (source, folder), tokens)
    assert len(tokens) == same.num_tokens == 32
    assert same.max_difference < 1e-5  # float32 sums in another order; log-probabilities of order 5
    changed = dict(load_file(source / "model.safetensors"))
    changed["model.layers.2.self_attn.k_proj.weight"] += 0.1
    other = shared_folder / "other"
    shutil.copytree(source, other)
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    assert compare(other, folder, (other, folder), tokens).max_difference > 1e-3
