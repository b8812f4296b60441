"""Every setting there is, as frozen dataclasses: names, types, defaults and what each one means.

This file holds data only, and `algorithm.py` that of the section `algorithm`. `load.py` reads YAML and dotted overrides into
these classes, `check.py` refuses values that contradict each other; nothing is changed or filled in afterwards. Imports no
torch, so `--help` answers at once.
"""

from dataclasses import dataclass, field
from typing import Literal

from a3po_megatron.config.algorithm import AlgorithmConfig


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
class ActorConfig:
    """The Megatron-core actor: device, layout, microbatches."""

    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda where torch finds a GPU, else cpu
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the parameters; bfloat16 keeps float32 main parameters
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline_parallel: int = 1  # model chunks a pipeline stage; above 1 the schedule is interleaved
    # of a pipeline whose stages differ, all chunks of the stage together; the others share the rest evenly. 0: as the others
    num_layers_in_first_pipeline_stage: int = 0
    num_layers_in_last_pipeline_stage: int = 0
    # ranks that share each sequence, two chunks of it each; parameters are the same on all of them
    context_parallel: int = 1
    data_parallel: int = 1
    # Of a mixture of experts: ranks that share the experts, and those that share each expert. They are taken from the
    # tensor, context and data parallel ranks, and do not add to the world size.
    expert_parallel: int = 1
    expert_tensor_parallel: int = 1
    sequence_parallel: bool = False
    # auto: overlapped with virtual stages, else batched (what Megatron's two schedules each support)
    p2p_communication: Literal["auto", "batched", "overlapped"] = "auto"
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    optimizer_cpu_offload: bool = False  # optimizer state and its step in host memory; bfloat16 on a GPU only
    optimizer_offload_fraction: float = 1.0  # share of the parameters whose state is there
    # Activations that are computed again in the backward pass instead of kept. selective: those of `recompute_modules`;
    # full: those of whole layers
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    # Of `selective`, which must name some. mlp of a dense model, moe of a mixture of experts; core_attn saves memory in the
    # local layers only: Transformer Engine's attention keeps no scores
    recompute_modules: list[str] = field(default_factory=list)
    # Of `full`. uniform: every layer, kept at each `recompute_num_layers`-th; block: the first `recompute_num_layers` of a chunk
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: int = 1
    # Of a mixture of experts: precision of the router's logits under bfloat16 (none: that of the parameters), and
    # what is added to the objective: coefficients of the load-balancing loss and of the z-loss. See docs/models.md
    moe_router_dtype: Literal["fp32", "fp64", "none"] = "fp32"
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    packed: bool = True  # True: sequences end to end (thd); False: one padded row a sequence (bshd)
    # padding counted, over all context-parallel ranks; a longer sequence is refused
    max_tokens_per_microbatch: int = 4096
    # Logits of bfloat16 hidden states and weights in float32, not rounded to bfloat16; `rollout.float32_head` must agree.
    float32_head: bool = False
    logprob_chunk_tokens: int = 0  # tokens whose logits exist at a time; 0: 384 on a CPU, 2048 on a GPU
    # Of the log-probabilities, once the logits are multiplied out. auto: compiled (torch.compile) on a GPU, plain on a CPU
    logprob_kernel: Literal["auto", "plain", "compiled"] = "auto"
    timeout_s: float = 300.0  # deadline of every collective
    host: str = "127.0.0.1"  # address of rank 0's node on the private interface over which weights leave it

    @property
    def world_size(self) -> int:
        """Ranks of the actor: tensor x context x pipeline x data."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def token_multiple(self) -> int:
        """What a microbatch is padded to: each context-parallel rank holds two chunks, sequence parallelism splits them on."""
        chunks = 2 * self.context_parallel if self.context_parallel > 1 else 1
        return chunks * (self.tensor_parallel if self.sequence_parallel else 1)


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
    # Log-probabilities are exact only for the plain distribution: any other value of the next seven is refused.
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stream_interval: int = 32  # tokens between two partial results of a request; fewer cost the controller more

    # Requests in flight when new weights arrive go on with them, are aborted and asked again for the rest, or may end first.
    in_flight: Literal["continue", "abort", "drain"] = "continue"
    kv_on_update: Literal["rebuild", "keep"] = "rebuild"  # cached keys and values of requests that continue
    drain_timeout_s: float = 60.0  # drain: how long they may take to end; the rest is aborted and asked again
    # How weights travel from the actor. auto: nccl where actor and servers have GPUs, else gloo; file: through `run.dir`, which
    # must be a folder that all nodes see
    weight_transfer: Literal["auto", "gloo", "nccl", "file"] = "auto"
    # True: the newest weights also lie below `run.dir` as files, so that a replica that was restarted gets them at once; False:
    # it waits for the next publication
    keep_published: bool = True
    # Nats by which the mean log-probability of a probe prompt may move from one version to the next; a replica beyond it holds
    # garbage and is dropped. 0: no probe
    probe_max_change: float = 3.0
    bucket_bytes: int = 67108864  # largest piece of weights in one broadcast; a larger tensor travels alone

    startup_timeout_s: float = 300.0  # until a started server has generated its first token
    request_timeout_s: float = 1800.0  # of one response, pauses included; and of its wait for a server with room
    control_timeout_s: float = 60.0  # of one control call (pause, resume, health...)
    transfer_timeout_s: float = (
        300.0  # of joining the weight group, of a broadcast, of all of a version into one server
    )
    stall_timeout_s: float = (
        120.0  # a server that does not answer, or has requests and no new token, for so long is hung
    )
    controller_timeout_s: float = 120.0  # a supervisor that cannot reach the controller for so long stops
    stop_timeout_s: float = 15.0  # between asking a server to end and killing it
    heartbeat_s: float = 2.0  # between two looks at the servers and the controller
    max_restarts: int = 3  # of one server within `restart_window_s`; one more failure retires it
    restart_window_s: float = 600.0

    @property
    def publication_timeout_s(self) -> float:
        """Longest time that new weights may take to arrive: draining, joining the group, start, transfer."""
        drain_s = self.drain_timeout_s if self.in_flight == "drain" else 0.0
        return drain_s + self.control_timeout_s + 2 * self.transfer_timeout_s


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
    # True: a group whose rewards are all equal, which teaches nothing, is replaced by another problem's (DAPO)
    dynamic_sampling: bool = False
    max_generated: float = 4.0  # groups generated for a batch, replacements counted, as a multiple of prompts_per_batch
    # after `max_generated`: train on the groups without signal too, or stop the run with the reason
    without_signal: Literal["train", "stop"] = "train"
    max_stragglers: int = 0  # groups of a batch that are replaced when `group_timeout_s` is over; one more ends the run
    eval_every: int = 10  # versions between evaluations; 0: only at the start and at the end
    max_eval_problems: int = 1000  # of each held-out set, from its front; 0: no evaluation
    eval_samples: int = 1  # responses to each held-out problem
    eval_temperature: float = 0.0  # 0: greedy, with which `eval_samples` is 1
    eval_pass_k: list[int] = field(default_factory=list)  # the k of pass@k; empty: 1 and `eval_samples`
    # Whether the next publication waits until an evaluation has ended, so that one version gave all its answers. first: only
    # for the one of the initial weights; auto: always in lockstep, first in free
    eval_holds_publication: Literal["auto", "always", "first", "never"] = "auto"
    max_concurrent_evals: int = 64  # requests in flight at once during an evaluation
    poll_s: float = 20.0  # how long one request for a batch is held before it is answered with "not yet"
    batch_timeout_s: float = 3600.0  # longest wait of the actor for one batch
    first_replica_timeout_s: float = 900.0  # from the start to the first registered replica
    group_timeout_s: float = 1800.0  # from the start of a group to its last response
    evaluation_timeout_s: float = 3600.0
    publication_timeout_s: float = 900.0  # of one publication; in lockstep it includes the batches it has to wait for
    actor_timeout_s: float = 3600.0  # longest silence of the actor before the run is given up


@dataclass(frozen=True)
class ProblemSetConfig:
    """One set of problems of `data.train` or `data.evaluation`, which name it."""

    # generated: by reasoning-gym; columns: any file, by the columns below; empty: the set's name is its kind
    kind: Literal["", "gsm8k", "dapo", "math500", "aime24", "aime25", "generated", "columns"] = ""
    path: str = ""  # .jsonl or .parquet file, Hugging Face folder or hub id; empty: the kind's file in the data folder
    subset: str = ""  # of a Hugging Face data set that has several, for example `main`
    split: str = (
        ""  # of a Hugging Face data set, and of gsm8k's files; empty: train in data.train, test in data.evaluation
    )
    limit: int = 0  # rows read, from the front; 0: all. Of `kind: generated`: how many are made
    problem_column: str = ""  # dotted path such as `prompt.0.content`; empty: the kind's own
    answer_column: str = ""
    id_column: str = ""  # of `kind: columns` empty: the row's number
    generator: str = ""  # of `kind: generated`: reasoning-gym's name, for example leg_counting
    seed: int = 0  # of `kind: generated`: problem i comes from seed + i, so keep the seeds of two sets far apart


@dataclass(frozen=True)
class PromptConfig:
    """How a problem becomes what the model reads: instruction, system prompt, chat template."""

    style: Literal["chat", "plain"] = "chat"  # plain: the text as it is, for base models without a chat template
    # own: that of the problem's set; dapo, gsm8k, boxed: as those sets are published; custom: `prefix` and `suffix`
    instruction: Literal["own", "dapo", "gsm8k", "boxed", "none", "custom"] = "own"
    prefix: str = ""  # of `instruction: custom`, with its own line breaks
    suffix: str = ""
    system: str = ""  # system prompt of the chat; empty: none, or what the template writes by itself
    # `enable_thinking` of the chat template; template: the template's own default
    thinking: Literal["template", "enabled", "disabled"] = "template"


@dataclass(frozen=True)
class DataConfig:
    """Which problems are trained on and which are held out."""

    task: Literal["arithmetic", "problems"] = "arithmetic"
    arithmetic: ArithmeticTaskConfig = field(default_factory=ArithmeticTaskConfig)  # of `task: arithmetic`
    # The rest is of `task: problems`. Sets by name: `train: {dapo: {}}`, `evaluation: {math500: {}, aime24: {}}`
    train: dict[str, ProblemSetConfig] = field(default_factory=dict)
    evaluation: dict[str, ProblemSetConfig] = field(default_factory=dict)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    # Training problems that also stand in an evaluation set are left out. exact: the same letters and digits;
    # ngrams: also those that hold `ngram_share` of an evaluation problem's runs of `ngram` words (not of generated sets)
    decontaminate: Literal["ngrams", "exact", "off"] = "ngrams"
    ngram: int = 10
    ngram_share: float = 0.5


@dataclass(frozen=True)
class RewardPoolConfig:
    """The worker processes that judge mathematics and call a user's own reward."""

    num_workers: int = 2
    timeout_s: float = 10.0  # of one answer; the worker is then killed and the answer is worth 0
    memory_bytes: int = 2147483648  # address space of a worker; 0: no limit
    max_response_chars: int = 400000  # a longer response is worth 0 unread


@dataclass(frozen=True)
class FormatRewardConfig:
    """A part of the reward for how a response is written."""

    weight: float = 0.0  # 0: off
    # boxed: closes a \boxed{...}; answer_line: has a line `Answer: x`; think: one <think>...</think>, then an answer;
    # regex: `pattern` matches somewhere (Python's re, with DOTALL)
    style: Literal["boxed", "answer_line", "think", "regex"] = "boxed"
    pattern: str = ""  # of `style: regex`


@dataclass(frozen=True)
class OverlongRewardConfig:
    """DAPO's soft overlong punishment: 0 up to `rollout.max_response_tokens - buffer_tokens`, then linear down to -weight."""

    weight: float = 0.0  # 0: off
    buffer_tokens: int = 0


@dataclass(frozen=True)
class PythonRewardConfig:
    """A part of the reward that is a user's function, called in a worker of the pool. See docs/rewards.md."""

    weight: float = 0.0  # 0: off
    path: str = ""  # package.module:function


@dataclass(frozen=True)
class HttpRewardConfig:
    """A part of the reward that an HTTP endpoint computes. See docs/rewards.md."""

    weight: float = 0.0  # 0: off
    url: str = ""
    timeout_s: float = 30.0  # of one try
    max_tries: int = 3  # of one group; then the run ends
    max_concurrent: int = 16  # requests in flight


@dataclass(frozen=True)
class RewardConfig:
    """What a response is worth: the answer's weight, and those of the other parts, added up."""

    # exact: 1 where the token ids are the answer and the end token, else 0 (arithmetic)
    # numeric: 1 where the final number of the text is the answer, else 0 (gsm8k)
    # math: 1 where the stated answer equals the truth as mathematics, else 0; `convention` says where it is stated
    # none: the answer is not judged; what counts are the parts below
    kind: Literal["exact", "numeric", "math", "none"] = "exact"
    weight: float = 1.0  # of the answer
    convention: Literal["auto", "boxed", "answer_line", "gsm8k"] = "auto"  # of `kind: math`
    # of `kind: math` and `numeric`: judge a response that was cut off at the token limit; else it is worth 0
    accept_truncated: bool = False
    format: FormatRewardConfig = field(default_factory=FormatRewardConfig)
    overlong: OverlongRewardConfig = field(default_factory=OverlongRewardConfig)
    python: PythonRewardConfig = field(default_factory=PythonRewardConfig)
    http: HttpRewardConfig = field(default_factory=HttpRewardConfig)
    pool: RewardPoolConfig = field(default_factory=RewardPoolConfig)
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
class AdvantageConfig:
    """How a sample's reward becomes its advantage. See `batching/advantages.py`."""

    baseline: Literal["mean", "leave_one_out"] = "mean"  # of the whole group, or of the other members
    scale: Literal["group_std", "none"] = "group_std"  # none: mean only (Dr. GRPO), rewards keep their size
    std_floor: float = 1e-3  # smallest std that is divided by
    normalize_batch: bool = False  # afterwards to mean 0 and std 1 over the tokens of the batch
    overlong_filtering: bool = False  # True: a sample cut off at max_response_tokens is neither trained nor counted


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
