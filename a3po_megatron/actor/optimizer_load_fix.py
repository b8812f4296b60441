"""Mends two faults in loading megatron-core 0.19.2's distributed optimizer over torch's AdamW (no Transformer Engine, no Apex).

Delete this module when `tests/distributed/test_checkpoint.py` passes without it: it is needed as long as, in
megatron/core/optimizer/distrib_optimizer.py,

1. `_set_main_param_and_optimizer_states` looks up `tensors["step"]` (torch's AdamW keeps `step` as a tensor in its state),
   which the checkpoint does not hold there: KeyError on load;
2. `load_state_dict` puts one `step` tensor into the state of every parameter. AdamW advances `step` in place once per
   parameter, so the shared tensor runs ahead and training diverges silently after a resume.
"""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_installed: list[bool] = []


def install() -> None:
    """Wrap the two methods. Idempotent."""
    if _installed:
        return
    _installed.append(True)
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    def set_states_without_step(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {"step": None, **tensors})  # None: left as load_state_dict restored it

    def load_state_dict_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_without_step
    DistributedOptimizer.load_state_dict = load_state_dict_with_own_steps
