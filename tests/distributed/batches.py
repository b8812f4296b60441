"""Batches of mixed staleness for the tests of the objective and of the loop."""

import numpy as np
import torch
from transformers import PreTrainedModel

from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.records import Batch, Sample
from tests.distributed.layouts import oracle_logprobs

# several microbatches a step where data parallelism leaves more than a few sequences
TOKENS = {"max_tokens_per_microbatch": 32}
SEED, MAX_STALENESS = 11, 4


def make_batch(model: PreTrainedModel, version: int, shift: float = 0.4) -> Batch:
    """Return 8 samples of mixed staleness 0..5; stale behaviour log-probs are off by `shift`, fresh ones are exact."""
    rng = np.random.default_rng(version)
    samples = []
    for index in range(8):
        prompt, response = (rng.integers(0, 131, rng.integers(1, size)).astype(np.int32) for size in (5, 10))
        versions = np.sort(version - rng.integers(0, 6, len(response))).astype(np.int32)
        tokens = np.concatenate([prompt, response]).astype(np.int64)
        with torch.no_grad():
            exact = oracle_logprobs(model, TokenSequence(tokens, np.zeros(len(tokens), np.bool_))).numpy()
        noise = np.where(versions == version, 0, shift * rng.standard_normal(len(response)))
        logprobs = (exact[len(prompt) - 1 :] + noise).astype(np.float32)
        samples.append(Sample(str(index), prompt, response, logprobs, versions, "stop"))
    advantages = rng.standard_normal(8).astype(np.float32)
    return Batch(tuple(samples), advantages, advantages, np.ones(8, np.bool_))
