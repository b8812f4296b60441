"""The walking run on the real engines: what it writes, that layouts and repetitions agree, that every method runs."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.golden.settings import NUM_STEPS, TOLERANCE, overrides
from tests.golden.stored import column_names, read
from tests.system.runs import DEADLINE_S, Finished, read_lines, run, same_steps

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)

COLUMNS = {
    *("step", "version", "reward/mean", "loss", "grad_norm", "staleness/mean", "staleness/max", "forward_passes"),
    *("time/step_s", "time/prox_s", "time/wait_s", "time/publish_s", "policy/clip_fraction", "policy/ratio_max"),
    *("policy/behavior_weight_max", "policy/behavior_weight_mean", "parity/logprob_max_abs", "rollout/tokens_per_s"),
}
GOLDEN = overrides("loglinear")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def free(runs: Path, model: Path) -> Finished:
    """The demo, shortened: generation runs ahead as it can, and the held-out accuracy is measured on the way."""
    # One group at a time, many a batch: generation takes as long as training, and goes on while it does.
    few = ("controller.max_concurrent_groups=1", "controller.prompts_per_batch=32", "rollout.stream_interval=1")
    evaluation = ("controller.max_eval_problems=50", "controller.eval_every=5")
    return run(runs / "free", model, "run.num_steps=12", *few, *evaluation)


def test_every_step_has_a_row_with_every_column(free):
    assert free.column("step") == free.column("version") == list(range(12))
    for row in free.rows:
        assert row.keys() >= COLUMNS
    assert all(row["loss"] is not None for row in free.rows)
    assert max(free.column("grad_norm")) > 0


def test_the_held_out_accuracy_is_measured_at_the_start_on_the_way_and_at_the_end(free):
    """Every five versions, of one that is live when its turn comes: a version or a row later where the machine was busy."""
    first, second, *_, last = read_lines(free.folder / "evals.jsonl")
    assert (first["version"], last["version"]) == (0, 12)
    assert 5 <= second["version"] < 10
    reported = [row for row in free.rows if "eval/accuracy" in row]
    assert [row["eval/accuracy"] for row in reported[:2]] == [first["accuracy"], second["accuracy"]]
    assert reported[0]["step"] == 0
    assert all(row["step"] >= row["eval/version"] for row in reported)


def test_generation_runs_ahead_within_the_bound(free):
    assert max(free.column("staleness/max")) > 0
    assert max(free.column("staleness/max")) <= 4  # of all tokens, also such as would have been masked
    assert sum(free.column("staleness/overdue_tokens")) == 0
    spans = [sample["versions"] for step in free.samples for sample in step if len(sample["versions"]) > 1]
    # How many span a publication is a matter of chance in a run this short; tests/engine makes one span two for certain.
    assert len(spans) == sum(free.column("rollout/samples_of_several_versions"))
    for stretches in spans:
        assert all(earlier[0] < later[0] for earlier, later in pairwise(stretches))


def test_lockstep_lags_by_exactly_two_versions(lockstep):
    for step, samples in enumerate(lockstep.samples):
        assert {version for sample in samples for version, _ in sample["versions"]} == {max(0, step - 2)}


def test_the_lockstep_run_is_the_golden_one_as_far_as_it_samples_the_same(lockstep):
    """On another CPU the last bit of a log-probability may once choose another token; from there the runs part."""
    golden = read("loglinear")
    assert len(lockstep.texts) == NUM_STEPS
    same = same_steps(lockstep.texts, [step.texts() for step in golden])
    for name in column_names("loglinear"):
        stored = [step.columns[name] for step in golden[:same]]
        assert lockstep.column(name)[:same] == pytest.approx(stored, **TOLERANCE), name


def test_vllm_and_the_actor_agree_on_fresh_tokens(free, lockstep):
    gaps = [gap for gap in free.column("parity/logprob_max_abs") + lockstep.column("parity/logprob_max_abs") if gap]
    assert gaps
    assert max(gaps) < 1e-4  # float32 on both sides; 3e-6 is typical


def test_samples_can_be_read(free):
    (sample, *_) = free.samples[0]
    assert sample["prompt"].endswith("=")
    assert sample["response"]
    assert sample["reward"] in (0.0, 1.0)
    assert sum(length for _, length in sample["versions"]) > 0


def test_the_run_ends_with_a_table_a_picture_and_a_model(free):
    for text in ("held-out accuracy before", "held-out accuracy after", "staleness, max", "share of training time"):
        assert text in free.output
    assert (free.folder / "report.png").stat().st_size > 10_000
    assert (free.folder / "model" / "model.safetensors").exists()
    assert "step 12/12" in free.output


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.full)], ids=["PP2", "TP2xPP2"]
)
def test_several_ranks_train_as_one(lockstep, runs, random_model, tensor, pipeline):
    """The first three batches come from version 0 in both runs, so the layouts get the same samples.

    Four ranks are a sweep: tests/distributed trains and publishes at TP2 x PP2 in each of its parts, on ranks that it shares.
    """
    layout = (f"actor.tensor_parallel={tensor}", f"actor.pipeline_parallel={pipeline}")
    several = run(runs / f"tp{tensor}pp{pipeline}", random_model, *GOLDEN, *layout, "run.num_steps=3")
    assert same_steps(several.texts, lockstep.texts[:3]) == 3
    for name in ("loss", "grad_norm", "reward/mean", "staleness/mean"):
        assert several.column(name) == pytest.approx(lockstep.column(name)[:3], abs=1e-5)


@pytest.mark.full
def test_plain_ppo_on_stale_data_runs(runs, model):
    """A sweep: tests/distributed/test_objective.py compares this method with autograd; the other three run here to the end."""
    behavior = run(runs / "behavior", model, "algorithm.method=behavior", "run.num_steps=2")
    assert all(row["policy/behavior_weight_max"] == 1.0 for row in behavior.rows)
