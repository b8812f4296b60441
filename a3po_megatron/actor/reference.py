"""Weights that are kept in host memory and take the model's place for a forward pass: those of the reference policy.

No second model is on the device: parameter by parameter the two exchange places, and after the pass they do so again, bit for
bit. Host memory holds one copy of this rank's parameters.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from a3po_megatron.actor.actor import Actor


class ReferenceWeights:
    """The weights that the actor has when this is made."""

    def __init__(self, actor: Actor) -> None:
        actor.make_parameters_fresh()
        self._actor = actor
        self._held = [parameter.detach().to("cpu", copy=True) for parameter in _parameters(actor)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have these weights until the block ends. Collective; no optimizer step may be taken inside."""
        self._actor.make_parameters_fresh()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, held in zip(_parameters(self._actor), self._held, strict=True):
            current = parameter.detach().to("cpu", copy=True)
            parameter.copy_(held)
            held.copy_(current)


def _parameters(actor: Actor) -> Sequence[torch.nn.Parameter]:
    return [parameter for model in actor.models for parameter in model.parameters()]
