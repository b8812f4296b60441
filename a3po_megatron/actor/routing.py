"""Which experts each token is sent to, and how far two passes over the same tokens differ in it.

Trainer and engine round differently, so near a tie they choose other experts; the share of such choices is the routing
mismatch.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray
from torch import Tensor

from a3po_megatron.actor import parallel
from a3po_megatron.batching.packing import Microbatch

Routing = Mapping[int, NDArray[np.bool_]]  # sequence index -> [n - 1, layers, experts]: whether the token goes there


def routing_mismatch(routing: Routing, reference: Routing) -> float:
    """Return the share, 0 to 1, of the (token, layer, expert) choices of `reference` that `routing` did not make."""
    if routing.keys() != reference.keys():
        raise ValueError(f"sequences {sorted(routing)} are compared with sequences {sorted(reference)}")
    missed = sum(int((reference[index] & ~routing[index]).sum()) for index in reference)
    return missed / sum(int(chosen.sum()) for chosen in reference.values())


@contextmanager
def recorded_routing(models: Sequence[torch.nn.Module]) -> Iterator[dict[int, list[Tensor]]]:
    """Collect, while open, layer number -> what its router chose in each forward pass, bool [tokens, experts]."""
    chosen: dict[int, list[Tensor]] = defaultdict(list)

    def record(router: Any, inputs: Any, outputs: tuple[Tensor, Tensor]) -> None:
        chosen[router.layer_number].append(outputs[1].detach())

    routers = [module for model in models for module in model.modules() if isinstance(module, TopKRouter)]
    handles = [router.register_forward_hook(record) for router in routers]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def by_sequence(
    chosen: Mapping[int, Sequence[Tensor]], microbatches: Sequence[Microbatch], sequence_parallel: bool
) -> dict[int, NDArray[np.bool_]]:
    """Put what was recorded over `microbatches` together from the tensor- and context-parallel ranks. Collective.

    Returns {sequence index: bool [n - 1, layers of this stage, experts]} of each token but the last.
    """
    found: dict[int, NDArray[np.bool_]] = {}
    for number, microbatch in enumerate(microbatches):
        rows = microbatch.tokens.shape[0]
        layers = [_whole(chosen[layer][number], rows, sequence_parallel) for layer in sorted(chosen)]
        parts = parallel.gather_over_cp(torch.stack(layers, dim=2))  # [b, s/cp, layers, experts] each
        joined = microbatch.join([part.cpu().numpy() for part in parts])
        found.update({index: values.astype(np.bool_) for index, values in microbatch.by_sequence(joined).items()})
    return found


def _whole(local: Tensor, rows: int, sequence_parallel: bool) -> Tensor:
    """Return uint8 [b, s, experts] of a router's [s * b, experts], whose tokens sequence parallelism splits over ranks."""
    local = local.to(torch.uint8).contiguous()  # a type that every backend gathers
    shards = [local]
    if sequence_parallel:
        shards = [torch.empty_like(local) for _ in range(parallel.tp_group().size())]
        dist.all_gather(shards, local, group=parallel.tp_group())
    return torch.cat(shards).unflatten(0, (-1, rows)).transpose(0, 1)
