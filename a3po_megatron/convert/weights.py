"""What every conversion is made of: weights under Hugging Face names, read one at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from a3po_megatron.actor.safetensors_writer import TensorType
from a3po_megatron.config.model_shape import ModelShape


class Watch(Protocol):
    """Goes around the steps of a conversion, to show how far it is."""

    def __call__[Step](self, steps: Sequence[Step]) -> Iterable[Step]:
        """Yield the steps."""


def unwatched[Step](steps: Sequence[Step]) -> Iterable[Step]:
    """Show nothing."""
    return steps


class Weights(Protocol):
    """A folder of weights: `HFFolder`, `MegatronFolder`."""

    shape: ModelShape

    def specs(self) -> dict[str, TensorType]:
        """Return the type and shape of each Hugging Face tensor, in model order."""

    def tensor(self, name: str) -> Tensor:
        """Return one whole tensor in host memory."""


class Cast:
    """The same weights in another type."""

    def __init__(self, weights: Weights, dtype: str) -> None:
        self.weights, self.dtype, self.shape = weights, dtype, weights.shape

    def specs(self) -> dict[str, TensorType]:
        """As of the weights, but for the type."""
        return {name: TensorType(self.dtype, spec.shape) for name, spec in self.weights.specs().items()}

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, rounded where the type is narrower."""
        return self.weights.tensor(name).to(getattr(torch, self.dtype))


@dataclass(frozen=True)
class Summary:
    """What a conversion wrote."""

    num_tensors: int  # of Hugging Face
    num_parameters: int
    num_bytes: int  # of the tensors
    largest_bytes: int  # of the largest tensor
    dtypes: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.num_tensors} tensors, {self.num_parameters / 1e6:.1f} M parameters, {' and '.join(self.dtypes)}, "
            f"{self.num_bytes / 1e6:.0f} MB"
        )


def summarise(weights: Weights) -> Summary:
    """Return the figures of weights."""
    specs = weights.specs().values()
    return Summary(
        num_tensors=len(specs),
        num_parameters=sum(torch.Size(spec.shape).numel() for spec in specs),
        num_bytes=sum(spec.nbytes for spec in specs),
        largest_bytes=max(spec.nbytes for spec in specs),
        dtypes=tuple(sorted({spec.dtype for spec in specs})),
    )


def stream(weights: Weights, watch: Watch) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) in model order."""
    for name in watch(list(weights.specs())):
        yield name, weights.tensor(name)
