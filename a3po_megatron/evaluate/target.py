"""What is evaluated: a Hugging Face folder, a checkpoint of a run, or servers that run already. Looks only at files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import yaml

from a3po_megatron.checkpoint_folder import MARKER, check_complete
from a3po_megatron.config.address import is_url, url_of
from a3po_megatron.config.data import ProblemSetConfig
from a3po_megatron.config.evaluation import EvaluateConfig
from a3po_megatron.config.load import load_config
from a3po_megatron.config.reward import RewardConfig
from a3po_megatron.config.schema import Config, PretrainConfig, TrainConfig
from a3po_megatron.data.sets import FORMATS
from a3po_megatron.errors import UserError

RUN_FILE = "config.yaml"  # of a run's folder


@dataclass(frozen=True)
class Target:
    """What the settings' `target` turned out to be."""

    kind: Literal["folder", "checkpoint", "fleet"]
    name: str  # for the report's folder
    model: Path  # with config.json and tokenizer; of a folder also the weights
    urls: tuple[str, ...] = ()  # of a fleet: of the controller, or of servers
    run: Path | None = None  # folder of the run it belongs to


def read_target(config: EvaluateConfig) -> tuple[Target, EvaluateConfig]:
    """Return the target and what `config` would be if all it says were `target`, `model` and the target's own settings.

    Raises UserError for a target that is nothing of the kind.
    """
    text = config.target
    if not text:
        raise UserError("target is empty: name a Hugging Face folder, a checkpoint, a run's folder or a URL")
    if "://" in text:
        target = _urls(config)
        return target, _within_positions(EvaluateConfig(), target.model)
    if config.model:
        raise UserError(f"model={config.model}: only a URL needs it; target={text} brings its own, leave model empty")
    folder = Path(text)
    if not folder.is_dir():
        raise UserError(f"target={text}: no such folder; name a Hugging Face folder, a checkpoint or a run's folder")
    if (folder / MARKER).exists() or folder.name.startswith("step_"):
        check_complete(folder)
        run = run_of(folder)
        settings = read_run_config(run)
        model = Path(settings.model.path)
        return Target("checkpoint", f"{run.name}_{folder.name}", model, run=run), _settings_of(settings)
    if (folder / RUN_FILE).exists():
        settings = read_run_config(folder)
        if not isinstance(settings, TrainConfig):
            raise UserError(f"target={text}: a run of {settings.recipe} has no fleet; name its model/ or a checkpoint")
        controller = settings.controller
        url = url_of(controller.host, controller.port)
        return Target("fleet", folder.name, Path(settings.model.path), (url,), folder), _settings_of(settings)
    if (folder / "config.json").exists():
        if not any(folder.glob("*.safetensors")):
            raise UserError(f"target={text}: no *.safetensors there, so there are no weights to evaluate")
        return Target("folder", folder.resolve().name, folder), _within_positions(EvaluateConfig(), folder)
    raise UserError(
        f"target={text}: neither a Hugging Face folder (config.json), nor a checkpoint ({MARKER}), nor a run ({RUN_FILE})"
    )


def _urls(config: EvaluateConfig) -> Target:
    urls = tuple(url.strip().rstrip("/") for url in config.target.split(","))
    for url in urls:
        if not is_url(url):
            raise UserError(
                f"target={config.target}: {url or '(empty)'} is no URL: http://HOST:PORT, with commas between"
            )
    if not config.model:
        raise UserError(
            "model is empty: a URL does not say which tokenizer to use; name the folder of the served model"
        )
    return Target("fleet", Path(config.model).name, Path(config.model), urls)


def _settings_of(run: Config) -> EvaluateConfig:
    """Return the settings with which a run itself evaluates."""
    if isinstance(run, TrainConfig):
        return EvaluateConfig(rollout=run.rollout, data=run.data, reward=run.reward)
    own = _within_positions(EvaluateConfig(), Path(run.model.path))
    data = replace(own.data, task="arithmetic", arithmetic=run.task)
    return replace(own, data=data, reward=RewardConfig(kind="exact"))


def _within_positions(config: EvaluateConfig, model: Path) -> EvaluateConfig:
    """Return the defaults with lengths that the model has positions for, half of them for the response.

    Only defaults give way: lengths that are set are refused where they do not fit, as are prompts that are too long.
    """
    positions = read_served_model(model).max_positions
    if config.rollout.max_model_len <= positions:
        return config
    lengths = replace(config.rollout, max_model_len=positions, max_response_tokens=positions // 2)
    return replace(config, rollout=lengths)


def run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to."""
    return checkpoint.resolve().parent.parent


def read_run_config(run: Path) -> Config:
    """Return the settings that a run saved in its folder. Raises UserError without them."""
    path = run / RUN_FILE
    try:
        recipe = yaml.safe_load(path.read_text())["recipe"]
    except OSError as error:
        raise UserError(
            f"{path}: cannot read the settings of the checkpoint's run: {error.strerror}; keep checkpoints in their run's "
            "folder"
        ) from None
    except (yaml.YAMLError, KeyError, TypeError):
        raise UserError(f"{path}: not the settings of a run: no recipe is named") from None
    schemas: dict[str, type[TrainConfig] | type[PretrainConfig]] = {"train": TrainConfig, "pretrain": PretrainConfig}
    if recipe not in schemas:
        raise UserError(f"{path}: settings of recipe {recipe!r}, not of a run; expected {' or '.join(schemas)}")
    return load_config(schemas[recipe], path)


@dataclass(frozen=True)
class ServedModel:
    """What a client must know of a model; vLLM knows the rest."""

    vocab_size: int
    max_positions: int


def read_served_model(folder: Path) -> ServedModel:
    """Read config.json of any model that vLLM serves, not only of those that the actor trains. Raises UserError."""
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return ServedModel(int(content["vocab_size"]), int(content["max_position_embeddings"]))
    except OSError as error:
        raise UserError(f"{path}: cannot read the model's config.json: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no vocab_size and max_position_embeddings in it ({error!r})") from None


def select_sets(config: EvaluateConfig) -> EvaluateConfig:
    """Return `config` with exactly the sets in `data.evaluation` that `sets` names. Raises UserError for an unknown one."""
    if config.data.task == "arithmetic":
        if config.sets:
            raise UserError(f"sets={config.sets}: data.task=arithmetic has one set; for others set data.task=problems")
        return config
    known = config.data.evaluation
    if not config.sets:
        if not known:
            raise UserError(f"sets is empty: name what to evaluate on, for example sets=[gsm8k] ({_names(())})")
        return config
    for name in config.sets:
        if name not in known and name not in FORMATS:
            raise UserError(
                f"sets: no set is called {name!r}; there are {_names(tuple(known))}, or data.evaluation.{name}"
            )
    chosen = {name: known.get(name, ProblemSetConfig()) for name in config.sets}
    return replace(config, data=replace(config.data, evaluation=chosen))


def _names(own: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys([*own, *FORMATS]))
