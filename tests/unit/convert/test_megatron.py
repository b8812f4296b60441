"""Hugging Face -> megatron -> Hugging Face is bit-identical, takes little memory, and what is wrong is named."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from a3po_megatron.convert import memory
from a3po_megatron.convert.megatron import hf_to_megatron, layout_of, megatron_to_hf
from a3po_megatron.convert.memory import PeakMemory
from a3po_megatron.errors import UserError
from tests.unit.convert.tiny import FAMILIES, change, make_folder, tensors_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("vocab", [131, 132], ids=["padded", "unpadded"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_identical(family: str, tied: bool, vocab: int, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", family, tied=tied, vocab=vocab)
    layout = layout_of(2, 2, 2 if family == "qwen3_moe" else 1)
    summary = hf_to_megatron(source, tmp_path / "megatron", layout)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "megatron", tmp_path / "back")
    expected, found = tensors_of(source), tensors_of(tmp_path / "back")
    assert summary.num_tensors == len(found)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == 4  # one a rank
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config == {**json.loads((source / "config.json").read_text()), "dtype": "float32"}
    assert (tmp_path / "back" / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "megatron", "back"}  # nothing half-written is left


@pytest.mark.parametrize("layers", [4, 5, 7])
def test_stages_need_not_be_even(layers: int, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", num_hidden_layers=layers)
    hf_to_megatron(source, tmp_path / "megatron", layout_of(1, 4))
    assert len(list((tmp_path / "megatron").glob("*.distcp"))) == 4  # no stage is without a layer
    megatron_to_hf(tmp_path / "megatron", source, tmp_path / "back")
    found = tensors_of(tmp_path / "back")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(source).items())
    with pytest.raises(UserError, match=rf"--pipeline-parallel 8: more stages than the model's {layers} layers"):
        hf_to_megatron(source, tmp_path / "other", layout_of(1, 8))


def test_types_are_kept_or_changed_on_request(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", dtype=torch.bfloat16)
    hf_to_megatron(source, tmp_path / "kept", layout_of(1, 1))
    hf_to_megatron(source, tmp_path / "wide", layout_of(1, 1), "float32")
    megatron_to_hf(tmp_path / "kept", source, tmp_path / "kept_hf")
    megatron_to_hf(tmp_path / "wide", source, tmp_path / "wide_hf")
    megatron_to_hf(tmp_path / "wide", source, tmp_path / "narrow_hf", "bfloat16")
    kept, wide, narrow = (tensors_of(tmp_path / name) for name in ("kept_hf", "wide_hf", "narrow_hf"))
    for name, tensor in tensors_of(source).items():
        assert torch.equal(kept[name], tensor)
        assert torch.equal(wide[name], tensor.float())
        assert torch.equal(narrow[name], tensor)
    assert json.loads((tmp_path / "wide_hf" / "config.json").read_text())["dtype"] == "float32"


def test_files_are_cut_at_the_given_size_with_an_index(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron", layout_of(1, 1))
    megatron_to_hf(tmp_path / "megatron", source, tmp_path / "back", max_shard_bytes=40_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2
    for file in set(index.values()):
        assert load_file(tmp_path / "back" / file).keys() == {name for name, where in index.items() if where == file}


MEASURED = """
import sys
from pathlib import Path
from a3po_megatron.convert.megatron import hf_to_megatron, layout_of, megatron_to_hf
from a3po_megatron.convert.memory import PeakMemory
source, megatron, back = map(Path, sys.argv[1:])
hf_to_megatron(source, megatron.with_name("first"), layout_of(2, 2))  # what is imported on the way does not count
megatron_to_hf(megatron.with_name("first"), source, back.with_name("first_back"))
meter = PeakMemory()
summary = hf_to_megatron(source, megatron, layout_of(2, 2))
there = meter.bytes_above_start()
meter = PeakMemory()
megatron_to_hf(megatron, source, back)
print(there, meter.bytes_above_start(), summary.largest_bytes, summary.num_bytes)
"""


def test_memory_is_bounded_by_a_few_tensors(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 128}
    source = make_folder(tmp_path / "hf", "llama", vocab=2048, tied=True, **sizes)
    # In a process of its own: what earlier tests left of the heap would count here.
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "megatron"), str(tmp_path / "back")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    there, back, largest, total = (int(word) for word in done.stdout.split()[-4:])
    # gate and up are one parameter, which is held once to read and once to write
    assert max(there, back) < 6 * largest, f"{there / 1e6:.0f} and {back / 1e6:.0f} MB"
    assert total > 20 * largest


@pytest.mark.parametrize("lacking", ["CLEAR_REFS", "STATUS"])
def test_memory_is_measured_where_the_kernel_does_not_reset_its_peak(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands for a file that may not be written (OSError), an empty file for one without the lines."""
    (tmp_path / "STATUS").write_text("")
    (tmp_path / "CLEAR_REFS").mkdir()
    monkeypatch.setattr(memory, lacking, tmp_path / lacking)
    meter = PeakMemory()
    used, before = 1 << 20, memory._usage_peak()
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: Usage((before + used) >> 10))
    assert meter.bytes_above_start() >= used


class Usage(NamedTuple):
    ru_maxrss: int  # KiB


def lacks(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = tensors_of(folder)
        del tensors[name]
        save_file(tensors, folder / "model.safetensors")

    return damage


def holds(name: str, shape: tuple[int, ...] = (3,)) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file({**tensors_of(folder), name: torch.zeros(shape)}, folder / "model.safetensors")

    return damage


def is_cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def mixes_types(folder: Path) -> None:
    tensors = tensors_of(folder)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].bfloat16()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lacks("model.layers.1.mlp.up_proj.weight"),
            "1 tensors are missing, among them model.layers.1.mlp.up_proj.weight",
        ),
        (holds("model.layers.9.mlp.up_proj.weight"), "1 tensors belong to no parameter, among them model.layers.9.mlp"),
        (holds("model.norm.weight"), r"model.norm.weight has shape \(3,\), config.json says \(24,\)"),
        (is_cut, "damaged weights file"),
        (mixes_types, "model.layers.1.self_attn.k_proj.weight is bfloat16, others .* are float32; .*--dtype"),
        (lambda folder: change(folder, num_hidden_layers=5) and None, "are missing, among them model.layers.4."),
        (lambda folder: change(folder, model_type="gpt2") and None, "model_type 'gpt2' is not supported"),
    ],
)
def test_a_wrong_source_is_named_in_one_line_and_nothing_is_written(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "hf")
    damage(source)
    with pytest.raises(UserError, match=message) as error:
        hf_to_megatron(source, tmp_path / "megatron", layout_of(1, 1))
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def shard_is_cut(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def shard_is_blank(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


def shard_is_gone(folder: Path) -> None:
    (folder / "complete.json").unlink()  # as of another program
    (folder / "__0_0.distcp").unlink()


def part_is_not_listed(folder: Path) -> None:
    change_metadata(
        folder, lambda metadata: metadata.state_dict_metadata["decoder.final_layernorm.weight"].chunks.clear()
    )


def key_is_missing(folder: Path) -> None:
    change_metadata(folder, lambda metadata: metadata.state_dict_metadata.pop("decoder.layers.mlp.linear_fc2.weight"))


def key_is_extra(folder: Path) -> None:
    def add(metadata: object) -> None:
        keys = metadata.state_dict_metadata  # type: ignore[attr-defined]
        keys["decoder.layers.mlp.linear_fc3.weight"] = keys["decoder.layers.mlp.linear_fc2.weight"]

    change_metadata(folder, add)


def change_metadata(folder: Path, change_it: Callable[[object], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change_it(metadata)
    (folder / "complete.json").unlink()
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shard_is_cut, r"__0_0\.distcp: damaged checkpoint: \d+ bytes were written, the file is \d+ bytes long"),
        (shard_is_blank, r"__0_0\.distcp: (damaged checkpoint|refused)"),
        (shard_is_gone, r"__0_0\.distcp: cannot read embedding\.word_embeddings\.weight: No such file"),
        (part_is_not_listed, r"decoder\.final_layernorm\.weight: the checkpoint lacks a part of it"),
        (key_is_missing, r"1 keys are missing, among them decoder\.layers\.mlp\.linear_fc2\.weight"),
        (key_is_extra, r"1 keys belong to no parameter .*, among them decoder\.layers\.mlp\.linear_fc3\.weight"),
    ],
)
def test_a_damaged_checkpoint_is_named_in_one_line_and_nothing_is_written(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    source = make_folder(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron", layout_of(1, 1))
    damage(tmp_path / "megatron")
    with pytest.raises(UserError, match=message) as error:
        megatron_to_hf(tmp_path / "megatron", source, tmp_path / "back")
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "megatron"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 6}, r"decoder.* has shape \(4, .*config.json says \(6, "),
        ({"intermediate_size": 48}, r"linear_fc\d\.weight has shape .*, config.json says"),
        ({"vocab_size": 140}, r"weight has shape \(132, 24\), config.json says \(140, 24\)"),
        ({"vocab_size": 100}, r"weight has shape \(132, 24\), config.json says \(100, 24\)"),
        ({"model_type": "llama"}, r"2 keys belong to no parameter of the llama model .*k_layernorm"),
        ({"tie_word_embeddings": True}, r"1 keys belong to no parameter .*, among them output_layer\.weight"),
    ],
)
def test_a_config_of_another_model_is_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf")
    hf_to_megatron(source, tmp_path / "megatron", layout_of(2, 1))
    with pytest.raises(UserError, match=message):
        megatron_to_hf(tmp_path / "megatron", change(source, **changes), tmp_path / "back")


def test_a_layout_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", "qwen3_moe")
    for layout, message in (
        (layout_of(4, 1), "tensor_parallel=4 does not divide the model's 2 key/value heads"),
        (layout_of(1, 5), "--pipeline-parallel 5: more stages than the model's 4 layers"),
        (layout_of(1, 1, 3), "expert_parallel=3 does not divide the model's 4 experts"),
    ):
        with pytest.raises(UserError, match=message):
            hf_to_megatron(source, tmp_path / "megatron", layout)


def test_an_existing_destination_is_left_alone(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf")
    for convert in (
        lambda: hf_to_megatron(source, source, layout_of(1, 1)),
        lambda: megatron_to_hf(tmp_path / "megatron", source, source),
    ):
        (tmp_path / "megatron").exists() or hf_to_megatron(source, tmp_path / "megatron", layout_of(1, 1))
        with pytest.raises(UserError, match="exists already"):
            convert()
    assert tensors_of(source)
