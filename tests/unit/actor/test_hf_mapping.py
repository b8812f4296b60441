"""The table of names: what belongs to experts."""

import pytest

from a3po_megatron.actor.hf_mapping import hf_shapes, layer_rules, model_name
from a3po_megatron.config.model_shape import ModelShape

MOE = ModelShape("qwen3_moe", 2, 12, 20, 4, 2, 5, 131, 64, 1e-6, 1e4, False, 4, 2, 8, True)


@pytest.mark.parametrize(
    ("of_rank", "of_model"),
    [
        ("mlp.experts.local_experts.1.linear_fc1.weight", "mlp.experts.7.linear_fc1.weight"),
        ("mlp.experts.linear_fc2.weight0", "mlp.experts.6.linear_fc2.weight"),  # Transformer Engine's grouped linear
        ("mlp.router.weight", "mlp.router.weight"),
        ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
    ],
)
def test_a_ranks_experts_are_numbered_over_the_model(of_rank: str, of_model: str) -> None:
    """The rank's first expert is number 6."""
    assert model_name(f"decoder.layers.3.{of_rank}", 6) == f"decoder.layers.3.{of_model}"


def test_every_expert_has_its_own_tensors_and_the_router_one() -> None:
    shapes = hf_shapes(MOE)
    assert shapes["model.layers.1.mlp.gate.weight"] == (4, 12)
    assert shapes["model.layers.1.mlp.experts.3.gate_proj.weight"] == (8, 12)
    assert shapes["model.layers.1.mlp.experts.3.down_proj.weight"] == (12, 8)
    assert not any(name.startswith("model.layers.0.mlp.gate_proj") for name in shapes)
    assert {rule.expert for rule in layer_rules(MOE)} == {None, 0, 1, 2, 3}
