"""The actor's whole state on disk: parameters, optimizer, learning rate schedule, random state; loadable at another layout.

A checkpoint is a folder `step_NNNNNN` of megatron's dist_checkpointing format. It is written under a temporary name; its
marker `complete.json`, which lists every file with its size, is written last, and the folder is renamed after that. Without
a fitting marker a folder is not a checkpoint.
"""

import json
import pickle
import queue
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from a3po_megatron.actor import parallel
from a3po_megatron.actor.actor import Actor
from a3po_megatron.checkpoint_folder import MARKER, check_complete, step_folder
from a3po_megatron.config.schema import OptimizerConfig
from a3po_megatron.errors import UserError

OBJECTIVE = "objective.json"


def save_checkpoint(actor: Actor, root: Path, step: int, objective: Mapping[str, float] | None = None) -> Path:
    """Write the actor's state after `step` optimizer steps below `root`, and return the folder. Collective.

    `objective`: what the objective remembers from batch to batch (`BatchStep.state`). The actor must have taken a step:
    before that its optimizer has no state to save.
    """
    assert step > 0, "a checkpoint is written after a step"
    final = step_folder(root, step)
    temporary = final.with_name(final.name + ".incomplete")
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    actor.make_parameters_fresh()
    # The synchronous save collects its results within this process; upstream's default queue would start a manager process
    # for it on every rank (several seconds, and left over when a rank is killed).
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_state(actor, is_loading=False, step=step), str(temporary))
    if dist.get_rank() == 0:
        (temporary / OBJECTIVE).write_text(json.dumps(objective or {}))
        files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        (temporary / MARKER).write_text(json.dumps({"step": step, "files": files}, indent=2))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    dist.barrier()
    return final


def read_objective(folder: Path) -> dict[str, float]:
    """Return the `objective` of a checkpoint, for `BatchStep.restore`."""
    state: dict[str, float] = json.loads((folder / OBJECTIVE).read_text())
    return state


def load_checkpoint(actor: Actor, folder: Path) -> int:
    """Fill the actor from `folder`, written at this or another layout, and return the step it was written after. Collective.

    Optimizer settings (learning rate, betas, decay) are today's, not the checkpoint's. Raises UserError when the folder is
    missing, incomplete or damaged, or does not fit the model.
    """
    check_complete(folder)
    if actor.settings.distributed_optimizer:
        for optimizer in actor.optimizer.chained_optimizers:
            # Makes the state that loading fills (distrib_optimizer.py); without it there is none before the first step.
            optimizer._init_optimizer_states_with_dummy_values()
    try:
        state = dist_checkpointing.load(
            _state(actor, is_loading=True, step=0), str(folder), strict=StrictHandling.RAISE_ALL
        )
    except (CheckpointingException, CheckpointException, pickle.UnpicklingError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{folder}: the checkpoint cannot be read or does not fit the model: {reason}") from error
    for name, chunk in zip(_chunk_names(actor), actor.models, strict=True):
        missing, unexpected = chunk.load_state_dict(state[name], strict=False)
        assert not _without_extra_state(dict.fromkeys([*missing, *unexpected])), f"{missing} {unexpected}"
    _use_todays_settings(state["optimizer"], actor.optimizer_settings)
    actor.optimizer.load_state_dict(state["optimizer"])
    actor.scheduler.num_steps = 0
    actor.scheduler.step(state["scheduler_steps"])  # also sets learning rate and weight decay of every group
    torch.set_rng_state(state["random_state"])
    return int(state["step"])


def _state(actor: Actor, *, is_loading: bool, step: int) -> dict[str, Any]:
    """Return megatron's sharded state dict, with what is the same on all ranks beside it."""
    metadata = {
        # The layout-independent form of the distributed optimizer's state: it loads at any TP, PP and DP.
        "distrib_optim_sharding_type": "fully_reshardable",
        "dp_cp_group": parallel.dp_cp_group(),
    }
    models = {
        name: _without_extra_state(chunk.sharded_state_dict(metadata=metadata))
        for name, chunk in zip(_chunk_names(actor), actor.models, strict=True)
    }
    return {
        **models,
        "optimizer": actor.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata),
        "scheduler_steps": actor.scheduler.num_steps,
        "random_state": torch.get_rng_state(),  # seeded and consumed alike on every rank; there is no dropout on the device
        "step": step,
    }


def _without_extra_state(entries: dict[str, Any]) -> dict[str, Any]:
    """Drop what Transformer Engine keeps for 8-bit recipes: a checkpoint is the same with and without it."""
    return {name: entry for name, entry in entries.items() if not name.endswith("_extra_state")}


def _use_todays_settings(entry: Any, settings: OptimizerConfig) -> None:
    """Overwrite the settings in loaded parameter groups; megatron would look for groups of the old ones and fail."""
    if not isinstance(entry, dict):
        return
    for group in entry.get("param_groups", []):
        group.update(
            max_lr=settings.lr, min_lr=settings.min_lr, betas=(settings.beta1, settings.beta2), eps=settings.eps
        )
    for part in entry.values():
        _use_todays_settings(part, settings)


def _chunk_names(actor: Actor) -> list[str]:
    return [f"model{index}" for index in range(len(actor.models))]
