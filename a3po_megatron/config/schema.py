"""Every setting there is, as frozen dataclasses: names, types, defaults and what each one means.

This file holds data only. `load.py` reads YAML and dotted overrides into these classes, `check.py` refuses values that
contradict each other; nothing is changed or filled in afterwards. Imports no torch, so `--help` answers at once.
"""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RunConfig:
    """What a run is called, where it writes and for how long it goes on."""

    dir: str = "runs/run"  # everything the run writes is below this folder
    seed: int = 0
    num_steps: int = 100  # batches in reinforcement learning, optimizer steps in pretraining
    checkpoint_every: int = 0  # steps between checkpoints of the actor; 0: only the last one
    resume: bool = False  # continue from the newest complete checkpoint below `dir`


@dataclass(frozen=True)
class ModelConfig:
    """The Hugging Face folder that defines the model: `config.json`, tokenizer and (unless `init: random`) weights."""

    path: str = ""
    init: Literal["pretrained", "random"] = "pretrained"
    init_seed: int = 0  # of `init: random`
    init_std: float = 0.02  # of `init: random`; projections and embeddings are N(0, init_std), norms are 1


@dataclass(frozen=True)
class ActorConfig:
    """The Megatron-core actor: device, layout, microbatches."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where torch finds a GPU, else cpu
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters; bfloat16 keeps float32 main parameters
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline_parallel: int = 1  # model chunks a pipeline stage; above 1 the schedule is interleaved
    data_parallel: int = 1
    sequence_parallel: bool = False
    # auto: overlapped with virtual stages, else batched (what Megatron's two schedules each support)
    p2p_communication: Literal["auto", "batched", "overlapped"] = "auto"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    packed: bool = True  # True: sequences end to end (thd); False: one padded row a sequence (bshd)
    max_tokens_per_microbatch: int = 4096  # padding counted; a longer sequence is refused
    timeout_s: float = 300.0  # deadline of every collective

    @property
    def world_size(self) -> int:
        """Ranks of the actor: tensor x pipeline x data."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW through Megatron, and its learning rate schedule (in optimizer steps)."""

    lr: float = 1e-6
    min_lr: float = 0.0
    lr_decay: Literal["constant", "cosine", "linear"] = "constant"
    lr_warmup_steps: int = 0
    lr_decay_steps: int = 0  # step at which `min_lr` is reached; needed unless lr_decay is constant
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0  # largest global gradient norm; 0 switches clipping off


@dataclass(frozen=True)
class ArithmeticTaskConfig:
    """Questions `a+b=` with 0 <= a, b <= max_operand; answers are digits and an end token."""

    max_operand: int = 99
    num_heldout: int = 1000
    split_seed: int = 1234  # of the shuffle that separates train from held-out questions


@dataclass(frozen=True)
class PretrainConfig:
    """Settings of `recipes/pretrain.py`: a supervised warm start on the arithmetic task."""

    recipe: Literal["pretrain"] = "pretrain"
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    task: ArithmeticTaskConfig = field(default_factory=ArithmeticTaskConfig)
    num_questions: int = 2000  # training questions used, from the front of the train split
    batch_size: int = 128  # questions an optimizer step
    eval_every: int = 20  # steps between evaluations on held-out questions; 0: only at the end
    stop_at_accuracy: float = 1.0  # stop early once an evaluation reaches this
