"""The walking run on the real engines: what it writes, that layouts and repetitions agree, that every method runs."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.golden.model import write_random_model
from tests.golden.settings import NUM_STEPS, TOLERANCE, overrides
from tests.golden.stored import column_names, read
from tests.system.runs import Finished, run

pytestmark = pytest.mark.timeout(1200)

COLUMNS = {
    *("step", "version", "reward/mean", "loss", "grad_norm", "staleness/mean", "staleness/max", "forward_passes"),
    *("time/step_s", "time/prox_s", "time/wait_s", "time/publish_s", "policy/clip_fraction", "policy/ratio_max"),
    *("policy/behavior_weight_max", "policy/behavior_weight_mean", "parity/logprob_max_abs", "rollout/tokens_per_s"),
}
LOCKSTEP = ("controller.schedule=lockstep", "controller.max_staleness=2")
GOLDEN = overrides("loglinear")
NEAR_TIES = 2  # samples of a step of which rounding may decide; with other seeds, nearly all of its 32 would differ


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


@pytest.fixture(scope="module")
def random_model(runs: Path) -> Path:
    return write_random_model(runs / "random_model")


@pytest.fixture(scope="module")
def lockstep(runs: Path, random_model: Path) -> Finished:
    """The golden run of loglinear, on this machine."""
    return run(runs / "lockstep", random_model, *GOLDEN)


def test_every_step_has_a_row_with_every_column(free):
    assert free.column("step") == free.column("version") == list(range(12))
    for row in free.rows:
        assert row.keys() >= COLUMNS
    assert [row["step"] for row in free.rows if "eval/accuracy" in row] == [0, 5, 10]
    assert all(row["loss"] is not None for row in free.rows)
    assert max(free.column("grad_norm")) > 0


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
    live = [[(s["problem"], s["response"], s["reward"]) for s in samples] for samples in lockstep.samples]
    others = [
        [sample for sample, text in zip(found, step.texts(), strict=True) if sample != text]
        for found, step in zip(live, golden, strict=True)
    ]
    same = next((step for step, samples in enumerate(others) if samples), NUM_STEPS)
    assert same > 0, f"step 0 sampled otherwise: {others[0]}"
    assert same == NUM_STEPS or len(others[same]) <= NEAR_TIES, f"step {same} sampled otherwise: {others[same]}"
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


def test_two_lockstep_runs_with_one_seed_are_the_same(lockstep, runs, random_model):
    again = run(runs / "again", random_model, *GOLDEN, "run.num_steps=5")  # the last two come from versions 1 and 2
    assert again.samples == lockstep.samples[:5]
    for name in ("loss", "grad_norm", "reward/mean", "staleness/mean"):
        assert again.column(name) == pytest.approx(lockstep.column(name)[:5], abs=1e-5)


def test_four_ranks_train_as_one(lockstep, runs, random_model):
    """The first three batches come from version 0 in both runs, so the layouts get the same samples."""
    layout = ("actor.tensor_parallel=2", "actor.pipeline_parallel=2")
    four = run(runs / "tp2pp2", random_model, *GOLDEN, *layout, "run.num_steps=3")
    assert four.samples == lockstep.samples[:3]
    for name in ("loss", "grad_norm"):
        assert four.column(name) == pytest.approx(lockstep.column(name)[:3], abs=1e-5)


def test_only_recompute_needs_more_forward_passes(lockstep, runs, model):
    sync = run(runs / "sync", model, "algorithm.method=sync", LOCKSTEP[0], "controller.max_staleness=0")
    recompute = run(runs / "recompute", model, "algorithm.method=recompute", *LOCKSTEP)
    steps = lockstep.column("forward_passes")[:3]
    assert steps == sync.column("forward_passes")
    assert recompute.column("forward_passes") == [2 * passes for passes in steps]  # one more a microbatch
    assert max(sync.column("staleness/max")) == 0
    assert max(lockstep.column("staleness/max")) == 2


def test_plain_ppo_on_stale_data_runs(runs, model):
    behavior = run(runs / "behavior", model, "algorithm.method=behavior", "run.num_steps=2")
    assert all(row["policy/behavior_weight_max"] == 1.0 for row in behavior.rows)
