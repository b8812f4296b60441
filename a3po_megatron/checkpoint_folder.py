"""Names and completeness of checkpoint folders. Torch-free, so that a launcher can check one before any rank starts."""

import json
from pathlib import Path

from a3po_megatron.errors import UserError

MARKER = "complete.json"


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint written after `step` steps."""
    return root / f"step_{step:06d}"


def newest_complete(root: Path) -> tuple[Path | None, list[str]]:
    """Return the complete checkpoint of the highest step below `root` (None: there is none), and why newer ones were left."""
    faults = []
    folders = [folder for folder in root.glob("step_*") if folder.name.removeprefix("step_").isdigit()]
    for folder in sorted(folders, key=lambda folder: int(folder.name.removeprefix("step_")), reverse=True):
        try:
            check_complete(folder)
        except UserError as fault:
            faults.append(str(fault))
        else:
            return folder, faults
    return None, faults


def check_complete(folder: Path) -> None:
    """Raise UserError unless `folder` holds a marker and every file that the marker lists, at its size."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such checkpoint folder")
    try:
        files: dict[str, int] = json.loads((folder / MARKER).read_text())["files"]
    except OSError:
        raise UserError(f"{folder}: incomplete checkpoint: {MARKER} is missing, the save did not finish") from None
        assert isinstance(files, dict)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{folder / MARKER}: damaged marker of a checkpoint") from None
    for name, size in files.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            what = "missing" if found is None else f"{found} bytes long"
            raise UserError(f"{path}: damaged checkpoint: {size} bytes were written, the file is {what}")
