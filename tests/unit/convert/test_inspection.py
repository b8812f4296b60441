"""What a folder is, without reading weights; and the tokens of a comparison."""

import importlib
from pathlib import Path

import pytest
import torch

from a3po_megatron.actor import device, scoring
from a3po_megatron.config.actor import ActorConfig
from a3po_megatron.convert.inspection import inspect
from a3po_megatron.convert.megatron import hf_to_megatron, layout_of
from a3po_megatron.convert.verify import tokens_of
from a3po_megatron.errors import UserError
from tests.unit.convert.test_nemo import make_nemo
from tests.unit.convert.tiny import make_folder, tensors_of
from tests.unit.test_gguf_conversion import write_gguf

ROOT = Path(__file__).parents[3]


def test_a_folder_and_its_conversion_are_described_alike(tmp_path: Path) -> None:
    source = make_folder(tmp_path / "hf", "qwen3_moe", vocab=132)
    hf_to_megatron(source, tmp_path / "megatron", layout_of(2, 2, 2))
    hf, megatron = (inspect(tmp_path / name).lines(with_tensors=False) for name in ("hf", "megatron"))
    count = sum(tensor.numel() for tensor in tensors_of(source).values())
    assert hf[0] == "kind:        Hugging Face folder"
    assert hf[-2] == f"parameters:  {count:,} in {len(tensors_of(source))} tensors"
    assert megatron[0] == "kind:        megatron checkpoint, weights only"
    assert f"parameters:  {count:,} in 12 tensors" in megatron
    assert "saved with:  tensor=2, pipeline=2, expert=2" in megatron
    assert "step:        0" in megatron
    assert [line for line in hf if line.startswith(("family", "shape"))] == megatron[1:3]
    listed = inspect(tmp_path / "megatron").lines(with_tensors=True)
    assert "  decoder.layers.mlp.experts.experts.linear_fc2.weight  [4, 4, 24, 16]  float32" in listed


def test_nemo_and_gguf_are_recognised(tmp_path: Path) -> None:
    hf_to_megatron(make_folder(tmp_path / "hf", "qwen2"), tmp_path / "megatron", layout_of(1, 1))
    nemo = make_nemo(tmp_path / "nemo")
    (nemo / "weights").rmdir()
    (tmp_path / "megatron").rename(nemo / "weights")
    assert inspect(nemo).lines(False)[0] == "kind:        NeMo 2 checkpoint"
    found = inspect(write_gguf(tmp_path / "tiny.gguf"))
    assert (found.kind, found.facts) == ("GGUF file", {"model": "llama"})


def test_anything_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a Hugging Face folder"):
        inspect(tmp_path)


def test_tokens_to_compare_on(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hf")
    assert tokens_of(None, "1,2,3", folder).tolist() == [1, 2, 3]
    assert tokens_of(None, None, folder).tolist() == tokens_of(None, None, folder).tolist()
    with pytest.raises(UserError, match="--tokens 1,x: expected whole numbers"):
        tokens_of(None, "1,x", folder)
    with pytest.raises(UserError, match="1 tokens to compare on: at least 2"):
        tokens_of(None, "1", folder)


def test_both_sides_are_compared_on_a_cpu_also_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's sums differ by more than the tolerance in some models: that is no difference between the folders."""
    folder, started = make_folder(tmp_path / "hf"), []

    def start(settings: ActorConfig) -> None:
        started.append(device.choose_device(settings).type)
        raise UserError("far enough")

    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(device, "start", start)
    monkeypatch.setattr("a3po_megatron.launch.ranks.become_only_rank", lambda: None)
    tool = importlib.import_module("convert_checkpoint")
    with pytest.raises(UserError, match="far enough"):
        tool.run(tool.parse(["verify", str(folder), str(folder)]))
    assert started == ["cpu"]
    assert device.choose_device(scoring.SETTINGS).type == "cpu"
