"""The published data sets, where they are; helpers that write small files."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError

WriteRows = Callable[..., str]


@pytest.fixture(scope="session")
def published() -> Path:
    try:
        return data_folder()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    def write(name: str, *rows: object) -> str:
        """Write rows as JSON lines (text and bytes as they are); return the path."""
        lines = [row if isinstance(row, bytes) else msgspec.json.encode(row) + b"\n" for row in rows]
        (tmp_path / name).write_bytes(b"".join(lines))
        return str(tmp_path / name)

    return write
