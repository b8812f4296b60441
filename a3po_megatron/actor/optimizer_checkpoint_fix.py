"""Mends three faults in the checkpoints of megatron-core 0.19.2's distributed optimizer.

Delete this module when `tests/distributed/test_checkpoint.py` passes without it. It is needed as long as, in
megatron/core/optimizer/distrib_optimizer.py,

1. `_set_main_param_and_optimizer_states` looks up `tensors["step"]` (torch's AdamW, used without Transformer Engine and Apex,
   keeps `step` as a tensor in its state), which the checkpoint does not hold there: KeyError on load;
2. `load_state_dict` puts one `step` tensor into the state of every parameter. AdamW advances `step` in place once per
   parameter, so the shared tensor runs ahead and training diverges silently after a resume;
3. `sharded_param_state_fully_reshardable` joins the gradient buckets without their padding but cuts parameters out of them at
   offsets that count it: with several buckets, one of them padded, parameters are saved shifted. A tied output layer has a
   bucket of its own, and so has every bucket of overlapped reduction.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from a3po_megatron.actor.megatron_version import require_megatron_version

_installed: list[bool] = []


def install() -> None:
    """Wrap the three methods. Idempotent."""
    if _installed:
        return
    require_megatron_version(__name__)
    _installed.append(True)
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict
    sharded_state = DistributedOptimizer.sharded_param_state_fully_reshardable

    def set_states_without_step(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {"step": None, **tensors})  # None: left as load_state_dict restored it

    def load_state_dict_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    def sharded_state_at_true_offsets(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _offsets_without_padding(self.buffers):
            return sharded_state(self, *args, **kwargs)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_without_step
    DistributedOptimizer.load_state_dict = load_state_dict_with_own_steps
    DistributedOptimizer.sharded_param_state_fully_reshardable = sharded_state_at_true_offsets


@contextmanager
def _offsets_without_padding(buffers: list[Any]) -> Iterator[None]:
    """For a while, let `param_index_map` count positions in the buckets joined without their padding."""
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        shift, joined = [], 0  # of each bucket: its place in the buffer less its place when joined
        for bucket in buffer.buckets:
            shift.append(bucket.offset - joined)
            joined += bucket.numel_unpadded
        buffer.param_index_map = {
            param: (start - shift[bucket], end - shift[bucket], bucket)
            for param, (start, end, bucket) in buffer.param_index_map.items()
        }
    try:
        yield
    finally:
        for buffer, index_map in zip(buffers, padded, strict=True):
            buffer.param_index_map = index_map
