"""docs/models.md says what is so: its families are the code's, its settings exist."""

import dataclasses
import re
from pathlib import Path

import torch

from a3po_megatron.actor.kernels import choose_kernels
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.config.model_shape import FAMILIES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
SETTINGS = {field.name for field in dataclasses.fields(ActorConfig)}


def test_every_family_has_a_row() -> None:
    table = PAGE.split("## Families")[1].split("### ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)[1:] == list(FAMILIES)


def test_every_setting_that_is_named_exists() -> None:
    layouts = PAGE.split("## Layouts")[1].split("**Uneven")[0]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.*?) \|", layouts, re.MULTILINE))))
    named |= set(re.findall(r"\bactor\.(\w+)[=:`]", PAGE)) | set(re.findall(r"`actor\.(\w+)`", PAGE))
    assert len(named) > 20
    assert named <= SETTINGS


def test_every_file_that_is_named_is_there() -> None:
    files = re.findall(r"`((?:a3po_megatron|tests)/[\w/]+\.py)`", PAGE)
    assert len(files) > 5
    assert all((ROOT / file).exists() for file in files)


def test_the_line_of_the_kernels_is_the_one_that_is_printed() -> None:
    kernels = dataclasses.replace(choose_kernels(torch.device("cpu"), torch.float32), adam="torch")
    assert f"`{kernels.describe()}`" in PAGE
