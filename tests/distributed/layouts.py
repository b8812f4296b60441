"""Layouts, models and the oracle of the distributed tests.

The oracle is transformers' model with plain autograd and torch's AdamW in float32, on whole sequences, one at a time: nothing
of ours and nothing of megatron's is in it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from a3po_megatron.actor.actor import Actor
from a3po_megatron.batching.packing import TokenSequence
from a3po_megatron.config.actor import ActorConfig, OptimizerConfig
from a3po_megatron.config.check import check_actor
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.config.schema import ModelConfig

# eps is large on purpose: Adam divides by sqrt(v) + eps, and where a gradient is of the size of rounding errors a small eps
# would turn a difference of 1e-9 into a whole step of the learning rate.
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
# With these numbers the first frequency is kept, the second interpolated and the others divided.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, Any] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS),
    "qwen3_moe_unnormalised": (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS | {"norm_topk_prob": False}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama3": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
}
FUSED_EXPERTS = {
    "experts.gate_up_proj": ("experts.{}.gate_proj", "experts.{}.up_proj"),
    "experts.down_proj": ("experts.{}.down_proj",),
}
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, beta2=0.99, clip_grad=0.5)


def test_device() -> ActorConfig:
    """Settings that only choose the device: GPUs where every rank has one, else CPUs. A job on GPUs does not fall back."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))  # of this node
    has_gpus = torch.cuda.device_count() >= ranks
    if "A3PO_TEST_ON_GPUS" in os.environ and not has_gpus:
        raise RuntimeError(f"torch finds {torch.cuda.device_count()} GPUs for the {ranks} ranks of this node")
    return ActorConfig(device="cuda" if has_gpus else "cpu")


test_device.__test__ = False  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Layout:
    """A layout by the numbers that differ from 1; data parallelism takes the ranks that are left."""

    tp: int = 1
    pp: int = 1
    sp: bool = False
    vpp: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    cp: int = 1
    ep: int = 1
    etp: int = 1

    def __str__(self) -> str:
        parts = [f"TP{self.tp}" if self.tp > 1 else "", f"PP{self.pp}" if self.pp > 1 else ""]
        parts += [f"VPP{self.vpp}" if self.vpp > 1 else "", "SP" if self.sp else ""]
        parts += [f"{n}{size}" if size > 1 else "" for n, size in (("CP", self.cp), ("EP", self.ep), ("ETP", self.etp))]
        parts += [name if value is True else f"{name}={value}" for name, value in self.options.items()]
        return "+".join(part for part in parts if part) or "TP1"

    def config(self, **changes: Any) -> ActorConfig:
        """Return the actor's settings on the ranks that there are."""
        settings = ActorConfig(
            device=test_device().device,
            tensor_parallel=self.tp,
            pipeline_parallel=self.pp,
            virtual_pipeline_parallel=self.vpp,
            context_parallel=self.cp,
            data_parallel=dist.get_world_size() // (self.tp * self.pp * self.cp),
            expert_parallel=self.ep,
            expert_tensor_parallel=self.etp,
            sequence_parallel=self.sp,
            **self.options,
        )
        return replace(settings, **changes)


@dataclass(frozen=True)
class Model:
    """A tiny random model of a family. A vocabulary of 131 does not divide by 2 or 4, so it is padded."""

    family: str = "qwen3"
    tied: bool = False
    layers: int = 4
    vocab: int = 131

    def __str__(self) -> str:
        sizes = f"{'' if self.layers == 4 else f'-{self.layers}layers'}{'' if self.vocab == 131 else f'-{self.vocab}tokens'}"
        return f"{self.family}{'-tied' if self.tied else ''}{sizes}"

    def build(self) -> PreTrainedModel:
        """Return the model, float32, the same on every rank."""
        config, state = _state_of(self)
        model = FAMILIES[self.family][1](config).float()
        model.load_state_dict(state)
        return model.train()


@cache
def _state_of(tiny: Model) -> tuple[Any, Any]:
    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "vocab_size": tiny.vocab,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tiny.tied,
        "initializer_range": 0.1,
    }
    config_class, model_class, more_sizes = FAMILIES[tiny.family]
    config = config_class(**sizes, **more_sizes)
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros would hide one that is left out
                parameter.add_(0.2 * torch.randn_like(parameter))
    return config, model.state_dict()


def hf_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `tensors`, named as in transformers' modules, under the names of the checkpoint: transformers 5 fuses experts."""
    named = {}
    for name, tensor in tensors.items():
        for fused, parts in FUSED_EXPERTS.items():
            if name.endswith(fused):
                for expert, of_expert in enumerate(tensor):
                    for part, values in zip(parts, of_expert.chunk(len(parts)), strict=True):
                        named[f"{name.removesuffix(fused)}{part.format(expert)}.weight"] = values
                break
        else:
            named[name] = tensor
    return named


def save_model(model: PreTrainedModel, folder: Path) -> Path:
    """Write the model as a Hugging Face folder, once for all ranks."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return folder


def build_actor(folder: Path, config: ActorConfig, optimizer: OptimizerConfig = OPTIMIZER, **model: Any) -> Actor:
    """Return an actor of the model in `folder`, its settings checked as a recipe would."""
    shape = read_model_shape(folder)
    check_actor(config, shape)
    return Actor(shape, ModelConfig(path=str(folder), **model), config, optimizer, seed=0)


def random_sequences(seed: int = 0, lengths: tuple[int, ...] = (5, 9, 2, 12, 4, 7, 7, 6, 3)) -> list[TokenSequence]:
    """Return sequences of unequal lengths; the first part of each is a prompt and not trainable."""
    rng = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        trainable = np.arange(length) >= rng.integers(1, length)
        sequences.append(TokenSequence(rng.integers(0, 131, length), trainable))
    return sequences


def oracle_logprobs(model: PreTrainedModel, sequence: TokenSequence) -> torch.Tensor:
    """Return [n-1] log-probabilities with gradient, from transformers."""
    tokens = torch.tensor(sequence.tokens)[None]
    logprobs = model(input_ids=tokens).logits.float().log_softmax(-1)
    return logprobs[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]


class OracleTrainer:
    """The same training in plain autograd: token-mean negative log-likelihood, clipping, torch's AdamW."""

    def __init__(self, model: PreTrainedModel, optimizer: OptimizerConfig = OPTIMIZER) -> None:
        self.model, self.clip_grad = model, optimizer.clip_grad
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=0.0,
        )

    def gradients(self, sequences: list[TokenSequence]) -> tuple[float, dict[str, torch.Tensor]]:
        """Return the loss and the gradient of each parameter, before clipping."""
        self.optimizer.zero_grad()
        count = sum(int(sequence.trainable.sum()) for sequence in sequences)
        total = torch.zeros(())
        for sequence in sequences:
            total = total - oracle_logprobs(self.model, sequence)[torch.tensor(sequence.trainable[1:])].sum() / count
        total.backward()
        return total.item(), {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def step(self) -> float:
        """Clip and update; return the gradient norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad).item()
        self.optimizer.step()
        return norm
