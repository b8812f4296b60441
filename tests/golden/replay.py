"""Stored batches -> advantages, minibatches, optimizer steps -> rows: all of a run but sampling and judging."""

from pathlib import Path
from typing import Any

from a3po_megatron.actor.actor import Actor
from a3po_megatron.actor.batch_step import BatchStep
from a3po_megatron.config.load import load_config
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.controller.groups import batch_of
from a3po_megatron.controller.rows import sampled_metrics
from tests.golden.settings import CONFIG, RANDOM_MODEL, ROOT, overrides
from tests.golden.stored import FOLDER, read


def replay(method: str, *layout: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Train on the batches of a golden run of `folder`; return its rows. Collective; `layout`: settings of the actor."""
    config = load_config(TrainConfig, str(ROOT / CONFIG), [*overrides(method), *RANDOM_MODEL, *layout])
    shape = read_model_shape(str(ROOT / config.model.path))
    actor = Actor(shape, config.model, config.actor, config.optimizer, config.run.seed, config.rollout.temperature)
    batch_step = BatchStep(actor, config.algorithm, config.controller.max_staleness, config.run.seed)
    rows = []
    for version, step in enumerate(read(method, folder)):
        batch = batch_of(step.groups, config.advantage)
        known = sampled_metrics(batch, version, config.controller.max_staleness, config.controller.samples_per_prompt)
        rows.append({**known, **batch_step.train(batch, version)})
    actor.close()
    return rows
