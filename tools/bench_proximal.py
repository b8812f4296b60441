"""Time of the proximal step: the extra forward pass of `recompute` over the interpolation of `loglinear`, in one run.

One rank trains the same batches under each method in turn; `reused` is recompute whose first minibatch takes its own training
forward for the extra pass. For each: seconds of the proximal step, its share of the training step, and the ratios to loglinear
(medians over the batches, after one to warm up). Prints a table, or with --json one object.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
from a3po_megatron.config.algorithm import AlgorithmConfig
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.config.schema import ModelConfig
from a3po_megatron.errors import exit_on_user_error
from a3po_megatron.launch.ranks import become_only_rank
from a3po_megatron.records import Batch, Sample

DEMO_MODEL = Path("configs/models/arithmetic_qwen3")
MAX_STALENESS = 4
METHODS = {
    "loglinear": AlgorithmConfig(),
    "recompute": AlgorithmConfig(method="recompute"),
    "reused": AlgorithmConfig(method="recompute", reuse_first_forward=True),
}


@dataclass(frozen=True)
class Workload:
    """What is trained: a model's shape, with random weights, and batches of one size."""

    name: str
    shape: ModelShape
    num_samples: int
    prompt_tokens: int
    response_tokens: int
    max_tokens_per_microbatch: int
    num_minibatches: int


def workloads(model: str | None, samples: int, response_tokens: int) -> list[Workload]:
    """Return what is measured: SmolLM2-135M (or the model folder that is named), then the demo."""
    shape = read_model_shape(model) if model else smollm2_shape()
    real = Workload(Path(model).name if model else "SmolLM2-135M", shape, samples, 64, response_tokens, 2048, 4)
    return [real, Workload("demo", read_model_shape(DEMO_MODEL), 256, 6, 4, 2048, 4)]


def smollm2_shape() -> ModelShape:
    """Return the shape of SmolLM2-135M: time depends on nothing else of the model."""
    return ModelShape(
        family="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        tie_word_embeddings=True,
        rope_theta=100000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
    )


def random_batch(work: Workload, version: int) -> Batch:
    """Return samples of mixed staleness 0..4 with behaviour log-probabilities near those of a random model."""
    rng = np.random.default_rng(version)
    vocab = work.shape.vocab_size

    def sample(index: int) -> Sample:
        versions = np.sort(version - rng.integers(0, MAX_STALENESS + 1, work.response_tokens)).astype(np.int32)
        logprobs = (-np.log(vocab) + 0.1 * rng.standard_normal(work.response_tokens)).astype(np.float32)
        prompt, response = (
            rng.integers(0, vocab, n).astype(np.int32) for n in (work.prompt_tokens, work.response_tokens)
        )
        return Sample(str(index), prompt, response, logprobs, versions, "length")

    rewards = rng.standard_normal(work.num_samples).astype(np.float32)
    samples = tuple(sample(index) for index in range(work.num_samples))
    return Batch(samples, rewards, rewards, np.ones(work.num_samples, np.bool_))


def measure(work: Workload, repeats: int) -> dict[str, Any]:
    """Train `repeats` batches with each method in turn, and one before; return the medians."""
    from a3po_megatron.actor.actor import Actor
    from a3po_megatron.actor.batch_step import BatchStep

    settings = ActorConfig(max_tokens_per_microbatch=work.max_tokens_per_microbatch)
    actor = Actor(work.shape, ModelConfig(init="random"), settings, OptimizerConfig(lr=1e-6), seed=0)
    steps = {
        method: BatchStep(actor, replace(algorithm, num_minibatches=work.num_minibatches), MAX_STALENESS, 0)
        for method, algorithm in METHODS.items()
    }
    rows: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    for version in range(repeats + 1):
        batch = random_batch(work, version)
        for method, step in steps.items():
            rows[method].append(step.train(batch, version))
    actor.close()

    def median(method: str, name: str) -> float:
        return statistics.median(row[name] for row in rows[method][1:])

    found = {f"{method}_proximal_s": median(method, "time/prox_s") for method in METHODS}
    found |= {f"{method}_step_s": median(method, "time/step_s") for method in METHODS}
    return {
        "tokens": work.num_samples * (work.prompt_tokens + work.response_tokens),
        **found,
        **{f"{method}_share_of_step": found[f"{method}_proximal_s"] / found[f"{method}_step_s"] for method in METHODS},
        "proximal_ratio": found["recompute_proximal_s"] / found["loglinear_proximal_s"],
        "reused_proximal_ratio": found["reused_proximal_s"] / found["loglinear_proximal_s"],
        "step_ratio": found["recompute_step_s"] / found["loglinear_step_s"],
        "reused_step_ratio": found["reused_step_s"] / found["loglinear_step_s"],
    }


def main(arguments: Sequence[str]) -> int:
    """Measure both workloads and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="Hugging Face folder whose shape is used instead of SmolLM2-135M's")
    parser.add_argument("--samples", type=int, default=16, help="of a batch; default: %(default)s")
    parser.add_argument("--response-tokens", type=int, default=192, help="of a sample; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="batches that are timed; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    works = workloads(options.model, options.samples, options.response_tokens)

    become_only_rank()
    from a3po_megatron.actor import device

    device.start(ActorConfig())
    results = {work.name: measure(work, options.repeats) for work in works}
    device.stop()
    if options.json:
        print(json.dumps(results))
        return 0
    for name, found in results.items():
        print(name)
        for quantity, value in found.items():
            print(f"  {quantity:<26}{value:.6g}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_user_error(lambda: main(sys.argv[1:])))
