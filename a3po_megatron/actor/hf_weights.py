"""Weights between Hugging Face names and this rank's model chunks: load, draw at random, export as a stream.

Knows ranks and chunks; files are in hf_folder.py, the table of names in hf_mapping.py, the surgery in hf_layout.py.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from a3po_megatron.actor import hf_layout, parallel
from a3po_megatron.actor.hf_mapping import (
    EMBEDDING,
    FINAL_NORM,
    Rule,
    hf_shapes,
    layer_rule,
    layer_rules,
    model_name,
    output_rule,
)
from a3po_megatron.actor.model import stage_of_each_layer
from a3po_megatron.config.model_shape import ModelShape

Source = Callable[[str], Tensor]  # Hugging Face name -> whole tensor
Room = Callable[[str], Tensor | None]  # Hugging Face name -> where the whole tensor may be received


def random_source(shape: ModelShape, seed: int, std: float) -> Source:
    """Return a source of freshly drawn weights: norms 1, biases 0, else N(0, std). The same on every rank and layout."""
    shapes = hf_shapes(shape)

    def draw(name: str) -> Tensor:
        if len(shapes[name]) == 1:
            return torch.zeros(shapes[name]) if name.endswith(".bias") else torch.ones(shapes[name])
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        return torch.randn(shapes[name], generator=generator) * std

    return draw


@torch.no_grad()
def load_weights(chunks: Sequence[GPTModel], shape: ModelShape, place: parallel.Place, source: Source) -> None:
    """Fill every parameter of this rank's chunks from `source`, one tensor at a time, cast to the parameter's dtype."""
    for chunk in chunks:
        for rule, parameter in _ruled_parameters(chunk, shape, place):
            size, rank = (place.tp_size, place.tp_rank) if rule.expert is None else (place.etp_size, place.etp_rank)
            shard = hf_layout.shard(rule.split, [source(name) for name in rule.hf], shape, size, rank)
            assert shard.shape == parameter.shape, f"{rule.megatron}: shard {shard.shape}, parameter {parameter.shape}"
            parameter.copy_(shard)


@torch.no_grad()
def export_weights(
    chunks: Sequence[GPTModel],
    shape: ModelShape,
    place: parallel.Place,
    value: Callable[[torch.nn.Parameter], Tensor] = lambda parameter: parameter.data,
    to_first_rank: bool = False,
    room: Room = lambda name: None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor) in model order, on every rank of the tensor, expert and pipeline groups.

    Collective: all of these ranks iterate to the end. Memory is bounded by one parameter (gathered) and its Hugging Face
    parts. `to_first_rank`: only the first rank of the pipeline and tensor groups gets them; the others send what they hold and
    yield what may be empty. `room` may name where the first rank receives a tensor. `value` picks what is
    exported of a parameter, for example its gradient. The caller makes parameters fresh first (`Actor.export_weights` does,
    under overlapped parameter gathering).
    """
    held = {rule.hf: parameter for chunk in chunks for rule, parameter in _ruled_parameters(chunk, shape, place)}
    shapes = hf_shapes(shape)
    like = value(next(iter(held.values())))
    for rule, stage in _model_order(shape, stage_of_each_layer(chunks[0].config)):
        owner, whole = stage % place.pp_size, None
        if place.pp_rank == owner and rule.hf in held:  # of an expert it is held by one expert-parallel rank
            gather = _gather_to_first if to_first_rank else _gather
            whole = gather(value(held[rule.hf]), rule, shape, place, room)
        for position, name in enumerate(rule.hf):
            tensor = whole[position] if whole else None
            if rule.expert is not None and place.pp_rank == owner and place.ep_size > 1:
                expert_owner = rule.expert // _experts_a_rank(shape, place)
                tensor = _from_owner(tensor, shapes[name], like, expert_owner, parallel.ep_group())
            if not to_first_rank:
                tensor = _from_owner(tensor, shapes[name], like, owner, parallel.pp_group())
            elif place.tp_rank == 0 and (rule.expert is None or place.etp_rank == 0):
                tensor = _to_first(tensor, shapes[name], like, owner, parallel.pp_group(), room(name))
            yield name, like.new_empty(0) if tensor is None else tensor


def _model_order(shape: ModelShape, stages: Sequence[int]) -> Iterator[tuple[Rule, int]]:
    """Yield each rule of the Hugging Face checkpoint with the (virtual) stage that holds it, in model order.

    `stages`: that of each layer.
    """
    yield EMBEDDING, stages[0]
    for layer, stage in enumerate(stages):
        for rule in layer_rules(shape):
            yield layer_rule(rule, layer), stage
    yield FINAL_NORM, stages[-1]
    if not shape.tie_word_embeddings:
        yield output_rule(shape), stages[-1]


def _ruled_parameters(
    chunk: GPTModel, shape: ModelShape, place: parallel.Place
) -> list[tuple[Rule, torch.nn.Parameter]]:
    """Return every parameter of a chunk with its rule. A parameter without a rule, or the reverse, is an error."""
    first_expert = place.ep_rank * _experts_a_rank(shape, place)
    parameters = {model_name(name, first_expert): parameter for name, parameter in chunk.named_parameters()}
    rules: dict[str, Rule] = {}
    if chunk.pre_process:
        rules[EMBEDDING.megatron] = EMBEDDING
    for index, layer in enumerate(chunk.decoder.layers):
        for rule in layer_rules(shape):
            if rule.expert is None or 0 <= rule.expert - first_expert < _experts_a_rank(shape, place):
                rules[f"decoder.layers.{index}.{rule.megatron}"] = layer_rule(rule, layer.layer_number - 1)
    if chunk.post_process:
        rules[FINAL_NORM.megatron] = FINAL_NORM
        if not (chunk.pre_process and shape.tie_word_embeddings):
            rules[output_rule(shape).megatron] = output_rule(shape)
    unmapped, missing = parameters.keys() - rules.keys(), rules.keys() - parameters.keys()
    if unmapped or missing:
        raise ValueError(f"the mapping of {shape.family} does not fit: unmapped {unmapped}, missing {missing}")
    return [(rules[name], parameter) for name, parameter in parameters.items()]


def _experts_a_rank(shape: ModelShape, place: parallel.Place) -> int:
    return shape.num_experts // place.ep_size


def _gather(local: Tensor, rule: Rule, shape: ModelShape, place: parallel.Place, _: Room) -> list[Tensor]:
    """Return the Hugging Face tensors of a parameter on all ranks that hold a shard."""
    size, group = _shards(rule, place)
    shards = [local]
    if size > 1:
        shards = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(shards, local.contiguous(), group=group)
    return hf_layout.join(rule.split, shards, shape)


def _gather_to_first(local: Tensor, rule: Rule, shape: ModelShape, place: parallel.Place, room: Room) -> list[Tensor]:
    """Return the Hugging Face tensors of a parameter on the first rank that holds a shard, none on the others."""
    size, group = _shards(rule, place)
    if size == 1:
        return hf_layout.join(rule.split, [local], shape)
    if group.rank() != 0:
        dist.send(local.contiguous(), group=group, group_dst=0)
        return []
    whole = room(rule.hf[0]) if rule.split == "vocab" else None
    if whole is None or whole.numel() != size * local.numel():  # a padded vocabulary does not fit
        whole = None
    shards = (local.new_empty(size * local.numel()) if whole is None else whole).view(size, *local.shape)
    arriving = [dist.irecv(shards[rank], group=group, group_src=rank) for rank in range(1, size)]
    shards[0].copy_(local)
    for receive in arriving:
        assert receive is not None
        receive.wait()
    return [whole] if whole is not None else hf_layout.join(rule.split, list(shards), shape)


def _shards(rule: Rule, place: parallel.Place) -> tuple[int, dist.ProcessGroup]:
    """Return in how many shards a parameter lies, and the group of the ranks that hold them."""
    size, group = (
        (place.tp_size, parallel.tp_group()) if rule.expert is None else (place.etp_size, parallel.etp_group())
    )
    return (1 if rule.split == "replicated" else size), group


def _from_owner(
    whole: Tensor | None, shape: tuple[int, ...], like: Tensor, owner: int, group: dist.ProcessGroup
) -> Tensor:
    """Broadcast one tensor, of the dtype and device of `like`, from the rank of `group` that holds it."""
    if group.size() == 1:
        assert whole is not None
        return whole
    tensor = torch.empty(shape, dtype=like.dtype, device=like.device) if whole is None else whole.contiguous()
    dist.broadcast(tensor, group_src=owner, group=group)
    return tensor


def _to_first(
    whole: Tensor | None,
    shape: tuple[int, ...],
    like: Tensor,
    owner: int,
    group: dist.ProcessGroup,
    room: Tensor | None,
) -> Tensor | None:
    """Send one tensor from the rank of `group` that holds it to the first one; nothing travels that is there already."""
    rank = group.rank()
    if owner != 0 and rank == owner:
        assert whole is not None
        dist.send(whole.contiguous(), group=group, group_dst=0)
    elif owner != 0 and rank == 0:
        whole = room
        if whole is None:
            whole = torch.empty(shape, dtype=like.dtype, device=like.device)
        dist.recv(whole, group=group, group_src=owner)
    return whole
