"""A run's settings, whole: one frozen dataclass a recipe, of which each section has a file of its own beside this one.

    actor.*, optimizer.*  actor.py       rollout.*                 rollout.py      algorithm.*  algorithm.py
    data.*                data.py        controller.*, advantage.* controller.py   reward.*     reward.py

These files hold data only: names, types, defaults and what each one means. `load.py` reads YAML and dotted overrides into
the classes, `check.py` refuses values that contradict each other; nothing is changed or filled in afterwards. Imports no
torch, so `--help` answers at once.
"""

from dataclasses import dataclass, field
from typing import Literal

from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
from a3po_megatron.config.algorithm import AlgorithmConfig
from a3po_megatron.config.controller import AdvantageConfig, ControllerConfig
from a3po_megatron.config.data import ArithmeticTaskConfig, DataConfig
from a3po_megatron.config.reward import RewardConfig
from a3po_megatron.config.rollout import RolloutConfig


@dataclass(frozen=True)
class RunConfig:
    """What a run is called, where it writes and for how long it goes on."""

    dir: str = "runs/run"  # everything the run writes is below this folder
    seed: int = 0
    num_steps: int = 100  # batches in reinforcement learning, optimizer steps in pretraining
    checkpoint_every: int = 0  # steps between checkpoints of the actor; 0: only the last one
    # True: training goes on while a checkpoint is written, from a copy of the state in host memory
    checkpoint_async: bool = False
    keep_last: int = 0  # newest checkpoints kept, older ones are deleted; 0: all are kept
    keep_every: int = 0  # steps; checkpoints at its multiples are kept besides; 0: none
    resume: bool = False  # continue from the newest complete checkpoint below `dir`


@dataclass(frozen=True)
class ModelConfig:
    """The Hugging Face folder that defines the model: `config.json`, tokenizer and (unless `init: random`) weights.

    A warm start also takes a megatron checkpoint of `tools/convert_checkpoint.py`; vLLM, and so a run of all roles, does not.
    """

    path: str = ""
    init: Literal["pretrained", "random"] = "pretrained"
    init_seed: int = 0  # of `init: random`
    init_std: float = 0.02  # of `init: random`; projections and embeddings are N(0, init_std), norms 1, biases 0


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


@dataclass(frozen=True)
class TrainConfig:
    """Settings of asynchronous reinforcement learning, shared by all roles of one run."""

    recipe: Literal["train"] = "train"
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


Config = PretrainConfig | TrainConfig
