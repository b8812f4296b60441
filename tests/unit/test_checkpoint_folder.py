"""Which folder is a checkpoint."""

import json
from pathlib import Path

import pytest

from a3po_megatron.checkpoint_folder import (
    begin_folder,
    check_complete,
    clean_up,
    finish_folder,
    incomplete_folder,
    newest_complete,
    prune,
    step_folder,
)
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


def test_what_a_killed_run_leaves_is_settled_with_a_word_about_each(tmp_path: Path) -> None:
    make(tmp_path, 1)
    make(tmp_path, 2).rename(tmp_path / "step_000002.incomplete")  # killed between marker and rename
    begin_folder(tmp_path, 3)  # killed while writing
    (incomplete_folder(tmp_path, 3) / "data").write_bytes(b"12")
    make(tmp_path, 4).rename(tmp_path / "step_000004.removed")  # killed while deleting
    assert newest_complete(tmp_path)[0] == tmp_path / "step_000001"
    assert clean_up(tmp_path) == [
        f"{tmp_path / 'step_000002.incomplete'}: complete but for its name, which it has now been given",
        f"{tmp_path / 'step_000003.incomplete'}: removed, the save did not finish",
        f"{tmp_path / 'step_000004.removed'}: removed, its deletion had been interrupted",
    ]
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step_000001", "step_000002"]
    assert newest_complete(tmp_path) == (tmp_path / "step_000002", [])
    assert clean_up(tmp_path) == []


def test_a_folder_is_finished_by_marker_and_name_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    (make(tmp_path, 5) / "data").unlink()
    begin_folder(tmp_path, 5)
    (incomplete_folder(tmp_path, 5) / "data").write_bytes(b"123")
    assert finish_folder(incomplete_folder(tmp_path, 5), 5) == tmp_path / "step_000005"
    check_complete(tmp_path / "step_000005")
    assert json.loads((tmp_path / "step_000005" / "complete.json").read_text()) == {"step": 5, "files": {"data": 3}}
    assert [folder.name for folder in tmp_path.iterdir()] == ["step_000005"]


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(0, 0, [10, 20, 30, 40, 50]), (1, 0, [50]), (2, 0, [40, 50]), (1, 20, [20, 40, 50]), (9, 0, [10, 20, 30, 40, 50])],
)
def test_the_newest_and_each_so_many_steps_are_kept(
    keep_last: int, keep_every: int, kept: list[int], tmp_path: Path
) -> None:
    for step in (10, 20, 30, 40, 50):
        make(tmp_path, step)
    prune(tmp_path, keep_last, keep_every)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == [f"step_{step:06d}" for step in kept]


def test_the_newest_complete_one_is_kept_below_newer_ones_that_are_not(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(tmp_path, step)
    (tmp_path / "step_000003" / "data").unlink()
    begin_folder(tmp_path, 4)
    assert prune(tmp_path, keep_last=1, keep_every=0) == [tmp_path / "step_000001"]
    assert newest_complete(tmp_path)[0] == tmp_path / "step_000002"
