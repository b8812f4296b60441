"""How long a step takes, from FLOPs, bytes and stated rates: an estimate to choose a layout by, not a measurement."""

import math
from dataclasses import dataclass

from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.estimate.flops import forward_flops, training_flops
from a3po_megatron.estimate.memory import ServerMemory
from a3po_megatron.estimate.parameters import DTYPE_BYTES, model_parameters

ASSUMED_PROMPT_TOKENS = 160.0
ASSUMED_GENERATED_PER_TRAINED = 1.5  # where dynamic sampling replaces groups


@dataclass(frozen=True)
class Rates:
    """What the hardware gives, and which share of it is used. The shares are assumptions until they are measured."""

    peak_flops: float = 989e12  # bfloat16, dense, of an H100 or H200 SXM (NVIDIA's data sheet)
    memory_bytes_per_s: float = 3.35e12  # of an H100 SXM
    training_utilisation: float = 0.35  # of `peak_flops`
    expert_training_utilisation: float = 0.15  # the same of a mixture of experts: small matrices, tokens sent around
    prefill_utilisation: float = 0.4
    decode_utilisation: float = 0.6  # of `memory_bytes_per_s`
    decode_overhead_s: float = 0.004  # an iteration of a server: scheduling, sampling, kernel launches
    weight_bytes_per_s: float = 5e9  # of a publication, from the actor's first rank to all servers


@dataclass(frozen=True)
class Workload:
    """Lengths that are not settings."""

    prompt_tokens: float  # mean
    response_tokens: float  # mean
    generated_per_trained: float  # above 1 where dynamic sampling replaces groups

    @property
    def sequence_tokens(self) -> float:
        """Prompt and response."""
        return self.prompt_tokens + self.response_tokens


def assumed_workload(config: TrainConfig) -> Workload:
    """Return what is planned with unless someone knows better: short prompts of mathematics, responses a quarter of their limit."""
    return Workload(
        prompt_tokens=ASSUMED_PROMPT_TOKENS,
        response_tokens=config.rollout.max_response_tokens / 4,
        generated_per_trained=ASSUMED_GENERATED_PER_TRAINED if config.controller.dynamic_sampling else 1.0,
    )


@dataclass(frozen=True)
class StepTokens:
    """Tokens and sequences of one batch."""

    samples: int
    trained: float  # prompt and response
    generated: float  # response, replaced groups counted
    microbatches: int  # of each data-parallel rank and optimizer step


@dataclass(frozen=True)
class StepTime:
    """Seconds of one batch. Generation and training run at once; a publication holds up both."""

    actor_s: float
    rollout_s: float
    publication_s: float
    decode_iteration_s: float  # one token of every sequence of a server
    sequences_per_server: int  # in flight
    rebuild_s: float  # of one publication under kv_on_update=rebuild: reading again what is in flight

    @property
    def step_s(self) -> float:
        """The slower side, and the publication."""
        return max(self.actor_s, self.rollout_s) + self.publication_s


def step_tokens(config: TrainConfig, work: Workload) -> StepTokens:
    """Return what one batch consists of."""
    samples = config.controller.prompts_per_batch * config.controller.samples_per_prompt
    trained = samples * work.sequence_tokens
    a_step = trained / config.algorithm.num_minibatches / config.actor.data_parallel
    return StepTokens(
        samples=samples,
        trained=trained,
        generated=samples * work.response_tokens * work.generated_per_trained,
        microbatches=max(1, math.ceil(a_step / config.actor.max_tokens_per_microbatch)),
    )


def step_time(
    shape: ModelShape, config: TrainConfig, server: ServerMemory, servers: int, work: Workload, rates: Rates
) -> StepTime:
    """Return the seconds of one batch on the actor's ranks and `servers` servers."""
    sequences = sequences_in_flight(config, server, servers, work)
    length = work.sequence_tokens
    iteration = decode_iteration_s(shape, config, server, sequences, length, rates)
    prefill = config.rollout.tensor_parallel * rates.peak_flops * rates.prefill_utilisation
    rebuild = sequences * length / 2 * forward_flops(shape, length / 4) / prefill
    tokens = step_tokens(config, work)
    weights = model_parameters(shape) * DTYPE_BYTES[config.actor.dtype]
    publication = weights / rates.weight_bytes_per_s
    return StepTime(
        actor_s=actor_s(shape, config, tokens, length / 2, rates),
        rollout_s=tokens.generated * iteration / (servers * sequences),
        publication_s=publication + (rebuild if config.rollout.kv_on_update == "rebuild" else 0.0),
        decode_iteration_s=iteration,
        sequences_per_server=sequences,
        rebuild_s=rebuild,
    )


def actor_s(shape: ModelShape, config: TrainConfig, tokens: StepTokens, context: float, rates: Rates) -> float:
    """Return the seconds of training one batch, the pipeline's idle share (pp - 1) / (v m) on top.

    m microbatches, v chunks a stage: Narayanan et al., arXiv 2104.04473, section 2.2. Communication is taken to be hidden.
    """
    actor = config.actor
    idle = (actor.pipeline_parallel - 1) / (actor.virtual_pipeline_parallel * tokens.microbatches)
    share = rates.expert_training_utilisation if shape.num_experts else rates.training_utilisation
    flops = tokens.trained * training_flops(shape, config.algorithm, config.actor, context)
    return flops / (actor.world_size * rates.peak_flops * share) * (1 + idle)


def sequences_in_flight(config: TrainConfig, server: ServerMemory, servers: int, work: Workload) -> int:
    """Return the sequences that a server generates at once: what is asked for, what it may run, what its cache holds."""
    asked = config.controller.max_concurrent_groups * config.controller.samples_per_prompt / servers
    held = server.kv_tokens / work.sequence_tokens
    return max(1, int(min(asked, config.rollout.max_num_seqs, held)))


def decode_iteration_s(
    shape: ModelShape, config: TrainConfig, server: ServerMemory, sequences: int, length: float, rates: Rates
) -> float:
    """Return the seconds of one token of each of `sequences`: reading weights and cache, or multiplying, whichever is longer.

    Of n tokens that choose k of E experts each, 1 - (1 - k/E)^n of the experts are read. A sequence in flight has half its length.
    """
    read_share = 1.0
    if shape.num_experts:
        read_share = 1 - (1 - shape.num_experts_per_tok / shape.num_experts) ** sequences
    read = server.weights * read_share + sequences * length / 2 * server.kv_bytes_per_token
    reading = read / (rates.memory_bytes_per_s * rates.decode_utilisation)
    flops = sequences * forward_flops(shape, length / 2)
    multiplying = flops / (config.rollout.tensor_parallel * rates.peak_flops * rates.prefill_utilisation)
    return max(reading, multiplying) + rates.decode_overhead_s
