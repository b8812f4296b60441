"""Controller and actor's link over a real socket, and the ways in which the recipe ends."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from a3po_megatron import wire
from a3po_megatron.controller.link import ActorLink, ControllerError
from a3po_megatron.controller.loop import Controller
from a3po_megatron.controller.messages import PublicationSent, RegisterReplica, WeightManifest
from a3po_megatron.controller.serve import RunStopped, bind, serve
from a3po_megatron.errors import UserError, exit_on_user_error, first_cause
from recipes import controller as recipe
from tests.fakes.fleet import FakeFleet
from tests.fakes.run import SMALL, TOKEN, make_controller

pytestmark = pytest.mark.timeout(60)

MODEL = Path(__file__).parents[2] / "configs/models/arithmetic_qwen3"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def register(port: int) -> None:
    body = wire.encode(RegisterReplica("r0", "http://127.0.0.1:1", 1))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    httpx.post(f"http://127.0.0.1:{port}/replicas/register", content=body, headers=headers).raise_for_status()


def actor(link: ActorLink, port: int) -> list[int]:
    """The sequence of calls that `link.py` shows."""
    sizes: list[int] = []
    register(port)
    with link:
        while (batch := link.next_batch(len(sizes))) is not None:
            version = len(sizes)
            sizes.append(len(batch.samples))
            plan = link.begin_publication(WeightManifest(version + 1, ["w"], ["float32"], [[2]]))
            assert plan.rendezvous["world_size"] == 2
            assert link.finish_publication(PublicationSent(version + 1)).members == ["r0"]
            link.report_step(version, version, {"loss": 0.1, "parity/logprob_max_abs": None})
        link.done("finished")
    return sizes


def test_a_run_over_a_real_socket_from_the_first_batch_to_the_last_evaluation(tmp_path: Path, port: int) -> None:
    async def main() -> tuple[Controller, list[int]]:
        controller = make_controller(tmp_path, FakeFleet(), 4, port=port)
        link = ActorLink(controller.config, TOKEN)
        serving = asyncio.create_task(serve(controller, TOKEN, bind("127.0.0.1", port)))
        sizes = await asyncio.to_thread(actor, link, port)
        await serving
        return controller, sizes

    controller, sizes = asyncio.run(main())
    assert sizes == [12] * 4
    assert sorted(controller.evaluations.results) == [0, 2, 4]
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_the_actor_hears_at_once_that_the_controller_failed(tmp_path: Path, port: int) -> None:
    async def main() -> tuple[BaseException, ControllerError, float]:
        fleet = FakeFleet()
        controller = make_controller(tmp_path, fleet, 4, port=port, poll_s=20.0)
        link = ActorLink(controller.config, TOKEN)
        serving = asyncio.create_task(serve(controller, TOKEN, bind("127.0.0.1", port)))
        call = asyncio.create_task(asyncio.to_thread(link.next_batch, 0))
        await asyncio.sleep(0.3)
        fleet.failure = RuntimeError("replica melted")
        started = time.monotonic()
        await asyncio.to_thread(register, port)
        results = await asyncio.gather(serving, call, return_exceptions=True)
        assert isinstance(results[0], BaseException)
        assert isinstance(results[1], ControllerError)
        return first_cause(results[0]), results[1], time.monotonic() - started

    cause, told, time_s = asyncio.run(main())
    assert str(cause) == "replica melted"
    assert "/batch" in str(told)
    assert time_s < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_says_where_it_was(tmp_path: Path, port: int, number: signal.Signals) -> None:
    async def main() -> None:
        controller = make_controller(tmp_path, FakeFleet(), 4, port=port)
        serving = asyncio.create_task(serve(controller, TOKEN, bind("127.0.0.1", port)))
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), number)
        await serving

    with pytest.raises(RunStopped, match=f"stopped by {number.name} at version 0"):
        asyncio.run(main())


def test_a_port_in_use_is_a_users_mistake(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UserError, match=rf"controller.port={port}: cannot listen on 127.0.0.1:{port}"),
    ):
        bind("127.0.0.1", port)


def test_a_link_without_a_controller_gives_up_at_its_deadline(port: int) -> None:
    from dataclasses import replace

    with (
        ActorLink(replace(SMALL, port=port), TOKEN, connect_timeout_s=0.5) as link,
        pytest.raises(ControllerError, match=f"/batch: no controller answers at http://127.0.0.1:{port}"),
    ):
        link.next_batch(0)


def test_a_link_with_a_wrong_token_is_refused(tmp_path: Path, port: int) -> None:
    async def main() -> None:
        controller = make_controller(tmp_path, FakeFleet(), 4, port=port)
        serving = asyncio.create_task(serve(controller, TOKEN, bind("127.0.0.1", port)))
        try:
            with ActorLink(controller.config, "another") as link:
                await asyncio.to_thread(link.next_batch, 0)
        finally:
            serving.cancel()
            await asyncio.wait((serving,))

    with pytest.raises(ControllerError, match="/batch: 401: the run's token is missing or wrong"):
        asyncio.run(main())


def run_recipe(*arguments: str) -> int:
    return exit_on_user_error(lambda: recipe.main(arguments))


@pytest.fixture
def config_file(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("A3PO_TOKEN", TOKEN)
    path = tmp_path / "config.yaml"
    path.write_text(
        f"run: {{dir: {tmp_path / 'run'}, num_steps: 2}}\nmodel: {{path: {MODEL}}}\ncontroller: {{port: {port}}}\n"
    )
    return str(path)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("controller.samples_per_prompt=1", "controller.samples_per_prompt=1: a sample is judged against the others"),
        ("controller.max_generated=0.5", "controller.max_generated=0.5: at least 1"),
        ("controller.eval_samples=4", "controller.eval_samples=4 with controller.eval_temperature=0: greedy responses"),
        ("controller.max_stragglers=-1", "controller.max_stragglers=-1: must be at least 0"),
        ("rollout.request_timeout_s=99", "rollout.request_timeout_s=99 is below controller.group_timeout_s=1800: one"),
        ("data.train.gsm8k={}", "data.train: sets of problems need data.task=problems; it is arithmetic"),
        ("controller.max_staleness=-1", "controller.max_staleness=-1: must be at least 0"),
        ("controller.host=0.0.0.0", "controller.host=0.0.0.0: would listen on every network"),
        ("controller.poll_s=0", "controller.poll_s=0.0: a number of seconds above 0"),
        ("controller.schedule=sometimes", "schedule"),
        ("reward.kind=numeric", "reward.kind=numeric does not fit data.task=arithmetic; use reward.kind=exact"),
        ("data.arithmetic.num_heldout=10000", "arithmetic.num_heldout=10000: there are 10000 questions"),
        ("rollout.temperature=0", "rollout.temperature=0.0"),
        ("controller.portt=1", "did you mean 'controller.port'?"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], config_file: str, override: str, line: str
) -> None:
    assert run_recipe(config_file, override) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_a_missing_token_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config_file: str
) -> None:
    monkeypatch.delenv("A3PO_TOKEN")
    assert run_recipe(config_file) == 2
    assert "cannot read the run's token" in capsys.readouterr().err


def test_a_run_without_a_replica_ends_with_exit_code_1_and_the_reason_on_the_last_line(
    capsys: pytest.CaptureFixture[str], config_file: str
) -> None:
    assert run_recipe(config_file, "controller.first_replica_timeout_s=0.2") == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error  # the line says it all
    assert error.splitlines()[-1].startswith("error: waited 0.2 s for the first rollout replica")


def test_a_port_in_use_and_the_folder_of_another_run_are_exit_code_2_and_touch_nothing(
    capsys: pytest.CaptureFixture[str], config_file: str, tmp_path: Path, port: int
) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert run_recipe(config_file) == 2
    assert f"controller.port={port}: cannot listen" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    assert run_recipe(config_file) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"
