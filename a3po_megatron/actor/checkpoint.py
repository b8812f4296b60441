"""The actor's whole state on disk: parameters, optimizer, learning rate schedule, random state; loadable at another layout.

A checkpoint is a folder `step_NNNNNN` of megatron's dist_checkpointing format with three files of ours; docs/checkpoints.md
describes it, `checkpoint_folder.py` its life, `checkpoint_writer.py` how it is written while training goes on.
"""

import io
import json
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from a3po_megatron.actor import parallel
from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.checkpoint_reading import load_plain, restricted_reading
from a3po_megatron.actor.random_state import collect_random_state, restore_random_state
from a3po_megatron.checkpoint_folder import check_complete
from a3po_megatron.config.actor import OptimizerConfig
from a3po_megatron.errors import UserError

OBJECTIVE = "objective.json"
LONGEST_REASON = 1000  # bytes of a message that ranks tell each other


def read_objective(folder: Path) -> dict[str, float]:
    """Return the `objective` of a checkpoint, for `BatchStep.restore`."""
    path = folder / OBJECTIVE
    try:
        state = json.loads(path.read_text())
        return {str(name): float(value) for name, value in state.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged checkpoint: {error}") from error


def load_checkpoint(actor: Actor, folder: Path) -> int:
    """Fill the actor from `folder`, written at this or another layout, and return the step it was written after. Collective.

    Optimizer settings (learning rate, betas, decay) are today's, not the checkpoint's. Raises UserError, the same on every
    rank, when the folder is missing, incomplete, damaged or unsafe to read, or does not fit the model.
    """
    check_complete(folder)
    if actor.settings.distributed_optimizer:
        for optimizer in actor.optimizer.chained_optimizers:
            # Makes the state that loading fills (distrib_optimizer.py); without it there is none before the first step.
            optimizer._init_optimizer_states_with_dummy_values()
    state, reason = _load(actor, folder)
    if reason := first_reason(reason):
        raise UserError(reason)
    for name, chunk in zip(_chunk_names(actor), actor.models, strict=True):
        missing, unexpected = chunk.load_state_dict(state[name], strict=False)
        assert not _without_extra_state(dict.fromkeys([*missing, *unexpected])), f"{missing} {unexpected}"
    _use_todays_settings(state["optimizer"], actor.optimizer_settings)
    actor.optimizer.load_state_dict(state["optimizer"])
    actor.scheduler.num_steps = 0
    actor.scheduler.step(state["scheduler_steps"])  # also sets learning rate and weight decay of every group
    restore_random_state(state["random"], with_tracker=state["layout"] == _layout(actor))
    return int(state["step"])


def _load(actor: Actor, folder: Path) -> tuple[dict[str, Any], str | None]:
    """Return the state as megatron reads it into this rank's shards, with the random state; and why it cannot be loaded."""
    try:
        with restricted_reading(folder):
            _check_same_form(actor, dist_checkpointing.load_common_state_dict(str(folder)), folder)
            state, left, absent = dist_checkpointing.load(
                checkpoint_state(actor, is_loading=True, step=0), str(folder), strict=StrictHandling.RETURN_ALL
            )
        left, absent = ({name for name in names if not _is_extra_state(name)} for names in (left, absent))
        if left or absent:
            names = [f"{what} {min(some)}" for what, some in (("it lacks", absent), ("it also holds", left)) if some]
            raise UserError(f"{folder}: the checkpoint does not fit the model: {' and '.join(names)}")
        own = folder / random_file(dist.get_rank() if state["layout"] == _layout(actor) else 0)
        return {**state, "random": load_plain(own, own.read_bytes())}, None
    except (Exception, CheckpointException) as error:  # megatron and torch raise whatever a damaged file leads to
        cause = root_cause(error)
        _forget_frames(error)
        if isinstance(cause, UserError):
            return {}, str(cause)
        return {}, f"{folder}: the checkpoint cannot be read or does not fit the model: {one_line(cause)}"


def checkpoint_state(actor: Actor, *, is_loading: bool, step: int) -> dict[str, Any]:
    """Return megatron's sharded state dict, with what is the same on all ranks beside it."""
    metadata = {
        # The layout-independent form of the distributed optimizer's state: it loads at any TP, PP and DP.
        "distrib_optim_sharding_type": "fully_reshardable",
        # Gathered, through gloo, on data-parallel rank 0, which writes it, and not in every rank's host memory.
        "distrib_optim_fully_reshardable_mem_efficient": True,
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
        "layout": _layout(actor),
        "form": _form(actor),
        "step": step,
    }


def write_own_files(folder: Path, objective: Mapping[str, float]) -> None:
    """Write what megatron does not: this rank's random state, and on rank 0 what the objective remembers."""
    content = io.BytesIO()
    torch.save(collect_random_state(), content)
    (folder / random_file(dist.get_rank())).write_bytes(content.getvalue())
    if dist.get_rank() == 0:
        (folder / OBJECTIVE).write_text(json.dumps(dict(objective)))


def random_file(rank: int) -> str:
    """Return the name of the file with a rank's random state."""
    return f"random_{rank:05d}.pt"


def first_reason(reason: str | None) -> str | None:
    """Return what failed (None: nothing) on the lowest rank on which something did, on every rank. Collective."""
    rank = torch.tensor(dist.get_rank() if reason else dist.get_world_size())
    dist.all_reduce(rank, op=dist.ReduceOp.MIN)
    if int(rank) == dist.get_world_size():
        return None
    text = torch.zeros(LONGEST_REASON, dtype=torch.uint8)
    encoded = list((reason or "").encode()[:LONGEST_REASON])
    text[: len(encoded)] = torch.tensor(encoded, dtype=torch.uint8)
    dist.broadcast(text, int(rank))
    return bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")


def _layout(actor: Actor) -> dict[str, Any]:
    """Return what two runs must share for their ranks to hold the same shards, and random states of the same kind."""
    settings = actor.settings
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "data", "expert", "expert_tensor")
    return {name: getattr(settings, f"{name}_parallel") for name in names} | {"device": actor.device.type}


def _form(actor: Actor) -> dict[str, Any]:
    """Return what decides which tensors the optimizer's state consists of."""
    return {"dtype": actor.settings.dtype, "distributed_optimizer": actor.settings.distributed_optimizer}


def _check_same_form(actor: Actor, common: dict[str, Any], folder: Path) -> None:
    if common.get("holds") == "weights":
        raise UserError(
            f"{folder}: a converted checkpoint, weights only: start from it with model.path, nothing resumes from it"
        )
    for name, now in _form(actor).items():
        if (written := common.get("form", {}).get(name)) != now:
            raise UserError(
                f"actor.{name}={now}: {folder} was written with {written}, which keeps another optimizer state; use the same"
            )


def root_cause(error: BaseException) -> BaseException:
    """Return the user's or the system's error that led to `error`, or the first of all."""
    while not isinstance(error, UserError | OSError):
        wrapped = error.failures.values() if isinstance(error, CheckpointException) else ()
        before = next((failure for failure, _ in wrapped), None) or error.__cause__ or error.__context__
        if before is None:
            break
        error = before
    return error


def one_line(error: BaseException) -> str:
    """Return what kind of error it is and the first line of its message."""
    return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]])


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold. Torch's own cycle would keep process groups and their threads for ever."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _is_extra_state(name: str) -> bool:
    """Whether Transformer Engine keeps this for its 8-bit recipes; a checkpoint is the same with and without it."""
    return re.search(r"_extra_state\d*$", name) is not None  # numbered where one layer holds several experts


def _without_extra_state(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if not _is_extra_state(name)}


def _use_todays_settings(entry: Any, settings: OptimizerConfig) -> None:
    """Overwrite the settings in loaded parameter groups; megatron would look for groups of the old ones and fail.

    `step`, which torch's AdamW leaves as a float, becomes the integer that Transformer Engine's asks for.
    """
    if not isinstance(entry, dict):
        return
    for group in entry.get("param_groups", []):
        group.update(
            max_lr=settings.lr, min_lr=settings.min_lr, betas=(settings.beta1, settings.beta2), eps=settings.eps
        )
        if "step" in group:
            group["step"] = int(group["step"])
    for part in entry.values():
        _use_todays_settings(part, settings)


def _chunk_names(actor: Actor) -> list[str]:
    return [f"model{index}" for index in range(len(actor.models))]
