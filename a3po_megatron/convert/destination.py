"""Where a conversion writes. Torch-free."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from a3po_megatron.errors import UserError


def refuse_existing(destination: Path) -> None:
    """Raise UserError for a destination that is there: nothing is written over."""
    if destination.exists():
        raise UserError(f"{destination}: exists already; remove it or choose another destination")


@contextmanager
def writing(destination: Path) -> Iterator[None]:
    """Refuse a destination that is there, and name it when it cannot be written. Raises UserError."""
    refuse_existing(destination)
    try:
        yield
    except OSError as error:
        raise UserError(f"{destination}: cannot be written: {error.strerror or error}") from error
