"""From the settings of `recipes/evaluate.py` to everything that one evaluation needs, checked before anything starts."""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from a3po_megatron.config.evaluation import EvaluateConfig
from a3po_megatron.config.load import load_config, save_run_record
from a3po_megatron.data.check import check_evaluation_data, check_lengths
from a3po_megatron.data.load import TaskData, load_evaluation
from a3po_megatron.errors import UserError
from a3po_megatron.evaluate.check import OF_COMMAND, check_samples, ks_of
from a3po_megatron.evaluate.loop import EvaluationPlan, answer_problems
from a3po_megatron.evaluate.own_servers import with_own_servers
from a3po_megatron.evaluate.result import Result, result_of
from a3po_megatron.evaluate.running_fleet import RunningFleet
from a3po_megatron.evaluate.target import Target, read_served_model, read_target, select_sets
from a3po_megatron.records import Problem
from a3po_megatron.reward.build import Rewards, check_reward
from a3po_megatron.rollout.generator import Generator
from a3po_megatron.rollout.sampling import SamplingSettings, check_rollout
from a3po_megatron.run_token import TOKEN_VARIABLE, read_run_token

DEFAULT_FOLDER = Path("runs/evaluations")

Say = Callable[[str], None]
FollowProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """One evaluation that may start."""

    config: EvaluateConfig
    target: Target
    vocab_size: int
    data: TaskData
    problems: Sequence[Problem]
    token: str
    folder: Path  # for the report

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k."""
        return ks_of(self.config.pass_k, self.config.num_samples)

    def about(self) -> dict[str, Any]:
        """Return what the report says of the evaluation besides its figures."""
        config = self.config
        return {
            "target": config.target,
            "kind": self.target.kind,
            "num_samples": config.num_samples,
            "temperature": config.temperature,
            "seed": config.seed,
            "max_response_tokens": config.rollout.max_response_tokens,
            "reward": config.reward.kind,
        }


def resolve(config_file: str | None, overrides: Sequence[str]) -> tuple[EvaluateConfig, Target]:
    """Return the settings and what they name. Those of the target's run come first, then the file's, then the overrides'."""
    target, defaults = read_target(load_config(EvaluateConfig, config_file, overrides))
    return select_sets(load_config(EvaluateConfig, config_file, overrides, defaults)), target


def check(config: EvaluateConfig, target: Target) -> int:
    """Check the settings against each other and the model; return the size of its vocabulary. Raises UserError."""
    check_samples(config.num_samples, config.temperature, config.pass_k, OF_COMMAND)
    if config.token_file and target.kind != "fleet":
        raise UserError(f"token_file={config.token_file}: only servers that run already have one; leave it empty")
    for name, minimum in {"max_problems": 0, "max_concurrent": 0, "seed": 0}.items():
        if getattr(config, name) < minimum:
            raise UserError(f"{name}={getattr(config, name)}: must be at least {minimum}")
    if not config.timeout_s > 0:
        raise UserError(f"timeout_s={config.timeout_s}: a number of seconds above 0")
    check_rollout(config.rollout)
    check_evaluation_data(config.data)
    check_reward(config.reward, config.data.task, config.rollout.max_response_tokens)
    model = read_served_model(target.model)
    if config.rollout.max_model_len > model.max_positions:
        raise UserError(
            f"rollout.max_model_len={config.rollout.max_model_len}: {target.model} is made for at most "
            f"{model.max_positions} positions (max_position_embeddings)"
        )
    return model.vocab_size


def prepare(config: EvaluateConfig, target: Target) -> Job:
    """Check everything, read the problems, and make the report's folder. Raises UserError."""
    vocab_size = check(config, target)
    data = load_evaluation(config.data, str(target.model))
    problems = data.heldout(config.max_problems or None)
    if not problems:
        raise UserError("data.arithmetic.num_heldout=0: there is no problem to evaluate on; hold some out")
    check_lengths(problems, config.rollout)
    token = _token_of(config, target)
    folder = Path(config.dir) if config.dir else DEFAULT_FOLDER / f"{target.name}_{time.strftime('%Y%m%d-%H%M%S')}"
    if (folder / "report.json").exists():
        raise UserError(f"dir={folder} already holds an evaluation; name another, or leave dir empty")
    try:
        save_run_record(config, folder)
    except OSError as error:
        raise UserError(f"dir={folder}: cannot write there: {error.strerror}; name a folder of yours") from None
    return Job(config, target, vocab_size, data, problems, token, folder)


def _token_of(config: EvaluateConfig, target: Target) -> str:
    """Return the secret of the servers: a new one for our own."""
    if target.kind != "fleet":
        return secrets.token_hex(32)
    if config.token_file:
        try:
            token = Path(config.token_file).read_text().strip()
        except OSError as error:
            raise UserError(f"token_file={config.token_file}: cannot read it: {error.strerror}") from None
        if not token:
            raise UserError(f"token_file={config.token_file}: the file is empty; it is `token` in the run's folder")
        return token
    if target.run is not None:
        return read_run_token(target.run)
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise UserError(
            f"token_file is empty and {TOKEN_VARIABLE} is not set: servers answer only who shows the token of their run"
        )
    return token


async def run(job: Job, model: Path, say: Say, progress: FollowProgress) -> tuple[Result, float]:
    """Evaluate; return the result and the seconds that the answers took. `model`: the weights' folder, of own servers."""
    config = job.config
    concurrent = config.max_concurrent or config.rollout.num_servers * config.rollout.max_num_seqs
    sampling = SamplingSettings.from_config(config.rollout, config.temperature)
    plan = EvaluationPlan(sampling, config.num_samples, concurrent, config.timeout_s, "timeout_s", config.seed)
    rewards = Rewards(config.reward, job.data.decode_answer, config.rollout.max_response_tokens)
    rewards.check(job.problems)

    async def work(fleet: Generator) -> tuple[Result, float]:
        started = time.monotonic()
        name = f"evaluate-{secrets.token_hex(4)}"  # a running fleet has other requests too
        answers = await answer_problems(fleet, job.problems, rewards.evaluation, plan, name, progress)
        return result_of(answers, job.ks), time.monotonic() - started

    try:
        if job.target.kind != "fleet":
            return await with_own_servers(
                config.rollout, model, job.token, job.vocab_size, config.seed, job.folder / "logs", say, work
            )
        fleet = RunningFleet(config.rollout, job.token, job.vocab_size)
        try:
            await fleet.connect(job.target.urls)
            say(f"servers: {', '.join(fleet.urls)}")
            return await work(fleet)
        finally:
            await fleet.aclose()
    finally:
        await rewards.aclose()
