"""The actor of one rank: model chunks, optimizer and schedule, and the things one can ask of them.

    train_step(sequences, loss) -> result      one optimizer step, in five verbs
    logprobs(sequences)                        forward only
    logprobs_by_step(steps)                    forward only, once for several steps to come
    export_weights()                           a stream of (Hugging Face name, whole tensor)

Every method is collective over all ranks, which all pass the same sequences.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from numpy.typing import NDArray
from torch import Tensor

from a3po_megatron.actor import device as devices
from a3po_megatron.actor import parallel, pipeline
from a3po_megatron.actor.hf_weights import Room, export_weights, load_weights, random_source
from a3po_megatron.actor.kernels import choose_kernels
from a3po_megatron.actor.logprobs import make_head, token_is_greedy, token_logprobs, token_output
from a3po_megatron.actor.model import DTYPES, build_chunks, transformer_config
from a3po_megatron.actor.nonfinite import NonFiniteError, find_culprit
from a3po_megatron.actor.optimizer import (
    build_optimizer,
    build_scheduler,
    clip_gradients,
    gradient_norm,
    wrap_chunks,
)
from a3po_megatron.actor.routing import by_sequence, recorded_routing
from a3po_megatron.actor.weights_folder import open_weights
from a3po_megatron.batching.balance import sequence_cost
from a3po_megatron.batching.packing import Microbatch, TokenSequence, make_microbatches
from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.config.schema import ModelConfig


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step was like; the same on every rank."""

    loss: float  # mean over the trainable tokens of the step, or over its sequences
    num_tokens: int  # trainable tokens of the step
    grad_norm: float  # before clipping
    lr: float
    totals: dict[str, float]  # of the loss: sums over the step, and maxima under names that end in `max`
    num_microbatches: int  # forward passes of each data-parallel rank


class Actor:
    """A Megatron model in training on one rank."""

    def __init__(
        self,
        shape: ModelShape,
        model: ModelConfig,
        actor: ActorConfig,
        optimizer: OptimizerConfig,
        seed: int,
        temperature: float = 1.0,
    ) -> None:
        """Build the model on this rank and fill it from `model`. Needs the default process group (`device.start`).

        `temperature`: that of the distribution whose log-probabilities are meant; logits are divided by it.
        """
        self.shape, self.settings, self.optimizer_settings = shape, actor, optimizer
        self.device: torch.device = devices.choose_device(actor)
        self.place = parallel.initialize(actor, seed)
        self.kernels = choose_kernels(self.device, DTYPES[actor.dtype])
        self.config = transformer_config(shape, actor, self.kernels)
        self.models: list[GPTModel] = build_chunks(self.config, shape, self.kernels, self.device)
        if model.init == "random":
            source = random_source(shape, model.init_seed, model.init_std)
        else:
            source = open_weights(model.path, shape).tensor
        load_weights(self.models, shape, self.place, source)
        self.chunks: list[DistributedDataParallel] = wrap_chunks(self.models, self.config, actor)
        self.optimizer: ChainedOptimizer = build_optimizer(self.chunks, optimizer, actor, DTYPES[actor.dtype])
        self.scheduler: OptimizerParamScheduler = build_scheduler(self.optimizer, optimizer)
        self.num_forward_passes = 0  # microbatches that this rank has run so far, with or without gradient
        self._head = make_head(actor, temperature)
        self._cost = sequence_cost(shape)

    def train_step(self, sequences: Sequence[TokenSequence], loss: pipeline.Loss) -> StepResult:
        """Take one optimizer step on `sequences`.

        Raises NonFiniteError, with nothing updated, when the loss or a gradient is not finite; it names the sample.
        """
        num_tokens = sum(int(sequence.trainable.sum()) for sequence in sequences)
        num_sequences = sum(bool(sequence.trainable.any()) for sequence in sequences)
        if num_tokens == 0:
            raise ValueError("the step has no trainable token: every sequence is masked")
        microbatches = self._microbatches(sequences)
        self._zero_gradients()
        totals = self._forward_backward(microbatches, loss)
        grad_norm = gradient_norm(self.optimizer)
        if not (math.isfinite(totals["loss"]) and math.isfinite(grad_norm)):
            found = f"the loss is {totals['loss']}, the gradient norm {grad_norm}"
            raise NonFiniteError(f"{found}; {self._name_culprit(sequences, loss)}")
        clip_gradients(self.optimizer, self.optimizer_settings.clip_grad, grad_norm)
        self._update()

        return StepResult(
            loss=totals.pop("loss") / (num_tokens if loss.counts == "tokens" else num_sequences),
            num_tokens=num_tokens,
            grad_norm=grad_norm,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            totals=totals,
            num_microbatches=len(microbatches),
        )

    def logprobs(self, sequences: Sequence[TokenSequence]) -> dict[int, NDArray[np.float32]]:
        """Return {index: float32 [n-1]}: log-probability of each token but the first, given those before it.

        On the last pipeline stage, for the sequences of this data-parallel rank, put together from its context-parallel
        ranks; empty on the other stages.
        """
        return self.logprobs_by_step([sequences])[0]

    def logprobs_by_step(self, steps: Sequence[Sequence[TokenSequence]]) -> list[dict[int, NDArray[np.float32]]]:
        """Return `logprobs` of the sequences of each step, all in one pass through the pipeline.

        The microbatches are those that `train_step` makes of the same sequences, so each sequence's log-probabilities
        are computed on the rank, and in the company, in which its loss will be.
        """
        return self._forward(steps, partial(token_logprobs, head=self._head))

    def is_greedy(self, sequences: Sequence[TokenSequence]) -> dict[int, NDArray[np.bool_]]:
        """Return {index: bool [n-1]}: whether each token but the first is the most probable one. Placed as `logprobs`."""
        return self._forward([sequences], partial(token_is_greedy, head=self._head))[0]

    def routing(self, sequences: Sequence[TokenSequence]) -> dict[int, NDArray[np.bool_]]:
        """Return {index: bool [n-1, layers, experts]}: which experts each token but the last is sent to.

        On every rank, for the layers of its pipeline stage and the sequences of its data-parallel rank.
        """
        with recorded_routing(self.models) as chosen:
            self.logprobs(sequences)
        return by_sequence(chosen, self._microbatches(sequences), self.settings.sequence_parallel)

    def export_weights(
        self, to_first_rank: bool = False, room: Room = lambda name: None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of the current weights in model order, on every rank.

        `to_first_rank`: whole on the first rank; the others iterate all the same. `room` may name where it receives one.
        """
        self.make_parameters_fresh()
        return export_weights(self.models, self.shape, self.place, to_first_rank=to_first_rank, room=room)

    def make_parameters_fresh(self) -> None:
        """Finish the gather of updated parameters, which overlapped gathering leaves to the next forward pass. Collective."""
        if self.settings.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def add_up(self, value: float) -> float:
        """Return the sum of `value` over the data-parallel ranks of the last pipeline stage, on every rank.

        Context-parallel ranks, which see the same sequences, are to pass the same value; it counts once.
        """
        return float(self.add_up_each(np.array([value], np.float64))[0])

    def add_up_each(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `add_up` of each of `values`."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.place.is_last_stage:
            dist.all_reduce(total, group=parallel.dp_group())
        dist.broadcast(total, group_src=self.place.pp_size - 1, group=parallel.pp_group())
        return np.asarray(total.cpu())

    def close(self) -> None:
        """Take megatron's process groups down, and let the model go with the last reference to this actor.

        A dispatcher of experts keeps tensors of the last pass. Their graph leads to DDP's hooks and so back to it: a cycle that
        Python's collector does not see.
        """
        for model in self.models:
            for module in model.modules():
                if (dispatcher := getattr(module, "token_dispatcher", None)) is not None:
                    vars(dispatcher).clear()
        parallel.destroy()

    def _microbatches(self, sequences: Sequence[TokenSequence]) -> list[Microbatch]:
        interleaved = self.settings.virtual_pipeline_parallel > 1
        return make_microbatches(
            sequences,
            dp_rank=self.place.dp_rank,
            dp_size=self.place.dp_size,
            max_tokens=self.settings.max_tokens_per_microbatch,
            packed=self.settings.packed,
            multiple_of=self.place.tp_size if self.settings.sequence_parallel else 1,
            count_multiple_of=self.place.pp_size if interleaved else 1,
            cp_rank=self.place.cp_rank,
            cp_size=self.place.cp_size,
            cost=self._cost,
        )

    def _forward(self, steps: Sequence[Sequence[TokenSequence]], processor: Any) -> list[dict[int, NDArray[Any]]]:
        microbatches = [self._microbatches(sequences) for sequences in steps]
        in_order = [microbatch for step in microbatches for microbatch in step]
        self.num_forward_passes += len(in_order)
        outputs = iter(pipeline.forward_only(self.chunks, in_order, processor, self.shape.vocab_size))
        values: list[dict[int, NDArray[Any]]] = [{} for _ in steps]
        if self.place.is_last_stage:
            for found, step in zip(values, microbatches, strict=True):
                for microbatch in step:
                    parts = [part.cpu().numpy() for part in parallel.gather_over_cp(next(outputs))]
                    found.update(microbatch.by_sequence(microbatch.join(parts)))
        return values

    def _zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _forward_backward(self, microbatches: Sequence[Microbatch], loss: pipeline.Loss) -> dict[str, float]:
        """Accumulate the gradients; return the loss and its metrics, summed over the step."""
        self.num_forward_passes += len(microbatches)
        processor = partial(token_output, head=self._head, with_entropy=loss.needs_entropy)
        metrics = pipeline.forward_backward(self.chunks, microbatches, processor, self.shape.vocab_size, loss)
        return self._reduce(metrics, ["loss", *loss.metric_names])

    def _name_culprit(self, sequences: Sequence[TokenSequence], loss: pipeline.Loss) -> str:
        """Say which sample is not finite, and which rank computes its loss. Spoils the gradients."""

        def is_finite(some: Sequence[TokenSequence]) -> bool:
            self._zero_gradients()
            total = self._forward_backward(self._microbatches(some), loss)["loss"]
            return math.isfinite(total) and math.isfinite(gradient_norm(self.optimizer))

        culprit = find_culprit(sequences, is_finite)
        if culprit is None:
            return "no sample is so alone"
        here = any(span.sequence == culprit for m in self._microbatches(sequences) for span in m.spans)
        rank = torch.tensor(dist.get_rank() if here and self.place.is_last_stage else -1, device=self.device)
        dist.all_reduce(rank, op=dist.ReduceOp.MAX)
        return f"so is {sequences[culprit].name or f'sequence {culprit}'} alone, whose loss is computed on rank {int(rank)}"

    def _update(self) -> None:
        self.scheduler.step(1)  # sets the rate of the step that follows
        self.optimizer.step_with_ready_grads()

    def _reduce(self, metrics: list[pipeline.Metrics], names: Sequence[str]) -> dict[str, float]:
        """Combine the last stage's metrics over microbatches, data- and context-parallel ranks, and tell every stage."""
        is_max = torch.tensor([name.endswith("max") for name in names], device=self.device)
        totals = torch.where(is_max, -torch.inf, 0.0).double()
        for microbatch in metrics:
            values = torch.stack([microbatch[name].double() for name in names])
            totals = torch.where(is_max, torch.maximum(totals, values), totals + values)
        if self.place.is_last_stage:
            sums, maxima = totals.clone(), totals
            dist.all_reduce(sums, group=parallel.dp_cp_group())
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel.dp_cp_group())
            totals = torch.where(is_max, maxima, sums)
        dist.broadcast(totals, group_src=self.place.pp_size - 1, group=parallel.pp_group())
        return dict(zip(names, totals.tolist(), strict=True))
