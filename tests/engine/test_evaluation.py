"""Evaluation with real vLLM: a fleet that runs and is published to meanwhile, and whole models through the command."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from a3po_megatron.data.folder import data_folder
from a3po_megatron.errors import UserError
from a3po_megatron.evaluate.loop import EvaluationPlan, answer_problems
from a3po_megatron.evaluate.result import result_of
from a3po_megatron.evaluate.running_fleet import RunningFleet
from a3po_megatron.records import Problem
from a3po_megatron.reward.base import Part, WeightedSum
from a3po_megatron.reward.exact import judge_exact
from a3po_megatron.rollout.client import Generation, PartialGeneration
from a3po_megatron.rollout.generator import Generator
from a3po_megatron.rollout.sampling import SamplingSettings
from recipes.evaluate import main
from tests.engine.conftest import TOKEN, rollout_config
from tests.engine.paced_scheduler import slow_from
from tests.engine.tiny_model import VOCABULARY, make_model, reference_logprobs
from tools.fetch_smollm2 import DEFAULT_DESTINATION, find_gguf

ROOT = Path(__file__).parents[2]
REWARD = WeightedSum([Part("answer", 1.0, judge_exact)])


class Watched:
    """Passes requests on and keeps what has come of each response."""

    def __init__(self, fleet: Generator) -> None:
        self.fleet = fleet
        self.partials: list[PartialGeneration] = []

    async def generate(self, prompt_ids, sampling, request_id, partial=None) -> Generation:
        self.partials.append(PartialGeneration())
        return await self.fleet.generate(prompt_ids, sampling, request_id, self.partials[-1])


@pytest.mark.timeout(300)  # the first test waits for the server
def test_the_command_evaluates_a_running_server_twice_with_the_same_result(live, tmp_path, capsys):
    (tmp_path / "token").write_text(TOKEN)
    model = live.rendezvous_dir.parent / "model"
    settings = [
        "data.task=arithmetic",
        "reward.kind=exact",
        "rollout.max_model_len=64",
        "rollout.max_response_tokens=8",
    ]
    for name in ("first", "second"):
        arguments = [f"model={model}", f"token_file={tmp_path}/token", f"dir={tmp_path}/{name}", "max_problems=20"]
        assert main([live.server.url, *arguments, *settings]) == 0
    out = capsys.readouterr().out
    assert f"responses: 20 by version {live.version}" in out
    first, second = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("first", "second"))
    assert first == second
    report = json.loads((tmp_path / "first" / "report.json").read_text())
    assert report["responses_by_versions"] == [{"oldest": live.version, "newest": live.version, "responses": 20}]
    (tmp_path / "token").write_text("guessed")
    with pytest.raises(UserError, match="another run's token, or none"):
        main([live.server.url, f"model={model}", f"token_file={tmp_path}/token", f"dir={tmp_path}/third", *settings])


@pytest.mark.timeout(300)
def test_weights_may_be_published_during_an_evaluation_whose_tokens_are_each_of_the_version_they_name(live):
    problems = [Problem(f"p{i}", np.array([5, 17 + i, 42], np.int32), "1", "tiny") for i in range(4)]
    sampling = SamplingSettings(1.0, 400, ignore_eos=True, evaluation=True)
    plan = EvaluationPlan(sampling, 2, max_concurrent=8, timeout_s=120, timeout_setting="limit", seed=3)

    async def run():
        ready = await live.fleet()
        asked = RunningFleet(rollout_config(), TOKEN, VOCABULARY)
        await asked.connect([live.server.url])
        watched = Watched(asked)
        evaluation = asyncio.create_task(answer_problems(watched, problems, REWARD, plan))
        with slow_from(live.pace_file, 0):
            while len(watched.partials) < 8 or min(len(partial.token_ids) for partial in watched.partials) < 20:
                await asyncio.sleep(0.005)
            await ready.publish(make_model(live.version + 401))
        answers = await evaluation
        await asked.aclose()
        await ready.fleet.aclose()
        return answers

    before = live.version
    answers = asyncio.run(run())
    result = result_of(answers, [1, 2])
    assert (result.oldest_version, result.newest_version) == (before, before + 1)
    assert result.responses_by_versions == {(before, before + 1): 8}
    for sample in (sample for one in answers for sample in one.samples):
        for version in (before, before + 1):
            expected = reference_logprobs(
                live.models[version], sample.prompt_ids.tolist(), sample.response_ids.tolist(), 1.0
            )
            own = sample.versions == version
            np.testing.assert_allclose(sample.behavior_logprobs[own], expected[own], atol=1e-4, rtol=0)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_smollm2_on_fifty_rows_of_gsm8k_gives_the_same_result_twice(tmp_path):
    try:
        find_gguf()
        data_folder()
    except UserError as error:
        pytest.skip(str(error))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    fetched = ROOT / DEFAULT_DESTINATION
    model = fetched if fetched.exists() else tmp_path / "SmolLM2-135M-Instruct"
    subprocess.run([sys.executable, "tools/fetch_smollm2.py", str(model)], cwd=ROOT, env=environment, check=True)
    results = []
    for name in ("first", "second"):
        settings = [f"target={model}", f"dir={tmp_path / name}", "rollout.startup_timeout_s=900"]
        command = [sys.executable, "recipes/evaluate.py", "configs/evaluate_smollm2_gsm8k_cpu.yaml", *settings]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1100)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert (report["overall"]["num_problems"], report["temperature"]) == (50, 0.0)
        results.append((report["sets"], (tmp_path / name / "samples.jsonl").read_bytes()))
    assert results[0] == results[1]
