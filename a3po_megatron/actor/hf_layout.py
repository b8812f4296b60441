"""Tensor surgery between a whole Hugging Face tensor and the shards of tensor-parallel ranks. Pure functions.

Megatron fuses query, key and value group by group (q q k v | q q k v | ...), and gate with up on each rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from a3po_megatron.actor.hf_mapping import Split
from a3po_megatron.config.model_shape import ModelShape


def shard(split: Split, whole: Sequence[Tensor], shape: ModelShape, tp_size: int, tp_rank: int) -> Tensor:
    """Return the megatron parameter of rank `tp_rank` made of the Hugging Face tensors `whole`."""
    match split:
        case "replicated":
            return whole[0]
        case "columns":
            return whole[0].chunk(tp_size, 1)[tp_rank]
        case "vocab":
            missing = shape.padded_vocab_size(tp_size) - whole[0].shape[0]
            padded = torch.nn.functional.pad(whole[0], (0, 0, 0, missing))
            return padded.chunk(tp_size, 0)[tp_rank]
        case "gate_up":
            return torch.cat([tensor.chunk(tp_size, 0)[tp_rank] for tensor in whole])
        case "qkv":
            groups = [
                tensor.unflatten(0, (shape.num_key_value_heads, -1)) for tensor in whole
            ]  # [groups, rows, hidden]
            return torch.cat(groups, dim=1).chunk(tp_size, 0)[tp_rank].flatten(0, 1)


def join(split: Split, shards: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    """Return the Hugging Face tensors made of every rank's shard, in rank order: the inverse of `shard`."""
    match split:
        case "replicated":
            return [shards[0]]
        case "columns":
            return [torch.cat(list(shards), dim=1)]
        case "vocab":
            return [torch.cat(list(shards))[: shape.vocab_size]]
        case "gate_up":
            gates, ups = zip(*(tensor.chunk(2, 0) for tensor in shards), strict=True)
            return [torch.cat(gates), torch.cat(ups)]
        case "qkv":
            groups = torch.cat(list(shards)).unflatten(0, (shape.num_key_value_heads, -1))
            rows = [shape.query_heads_per_group * shape.head_dim, shape.head_dim, shape.head_dim]
            return [tensor.flatten(0, 1) for tensor in groups.split(rows, dim=1)]
