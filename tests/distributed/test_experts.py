"""A mixture of experts beside the parity of test_parity.py: which experts are chosen, and what may be added to the loss."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from a3po_megatron.actor.routing import Routing, routing_mismatch
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, OracleTrainer, build_actor, random_sequences, save_model

MOE = Model("qwen3_moe")
COUNT, LENGTH = 8, 8
# Of 460 tokens x 4 layers x 2 experts: 0.0027 to 0.0046 were seen, with either router and either reference.
BFLOAT16_MISMATCH = 0.01


def router_logits(model: PreTrainedModel, sequence: TokenSequence) -> list[Tensor]:
    """Return [n, experts] of each layer, with gradient, from transformers."""
    return list(model(input_ids=torch.tensor(sequence.tokens)[None], output_router_logits=True).router_logits)


@torch.no_grad()
def oracle_routing(model: PreTrainedModel, sequences: list[TokenSequence], wanted: Routing) -> Routing:
    """Return the routing of the sequences in `wanted`, which this rank has, over all layers."""
    routing = {}
    for index in wanted:
        logits = torch.stack(router_logits(model, sequences[index])).transpose(0, 1)[:-1]  # [n - 1, layers, experts]
        chosen = torch.zeros_like(logits, dtype=torch.bool)
        routing[index] = chosen.scatter(-1, logits.float().topk(2, dim=-1).indices, True).numpy()
    return routing


def many_sequences() -> list[TokenSequence]:
    return [sequence for seed in range(10) for sequence in random_sequences(seed)]


@pytest.mark.parametrize(
    "layout",
    [Layout(ep=4), Layout(tp=2, sp=True, cp=2, ep=2), Layout(tp=2, sp=True, ep=2, options={"packed": False})],
    ids=str,
)
def test_float32_sends_every_token_where_transformers_does(layout: Layout, shared_folder: Path) -> None:
    oracle, sequences = MOE.build(), random_sequences()
    actor = build_actor(save_model(oracle, shared_folder), layout.config(max_tokens_per_microbatch=24))
    routing = actor.routing(sequences)
    assert actor.add_up(len(routing)) == len(sequences)
    assert routing_mismatch(routing, oracle_routing(oracle, sequences, routing)) == 0
    actor.close()


def test_a_pipeline_stage_tells_the_routing_of_its_own_layers(shared_folder: Path) -> None:
    oracle, sequences = MOE.build(), random_sequences()
    actor = build_actor(save_model(oracle, shared_folder), Layout(pp=2, vpp=2, ep=2).config())
    routing = actor.routing(sequences)
    stage = actor.place.pp_rank  # layers 0 and 2, or 1 and 3
    expected = oracle_routing(oracle, sequences, routing)
    assert routing_mismatch(routing, {index: chosen[:, stage::2] for index, chosen in expected.items()}) == 0
    actor.close()


@pytest.mark.parametrize("router", ["fp32", "none"])
def test_bfloat16_sends_few_tokens_elsewhere(router: str, shared_folder: Path) -> None:
    """transformers in bfloat16 stands for the rollout engine: it rounds the router's logits to bfloat16."""
    oracle, sequences = MOE.build(), many_sequences()
    layout = Layout(ep=2, options={"dtype": "bfloat16", "moe_router_dtype": router})
    actor = build_actor(save_model(oracle, shared_folder), layout.config())
    routing = actor.routing(sequences)
    half = copy.deepcopy(oracle).bfloat16()
    for model in (oracle, half):
        mismatch = routing_mismatch(routing, oracle_routing(model, sequences, routing))
        assert 0 < actor.add_up(mismatch) / actor.place.dp_size <= BFLOAT16_MISMATCH
    actor.close()


@pytest.mark.parametrize(
    "layout",
    [Layout(ep=2), Layout(tp=2, sp=True, ep=2), Layout(cp=2, ep=4), Layout(pp=2, options={"packed": False})],
    ids=str,
)
def test_auxiliary_losses_are_those_of_the_papers(layout: Layout, shared_folder: Path) -> None:
    """Load balancing of Switch Transformer and z-loss of ST-MoE, a microbatch and layer each.

    Their weight is the microbatch's tokens over the trainable tokens of the step: megatron counts on every token being
    trained. With one sequence of 8 tokens a microbatch the reference can say so.
    """
    balance, z = 0.3, 0.05
    rng = np.random.default_rng(3)
    sequences = [TokenSequence(rng.integers(0, 131, LENGTH), np.arange(LENGTH) >= 3) for _ in range(COUNT)]
    oracle = MOE.build()
    settings = layout.config(max_tokens_per_microbatch=LENGTH, moe_aux_loss_coeff=balance, moe_z_loss_coeff=z)
    actor = build_actor(save_model(oracle, shared_folder), settings)
    report = actor.train_step(sequences, SupervisedLoss())

    trainer = OracleTrainer(oracle)
    loss, _ = trainer.gradients(sequences)
    without = torch.nn.utils.get_total_norm([p.grad for p in oracle.parameters() if p.grad is not None]).item()
    trainable = sum(int(sequence.trainable.sum()) for sequence in sequences)
    for sequence in sequences:
        for logits in router_logits(oracle, sequence):
            probabilities = logits.softmax(-1)
            taken = torch.zeros_like(logits).scatter(-1, logits.topk(2, dim=-1).indices, 1.0)
            share = taken.sum(0) / taken.sum()
            added = balance * 4 * (probabilities.mean(0) * share).sum() + z * logits.logsumexp(-1).square().mean()
            (added * LENGTH / trainable).backward(retain_graph=True)
    assert report.loss == pytest.approx(loss, abs=1e-5)  # of the objective alone
    norm = trainer.step()
    assert abs(norm - without) > 0.01  # it is there
    assert report.grad_norm == pytest.approx(norm, abs=1e-5)
    parameters = dict(oracle.named_parameters())
    for name, tensor in actor.export_weights():
        if name.endswith("mlp.gate.weight"):
            torch.testing.assert_close(tensor.cpu(), parameters[name].detach(), atol=1e-5, rtol=0)
    actor.close()
