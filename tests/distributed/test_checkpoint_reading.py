"""A checkpoint that is damaged, foreign or hostile is refused in one line, and runs nothing."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.models.gpt import GPTModel

from a3po_megatron.actor import checkpoint_writer
from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.checkpoint import load_checkpoint
from a3po_megatron.actor.checkpoint_reading import read_metadata
from a3po_megatron.actor.checkpoint_writer import save_checkpoint
from a3po_megatron.errors import UserError
from a3po_megatron.objective.supervised import SupervisedLoss
from tests.distributed.layouts import Layout, Model, build_actor, random_sequences, save_model

TRACE = "A3PO_TEST_HOSTILE_CODE_RAN"


class Hostile:
    """Unpickled as a plain pickle, it sets an environment variable."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.putenv, (TRACE, "1")  # by name posix.putenv


def metadata_runs_code(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile()))


def metadata_names_another_file(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../model/model.safetensors"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def metadata_is_of_another_kind(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"weights": [1, 2]}))


def metadata_is_torn(folder: Path) -> None:
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:500])


def data_of_rank_1_is_blank(folder: Path) -> None:
    data = folder / "__1_0.distcp"
    data.write_bytes(bytes(data.stat().st_size))


def random_state_runs_code(folder: Path) -> None:
    for path in folder.glob("random_*.pt"):
        torch.save(Hostile(), path)


def common_file_runs_code(folder: Path) -> None:
    torch.save(Hostile(), folder / "common.pt")


DAMAGE = {
    metadata_runs_code: r"/\.metadata: refused: it asks for posix\.putenv, which no checkpoint's metadata needs",
    metadata_names_another_file: r"/\.metadata: refused: it names the file '\.\./\.\./model/model\.safetensors'",
    metadata_is_of_another_kind: r"/\.metadata: damaged metadata of a checkpoint \(AssertionError\)",
    metadata_is_torn: r"/\.metadata: damaged metadata of a checkpoint \(UnpicklingError\)",
    data_of_rank_1_is_blank: r"step_000001: the checkpoint cannot be read or does not fit the model: ",
    random_state_runs_code: r"/random_0000\d\.pt: refused: it asks for posix\.putenv; a checkpoint holds tensors and plain",
    common_file_runs_code: r"/common\.pt: refused: a checkpoint of another program or version",
}


def saved(shared_folder: Path) -> tuple[Actor, Path]:
    actor = build_actor(save_model(Model().build(), shared_folder / "model"), Layout(tp=2, pp=2).config())
    actor.train_step(random_sequences(), SupervisedLoss())
    path = save_checkpoint(actor, shared_folder / "checkpoints", 1)
    os.unsetenv(TRACE)  # megatron compares the ranks' states by pickles of its own while it saves
    return actor, path


def hostile_code_ran() -> bool:
    return bool(os.popen(f"echo ${TRACE}").read().strip())


def spoil(folder: Path, damage: Callable[[Path], None]) -> None:
    """Damage the checkpoint, once for all ranks, and let its marker fit, as whoever means harm would."""
    if dist.get_rank() == 0:
        damage(folder)
        files = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "complete.json"}
        (folder / "complete.json").write_text(json.dumps({"step": 1, "files": files}))
    dist.barrier()


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_or_hostile_checkpoint_is_one_line_on_every_rank(
    damage: Callable[[Path], None], shared_folder: Path
) -> None:
    actor, path = saved(shared_folder)
    load_checkpoint(actor, path)
    spoil(path, damage)
    with pytest.raises(UserError, match=DAMAGE[damage]) as refusal:
        load_checkpoint(actor, path)
    assert "\n" not in str(refusal.value)
    assert not hostile_code_ran()
    actor.close()


def test_an_object_among_the_tensors_that_would_run_code_is_refused_with_its_file(shared_folder: Path) -> None:
    state = checkpoint_writer.checkpoint_state
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            checkpoint_writer, "checkpoint_state", lambda *a, **k: {**state(*a, **k), "more": Hostile()}
        )
        actor, path = saved(shared_folder)
    with pytest.raises(UserError, match=r"/__0_0\.distcp: refused: it asks for posix\.putenv"):
        load_checkpoint(actor, path)
    assert not hostile_code_ran()
    actor.close()


def test_what_transformer_engine_keeps_of_each_expert_is_neither_written_nor_asked_for(shared_folder: Path) -> None:
    """As its grouped layers name it: an entry for each expert, none of which a rank holds whole."""
    whole, prefix = GPTModel.sharded_state_dict, "decoder.layers.0.mlp.experts.experts.linear_fc1._extra_state"

    def with_extra_states(*args: Any, **kwargs: Any) -> dict[str, Any]:
        names = {f"{prefix}{number}" for number in ("", *range(1, 12))}
        extra = {name: ShardedObject(prefix, torch.zeros(2), (24,), (0,), replica_id=dist.get_rank()) for name in names}
        return {**whole(*args, **kwargs), **extra}

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(GPTModel, "sharded_state_dict", with_extra_states)
        actor, path = saved(shared_folder)
        assert not [key for key in read_metadata(path).state_dict_metadata if "_extra_state" in key]
        assert load_checkpoint(actor, path) == 1
    actor.close()


def test_what_transformer_engine_adds_is_left_and_what_else_the_model_has_no_use_for_is_named(
    shared_folder: Path,
) -> None:
    state = checkpoint_writer.checkpoint_state

    def with_more(key: str) -> Callable[..., dict[str, Any]]:
        def more(*args: Any, **kwargs: Any) -> dict[str, Any]:
            # The rank is the replica: rank 0 writes it.
            extra = ShardedObject(key, torch.zeros(2), (1,), (0,), replica_id=dist.get_rank())
            return {**state(*args, **kwargs), "more": extra}

        return more

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            checkpoint_writer, "checkpoint_state", with_more("decoder.layers.0.mlp.linear_fc1._extra_state12")
        )
        actor, path = saved(shared_folder)
        assert load_checkpoint(actor, path) == 1
        monkeypatch.setattr(checkpoint_writer, "checkpoint_state", with_more("value_head.weight"))
        path = save_checkpoint(actor, shared_folder / "checkpoints", 2)
    with pytest.raises(UserError, match=r"does not fit the model: it also holds value_head\.weight$"):
        load_checkpoint(actor, path)
    actor.close()
