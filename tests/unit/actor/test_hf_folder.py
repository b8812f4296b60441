"""Hugging Face folders on disk: faults are named before any rank starts; sharded writing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from a3po_megatron.actor.hf_folder import HFFolder, write_hf_folder
from a3po_megatron.actor.hf_mapping import hf_shapes
from a3po_megatron.actor.safetensors_writer import TensorType
from a3po_megatron.config.model_shape import ModelShape
from a3po_megatron.errors import UserError

SHAPE = ModelShape("qwen3", 2, 12, 20, 4, 2, 5, 131, 64, 1e-6, 1e4, False)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in hf_shapes(SHAPE).items()}


def specs_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorType]:
    return {name: TensorType("float32", tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_a_whole_folder_is_read_tensor_by_tensor(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    folder = HFFolder(tmp_path, SHAPE)
    assert all(torch.equal(folder.tensor(name), tensor) for name, tensor in tensors.items())


def test_a_folder_is_written_in_shards_with_config_and_tokenizer(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    source, destination = tmp_path / "source", tmp_path / "destination"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3", "torch_dtype": "bfloat16"}')
    (source / "tokenizer.json").write_text("{}")
    write_hf_folder(iter(tensors.items()), specs_of(tensors), source, destination, max_shard_bytes=10_000)
    files = sorted(path.name for path in destination.glob("*.safetensors"))
    assert len(files) > 2
    assert all((destination / file).stat().st_size < 12_000 for file in files)
    index = json.loads((destination / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    read = {name: tensor for file in files for name, tensor in load_file(destination / file).items()}
    assert read.keys() == index["weight_map"].keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert json.loads((destination / "config.json").read_text()) == {"model_type": "qwen3", "dtype": "float32"}
    assert (destination / "tokenizer.json").exists()
    HFFolder(destination, SHAPE)


def test_an_interrupted_write_leaves_no_folder_of_that_name(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    def stream():
        yield from list(tensors.items())[:3]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        write_hf_folder(stream(), specs_of(tensors), tmp_path, tmp_path / "destination")
    assert not (tmp_path / "destination").exists()


def test_what_repeats_known_tensors_is_no_fault(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    tied = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    repeated = {
        "lm_head.weight": tied["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
        "model.layers.0.mlp.down_proj._extra_state": torch.zeros(3, dtype=torch.uint8),
    }
    save_file(tied | repeated, tmp_path / "model.safetensors")
    HFFolder(tmp_path, replace(SHAPE, tie_word_embeddings=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("other", [True, False], ids=["another value", "another type"])
def test_an_output_layer_of_its_own_is_not_dropped_where_config_ties_it(
    tmp_path: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype, other: bool
) -> None:
    """In a second file, and different in its last element only; transformers would use it."""
    embedding = tensors["model.embed_tokens.weight"].to(dtype)
    output = embedding.clone() if other else embedding.to(torch.float16)
    if other:
        output[-1, -1] += 1
    write_sharded(tmp_path, [tensors | {"model.embed_tokens.weight": embedding}, {"lm_head.weight": output}])
    HFFolder(tmp_path, SHAPE)
    with pytest.raises(
        UserError, match=r"model-1\.safetensors: lm_head\.weight is not model\.embed_tokens\.weight, but "
    ):
        HFFolder(tmp_path, replace(SHAPE, tie_word_embeddings=True))
    write_sharded(tmp_path, [tensors, {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}])
    HFFolder(tmp_path, replace(SHAPE, tie_word_embeddings=True))


def write_sharded(folder: Path, shards: list[dict[str, torch.Tensor]], **changed: object) -> None:
    """Write shards, a tensor of two in its last one, with an index of which `changed` are other file names."""
    named = {name: number for number, shard in enumerate(shards) for name in shard}
    for number, shard in enumerate(shards):
        held = {name: tensor for name, tensor in shard.items() if named[name] == number}
        save_file(held, folder / f"model-{number}.safetensors")
    weight_map = {name: f"model-{number}.safetensors" for name, number in named.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map | changed}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.norm.weight": 5}, "damaged index: model.norm.weight is in 5; expected the name of a file"),
        ({"model.norm.weight": ["a"]}, "damaged index: model.norm.weight is in ['a']"),
        (
            {"model.norm.weight": "../outside.safetensors"},
            "is in '../outside.safetensors'; expected the name of a file",
        ),
        ({"model.norm.weight": "/outside.safetensors"}, "is in '/outside.safetensors'; expected the name of a file"),
        ({"model.norm.weight": ".."}, "is in '..'; expected the name of a file in this folder"),
        ({"model.norm.weight": ""}, "is in ''; expected the name of a file in this folder"),
        (
            {"model.norm.weight": "model-1.safetensors"},
            "names model-1.safetensors for model.norm.weight, but it is in model-0.safetensors",
        ),
        ({"model.other": "model-1.safetensors"}, "names model-1.safetensors for model.other, but no file has it"),
    ],
)
def test_an_index_that_does_not_say_where_tensors_are_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], changed: dict[str, object], message: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(tensors, tmp_path / "outside.safetensors")
    output = {"lm_head.weight": tensors["lm_head.weight"]}
    write_sharded(folder, [tensors, output])
    assert torch.equal(HFFolder(folder, SHAPE).tensor("lm_head.weight"), output["lm_head.weight"])
    write_sharded(folder, [tensors, output], **changed)
    with pytest.raises(UserError) as caught:
        HFFolder(folder, SHAPE)
    assert message in str(caught.value)


@pytest.mark.parametrize("weight_map", ['["a"]', "5", "null", '"abc"'])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')
    with pytest.raises(UserError, match="damaged index"):
        HFFolder(tmp_path, SHAPE)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_sharded(tmp_path, [tensors, {"lm_head.weight": tensors["lm_head.weight"]}])
    save_file(tensors, tmp_path / "model-0.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight is in both model-0\.safetensors and model-1\.safetensors"):
        HFFolder(tmp_path, SHAPE)


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.7.extra"] = torch.zeros(1)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(13)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop, "1 tensors are missing, among them model.norm.weight"),
        (_add, "1 tensors belong to no parameter, among them model.layers.7.extra"),
        (_reshape, "model.norm.weight has shape (13,), config.json says (12,)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], damage, message: str
) -> None:
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        HFFolder(tmp_path, SHAPE)
    assert message in str(caught.value)


def test_a_damaged_or_missing_file_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UserError, match=r"no weights: expected model\.safetensors"):
        HFFolder(tmp_path, SHAPE)
    save_file(tensors, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged weights file"):
        HFFolder(tmp_path, SHAPE)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(UserError, match=r"named in model\.safetensors\.index\.json but missing"):
        HFFolder(tmp_path, SHAPE)
    index.write_text("{")
    with pytest.raises(UserError, match="damaged index"):
        HFFolder(tmp_path, SHAPE)
