"""One run on this machine: folder and token, then controller, rollout supervisor and actor, watched to the end.

    folder, token -> controller answers -> rollout, actor -> ... steps ... -> actor, controller done -> end the rest

A role that fails, a signal and a good end all lead to the same ending: every role is stopped in order and nothing that
they started is left, neither process nor port nor shared memory.
"""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

import a3po_megatron
from a3po_megatron.config.address import url_of
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import USER_ERROR_EXIT_CODE
from a3po_megatron.launch.ports import check_port, check_server_ports
from a3po_megatron.launch.processes import Role, Roles
from a3po_megatron.launch.run_folder import open_run_folder
from a3po_megatron.launch.signals import SignalCount
from a3po_megatron.observe.progress import Progress
from a3po_megatron.run_token import TOKEN_VARIABLE

POLL_S = 0.1
CONTROLLER_START_S = 120.0  # reading the problems included
STOP_ACTOR_S, STOP_CONTROLLER_S = 20.0, 10.0
STOP_ROLLOUT_SLACK_S = 10.0  # beyond what the supervisor gives its servers
LAST_LINES = 8  # of a failing role's log


@dataclass(frozen=True)
class Ending:
    """How a run ended: the exit code of the launcher, and what to say (empty after a good end)."""

    exit_code: int
    reason: str
    log: Sequence[str] = ()  # last lines of the role that failed


def prepare(config: TrainConfig) -> str:
    """Check ports and the run's folder, write its token and its record; return the token. Raises UserError."""
    check_port("controller.port", config.controller.host, config.controller.port)
    check_server_ports(config.rollout)
    token = open_run_folder(config)
    if not config.run.resume:
        # Of an attempt that failed before its first step.
        shutil.rmtree(Path(config.run.dir) / "logs", ignore_errors=True)
    return token


def run(config: TrainConfig, arguments: Sequence[str], token: str, progress: Progress) -> Ending:
    """Run all roles to the end. `arguments` are what every role parses: the YAML file, then overrides."""
    stop_rollout_s = config.rollout.stop_timeout_s + STOP_ROLLOUT_SLACK_S
    url = url_of(config.controller.host, config.controller.port)
    roles = Roles(Path(config.run.dir) / "logs", _environment(token))
    with SignalCount() as signals:
        try:
            controller = roles.start("controller", ["-m", "recipes.controller", *arguments], STOP_CONTROLLER_S)
            progress.phase("the controller reads the problems")
            failure = _wait_for_controller(controller, url, token, signals)
            if failure is not None:
                return failure
            rollout = ["-m", "recipes.rollout", arguments[0], "--controller", url, "--node", "local", *arguments[1:]]
            roles.start("rollout", rollout, stop_rollout_s)
            roles.start("actor", ["-m", "recipes.actor", *arguments], STOP_ACTOR_S)
            progress.phase("vLLM and the actor start, the initial weights are evaluated")
            return _watch(roles, signals, progress, config.controller.actor_timeout_s)
        finally:
            progress.phase("the roles end")
            roles.stop(["actor", "rollout", "controller"], signals.in_a_hurry)


def _watch(roles: Roles, signals: SignalCount, progress: Progress, last_words_s: float) -> Ending:
    """Show progress until a role fails, a signal comes, or actor and controller are both done."""
    one_done_at: float | None = None
    while True:
        progress.update()
        if signals.first is not None:
            return _interrupted(signals.first)
        ended = roles.ended()
        for role in ended:
            if role.exit_code != 0 or role.name == "rollout":
                return _failed(role)
        if len(ended) == 2:  # not the rollout: it serves until it is told to end
            progress.update()
            return Ending(0, "")
        if ended:
            one_done_at = one_done_at or time.monotonic()
            if time.monotonic() - one_done_at > last_words_s:
                return Ending(1, f"{ended[0].ending()}, but the other one did not end within {last_words_s:g} s")
        time.sleep(POLL_S)


def _wait_for_controller(controller: Role, url: str, token: str, signals: SignalCount) -> Ending | None:
    """Return None once the controller answers, else why it will not."""
    deadline = time.monotonic() + CONTROLLER_START_S
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=5.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            if signals.first is not None:
                return _interrupted(signals.first)
            if controller.exit_code is not None:
                return _failed(controller)
            try:
                code = client.get("/status").status_code
            except httpx.TransportError:
                code = None  # it does not listen yet
            if code == 200:
                return None
            if code == 401:
                return Ending(1, f"another program with another token answers at {url}")
            time.sleep(POLL_S)
    return Ending(1, f"the controller did not answer at {url} within {CONTROLLER_START_S:g} s; log: {controller.log}")


def _failed(role: Role) -> Ending:
    """A role that ended when it should not. A user's mistake is told in the role's own line."""
    lines = role.last_lines(LAST_LINES)
    mistakes = [line for line in lines if line.startswith("error: ")]
    if role.exit_code == USER_ERROR_EXIT_CODE and mistakes:
        return Ending(USER_ERROR_EXIT_CODE, mistakes[-1].removeprefix("error: "))
    return Ending(1, f"{role.ending()}; its whole log: {role.log}", lines)


def _interrupted(number: signal.Signals) -> Ending:
    return Ending(128 + number, f"stopped by {number.name}; every role has been ended")


def _environment(token: str) -> dict[str, str]:
    """Return the environment of the roles: this one, the package wherever it is, and the token."""
    environment = dict(os.environ)
    root = str(Path(a3po_megatron.__file__).resolve().parent.parent)
    paths = [root, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    return environment | {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path for path in paths if path)),
        "PYTHONUNBUFFERED": "1",  # a killed role has written what it said
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
        TOKEN_VARIABLE: token,
    }
