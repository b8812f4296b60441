"""Where each parameter lies in a megatron distributed checkpoint, whatever the layout that wrote it. Torch-free.

A checkpoint holds whole tensors, in chunks, under the names of a model without any parallelism. Layers and experts are stacked:
`decoder.layers.mlp.linear_fc2.weight` is [layers, hidden, intermediate], an expert's weight [layers, experts, rows, columns].
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from a3po_megatron.actor.hf_mapping import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    Rule,
    hf_shapes,
    layer_rule,
    layer_rules,
)
from a3po_megatron.config.model_shape import ModelShape

WRAPPER = "module."  # before every name in a NeMo 2 checkpoint
COMMON_KEY = "common_state/shard_0_1"  # what is the same on all ranks
# Keys that hold no parameter, and what they hold.
NO_PARAMETER = {
    re.compile(r"(chained_\d+\.)?optimizer\."): "the optimizer's state",
    re.compile(r".*\._extra_state(/|$)"): "Transformer Engine's scales of 8-bit kernels",
    re.compile(r"(common_state|rng_state|rerun_state_machine_state)(/|$)"): "the state of the program that wrote it",
}


@dataclass(frozen=True)
class Entry:
    """One parameter of the model, as a slice of a checkpoint's tensor."""

    key: str
    stack: tuple[int, ...]  # leading sizes of the tensor: layers, or layers and experts
    index: tuple[int, ...]  # of the slice, in those sizes
    shape: tuple[int, ...]  # of the slice; a vocabulary without padding
    rule: Rule  # with Hugging Face names of the whole model


def entries(shape: ModelShape) -> Iterator[Entry]:
    """Yield every parameter in the order of the Hugging Face checkpoint."""
    shapes = hf_shapes(shape)

    def entry(key: str, rule: Rule, stack: tuple[int, ...] = (), index: tuple[int, ...] = ()) -> Entry:
        parts = [shapes[name] for name in rule.hf]
        return Entry(key, stack, index, (sum(part[0] for part in parts), *parts[0][1:]), rule)

    yield entry(EMBEDDING.megatron, EMBEDDING)
    for layer in range(shape.num_layers):
        for rule in layer_rules(shape):
            key = f"decoder.layers.{rule.megatron}"
            named = layer_rule(rule, layer)
            if rule.expert is None:
                yield entry(key, named, (shape.num_layers,), (layer,))
            else:
                key = key.replace(f"experts.{rule.expert}.", "experts.experts.")
                yield entry(key, named, (shape.num_layers, shape.num_experts), (layer, rule.expert))
    yield entry(FINAL_NORM.megatron, FINAL_NORM)
    if not shape.tie_word_embeddings:
        yield entry(OUTPUT.megatron, OUTPUT)


def what_else(key: str) -> str | None:
    """Return what a key that names no parameter holds; None for a key that may be a parameter's."""
    return next((what for pattern, what in NO_PARAMETER.items() if pattern.match(key)), None)
