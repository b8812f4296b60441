"""Settings of the objective that mean nothing together are refused with the reason; what the shipped files say is not."""

from pathlib import Path

import pytest

from a3po_megatron.config.check_algorithm import check_algorithm
from a3po_megatron.config.load import load_config, to_yaml
from a3po_megatron.config.schema import TrainConfig
from a3po_megatron.errors import UserError

ROOT = Path(__file__).parents[3]


def check(path: Path, *overrides: str) -> TrainConfig:
    config = load_config(TrainConfig, path, [f"algorithm.{override}" for override in overrides])
    check_algorithm(config.algorithm)
    return config


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text("recipe: train\n")
    return path


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["num_epochs=0"], "algorithm.num_epochs=0: must be at least 1"),
        (["num_minibatches=0"], "algorithm.num_minibatches=0: must be at least 1"),
        (["clip_low=1.5"], "algorithm.clip_low=1.5: above 0 and at most 1"),
        (["clip_high=.nan"], "algorithm.clip_high=nan: must be above 0"),
        (["dual_clip=1"], "algorithm.dual_clip=1.0: above 1, or 0 for none"),
        (["dual_clip=3", "surrogate=cispo"], "algorithm.dual_clip=3.0 with algorithm.surrogate=cispo"),
        (["behavior_weight.cap=0.5"], "algorithm.behavior_weight.cap=0.5: at least 1"),
        (
            ["behavior_weight.level=token", "surrogate=gspo"],
            "algorithm.behavior_weight.level=token with algorithm.surr",
        ),
        (["total_weight.bound=1"], "algorithm.total_weight.bound=1.0: above 1"),
        (
            ["total_weight.bound=2", "surrogate=cispo"],
            "algorithm.total_weight.bound=2.0 with algorithm.surrogate=cispo",
        ),
        (["kl.reference_coefficient=-1"], "algorithm.kl.reference_coefficient=-1.0: must be at least 0"),
        (["kl.behavior_coefficient=.inf"], "algorithm.kl.behavior_coefficient=inf: must be at least 0"),
        (["kl.behavior_clamp=0"], "algorithm.kl.behavior_clamp=0.0: must be above 0"),
        (["entropy_coefficient=.nan"], "algorithm.entropy_coefficient=nan: must be at least 0"),
        (["alpha.value=1.5"], "algorithm.alpha.value=1.5: a share between 0 and 1"),
        (["alpha.rate=0"], "algorithm.alpha.rate=0.0: must be above 0"),
        (["alpha.adaptive.target=0"], "algorithm.alpha.adaptive.target=0.0: must be above 0"),
        (["alpha.adaptive.initial_strength=99"], "algorithm.alpha.adaptive.initial_strength=99.0: must lie between"),
        (["m2po_threshold=-1"], "algorithm.m2po_threshold=-1.0: above 0, or 0 for no M2PO"),
        (["m2po_threshold=0.04"], "algorithm.m2po_threshold=0.04 with algorithm.method=loglinear"),
        (["m2po_threshold=0.04", "method=metrics"], "algorithm.m2po_threshold=0.04 with algorithm.method=metrics"),
        (["method=recompute", "reuse_first_forward=true", "num_epochs=2"], "so nothing is saved"),
        (["alpha.kind=constant", "alpha.fresh_anchor=target"], "algorithm.alpha.fresh_anchor=target"),
        (["alpha.kind=adaptive", "alpha.adaptive.target=5"], "algorithm.alpha.adaptive.target=5.0: a share of tokens"),
        (["alpha.kind=adaptive", "surrogate=cispo"], "which no alpha moves"),
        (["behavior_weight.mode=mask", "behavior_weight.cap=0"], "algorithm.behavior_weight.mode=mask with"),
        (["total_weight.mode=mask"], "algorithm.total_weight.mode=mask with"),
        (["fixed_length=64"], "algorithm.fixed_length=64 with algorithm.aggregation=token"),
        (["m2po_threshold=0.04", "method=recompute", "reuse_first_forward=true"], "M2PO needs the ratios of the first"),
        (["m2po_threshold=0.04", "method=recompute", "surrogate=gspo"], "M2PO drops single tokens by their own ratio"),
        (["reuse_first_forward=true"], "algorithm.reuse_first_forward=true with algorithm.method=loglinear"),
        (["aggregation=fixed_length"], "algorithm.fixed_length=0: algorithm.aggregation=fixed_length divides by it"),
        (["alpha.kind=cosine"], "algorithm.alpha.kind: Invalid value 'cosine'"),
        (["alpha.knd=inverse"], "unknown key 'algorithm.alpha.knd'; did you mean 'algorithm.alpha.kind'?"),
        (["alpha.adaptive.goal=1"], "unknown key 'algorithm.alpha.adaptive.goal'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else None,
)
def test_what_makes_no_sense_is_refused_in_one_line_with_the_reason(
    empty: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check(empty, *overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["surrogate=gspo", "clip_low=0.1", "clip_high=0.1", "aggregation=sequence", "dual_clip=3"],
        [
            "surrogate=cispo",
            "alpha.kind=adaptive",
            "alpha.adaptive.measure=behavior_kl",
            "kl.reference_coefficient=0.01",
        ],
        ["alpha.kind=constant", "alpha.value=0.35", "behavior_weight.level=sequence", "behavior_weight.mode=mask"],
        ["kl.behavior_coefficient=0.1", "total_weight.bound=2", "total_weight.mode=mask", "entropy_coefficient=0.001"],
        ["method=recompute", "m2po_threshold=0.04", "num_epochs=2"],
        ["method=metrics", "alpha.kind=minibatch"],
        ["method=recompute", "reuse_first_forward=true", "aggregation=fixed_length", "fixed_length=64"],
        ["method=recompute", "alpha.value=7"],  # not read
    ],
    ids=",".join,
)
def test_what_composes_is_accepted_and_reads_back_equal(empty: Path, tmp_path: Path, overrides: list[str]) -> None:
    config = check(empty, *overrides)
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(TrainConfig, tmp_path / "again.yaml") == config


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_objective_of_every_shipped_file_passes(path: Path) -> None:
    if "recipe: train" in path.read_text():
        check(path)
