"""Shapes and parameter counts of published models, without a weight: transformers' model on the meta device is the oracle."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError
from tests.references.published_models import PUBLISHED_MODELS


def write_config(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(PUBLISHED_MODELS[name][0]))
    return folder


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_every_tensor_has_the_shape_that_transformers_gives_it(name: str, tmp_path: Path) -> None:
    shapes = hf_shapes(read_model_shape(write_config(tmp_path, name)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # a shared one once
    experts = {name for name in theirs if ".experts." in name}  # fused in transformers 5, apart in the checkpoint
    ours = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    assert ours == {name: shape for name, shape in theirs.items() if name not in experts}
    count = sum(math.prod(shape) for shape in shapes.values())
    assert count == sum(math.prod(shape) for shape in theirs.values())
    assert count == PUBLISHED_MODELS[name][1]


def test_three_of_thirty_billion_parameters_are_used_for_a_token(tmp_path: Path) -> None:
    """Qwen3-30B-A3B, published as 30.5 and 3.3 billion."""
    shapes = hf_shapes(read_model_shape(write_config(tmp_path, "Qwen3-30B-A3B")))
    experts = sum(math.prod(size) for name, size in shapes.items() if ".experts." in name)
    count = sum(math.prod(size) for size in shapes.values())
    assert round((count - experts + experts * 8 // 128) / 1e9, 3) == 3.353


def test_the_fields_are_those_of_the_published_files(tmp_path: Path) -> None:
    try:
        folder = data_folder() / "hf_configs"
    except UserError as error:
        pytest.skip(str(error))
    files = {path.name.split(".json")[0].removesuffix(".from_gguf"): path for path in folder.glob("*.json")}
    assert files.keys() == PUBLISHED_MODELS.keys()
    for name, path in files.items():
        published = json.loads(path.read_text())
        assert PUBLISHED_MODELS[name][0].items() <= published.items(), name
        shape = read_model_shape(write_config(tmp_path, name))
        (tmp_path / "config.json").write_bytes(path.read_bytes())
        assert read_model_shape(tmp_path) == shape
