"""From the settings of a run to a controller that can run."""

import math
from functools import partial
from pathlib import Path

from a3po_megatron.config.controller import ControllerConfig
from a3po_megatron.config.model_shape import read_model_shape
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.controller.loop import Controller
from a3po_megatron.controller.parts import Parts
from a3po_megatron.controller.rows import RunFiles
from a3po_megatron.data.check import check_data, check_lengths
from a3po_megatron.data.load import load_task
from a3po_megatron.data.source import PromptSource
from a3po_megatron.errors import UserError
from a3po_megatron.evaluate.check import OF_RUN, check_samples
from a3po_megatron.reward.build import Rewards, check_reward
from a3po_megatron.rollout.fleet import Fleet
from a3po_megatron.rollout.sampling import SamplingSettings, check_rollout


def build_controller(config: TrainConfig, token: str) -> Controller:
    """Load the problems and put everything together, for settings that `check_controller` has passed.

    Starts the files of the run's folder, and the reward's workers where they have to look at the answers. Raises
    UserError for a file or row that is wrong, or another run's folder.
    """
    data = load_task(config.data, config.model, config.rollout.max_model_len - config.rollout.max_response_tokens)
    heldout = data.heldout(config.controller.max_eval_problems)
    check_lengths([*data.train, *heldout], config.rollout)
    run_dir = Path(config.run.dir)
    files = RunFiles(run_dir, data.decode, resume=config.run.resume)
    if data.report is not None:
        data.report.save(run_dir / "data_report.json")
        print(*data.report.lines(), sep="\n", flush=True)
    vocab_size = read_model_shape(config.model.path).vocab_size

    rewards = Rewards(config.reward, data.decode_answer, config.rollout.max_response_tokens)
    rewards.check([*data.train, *heldout])
    parts = Parts(
        fleet=Fleet(config.rollout, token, run_dir / "rendezvous", vocab_size=vocab_size),
        source=PromptSource(data.train, config.run.seed),
        heldout=heldout,
        reward=rewards.training,
        evaluation_reward=rewards.evaluation,
        advantage=config.advantage,
        shuffle_rewards=config.reward.shuffle,
        sampling=SamplingSettings.from_config(config.rollout),
        evaluation_sampling=SamplingSettings.from_config(config.rollout, config.controller.eval_temperature),
        files=files,
        say=partial(print, flush=True),
        close_rewards=rewards.aclose,
    )
    return Controller(config.controller, config.run.num_steps, config.run.seed, parts)


def check_controller(config: TrainConfig) -> None:
    """Refuse controller, rollout, data and reward settings that cannot work. Raises UserError."""
    check_rollout(config.rollout)
    check_data(config.data)
    controller = config.controller
    at_least: dict[str, int] = {
        "prompts_per_batch": 1,
        "max_concurrent_groups": 1,
        "max_concurrent_evals": 1,
        "max_staleness": 0,
        "eval_every": 0,
        "max_eval_problems": 0,
        "max_stragglers": 0,
    }
    for name, minimum in at_least.items():
        if getattr(controller, name) < minimum:
            raise UserError(f"controller.{name}={getattr(controller, name)}: must be at least {minimum}")
    if controller.samples_per_prompt < 2:
        raise UserError(
            f"controller.samples_per_prompt={controller.samples_per_prompt}: a sample is judged against the others of "
            "its prompt, so at least 2 are needed"
        )
    if not 1 <= controller.max_generated < math.inf:
        raise UserError(
            f"controller.max_generated={controller.max_generated}: at least 1, which generates no group twice; 4 is usual"
        )
    check_samples(controller.eval_samples, controller.eval_temperature, controller.eval_pass_k, OF_RUN)
    for name in _timeouts(controller):
        if getattr(controller, name) <= 0:
            raise UserError(f"controller.{name}={getattr(controller, name)}: a number of seconds above 0")
    if config.rollout.request_timeout_s < controller.group_timeout_s:
        raise UserError(
            f"rollout.request_timeout_s={config.rollout.request_timeout_s:g} is below controller.group_timeout_s="
            f"{controller.group_timeout_s:g}: one response would end its group before the group's own deadline; make it as long"
        )
    if controller.host in ("", "0.0.0.0", "::"):
        raise UserError(
            f"controller.host={controller.host or '(empty)'}: would listen on every network; name the loopback "
            "(127.0.0.1) or the cluster's private address"
        )
    if not 1 <= controller.port <= 65535:
        raise UserError(f"controller.port={controller.port}: between 1 and 65535")
    check_reward(config.reward, config.data.task, config.rollout.max_response_tokens)


def _timeouts(controller: ControllerConfig) -> list[str]:
    return [name for name in vars(controller) if name.endswith("_s")]
