"""Log-probabilities of given tokens under a megatron checkpoint that megatron itself loads: one CPU rank, float32, no optimizer."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from numpy.typing import NDArray
from torch.distributed.checkpoint.api import CheckpointException

from a3po_megatron.actor import device as devices
from a3po_megatron.actor import parallel, pipeline
from a3po_megatron.actor.checkpoint import one_line, root_cause
from a3po_megatron.actor.checkpoint_reading import restricted_reading
from a3po_megatron.actor.kernels import choose_kernels
from a3po_megatron.actor.logprobs import make_head, token_logprobs
from a3po_megatron.actor.megatron_keys import what_else
from a3po_megatron.actor.model import build_chunks, transformer_config
from a3po_megatron.batching.packing import TokenSequence, make_microbatches
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.errors import UserError

# On a CPU everywhere: what it is compared with is computed there, and a GPU sums in another order.
SETTINGS = ActorConfig(device="cpu")


def checkpoint_logprobs(folder: Path, shape: ModelShape, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return float32 [n - 1]: the log-probability of each of `tokens` but the first. Needs the process group of SETTINGS."""
    settings = SETTINGS
    device = devices.choose_device(settings)
    parallel.initialize(settings, seed=0)
    try:
        kernels = choose_kernels(device, torch.float32)
        chunks = build_chunks(transformer_config(shape, settings, kernels), shape, kernels, device)
        load_model(chunks[0].eval(), folder)
        sequence = TokenSequence(tokens, np.zeros(len(tokens), np.bool_))
        microbatches = make_microbatches([sequence], dp_rank=0, dp_size=1, max_tokens=len(tokens), packed=False)
        processor = partial(token_logprobs, head=make_head(settings, temperature=1.0))
        (output,) = pipeline.forward_only(chunks, microbatches, processor, shape.vocab_size)
        return np.asarray(microbatches[0].by_sequence(output.cpu().numpy())[0], np.float32)
    finally:
        parallel.destroy()


def load_model(model: GPTModel, folder: Path) -> None:
    """Fill a whole model from a checkpoint by megatron's own reading. Raises UserError where it does not fit or is damaged."""
    wanted = {key: entry for key, entry in model.sharded_state_dict().items() if not what_else(key)}
    try:
        with restricted_reading(folder):
            state, left, absent = dist_checkpointing.load(
                {"model": wanted}, str(folder), strict=StrictHandling.RETURN_ALL
            )
    except (Exception, CheckpointException) as error:  # megatron and torch raise whatever a damaged file leads to
        cause = root_cause(error)
        raise UserError(str(cause) if isinstance(cause, UserError) else f"{folder}: {one_line(cause)}") from error
    left = {key for key in left if not what_else(key)}
    if left or absent:
        names = [f"{what} {min(some)}" for what, some in (("it lacks", absent), ("it also holds", left)) if some]
        raise UserError(f"{folder}: the checkpoint does not fit the model: {' and '.join(names)}")
    model.load_state_dict(state["model"], strict=False)
