"""Checkpoint folders: names, completeness, retention. Torch-free, so that a launcher can look at them before any rank starts.

    step_000012.incomplete   being written, or left by a save that was killed
    step_000012              a checkpoint: its marker `complete.json`, written last, lists every other file with its size
    step_000012.removed      being deleted

A folder changes from one to the next by a rename, so whenever a run is killed each of them is what its name says.
"""

import json
import os
import shutil
from pathlib import Path

from a3po_megatron.errors import UserError

MARKER = "complete.json"
INCOMPLETE, REMOVED = ".incomplete", ".removed"


def step_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint written after `step` steps."""
    return root / f"step_{step:06d}"


def incomplete_folder(root: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of `step` is written."""
    return _with_suffix(step_folder(root, step), INCOMPLETE)


def begin_folder(root: Path, step: int) -> None:
    """Make `incomplete_folder` anew, empty."""
    temporary = incomplete_folder(root, step)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def finish_folder(temporary: Path, step: int) -> Path:
    """Mark the folder complete, once all its files are on the disk, and give it its name; return it."""
    files = sorted(path for path in temporary.iterdir() if path.name != MARKER)
    for path in files:
        _sync(path)
    sizes = {path.name: path.stat().st_size for path in files}
    write_synced(temporary / MARKER, json.dumps({"step": step, "files": sizes}, indent=2))
    _sync(temporary)
    return _rename(temporary)


def newest_complete(root: Path) -> tuple[Path | None, list[str]]:
    """Return the complete checkpoint of the highest step below `root` (None: there is none), and why newer ones were left."""
    faults = []
    for folder in _newest_first(root):
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
        assert isinstance(files, dict)
    except OSError:
        raise UserError(
            f"{folder}: incomplete checkpoint: {MARKER} is missing, the save did not finish (or another program wrote it)"
        ) from None
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UserError(f"{folder / MARKER}: damaged marker of a checkpoint") from None
    for name, size in files.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            what = "missing" if found is None else f"{found} bytes long"
            raise UserError(f"{path}: damaged checkpoint: {size} bytes were written, the file is {what}")


def clean_up(root: Path) -> list[str]:
    """Settle what a killed run left below `root`; return a line about each folder. No run may be writing there.

    A save that was killed after its marker is finished, any other is removed, and so is what was being deleted.
    """
    notes = []
    for folder in sorted(root.glob(f"step_*{INCOMPLETE}")):
        try:
            check_complete(folder)
        except UserError:
            shutil.rmtree(folder)
            notes.append(f"{folder}: removed, the save did not finish")
        else:
            _rename(folder)
            notes.append(f"{folder}: complete but for its name, which it has now been given")
    for folder in sorted(root.glob(f"step_*{REMOVED}")):
        shutil.rmtree(folder)
        notes.append(f"{folder}: removed, its deletion had been interrupted")
    return notes


def prune(root: Path, keep_last: int, keep_every: int) -> list[Path]:
    """Delete complete checkpoints but the newest `keep_last` (0: none is deleted) and those of each `keep_every` steps.

    Returns the deleted ones. The newest complete one stays, and so does whatever is not complete.
    """
    complete = []
    for folder in _newest_first(root):
        try:
            check_complete(folder)
        except UserError:
            continue
        complete.append(folder)
    surplus = [f for f in complete[keep_last:] if not (keep_every and _step(f) % keep_every == 0)] if keep_last else []
    for folder in surplus:
        remove(folder)
    return surplus


def remove(folder: Path) -> None:
    """Delete a checkpoint; killed on the way it leaves no folder that looks like one."""
    removed = _with_suffix(folder, REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed)


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    path.write_text(text)
    _sync(path)


def _newest_first(root: Path) -> list[Path]:
    folders = [folder for folder in root.glob("step_*") if folder.name.removeprefix("step_").isdigit()]
    return sorted(folders, key=_step, reverse=True)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _with_suffix(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def _rename(temporary: Path) -> Path:
    """Give a marked folder its name. A folder that has it is replaced; killed in between, `clean_up` finishes the rename."""
    final = temporary.with_name(temporary.name.removesuffix(INCOMPLETE))
    if final.exists():
        remove(final)
    temporary.rename(final)
    _sync(final.parent)
    return final


def _sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
