"""Whether two folders hold the same model: log-probabilities of the same tokens, each side read and run by its own engine.

A Hugging Face folder is run by transformers, a megatron checkpoint is loaded and run by megatron-core; both in float32.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from a3po_megatron.actor.checkpoint_reading import METADATA
from a3po_megatron.actor.hf_folder import HFFolder
from a3po_megatron.config.model_shape import ModelShape, read_model_shape
from a3po_megatron.data.tokenizer import ChatTokenizer
from a3po_megatron.errors import UserError

NUM_RANDOM_TOKENS = 32


@dataclass(frozen=True)
class Agreement:
    """How far apart two sides are."""

    num_tokens: int
    max_difference: float  # of a token's log-probability, in nats
    mean_logprobs: tuple[float, float]  # of each side


def compare(a: Path, b: Path, configs: tuple[Path, Path], tokens: NDArray[np.int64]) -> Agreement:
    """Compare two folders on `tokens`; `configs` are the folders with their config.json. Raises UserError for bad ones."""
    shapes = [read_model_shape(config) for config in configs]
    for shape, config in zip(shapes, configs, strict=True):
        if outside := [int(token) for token in tokens if not 0 <= token < shape.vocab_size]:
            raise UserError(f"token {outside[0]} is not in the vocabulary of {config} (0 to {shape.vocab_size - 1})")
    first, second = (logprobs(path, shape, tokens) for path, shape in zip((a, b), shapes, strict=True))
    means = float(first.mean()), float(second.mean())
    return Agreement(len(tokens), float(np.abs(first - second).max()), means)


def logprobs(path: Path, shape: ModelShape, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return float32 [n - 1]: the log-probability of each of `tokens` but the first."""
    if (path / METADATA).is_file():
        from a3po_megatron.actor.scoring import checkpoint_logprobs  # megatron: only when it is needed

        return checkpoint_logprobs(path, shape, tokens)
    return _transformers_logprobs(path, shape, tokens)


@torch.no_grad()
def _transformers_logprobs(path: Path, shape: ModelShape, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    HFFolder(path, shape)  # its errors are of one line
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor(tokens)[None]
    chosen = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.asarray(chosen.numpy(), np.float32)


def tokens_of(prompt: str | None, tokens: str | None, folder: Path) -> NDArray[np.int64]:
    """Return the tokens to compare on: given, or of a prompt, or else the same random ones each time. Raises UserError."""
    if tokens is not None:
        try:
            chosen = [int(token) for token in tokens.split(",")]
        except ValueError:
            raise UserError(
                f"--tokens {tokens}: expected whole numbers with commas between, for example 1,2,3"
            ) from None
    elif prompt is not None:
        chosen = ChatTokenizer(folder).encode_document(prompt).tolist()
    else:
        size = read_model_shape(folder).vocab_size
        chosen = np.random.default_rng(0).integers(0, size, NUM_RANDOM_TOKENS).tolist()
    if len(chosen) < 2:
        raise UserError(f"{len(chosen)} tokens to compare on: at least 2, the first one has no log-probability")
    return np.array(chosen, dtype=np.int64)
