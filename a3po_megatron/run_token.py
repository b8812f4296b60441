"""The run's token: the secret that every role shows to every other one. The launcher makes it, roles read it here."""

import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from a3po_megatron.errors import UserError

TOKEN_VARIABLE = "A3PO_TOKEN"


def read_run_token(run_dir: Path) -> str:
    """Return the token from the environment (A3PO_TOKEN), else from `run_dir/token`. UserError without either."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    path = run_dir / "token"
    if not token:
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise UserError(
                f"{path}: cannot read the run's token: {error.strerror}; the launcher writes it, "
                f"or set {TOKEN_VARIABLE}"
            ) from None
    if not token:
        raise UserError(f"{path}: the run's token is empty; let the launcher write it, or set {TOKEN_VARIABLE}")
    return token


def bears_token(headers: Iterable[tuple[bytes, bytes]], token: str) -> bool:
    """Whether an ASGI request's headers hold `Authorization: Bearer TOKEN`, once; compared in constant time."""
    given = [value for name, value in headers if name == b"authorization"]
    return len(given) == 1 and hmac.compare_digest(given[0], f"Bearer {token}".encode())
