"""Which folder is a checkpoint."""

import json
from pathlib import Path

import pytest

from a3po_megatron.checkpoint_folder import check_complete, newest_complete, step_folder
from a3po_megatron.errors import UserError


def make(root: Path, step: int) -> Path:
    folder = step_folder(root, step)
    folder.mkdir(parents=True)
    (folder / "data").write_bytes(b"12345")
    (folder / "complete.json").write_text(json.dumps({"step": step, "files": {"data": 5}}))
    return folder


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    assert newest_complete(tmp_path) == (None, [])
    make(tmp_path, 2)
    tenth = make(tmp_path, 10)
    (make(tmp_path, 11) / "complete.json").unlink()
    (tmp_path / "step_000012.incomplete").mkdir()
    newest, faults = newest_complete(tmp_path)
    assert newest == tenth
    assert len(faults) == 1
    assert "step_000011: incomplete checkpoint" in faults[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "data").write_bytes(b"123"),
            "data: damaged checkpoint: 5 bytes were written, the file is 3 bytes long",
        ),
        (lambda f: (f / "data").unlink(), "data: damaged checkpoint: 5 bytes were written, the file is missing"),
        (lambda f: (f / "complete.json").unlink(), "incomplete checkpoint: complete.json is missing"),
        (lambda f: (f / "complete.json").write_text("{"), "damaged marker"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage, message: str) -> None:
    folder = make(tmp_path, 1)
    check_complete(folder)
    damage(folder)
    with pytest.raises(UserError) as caught:
        check_complete(folder)
    assert message in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such checkpoint folder"):
        check_complete(tmp_path / "step_000001")
