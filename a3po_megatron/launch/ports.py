"""Ports of a run on this machine: are the configured ones free, and which one is, when any will do."""

import socket

from a3po_megatron.config.rollout import RolloutConfig
from a3po_megatron.errors import UserError
from a3po_megatron.rollout.server import choose_port


def check_port(setting: str, host: str, port: int) -> None:
    """Raise UserError, naming `setting`, when nothing can listen on `host`:`port`."""
    try:
        _listen(host, port)
    except OSError as error:
        raise UserError(
            f"{setting}={port}: cannot listen on {host}:{port}: {error.strerror}; stop the program that uses it, "
            f"choose another, or set {setting}=0 for any free port"
        ) from None


def free_port(setting: str, host: str) -> int:
    """Return a port that is free on `host` now. Raises UserError when `host` is no address of this machine."""
    try:
        return _listen(host, 0)
    except OSError as error:
        raise UserError(f"{setting}=0: cannot listen on {host}: {error.strerror}; use 127.0.0.1") from None


def check_server_ports(config: RolloutConfig) -> None:
    """Raise UserError when a vLLM server's configured port is in use; `base_port: 0` always passes."""
    for slot in range(config.num_servers if config.base_port else 0):
        choose_port(config, slot)


def _listen(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        return int(listener.getsockname()[1])
