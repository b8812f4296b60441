"""Conversion by megatron-bridge's AutoBridge, an optional package of GPU nodes: it knows more families than hf_mapping.py.

Its checkpoints are megatron-bridge's own (`iter_0000000/` and its configuration), not those of a run.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from a3po_megatron.errors import UserError


def bridge_hf_to_megatron(source: Path, destination: Path) -> None:
    """Import a Hugging Face folder."""
    _auto_bridge().import_ckpt(str(source), str(destination))


def bridge_megatron_to_hf(source: Path, config: Path, destination: Path) -> None:
    """Export a checkpoint of megatron-bridge; `config` is the Hugging Face folder of the model."""
    _auto_bridge().from_hf_pretrained(str(config)).export_ckpt(str(source), str(destination))


def _auto_bridge() -> Any:
    """Return megatron-bridge's class. Raises UserError where it, or what it needs, is not installed."""
    for package in ("megatron.bridge", "transformer_engine"):
        if find_spec(package) is None:
            raise UserError(
                f"--bridge: {package} is not installed here; it belongs to GPU nodes (pip install '.[gpu,nemo]'), "
                "leave --bridge out to convert without it"
            )
    from megatron.bridge import AutoBridge

    return AutoBridge
