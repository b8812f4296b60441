"""What estimate/ computes against what real ranks take at work; the table of docs/parallelism.md.

    python -m pytest tests/distributed/test_memory.py -q -s | grep -o '| .*'          prints that table

Sizes of tensors hardly depend on the machine, so the docs are held to every row.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.checkpoint import load_checkpoint
from a3po_megatron.actor.checkpoint_writer import CheckpointWriter
from a3po_megatron.actor.token_head import TokenHead, VocabularyPart, logprobs_and_entropy
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import ModelConfig, RunConfig
from a3po_megatron.estimate.activations import layer_bytes_per_token, microbatches_in_flight, stage_bytes_per_token
from a3po_megatron.estimate.host import resuming_bytes, saving_bytes
from a3po_megatron.estimate.memory import actor_memory, logprob_chunk_bytes
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout
from tests.distributed.meters import KeptMeter, frees_in_this_thread, peak_allocated

DOCS = Path(__file__).parents[2] / "docs/parallelism.md"
DENSE = ModelShape("qwen3", 8, 128, 320, 4, 2, 32, 500, 512, 1e-6, 1e6, False)
MIXTURE = replace(DENSE, family="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
TOKENS = 256  # of a microbatch
TOLERANCE = 0.05  # of a toy: a few numbers a token, and views where the formula counts copies
FULL = {"recompute_granularity": "full"}
SHARDED = {"distributed_optimizer": True}


def report(what: str, layout: Layout, computed: float, measured: float) -> None:
    """Print the row of the docs and hold the docs to it: exactly to what is computed, and to what kernels take anywhere."""
    head = f"| {what} | {layout} | {computed / 1e3:.0f} | "
    print(f"{head}{measured / 1e3:.0f} | {measured / computed:.3f} |", flush=True)
    (shown,) = [line.removeprefix(head) for line in DOCS.read_text().splitlines() if line.startswith(head)]
    assert measured / 1e3 == pytest.approx(float(shown.split()[0]), rel=TOLERANCE)


def build(shape: ModelShape, settings: ActorConfig) -> Actor:
    return Actor(shape, ModelConfig(init="random"), settings, OptimizerConfig(), seed=0)


def train(actor: Actor) -> None:
    """Take a step of eight full microbatches a rank: more than any pipeline here warms up with."""
    tokens = np.random.default_rng(0).integers(0, actor.shape.vocab_size, 64)
    count = 8 * TOKENS // 64 * actor.settings.data_parallel
    actor.train_step([TokenSequence(tokens, np.arange(64) > 3)] * count, SupervisedLoss())


def kept_bytes(shape: ModelShape, settings: ActorConfig) -> tuple[int, int]:
    """Return this rank's stage and the most that autograd keeps on it during a step, parameters aside."""
    actor = build(shape, settings)
    with KeptMeter([parameter for model in actor.models for parameter in model.parameters()]) as meter:
        train(actor)
    actor.close()
    assert meter.now == 0
    return actor.place.pp_rank, meter.peak


@pytest.mark.parametrize(
    ("what", "layout", "shape", "stages"),
    [
        ("activations, stage {} of 4: {} in flight", Layout(pp=4), DENSE, (0, 1, 3)),
        (
            "activations, stage {} of 4: inputs of layers, and one layer again",
            Layout(pp=4, options=FULL),
            DENSE,
            (0, 3),
        ),
        (
            "activations, stage {} of 4: all but the MLPs, and one of them again",
            Layout(pp=4, options={"recompute_granularity": "selective", "recompute_modules": ("mlp",)}),
            DENSE,
            (0, 3),
        ),
        ("activations, stage {} of 2: {} in flight", Layout(tp=2, pp=2, sp=True), DENSE, (0, 1)),
        ("activations, stage {} of 2: {} in flight", Layout(pp=2, vpp=2), DENSE, (0, 1)),
        ("activations, 8 experts of which a token takes 2", Layout(), MIXTURE, (0,)),
    ],
    ids=str,
)
def test_a_stage_keeps_what_is_computed(what: str, layout: Layout, shape: ModelShape, stages: tuple[int, ...]) -> None:
    """In float32, whose layers are the same on a GPU; those of bfloat16 there are Transformer Engine's."""
    settings = layout.config(max_tokens_per_microbatch=TOKENS)
    stage, measured = kept_bytes(shape, settings)
    computed = TOKENS * stage_bytes_per_token(shape, settings, stage)
    assert measured == pytest.approx(computed, rel=TOLERANCE)
    if stage in stages and dist.get_rank() % (4 // settings.pipeline_parallel) == 0:
        report(what.format(stage, microbatches_in_flight(settings, stage)), layout, computed, measured)


def test_local_layers_in_bfloat16_keep_twice_what_fused_kernels_do() -> None:
    """Their norms work in float32. What Transformer Engine keeps is computed, and not measured here."""
    layout = Layout(options={"dtype": "bfloat16"})
    settings = layout.config(max_tokens_per_microbatch=TOKENS)
    two, one = (kept_bytes(replace(DENSE, num_layers=layers), settings)[1] for layers in (2, 1))
    computed = TOKENS * layer_bytes_per_token(DENSE, settings).total
    assert 1.9 < (two - one) / computed < 2.3
    if dist.get_rank() == 0:
        report("activations, a local layer against the formula of fused ones", layout, computed, two - one)


@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_head_takes_no_more_than_is_computed(dtype: str, with_entropy: bool) -> None:
    """The logits' gradient is counted apart, which plain kernels may write over the logits.

    With an entropy bonus they hold a chunk's probabilities beside it, which are not computed.
    """
    shape, settings = replace(DENSE, vocab_size=20000), Layout().config(dtype=dtype, logprob_chunk_tokens=64)
    hidden, weight = (
        torch.randn(rows, shape.hidden_size, dtype=getattr(torch, dtype)).requires_grad_()
        for rows in (TOKENS, shape.vocab_size)
    )
    labels, head = torch.zeros(TOKENS, dtype=torch.int64), TokenHead(chunk_tokens=64, kernel="plain")

    def work() -> None:
        part = VocabularyPart(0, shape.vocab_size)
        logprobs, entropy = logprobs_and_entropy(hidden, weight, labels, part, head, with_entropy)
        torch.autograd.grad((logprobs if entropy is None else logprobs + entropy).sum(), [hidden, weight])

    computed, measured = logprob_chunk_bytes(shape, settings, TOKENS), peak_allocated(work)
    probabilities = 4 * 64 * shape.vocab_size if with_entropy else 0
    assert 0.7 < measured / (computed + probabilities) < 1
    if dist.get_rank() == 0 and not with_entropy:
        report(f"logits, a chunk of 64 tokens, {dtype}", Layout(), computed, measured)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(tp=2, options=SHARDED), DENSE),
        (Layout(options=SHARDED | {"dtype": "bfloat16"}), DENSE),
        (Layout(ep=2, options=SHARDED | {"dtype": "bfloat16"}), MIXTURE),
    ],
    ids=str,
)
def test_buffers_and_shards_take_what_is_computed_and_padding(layout: Layout, shape: ModelShape) -> None:
    """DDP's buffers of gradients, and this rank's shards of the optimizer: test_estimate.py counts all shards exactly."""
    actor = build(shape, layout.config(max_tokens_per_microbatch=TOKENS))
    train(actor)
    computed = actor_memory(shape, actor.settings, 0)
    buffers = [buffer for chunk in actor.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
    shards = sum(
        value.nbytes
        for part in actor.optimizer.chained_optimizers
        for state in part.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    )
    if actor.settings.dtype == "bfloat16":
        mains = {
            id(p): p
            for part in actor.optimizer.chained_optimizers
            for group in part.param_groups
            for p in group["params"]
        }
        shards += sum(parameter.nbytes for parameter in mains.values())
    assert gradients == pytest.approx(computed.gradients, rel=0.01)
    assert shards == pytest.approx(computed.optimizer, rel=0.01)
    if dist.get_rank() == 0:
        of = f"{shape.family}, {actor.settings.dtype}"
        report(f"buffers of gradients, {of}", layout, computed.gradients, gradients)
        report(f"shards of the distributed optimizer, rank 0, {of}", layout, computed.optimizer, shards)
    actor.close()


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(options=SHARDED), DENSE),
        (Layout(tp=2, options=SHARDED | {"dtype": "bfloat16"}), DENSE),
        (Layout(ep=2, options=SHARDED | {"dtype": "bfloat16"}), MIXTURE),
    ],
    ids=str,
)
def test_checkpoints_take_the_host_memory_that_is_computed(
    layout: Layout, shape: ModelShape, shared_folder: Path
) -> None:
    """On a CPU parameters are in host memory too, and cloned out of DDP's buffers where they are written: left out."""
    actor = build(shape, layout.config(max_tokens_per_microbatch=TOKENS))
    train(actor)
    writer, rank = CheckpointWriter(actor, shared_folder, RunConfig(checkpoint_async=True)), dist.get_rank()
    with frees_in_this_thread():
        saved = peak_allocated(lambda: writer.save(1))
    writer.finish()
    loaded = peak_allocated(lambda: load_checkpoint(actor, shared_folder / "step_000001"))
    saving, resuming = (of(shape, actor.settings, rank) for of in (saving_bytes, resuming_bytes))
    assert loaded == pytest.approx(resuming, rel=TOLERANCE)
    # Below: of a mixture the shards of both kinds are added, of which one at a time is copied.
    assert 0.75 < saved / saving < 1 + TOLERANCE
    if rank in (0, 3):
        of = f"{shape.family}, {actor.settings.dtype}"
        role = "writes" if rank == 0 else "does not write"
        report(f"host memory, saving, a rank that {role}, {of}", layout, saving, saved)
    if rank == 0:
        report(f"host memory, resuming, {of}", layout, resuming, loaded)
    actor.close()
