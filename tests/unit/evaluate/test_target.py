"""What can be evaluated, which settings come with it, and how a mistake is named."""

import json
from pathlib import Path

import pytest

from a3po_megatron.checkpoint_folder import MARKER
from a3po_megatron.config.evaluation import EvaluateConfig
from a3po_megatron.config.load import load_config, save_run_record
from a3po_megatron.config.schema import PretrainConfig, TrainConfig
from a3po_megatron.errors import UserError
from a3po_megatron.evaluate import build

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "configs").glob("evaluate*.yaml"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model's: nothing here reads weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 16, "max_position_embeddings": 64}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    """The folder of a run with one checkpoint."""
    folder = tmp_path / "run"
    overrides = [f"model.path={model}", "rollout.max_response_tokens=7", "controller.port=8765", "controller.host=::1"]
    save_run_record(load_config(TrainConfig, None, overrides), folder)
    checkpoint = folder / "checkpoints" / "step_000003"
    checkpoint.mkdir(parents=True)
    (checkpoint / MARKER).write_text('{"files": {}}')
    return folder


def test_a_hugging_face_folder_is_served_as_it_is(model: Path) -> None:
    config, target = build.resolve(None, [f"target={model}", "sets=[gsm8k,aime24]"])
    assert (target.kind, target.model, target.name) == ("folder", model, "model")
    assert list(config.data.evaluation) == ["gsm8k", "aime24"]
    assert (config.reward.kind, config.data.task) == ("math", "problems")


@pytest.mark.parametrize("part", ["", "checkpoints/step_000003"])
def test_a_run_and_its_checkpoint_bring_the_runs_own_settings(run: Path, model: Path, part: str) -> None:
    config, target = build.resolve(None, [f"target={run / part}"])
    assert (target.kind, target.model) == ("checkpoint" if part else "fleet", model)
    assert target.urls == (() if part else ("http://[::1]:8765",))
    assert (config.data.task, config.reward.kind, config.rollout.max_response_tokens) == ("arithmetic", "exact", 7)
    config, _ = build.resolve(None, [f"target={run / part}", "rollout.max_response_tokens=9"])
    assert config.rollout.max_response_tokens == 9


def test_a_checkpoint_of_the_warm_start_is_evaluated_on_its_task(tmp_path: Path, run: Path) -> None:
    save_run_record(
        load_config(PretrainConfig, None, ["task.num_heldout=11", f"model.path={run.parent / 'model'}"]), run
    )
    config, _ = build.resolve(None, [f"target={run / 'checkpoints/step_000003'}"])
    assert (config.data.task, config.data.arithmetic.num_heldout, config.reward.kind) == ("arithmetic", 11, "exact")
    with pytest.raises(UserError, match="a run of pretrain has no fleet"):
        build.resolve(None, [f"target={run}"])


@pytest.mark.parametrize("positions", [64, 4096])
def test_default_lengths_follow_a_model_of_few_positions(
    tmp_path: Path, run: Path, model: Path, positions: int
) -> None:
    """Of a folder, of a checkpoint of the warm start, and of what a URL serves; what is set is kept."""
    (model / "config.json").write_text(json.dumps({"vocab_size": 16, "max_position_embeddings": positions}))
    save_run_record(load_config(PretrainConfig, None, [f"model.path={model}"]), run)
    targets = ([f"target={model}", "sets=[gsm8k]"], [f"target={run / 'checkpoints/step_000003'}"])
    for overrides in (*targets, ["target='http://a:1'", f"model={model}", "sets=[gsm8k]"]):
        config, target = build.resolve(None, overrides)
        assert build.check(config, target) == 16
        lengths = config.rollout.max_model_len, config.rollout.max_response_tokens
        assert lengths == ((64, 32) if positions == 64 else (2048, 1024))
        config, _ = build.resolve(None, [*overrides, "rollout.max_model_len=48"])
        assert config.rollout.max_model_len == 48


def test_urls_need_a_model_and_may_be_several(model: Path) -> None:
    _, target = build.resolve(None, ["target='http://a:1/, http://b:2'", f"model={model}", "sets=[math500]"])
    assert (target.kind, target.urls, target.model) == ("fleet", ("http://a:1", "http://b:2"), model)


def test_sets_choose_among_those_of_the_settings_and_the_known_ones(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "evaluate.yaml"
    mine = "{kind: columns, path: x.jsonl, problem_column: q, answer_column: a}"
    path.write_text(
        f"recipe: evaluate\ntarget: {model}\ndata: {{evaluation: {{mine: {mine}, aime25: {{limit: 3}}}}}}\n"
    )
    assert list(build.resolve(str(path), [])[0].data.evaluation) == ["mine", "aime25"]
    config, _ = build.resolve(str(path), ["sets=[aime25,gsm8k]"])
    assert {name: one.limit for name, one in config.data.evaluation.items()} == {"aime25": 3, "gsm8k": 0}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target=nowhere"], "target=nowhere: no such folder"),
        ([], "target is empty: name a Hugging Face folder"),
        (["target=EMPTY"], "neither a Hugging Face folder"),
        (["target=NO_WEIGHTS"], r"no \*\.safetensors there"),
        (["target=CHECKPOINT/../step_000004"], "step_000004: no such folder"),
        (["target=INCOMPLETE"], r"complete\.json is missing"),
        (["target=ORPHAN"], r"config\.yaml: cannot read the settings of the checkpoint's run"),
        (["target=http://127.0.0.1:1", "sets=[gsm8k]"], "model is empty: a URL does not say which tokenizer"),
        (["target='http://a:1,b:2'", "model=MODEL"], "b:2 is no URL"),
        (["target=http://a:b", "model=MODEL"], "http://a:b is no URL"),
        (["target=MODEL", "model=MODEL", "sets=[gsm8k]"], "only a URL needs it"),
        (["target=MODEL"], r"sets is empty: name what to evaluate on.*gsm8k, dapo, math500, aime24, aime25"),
        (["target=MODEL", "sets=[gsm9k]"], "sets: no set is called 'gsm9k'; there are gsm8k"),
        (["target=RUN", "sets=[gsm8k]"], "data.task=arithmetic has one set"),
        (["target=MODEL", "sets=[gsm8k]", "num_samples=4"], "num_samples=4 with temperature=0"),
        (["target=MODEL", "sets=[gsm8k]", "temperature=1", "pass_k=[2]"], "pass@2 needs k between 1 and num_samples=1"),
        (["target=MODEL", "sets=[gsm8k]", "max_problems=-1"], "max_problems=-1: must be at least 0"),
        (["target=MODEL", "sets=[gsm8k]", "timeout_s=0"], "timeout_s=0.0: a number of seconds above 0"),
        (["target=MODEL", "sets=[gsm8k]", "rollout.max_model_len=65"], "max_model_len=65: .* at most 64 positions"),
        (["target=MODEL", "sets=[gsm8k]", "rollout.max_response_tokens=64"], "max_model_len=64 leaves no room"),
        (["target=MODEL", "sets=[gsm8k]", "reward.kind=exact"], "reward.kind=exact does not fit data.task=problems"),
        (["target=MODEL", "set=[gsm8k]"], "unknown key 'set'; did you mean 'sets'?"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, model: Path, run: Path, overrides: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no_weights").mkdir()
    (tmp_path / "no_weights" / "config.json").write_text("{}")
    (run / "checkpoints" / "step_000005").mkdir()
    orphan = tmp_path / "a" / "b" / "step_000001"
    orphan.mkdir(parents=True)
    (orphan / MARKER).write_text('{"files": {}}')
    places = {
        "EMPTY": tmp_path / "empty",
        "NO_WEIGHTS": tmp_path / "no_weights",
        "CHECKPOINT": run / "checkpoints" / "step_000003",
        "INCOMPLETE": run / "checkpoints" / "step_000005",
        "ORPHAN": orphan,
        "MODEL": model,
        "RUN": run,
    }
    for name, place in places.items():
        overrides = [override.replace(f"={name}", f"={place}") for override in overrides]
    with pytest.raises(UserError, match=message) as caught:
        build.check(*build.resolve(None, overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "already holds an evaluation; name another, or leave dir empty"),
        (["data.arithmetic.num_heldout=0"], "data.arithmetic.num_heldout=0: there is no problem to evaluate on"),
        (["token_file=secret"], "token_file=secret: only servers that run already have one"),
        (["rollout.max_model_len=9"], r"max_model_len=9: problem '.*' has 6 prompt tokens, .* that is 10; raise"),
    ],
)
def test_what_shows_once_the_problems_are_read_is_one_line_too(
    tmp_path: Path, model: Path, overrides: list[str], message: str
) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "report.json").write_text("{}")
    settings = [
        "data.task=arithmetic",
        "reward.kind=exact",
        "rollout.max_model_len=16",
        "rollout.max_response_tokens=4",
    ]
    config, target = build.resolve(None, [f"target={model}", f"dir={tmp_path / 'report'}", *settings, *overrides])
    with pytest.raises(UserError, match=message):
        build.prepare(config, target)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_file_fits_a_model_of_its_size(path: Path, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"vocab_size": 151936, "max_position_embeddings": 40960}))
    config, target = build.resolve(str(path), [f"target={model}"])
    assert build.check(config, target) == 151936
    assert isinstance(config, EvaluateConfig)


def test_there_are_shipped_files() -> None:
    assert len(SHIPPED) >= 2
