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
    # Logits of bfloat16 hidden states and weights in float32, not rounded to bfloat16; `rollout.float32_head` must agree.
    float32_head: bool = False
    logprob_chunk_tokens: int = 0  # tokens whose logits exist at a time; 0: 384 on a CPU, 2048 on a GPU
    # Of the log-probabilities, once the logits are multiplied out. auto: compiled (torch.compile) on a GPU, plain on a CPU
    logprob_kernel: Literal["auto", "plain", "compiled"] = "auto"
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
class RolloutConfig:
    """The rollout fleet: vLLM servers of each node, how they sample, how they take new weights."""

    num_servers: int = 1  # vLLM servers a node
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where the node has a GPU, else cpu
    dtype: Literal["float32", "bfloat16"] = "float32"
    float32_head: bool = False  # logits in float32 from bfloat16 weights; `actor.float32_head` must agree
    tensor_parallel: int = 1  # GPUs (or CPU ranks) a server
    max_model_len: int = 512  # prompt and response tokens of one sequence; a longer request is refused
    max_num_seqs: int = 64  # sequences a server runs at once; more wait inside the server
    kv_cache_bytes: int = 67108864  # a server; 0: vLLM sizes it from `gpu_memory_utilization` (GPU only)
    gpu_memory_utilization: float = 0.85  # share of a GPU that a server may take
    enforce_eager: bool = True  # False: CUDA graphs
    prefix_caching: bool = True  # prompts of a group are computed once; the cache never crosses a weight version
    cpu_threads: int = 1  # OpenMP threads of a server on a CPU
    host: str = "127.0.0.1"  # address the servers bind and are reached at; a private interface, never a public one
    base_port: int = 0  # server i listens on base_port + i; 0: any free port

    temperature: float = 1.0
    max_response_tokens: int = 64
    # Log-probabilities are exact only for the plain distribution: any other value of the next four is refused.
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stream_interval: int = 8  # tokens between two partial results of a request

    kv_on_update: Literal["rebuild", "keep"] = "rebuild"  # of requests in flight when new weights arrive
    bucket_bytes: int = 67108864  # largest piece of weights in one broadcast; a larger tensor travels alone

    startup_timeout_s: float = 300.0  # until a started server has generated its first token
    request_timeout_s: float = 600.0  # of one response, pauses included
    control_timeout_s: float = 60.0  # of one control call (pause, resume, health...)
    transfer_timeout_s: float = 300.0  # of joining the weight group, and of sending one version
    controller_timeout_s: float = 120.0  # a supervisor that cannot reach the controller for so long stops
    stop_timeout_s: float = 15.0  # between asking a server to end and killing it
    heartbeat_s: float = 2.0  # between two looks at the servers and the controller
    max_restarts: int = 3  # of one server within `restart_window_s`; one more ends the supervisor
    restart_window_s: float = 600.0

    @property
    def publication_timeout_s(self) -> float:
        """Longest time that new weights may take to arrive: joining the group, start, transfer."""
        return self.control_timeout_s + 2 * self.transfer_timeout_s


@dataclass(frozen=True)
class ArithmeticTaskConfig:
    """Questions `a+b=` with 0 <= a, b <= max_operand; answers are digits and an end token."""

    max_operand: int = 99
    num_heldout: int = 1000
    split_seed: int = 1234  # of the shuffle that separates train from held-out questions


@dataclass(frozen=True)
class ControllerConfig:
    """The controller: schedule, batch size, evaluation and the deadlines of its waits."""

    host: str = "127.0.0.1"  # loopback, or the cluster's private interface
    port: int = 8700
    # free: generation runs ahead of training by at most `max_staleness` versions
    # lockstep: batch k comes wholly from version max(0, k - max_staleness). Each request has a seed of its own, so two runs
    # give the same samples, and losses that differ by float32 rounding at most (vLLM batches requests as they arrive)
    schedule: Literal["free", "lockstep"] = "free"
    max_staleness: int = 4  # versions; 0: every batch is generated by the weights that it trains
    prompts_per_batch: int = 32  # groups a training step consumes
    samples_per_prompt: int = 8  # members of a group
    max_concurrent_groups: int = 64  # groups in generation at once
    eval_every: int = 10  # versions between evaluations; 0: only at the start and at the end
    max_eval_problems: int = 1000  # held-out problems of an evaluation, from the front of the split; 0: no evaluation
    max_concurrent_evals: int = 64  # greedy requests in flight at once during an evaluation
    poll_s: float = 20.0  # how long one request for a batch is held before it is answered with "not yet"
    batch_timeout_s: float = 3600.0  # longest wait of the actor for one batch
    first_replica_timeout_s: float = 900.0  # from the start to the first registered replica
    group_timeout_s: float = 1800.0  # from the start of a group to its last reward
    evaluation_timeout_s: float = 3600.0
    publication_timeout_s: float = 900.0  # of one publication; in lockstep it includes the batches it has to wait for
    actor_timeout_s: float = 3600.0  # longest silence of the actor before the run is given up


@dataclass(frozen=True)
class DataConfig:
    """Which problems are trained on and which are held out."""

    task: Literal["arithmetic", "gsm8k"] = "arithmetic"
    arithmetic: ArithmeticTaskConfig = field(default_factory=ArithmeticTaskConfig)  # of `task: arithmetic`
    train_file: str = ""  # of `task: gsm8k`, JSON lines; empty: gsm8k/train.jsonl in the data folder
    heldout_file: str = ""  # likewise; empty: gsm8k/test.jsonl


@dataclass(frozen=True)
class RewardConfig:
    """What a response is worth."""

    # exact: 1 where the token ids are the answer and the end token, else 0 (arithmetic)
    # numeric: 1 where the final number of the text is the answer, else 0 (gsm8k)
    kind: Literal["exact", "numeric"] = "exact"
    shuffle: bool = False  # negative control: permute the rewards over the batch, so that they teach nothing


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
class AlgorithmConfig:
    """The objective: which proximal policy, and where ratios are clipped and weights capped. See docs and `objective/`."""

    # loglinear: A-3PO, interpolated between behaviour and current policy; recompute: an extra forward pass a batch;
    # behavior: the behaviour policy itself (PPO on stale data); sync: the same, on data of staleness 0 only
    method: Literal["loglinear", "recompute", "sync", "behavior"] = "loglinear"
    fresh_anchor: Literal["behavior", "target"] = "behavior"  # of loglinear: the anchor of tokens of staleness 0
    num_minibatches: int = 4  # optimizer steps a batch
    clip_low: float = 0.2  # the ratio to the proximal policy is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    behavior_weight_cap: float = 5.0  # largest pi_prox / pi_behav that weighs a token; 0: no cap


@dataclass(frozen=True)
class TrainConfig:
    """Settings of asynchronous reinforcement learning, shared by all roles of one run."""

    recipe: Literal["train"] = "train"
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)


Config = PretrainConfig | TrainConfig
