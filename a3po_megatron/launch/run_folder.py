"""What is checked and written before any role of a run starts, on this machine or on many."""

import os
import secrets
from pathlib import Path

from a3po_megatron.actor.hf_folder import HFFolder
from a3po_megatron.config.check import check_train
from a3po_megatron.config.load import save_run_record
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.controller.build import check_controller
from a3po_megatron.errors import UserError


def check_before_start(config: TrainConfig) -> None:
    """Check the settings against each other and the model's folder, before anything starts. Raises UserError."""
    check_controller(config)
    shape = read_model_shape(config.model.path)
    check_train(config, shape)
    HFFolder(config.model.path, shape)


def open_run_folder(config: TrainConfig) -> str:
    """Write the token and the record of a run into its folder; return the token.

    Raises UserError for a folder that cannot be written, that holds another run, or none to go on with.
    """
    folder = Path(config.run.dir)
    rows = folder / "metrics.jsonl"
    has_steps = rows.exists() and rows.stat().st_size > 0
    if has_steps and not config.run.resume:
        raise UserError(f"run.dir={folder} already holds a run; name another or remove it")
    if config.run.resume and not has_steps:
        raise UserError(f"run.resume=true: run.dir={folder} holds no run to go on with")
    try:
        save_run_record(config, folder)
        return _write_token(folder / "token")
    except OSError as error:
        raise UserError(f"run.dir={folder}: cannot write there: {error.strerror}; name a folder of yours") from None


def _write_token(path: Path) -> str:
    """Make the run's secret, readable by this user alone from the first moment."""
    token = secrets.token_hex(32)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{token}\n")
    return token
