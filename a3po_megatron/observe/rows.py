"""Reads the JSON-lines files of a run, whole or as they grow."""

import json
from pathlib import Path
from typing import Any

from a3po_megatron.errors import UserError

Row = dict[str, Any]


class RowTail:
    """Rows of a file that may not be there yet and that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_rows(self) -> list[Row]:
        """Return the rows that were completed since the last call; a line without its end waits for it.

        Raises UserError for a line that is no row.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete) + len(newline)
        return [self._row(line) for line in complete.splitlines() if line.strip()]

    def _row(self, line: bytes) -> Row:
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            raise UserError(f"{self._path}: damaged: {line[:80]!r} is no JSON object; remove that line") from None


def read_rows(path: Path) -> list[Row]:
    """Return every row of the file; none when it is not there."""
    return RowTail(path).new_rows()
