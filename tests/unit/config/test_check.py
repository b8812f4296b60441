"""Contradictory settings are refused, each with value, reason and fix."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
from a3po_megatron.config.algorithm import AlgorithmConfig
from a3po_megatron.config.check import ARITHMETIC_VOCABULARY, check_actor, check_optimizer, check_pretrain, check_train
from a3po_megatron.config.data import ArithmeticTaskConfig
from a3po_megatron.config.evaluation import EvaluateConfig
from a3po_megatron.config.load import load_config
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.config.schema import ModelConfig, PretrainConfig, RunConfig, TrainConfig
from a3po_megatron.controller.build import check_controller
from a3po_megatron.data.arithmetic import TOKENS
from a3po_megatron.errors import UserError

SMOLLM2 = ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, 1e-5, 1e5, True)
QWEN = ModelShape("qwen3", 4, 64, 128, 8, 4, 16, 1000, 512, 1e-6, 1e6, False)
MOE = replace(QWEN, family="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=36)
# What the cluster's configurations are for, from the published config.json; their model.path is left to the launcher.
QWEN3_8B = ModelShape("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, 40960, 1e-6, 1e6, False)
CLUSTER = {
    "qwen2_5_1p5b_gsm8k": ModelShape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, 32768, 1e-6, 1e6, True),
    "qwen3_8b_dapo": QWEN3_8B,
    "qwen3_14b_dapo": replace(
        QWEN3_8B, num_layers=40, hidden_size=5120, intermediate_size=17408, num_attention_heads=40
    ),
    "qwen3_32b_dapo": replace(
        QWEN3_8B, num_layers=64, hidden_size=5120, intermediate_size=25600, num_attention_heads=64
    ),
    "qwen3_30b_a3b_dapo": ModelShape(
        "qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, 40960, 1e-6, 1e6, False, 128, 8, 768, True
    ),
}
ROOT = Path(__file__).parents[3]


SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


FULL = {"recompute_granularity": "full"}
OFFLOAD = {"optimizer_cpu_offload": True, "distributed_optimizer": True, "dtype": "bfloat16"}


def test_there_are_shipped_files() -> None:
    assert {path.stem for path in SHIPPED} >= CLUSTER.keys()


@pytest.mark.parametrize("name", CLUSTER)
def test_a_cluster_configuration_passes_every_check_once_the_launcher_has_named_the_model(name: str) -> None:
    config = load_config(
        TrainConfig, ROOT / f"configs/{name}.yaml", ["model.path=/models/named", "run.dir=/runs/named"]
    )
    assert (config.actor.device, config.actor.dtype, config.rollout.enforce_eager) == ("cuda", "bfloat16", False)
    check_train(config, CLUSTER[name])
    check_controller(config)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_is_valid(path: Path) -> None:
    """Of the models only the arithmetic one is in the repository; its warm start and SmolLM2 are made by commands."""
    arithmetic = read_model_shape(ROOT / "configs/models/arithmetic_qwen3")
    recipe = yaml.safe_load(path.read_text())["recipe"]
    if recipe == "pretrain":
        check_pretrain(load_config(PretrainConfig, path), arithmetic)
    elif recipe == "evaluate":
        load_config(EvaluateConfig, path)  # tests/unit/evaluate/test_target.py checks the settings
    elif path.stem in CLUSTER:
        assert not load_config(TrainConfig, path).model.path
    else:
        config = load_config(TrainConfig, path)
        made = ROOT / "configs/models" / Path(config.model.path).name  # what a random model was made from
        shape = read_model_shape(made) if made.is_dir() else arithmetic
        check_train(config, SMOLLM2 if "SmolLM2" in config.model.path else shape)


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        (
            {"tensor_parallel": 2},
            SMOLLM2,
            "actor.tensor_parallel=2 does not divide the model's 9 query heads; use 1 or 3 and more",
        ),
        (
            {"tensor_parallel": 8},
            QWEN,
            "actor.tensor_parallel=8 does not divide the model's 4 key/value heads; use 1 or 2 or 4",
        ),
        ({"pipeline_parallel": 8}, QWEN, "makes 8 chunks, more than the model's 4 layers; use at most 4"),
        (
            {"pipeline_parallel": 3},
            QWEN,
            "makes 3 chunks, which do not divide the model's 4 layers evenly; "
            "actor.num_layers_in_last_pipeline_stage=2 would leave 1 to each other stage",
        ),
        (
            {"pipeline_parallel": 4},
            SMOLLM2,
            "actor.num_layers_in_last_pipeline_stage=6 would leave 8 to each other stage",
        ),
        (
            {"pipeline_parallel": 4, "virtual_pipeline_parallel": 2},
            SMOLLM2,
            "actor.num_layers_in_last_pipeline_stage=6 would leave 8 to each other stage",
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
            replace(SMOLLM2, num_layers=5),
            "makes 4 chunks, which do not divide the model's 5 layers evenly; use another actor.virtual_pipeline_parallel",
        ),
        ({"num_layers_in_first_pipeline_stage": 4}, QWEN, "the one stage of actor.pipeline_parallel=1 has every layer"),
        (
            {"pipeline_parallel": 4, "num_layers_in_first_pipeline_stage": 6, "num_layers_in_last_pipeline_stage": 7},
            SMOLLM2,
            "leave 17 of the model's 30 layers for the other 2 of 4 pipeline stages, which must share them evenly",
        ),
        (
            {"pipeline_parallel": 2, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2},
            QWEN,
            "leave 1 of the model's 4 layers for the other 0 of 2 pipeline stages",
        ),
        ({"pipeline_parallel": 2, "num_layers_in_last_pipeline_stage": 4}, QWEN, "leave 0 of the model's 4 layers"),
        ({"pipeline_parallel": 2, "num_layers_in_last_pipeline_stage": -1}, QWEN, "must be at least 0"),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "num_layers_in_first_pipeline_stage": 1},
            QWEN,
            "cannot be cut into actor.virtual_pipeline_parallel=2 equal chunks",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
            QWEN,
            "actor.recompute_modules=['layernorm']: of this model core_attn and mlp can be recomputed",
        ),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
            MOE,
            "of this model core_attn and moe can be recomputed",
        ),
        ({"recompute_granularity": "selective"}, QWEN, "name at least one"),
        (
            {"recompute_modules": ["mlp"]},
            QWEN,
            "actor.recompute_modules=['mlp'] does nothing with actor.recompute_granularity=none; "
            "set actor.recompute_granularity=selective, or leave it out",
        ),
        (
            {"recompute_granularity": "full", "recompute_modules": ["mlp"]},
            QWEN,
            "recompute_modules=['mlp'] does nothing",
        ),
        ({"recompute_num_layers": 2}, QWEN, "actor.recompute_num_layers=2 does nothing with"),
        ({"recompute_method": "block"}, QWEN, "set actor.recompute_granularity=full, or leave it out"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "recompute_num_layers": 2},
            QWEN,
            "actor.recompute_num_layers=2 does nothing with actor.recompute_granularity=selective",
        ),
        ({"recompute_granularity": "full", "recompute_num_layers": 5}, QWEN, "recompute_num_layers=5: at most 4, the "),
        (
            FULL | {"recompute_method": "block", "pipeline_parallel": 2, "recompute_num_layers": 3},
            QWEN,
            "actor.recompute_num_layers=3: at most 2, the layers of a stage's chunk",
        ),
        (
            FULL | {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "recompute_num_layers": 2},
            QWEN,
            "actor.recompute_num_layers=2: at most 1",
        ),
        (
            FULL | {"pipeline_parallel": 4, "num_layers_in_last_pipeline_stage": 6, "recompute_num_layers": 9},
            SMOLLM2,
            "actor.recompute_num_layers=9: at most 8",
        ),
        ({"optimizer_offload_fraction": 0.5}, QWEN, "does nothing without actor.optimizer_cpu_offload=true"),
        (
            {"optimizer_cpu_offload": True, "distributed_optimizer": True},
            QWEN,
            "actor.optimizer_cpu_offload=true with actor.dtype=float32",
        ),
        ({"recompute_num_layers": 0}, QWEN, "actor.recompute_num_layers=0: must be at least 1"),
        ({"moe_aux_loss_coeff": 0.01}, QWEN, "actor.moe_aux_loss_coeff=0.01: the model has no experts"),
        ({"moe_z_loss_coeff": -0.01}, MOE, "actor.moe_z_loss_coeff=-0.01: must be at least 0"),
        ({"optimizer_cpu_offload": True, "dtype": "bfloat16"}, QWEN, "needs actor.distributed_optimizer=true"),
        (
            OFFLOAD | {"optimizer_offload_fraction": 0.0},
            QWEN,
            "actor.optimizer_offload_fraction=0.0: above 0 and at most 1",
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 4},
            QWEN,
            "makes 8 chunks, more than the model's 4 layers",
        ),
        ({"virtual_pipeline_parallel": 2}, QWEN, "virtual_pipeline_parallel=2 needs actor.pipeline_parallel above 1"),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "p2p_communication": "batched"},
            QWEN,
            "trains silently wrong on megatron-core (actor.virtual_pipeline_parallel=2, actor.pipeline_parallel=2); "
            "use overlapped or auto",
        ),
        (
            {"pipeline_parallel": 2, "p2p_communication": "overlapped"},
            QWEN,
            "needs actor.virtual_pipeline_parallel above 1",
        ),
        ({"sequence_parallel": True}, QWEN, "actor.sequence_parallel=true needs actor.tensor_parallel above 1"),
        (
            {"overlap_param_gather": True},
            QWEN,
            "needs actor.distributed_optimizer=true and actor.overlap_grad_reduce=true",
        ),
        ({"data_parallel": 0}, QWEN, "actor.data_parallel=0: must be at least 1"),
        ({"context_parallel": 0}, QWEN, "actor.context_parallel=0: must be at least 1"),
        (
            {"expert_parallel": 2},
            QWEN,
            "actor.expert_parallel=2, actor.expert_tensor_parallel=1: the model has no experts",
        ),
        ({"expert_parallel": 4}, MOE, "actor.expert_parallel=4 does not divide the model's 6 experts"),
        ({"expert_tensor_parallel": 5}, MOE, "does not divide the 36 columns of an expert (moe_intermediate_size)"),
        (
            {"expert_parallel": 3, "data_parallel": 2, "context_parallel": 2, "pipeline_parallel": 4},
            MOE,
            "actor.expert_parallel=3 x actor.expert_tensor_parallel=1 does not divide the 4 ranks of a pipeline stage",
        ),
        ({"tensor_parallel": 2}, MOE, "with a mixture of experts needs actor.sequence_parallel=true"),
        ({"logprob_chunk_tokens": -1}, QWEN, "actor.logprob_chunk_tokens=-1: must be at least 0"),
        ({"max_tokens_per_microbatch": 0}, QWEN, "actor.max_tokens_per_microbatch=0: must be at least 1"),
        ({"timeout_s": 0.0}, QWEN, "actor.timeout_s=0.0"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(settings: dict, shape: ModelShape, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_actor(ActorConfig(**settings), shape)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"tensor_parallel": 4, "sequence_parallel": True}, QWEN),
        ({"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "p2p_communication": "overlapped"}, QWEN),
        ({"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, QWEN),
        ({"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}, QWEN),
        ({"context_parallel": 3}, QWEN),
        ({"pipeline_parallel": 4, "num_layers_in_last_pipeline_stage": 6}, SMOLLM2),
        (
            {"pipeline_parallel": 4, "num_layers_in_first_pipeline_stage": 6, "num_layers_in_last_pipeline_stage": 8},
            SMOLLM2,
        ),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "num_layers_in_first_pipeline_stage": 12},
            replace(SMOLLM2, num_layers=30 - 2),
        ),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}, MOE),
        (FULL | {"recompute_num_layers": 4}, QWEN),
        (
            FULL | {"pipeline_parallel": 4, "num_layers_in_last_pipeline_stage": 6, "recompute_num_layers": 8},
            SMOLLM2,
        ),
        (FULL | {"pipeline_parallel": 2, "num_layers_in_first_pipeline_stage": 3, "recompute_num_layers": 3}, QWEN),
        (OFFLOAD | {"optimizer_offload_fraction": 0.5}, QWEN),
        ({"expert_parallel": 6, "context_parallel": 2, "data_parallel": 3}, MOE),
        # experts are not split over tensor-parallel ranks, so their columns need not divide
        ({"tensor_parallel": 4, "sequence_parallel": True, "expert_parallel": 2}, replace(MOE, intermediate_size=0)),
    ],
)
def test_a_layout_that_fits_is_accepted(settings: dict, shape: ModelShape) -> None:
    check_actor(ActorConfig(**settings), shape)


@pytest.mark.parametrize(
    ("settings", "ranks", "multiple"),
    [
        ({"tensor_parallel": 2}, 2, 1),
        ({"tensor_parallel": 2, "sequence_parallel": True}, 2, 2),
        ({"context_parallel": 3, "data_parallel": 2}, 6, 6),
        ({"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2, "expert_parallel": 4}, 4, 8),
    ],
)
def test_ranks_and_padding_of_a_layout(settings: dict, ranks: int, multiple: int) -> None:
    assert (ActorConfig(**settings).world_size, ActorConfig(**settings).token_multiple) == (ranks, multiple)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "optimizer.lr=0.0"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "optimizer.min_lr=0.01"),
        ({"beta2": 1.0}, "optimizer.beta2=1.0"),
        ({"eps": 0.0}, "optimizer.eps=0.0"),
        ({"clip_grad": -1.0}, "optimizer.clip_grad=-1.0"),
        (
            {"lr_decay": "cosine", "lr_warmup_steps": 10, "lr_decay_steps": 10},
            "must be above optimizer.lr_warmup_steps=10",
        ),
    ],
)
def test_an_optimizer_that_makes_no_sense_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_optimizer(OptimizerConfig(**settings))
    assert message in str(caught.value)


def test_a_model_whose_vocabulary_is_too_small_for_the_task_is_refused() -> None:
    assert len(TOKENS) == ARITHMETIC_VOCABULARY
    with pytest.raises(UserError, match="a vocabulary of 13 tokens; the arithmetic task uses 14"):
        check_pretrain(PretrainConfig(), replace(QWEN, vocab_size=13))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_questions": 10_000}, "num_questions=10000: the task has 9000 training questions"),
        ({"task": ArithmeticTaskConfig(num_heldout=20_000)}, "task.num_heldout=20000: of 10000 questions at most 9999"),
        ({"task": ArithmeticTaskConfig(max_operand=10**300)}, "positions"),
        ({"run": RunConfig(seed=-1)}, "run.seed=-1: must be at least 0"),
        ({"run": RunConfig(keep_last=-1)}, "run.keep_last=-1: must be at least 0"),
        ({"run": RunConfig(checkpoint_every=5, keep_every=10)}, "run.keep_every=10 without run.keep_last"),
        (
            {"run": RunConfig(checkpoint_every=5, keep_last=2, keep_every=12)},
            "run.keep_every=12 is not a multiple of run.checkpoint_every=5",
        ),
        ({"optimizer": OptimizerConfig(weight_decay=math.nan)}, "optimizer.weight_decay=nan: must be at least 0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"stop_at_accuracy": 0.0}, "stop_at_accuracy=0.0"),
        ({"model": ModelConfig(init_std=0.0)}, "model.init_std=0.0"),
    ],
)
def test_pretraining_settings_out_of_range_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_pretrain(replace(PretrainConfig(), **changes), QWEN)
    assert message in str(caught.value)


@pytest.mark.parametrize("aggregation", ["sequence", "fixed_length"])
def test_auxiliary_losses_of_experts_go_with_a_count_of_tokens_only(aggregation: str) -> None:
    algorithm = AlgorithmConfig(aggregation=aggregation, fixed_length=64 if aggregation == "fixed_length" else 0)  # type: ignore[arg-type]
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        config = replace(TrainConfig(), actor=ActorConfig(**{name: 0.01}), algorithm=algorithm)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=f"algorithm.aggregation={aggregation} with actor.moe_aux_loss_coeff="):
            check_train(config, MOE)
